"""Damage, full disks, failing disks, foreign files: an error that says what was seen, and nothing acknowledged lost."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest

from storage import (
    CorruptRowError,
    CorruptSegmentError,
    LmdbStore,
    NotAStoreError,
    RowIds,
    SchemaMismatchError,
    StoreConfig,
    StoreFullError,
    StoreIOError,
    StoreLockedError,
    StoreMissingError,
)
from storage.row_log.lmdb_errors import has_no_room
from storage.row_log.log import RowLog
from storage.row_log.places import COUNT, IDS, MAX_SEGMENT_ROWS, ROWS
from storage.row_log.segment import HEADER_BYTES
from storage.testing import check_equal, random_rows, read, schema_of

TINY = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 14, index_shards=16)
SIZE_AT = 88  # of a segment's size within its header (docs/formats.md)


def filled(
    path: Path, count: int = 2000, config: StoreConfig = TINY, width: int = 8
) -> tuple[LmdbStore, dict[tuple[int, int], bytes]]:
    store = LmdbStore(path, durability="snapshot", config=config)
    table = store.open_table("t", schema_of(width))
    data = random_rows(np.random.default_rng(0), count, table)
    store.put(RowIds.of(table, np.arange(count)), data)
    store.flush(b"full")
    return store, {(table.number, id): row.tobytes() for id, row in enumerate(data)}


def file_offset(address: int) -> int:
    """Where in data.mdb an address of the memory map lies."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, *_, name = line.split(maxsplit=5) if line.count(" ") >= 5 else (line, "", "0", "")
        if name.strip().endswith("data.mdb"):
            first, last = (int(end, 16) for end in span.split("-"))
            if first <= address < last:
                return address - first + int(offset, 16)
    raise AssertionError(f"address {address:x} is in no map of a data.mdb")


class TestDamage:
    def test_a_header_that_says_any_size_is_found(self, tmp_path: Path) -> None:
        """Every bit of the size, flipped while the store is open: more bytes than there can be are no crash."""
        store, _ = filled(tmp_path / "s")
        group = store._session.groups[0]
        slot = int(group.segments.slots()[0])
        header = int(group.segments.lines[slot, IDS]) - HEADER_BYTES
        at = file_offset(header) + SIZE_AT
        with open(tmp_path / "s" / "data.mdb", "r+b", buffering=0) as file:
            whole = os.pread(file.fileno(), 8, at)
            for bit in range(64):
                flipped = int.from_bytes(whole, "little") ^ 1 << bit
                os.pwrite(file.fileno(), flipped.to_bytes(8, "little"), at)
                with pytest.raises(CorruptSegmentError, match="damaged header"):
                    list(store.scan(0))
            os.pwrite(file.fileno(), whole, at)
        list(store.scan(0))
        store.close()

    @pytest.mark.parametrize("width", [8, 129])
    def test_a_thousand_flipped_bits_of_rows_are_found_by_id(self, tmp_path: Path, width: int) -> None:
        store, rows = filled(tmp_path / "s", width=width)
        group, rng = store._session.groups[0], np.random.default_rng(1)
        table = next(iter(rows))[0]
        slots = group.segments.slots()
        with store, open(tmp_path / "s" / "data.mdb", "r+b", buffering=0) as file:
            for _ in range(1000):
                slot = rng.choice(slots)
                row = int(rng.integers(group.segments.lines[slot, COUNT] & 0xFFFFFFFF))
                bit = int(rng.integers(8 * group.stride))
                at = file_offset(int(group.segments.lines[slot, ROWS])) + row * group.stride + bit // 8
                whole = os.pread(file.fileno(), 1, at)[0]
                os.pwrite(file.fileno(), bytes([whole ^ 1 << bit % 8]), at)
                with pytest.raises(CorruptRowError) as caught:
                    read(store, RowIds(0, np.full(2000, table, np.uint32), np.arange(2000)), 4 * width)
                os.pwrite(file.fileno(), bytes([whole]), at)
                assert caught.value.table == table
                assert str(caught.value.id) in str(caught.value) and str(tmp_path) in str(caught.value)
                id_there = int(np.ctypeslib.as_array(_ids_of(store, int(slot)))[row])
                assert caught.value.id == id_there
            check_equal(store, 0, rows)

    def test_a_damaged_row_hurts_no_other(self, tmp_path: Path) -> None:
        store, rows = filled(tmp_path / "s")
        line = store._session.groups[0].segments.lines[store._session.groups[0].segments.slots()[0]]
        with store, open(tmp_path / "s" / "data.mdb", "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), b"\xff\x01", file_offset(int(line[ROWS])) + 9)
            others = np.arange(1, 2000)
            number = next(iter(rows))[0]
            assert read(store, RowIds(0, np.full(1999, number, np.uint32), others), 32) == list(rows.values())[1:]
            with pytest.raises(CorruptRowError) as caught:
                list(store.scan(0))
            assert caught.value.id == 0
            store.put(RowIds(0, np.array([number], np.uint32), np.array([0])), np.zeros((1, 32), np.uint8))
            check_equal(store, 0, rows | {(number, 0): bytes(32)})

    def test_ids_damaged_while_the_store_is_open_lead_to_no_old_version(self, tmp_path: Path) -> None:
        """The row proves itself, so it is found, replaced and deleted; a scan believes no id that is not proved."""
        store, rows = filled(tmp_path / "s")
        group, number, rng = store._session.groups[0], next(iter(rows))[0], np.random.default_rng(2)
        with store, open(tmp_path / "s" / "data.mdb", "r+b", buffering=0) as file:
            for step in range(40):
                id, bit = int(rng.integers(2000)), int(rng.integers(32))
                one = RowIds(0, np.array([number], np.uint32), np.array([id]))
                slot, row = divmod(
                    int(group.index.find(group.segments.lines, one.tables, one.ids)[0]), MAX_SEGMENT_ROWS
                )
                if (number, id) not in rows or slot in group.slots_in_memory():
                    continue
                at = file_offset(int(group.segments.lines[slot, IDS])) + 4 * row + bit // 8
                whole = os.pread(file.fileno(), 1, at)[0]
                os.pwrite(file.fileno(), bytes([whole ^ 1 << bit % 8]), at)
                assert read(store, one, 32) == [rows[number, id]]
                with pytest.raises(CorruptSegmentError, match="damaged block of ids"):
                    list(store.scan(0))
                if step % 2:
                    rows[number, id] = bytes([step] * 32)
                    store.put(one, np.full((1, 32), step, np.uint8))
                else:
                    del rows[number, id]
                    store.delete(one)
                assert read(store, one, 32) == [rows.get((number, id))]
                os.pwrite(file.fileno(), bytes([whole]), at)
            check_equal(store, 0, rows)

    @pytest.mark.parametrize("page", [0, 1])
    @pytest.mark.parametrize("bit", [0, 3, 17, 63])
    def test_a_flipped_bit_in_lmdbs_transaction_number_does_not_bring_back_an_old_state(
        self, tmp_path: Path, page: int, bit: int
    ) -> None:
        store, _ = filled(tmp_path / "s")
        store.flush(b"newer")
        store.close()
        with open(tmp_path / "s" / "data.mdb", "r+b", buffering=0) as file:
            at = 4096 * page + 144 + bit // 8
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), at)
        for read_only in (True, False):
            with pytest.raises(CorruptSegmentError, match=r"data\.mdb has meta pages of transactions"):
                LmdbStore(tmp_path / "s", read_only=read_only)

    @pytest.mark.parametrize("offset", [3, 20, 50, 100, 115, 130, 700])
    def test_damage_to_a_header_or_to_ids_is_found_at_the_next_open(self, tmp_path: Path, offset: int) -> None:
        store, _ = filled(tmp_path / "s")
        with store._session.log.reading() as txn:
            at = file_offset(store._session.log.segment(txn, 3).ctypes.data) + offset
        store.close()
        with open(tmp_path / "s" / "data.mdb", "r+b", buffering=0) as file:
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 4]), at)
        with pytest.raises(CorruptSegmentError, match=r"segment 3 of .*/s"):
            LmdbStore(tmp_path / "s")

    def test_a_data_file_cut_short_anywhere_is_an_error(self, tmp_path: Path) -> None:
        """In a process of its own, since the wrong answer would kill it."""
        store, _ = filled(tmp_path / "s")
        store.close()
        program = """
import os, shutil, sys
import numpy as np
from storage import LmdbStore, StorageError
path = sys.argv[1]
size = os.path.getsize(path + "/data.mdb")
for cut in [0, 1, 4095, 4096, 8191, 8192, *np.linspace(8193, size - 1, 20).astype(int).tolist()]:
    shutil.rmtree(path + "x", ignore_errors=True)
    shutil.copytree(path, path + "x")
    os.truncate(path + "x/data.mdb", cut)
    for read_only in (True, False):
        try:
            store = LmdbStore(path + "x", read_only=read_only)
            list(store.scan(0))
        except StorageError as error:
            print(cut, type(error).__name__, error)
        else:
            sys.exit(f"no error after truncation to {cut} of {size} bytes")
"""
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path / "s"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 2 * 26


def _ids_of(store: LmdbStore, slot: int) -> object:
    line = store._session.groups[0].segments.lines[slot]
    return (ctypes.c_uint32 * int(line[COUNT] & 0xFFFFFFFF)).from_address(int(line[IDS]))


class TestForeignThings:
    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "s").write_text("hello")
        with pytest.raises(NotAStoreError, match="is a file"):
            LmdbStore(tmp_path / "s")
        assert (tmp_path / "s").read_text() == "hello"

    def test_a_directory_of_somebody_else(self, tmp_path: Path) -> None:
        (tmp_path / "photos").mkdir()
        (tmp_path / "photos" / "cat.jpg").write_text("meow")
        with pytest.raises(NotAStoreError, match=r"cat\.jpg and no manifest\.json"):
            LmdbStore(tmp_path / "photos")
        assert os.listdir(tmp_path / "photos") == ["cat.jpg"], "nothing is left behind"

    def test_nothing_at_all_when_only_reading(self, tmp_path: Path) -> None:
        with pytest.raises(StoreMissingError, match="no store here"):
            LmdbStore(tmp_path / "s", read_only=True)
        assert not (tmp_path / "s").exists()

    def test_an_empty_directory_becomes_a_store(self, tmp_path: Path) -> None:
        LmdbStore(tmp_path).close()
        LmdbStore(tmp_path, read_only=True).close()

    @pytest.mark.parametrize("name", ["data.mdb", "manifest.json"])
    def test_a_store_without_one_of_its_files(self, tmp_path: Path, name: str) -> None:
        filled(tmp_path / "s")[0].close()
        (tmp_path / "s" / name).unlink()
        with pytest.raises(NotAStoreError, match=name):
            LmdbStore(tmp_path / "s")

    def test_a_creation_that_was_interrupted_is_begun_again(self, tmp_path: Path) -> None:
        LmdbStore(tmp_path / "s").close()
        (tmp_path / "s" / "manifest.json").unlink()
        LmdbStore(tmp_path / "s").close()

    def test_the_data_file_of_another_store(self, tmp_path: Path) -> None:
        for name in "ab":
            filled(tmp_path / name)[0].close()
        shutil.copy(tmp_path / "a" / "data.mdb", tmp_path / "b" / "data.mdb")
        with pytest.raises(NotAStoreError, match="they do not fit"):
            LmdbStore(tmp_path / "b")

    @pytest.mark.parametrize("manifest", [False, True])
    def test_an_lmdb_environment_of_somebody_else(self, tmp_path: Path, manifest: bool) -> None:
        with lmdb.open(str(tmp_path / "theirs")) as theirs, theirs.begin(write=True) as txn:
            txn.put(b"a", b"1")
        if manifest:
            filled(tmp_path / "ours")[0].close()
            shutil.copy(tmp_path / "ours" / "manifest.json", tmp_path / "theirs")
        before = (tmp_path / "theirs" / "data.mdb").read_bytes()
        with pytest.raises(
            NotAStoreError, match=r"data\.mdb is an LMDB environment with 1 entries, and not of a store"
        ):
            LmdbStore(tmp_path / "theirs")
        if manifest:
            with pytest.raises(NotAStoreError, match="not of a store"):
                LmdbStore(tmp_path / "theirs", read_only=True)
        assert (tmp_path / "theirs" / "data.mdb").read_bytes() == before

    def test_a_data_file_that_is_not_lmdbs(self, tmp_path: Path) -> None:
        filled(tmp_path / "s")[0].close()
        (tmp_path / "s" / "data.mdb").write_bytes(np.random.default_rng(0).bytes(50_000))
        with pytest.raises(CorruptSegmentError, match="damaged"):
            LmdbStore(tmp_path / "s")

    @pytest.mark.parametrize(
        ("edit", "error", "says"),
        [
            (lambda m: "not json", NotAStoreError, "not JSON"),
            (lambda m: json.dumps({"name": "something else"}), NotAStoreError, "not the manifest of a store"),
            (lambda m: json.dumps({**m, "version": 2}), NotAStoreError, "version 2"),
            (lambda m: json.dumps({**m, "tables": []}), CorruptSegmentError, "checksum"),
        ],
    )
    def test_another_manifest(
        self, tmp_path: Path, edit: Callable[[object], str], error: type[Exception], says: str
    ) -> None:
        filled(tmp_path / "s")[0].close()
        path = tmp_path / "s" / "manifest.json"
        path.write_text(edit(json.loads(path.read_text())))
        with pytest.raises(error, match=says):
            LmdbStore(tmp_path / "s")

    def test_tables_whose_numbers_collide(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("storage.row_log.session.table_number", lambda name: 4)
        with LmdbStore(tmp_path / "s") as store:
            store.open_table("a", schema_of(2))
            with pytest.raises(SchemaMismatchError, match="'a' and 'b' share the number 4: rename one"):
                store.open_table("b", schema_of(2))


class TestFullDisk:
    def test_a_full_map_loses_nothing_and_says_what_to_do(self, tmp_path: Path) -> None:
        small = StoreConfig(segment_bytes=1 << 14, write_buffer_bytes=1 << 15, map_size_bytes=1 << 19)
        store, rows = filled(tmp_path / "s", 1000, small)
        table = store.open_table("t", schema_of(8))
        at, full = 1000, ""
        while not full:
            data = np.full((100, 32), at % 251, np.uint8)
            try:
                store.put(RowIds.of(table, np.arange(at, at + 100)), data)
            except StoreFullError as error:
                full = str(error)
            else:
                rows |= {(table.number, at + i): data[i].tobytes() for i in range(100)}
                at += 100
        assert "raise StoreConfig.map_size_bytes" in full
        number = RowIds(0, np.full(at, table.number, np.uint32), np.arange(at))
        assert read(store, number, 32) == list(rows.values())
        with pytest.raises(StoreFullError):
            store.flush()
        with pytest.raises(StoreFullError):
            store.close()
        assert read(store, number, 32) == list(rows.values()), "close did not close it"
        store.abandon()
        with LmdbStore(tmp_path / "s", durability="snapshot") as again:
            assert (again.stats().rows, again.note) == (1000, b"full")

    def test_a_full_disk_loses_nothing_and_all_is_well_once_there_is_room(self, tmp_path: Path) -> None:
        """RLIMIT_FSIZE, in a process of its own; LMDB reports the write cut short as an I/O error."""
        program = f"""
import resource, sys
import numpy as np
from storage import LmdbStore, RowIds, StoreFullError
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_lmdb_faults import TINY, check_equal, filled
store, rows = filled(sys.argv[1])
number, at, full = next(iter(rows))[0], 2000, 0
size = __import__("os").path.getsize(sys.argv[1] + "/data.mdb")
for extra in (10_000, 50_001, 100_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + extra, resource.RLIM_INFINITY))
    while True:
        ids = np.arange(at, at + 50)
        data = np.full((50, 32), at % 251, np.uint8)
        try:
            store.put(RowIds(0, np.full(50, number, np.uint32), ids), data)
        except StoreFullError as error:
            full += 1
            break
        rows |= {{(number, int(id)): data[0].tobytes() for id in ids}}
        at += 50
    try:
        store.flush(b"does not fit")
    except StoreFullError:
        full += 1
    assert store.note == b"full"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.put(RowIds(0, np.full(50, number, np.uint32), ids), data)
    rows |= {{(number, int(id)): data[0].tobytes() for id in ids}}
    at += 50
    check_equal(store, 0, rows)
store.flush(b"fits")
store.abandon()
with LmdbStore(sys.argv[1], durability="snapshot") as store:
    check_equal(store, 0, rows)
    assert store.note == b"fits" and full == 6, full
"""
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path / "s"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def test_what_this_process_may_write_is_what_counts_as_room(self, tmp_path: Path) -> None:
        store, _ = filled(tmp_path / "s")
        with store:
            assert not has_no_room(tmp_path / "s" / "data.mdb", 1 << 20)
            assert has_no_room(tmp_path / "s" / "data.mdb", 1 << 62)
            assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY

    def test_a_store_that_found_no_room_to_be_created_is_begun_again(self, tmp_path: Path) -> None:
        """Files of every size may be left behind; LMDB calls one of a single page damaged."""
        program = """
import resource, sys
from storage import LmdbStore, StoreFullError
from storage.testing import schema_of
full = 0
for kib in range(0, 64, 2):
    path = f"{sys.argv[1]}/{kib}"
    for limit in (kib << 10, resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            LmdbStore(path).close()
        except StoreFullError:
            full += 1
            assert limit == kib << 10
store = LmdbStore(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
try:
    store.open_table("t", schema_of(8))
except StoreFullError as error:
    assert "manifest" in str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.open_table("t", schema_of(8))
assert full > 5, full
"""
        done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def test_the_file_that_lmdb_maps_for_its_readers_has_its_blocks(self, tmp_path: Path) -> None:
        """Writing to a hole of a mapped file on a full disk kills the process."""
        with LmdbStore(tmp_path / "s"):
            lock = (tmp_path / "s" / "lock.mdb").stat()
            assert 512 * lock.st_blocks >= lock.st_size > 0


class TestFailingDisk:
    def test_a_commit_that_cannot_be_read_back_is_not_tried_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, rows = filled(tmp_path / "s")
        one = RowIds(0, np.array([next(iter(rows))[0]], np.uint32), np.array([1]))
        store.put(one, np.ones((1, 32), np.uint8))

        def fail(*_: object, **__: object) -> None:
            raise CorruptSegmentError("other bytes than were written")

        with monkeypatch.context() as patch:
            patch.setattr("storage.row_log.committer.read_header", fail)
            with pytest.raises(CorruptSegmentError):
                store.flush(b"lost")
        with pytest.raises(StoreIOError, match="failed before"):
            store.flush()
        assert read(store, one, 32) == [b"\1" * 32]
        with pytest.raises(StoreIOError):
            store.close()

    def test_after_an_io_error_nothing_is_written_until_the_store_is_reopened(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, rows = filled(tmp_path / "s")
        number = next(iter(rows))[0]
        one = RowIds(0, np.array([number], np.uint32), np.array([1]))
        store.put(one, np.ones((1, 32), np.uint8))

        def fail(*_: object, **how: bool) -> None:
            raise StoreIOError("fsync: Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(RowLog, "commit", fail)
            with pytest.raises(StoreIOError, match="fsync"):
                store.flush(b"lost")
        assert store.note == b"full"
        assert read(store, one, 32) == [b"\1" * 32], "reads go on"
        for verb in (lambda: store.flush(), lambda: store.put(one, np.ones((1, 32), np.uint8)), store.close):
            with pytest.raises(StoreIOError, match=r"failed before .*fsync.*reopen it") as caught:
                verb()
            assert isinstance(caught.value.__cause__, StoreIOError)
        with LmdbStore(tmp_path / "s", durability="snapshot") as again:
            check_equal(again, 0, rows)

    def test_a_directory_removed_under_an_open_store_is_noticed_by_the_next_flush(self, tmp_path: Path) -> None:
        store, rows = filled(tmp_path / "s")
        shutil.rmtree(tmp_path / "s")
        store.put(RowIds(0, np.array([next(iter(rows))[0]], np.uint32), np.array([1])), np.ones((1, 32), np.uint8))
        with pytest.raises(StoreIOError, match=r"data\.mdb was removed"):
            store.flush()
        with pytest.raises(StoreIOError):
            store.close()
        store.close()

    def test_a_data_file_replaced_under_an_open_store_is_noticed_by_the_next_flush(self, tmp_path: Path) -> None:
        store, rows = filled(tmp_path / "s")
        filled(tmp_path / "other")[0].close()
        os.replace(tmp_path / "other" / "data.mdb", tmp_path / "s" / "data.mdb")
        store.put(RowIds(0, np.array([next(iter(rows))[0]], np.uint32), np.array([1])), np.ones((1, 32), np.uint8))
        with pytest.raises(StoreIOError, match=r"data\.mdb was replaced"):
            store.flush()
        with pytest.raises(StoreIOError):
            store.close()


class TestSecondWriter:
    def test_is_refused_at_once_and_told_who_has_it(self, tmp_path: Path) -> None:
        store, rows = filled(tmp_path / "s")
        (tmp_path / "link").symlink_to(tmp_path / "s")
        with store:
            for path in (tmp_path / "s", tmp_path / "link"):
                with pytest.raises(StoreLockedError, match=rf"process {os.getpid()} on .* since .*read_only=True"):
                    LmdbStore(path)
            with pytest.raises(StoreLockedError, match="already open in this process"):
                LmdbStore(tmp_path / "s", read_only=True)
            check_equal(store, 0, rows)
        LmdbStore(tmp_path / "link").close()

    def test_through_a_hard_link_to_the_data_file(self, tmp_path: Path) -> None:
        store, _ = filled(tmp_path / "s")
        (tmp_path / "t").mkdir()
        os.link(tmp_path / "s" / "data.mdb", tmp_path / "t" / "data.mdb")
        shutil.copy(tmp_path / "s" / "manifest.json", tmp_path / "t" / "manifest.json")
        with store, pytest.raises(StoreLockedError, match="already open in this process"):
            LmdbStore(tmp_path / "t")

    def test_a_failed_open_leaves_no_lock(self, tmp_path: Path) -> None:
        store, rows = filled(tmp_path / "s")
        store.close()
        good = (tmp_path / "s" / "manifest.json").read_text()
        (tmp_path / "s" / "manifest.json").write_text(good.replace(": 1,", ": 9,"))
        with pytest.raises(NotAStoreError):
            LmdbStore(tmp_path / "s")
        (tmp_path / "s" / "manifest.json").write_text(good)
        with LmdbStore(tmp_path / "s") as again:
            check_equal(again, 0, rows)

    def test_a_store_that_was_dropped_without_close_leaves_no_lock(self, tmp_path: Path) -> None:
        store, rows = filled(tmp_path / "s")
        del store
        gc.collect()
        with LmdbStore(tmp_path / "s") as again:
            check_equal(again, 0, rows)
