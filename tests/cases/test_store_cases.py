"""A store under faults: cases 2 and 32 to 38, each in short. tests/faults does the same things hundreds of times."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from storage import (
    CorruptRowError,
    LmdbStore,
    NotAStoreError,
    RowIds,
    StorageError,
    StoreConfig,
    StoreIOError,
    StoreLockedError,
)
from storage.testing import EXTREME_IDS, check_equal, read, schema_of
from tests.faults.damage import cut_short, flip_all, refusal, some_flips, spans
from tests.faults.lives import Lives, wait_for
from tests.faults.room import fill_and_make_room, limit_file_size
from tests.faults.victim import CHANGES, Child, Strace, call, config, inspect

ROOT = Path(__file__).resolve().parents[2]


def test_case_2_nine_ids_of_every_kind_are_nine_rows_after_reopening(tmp_path: Path) -> None:
    data = np.arange(9 * 32, dtype=np.uint8).reshape(9, 32)
    data[3] = 0
    for _ in range(2):
        with LmdbStore(tmp_path / "s") as store:
            table = store.open_table("t", schema_of(8))
            if store.stats().rows == 0:
                store.put(RowIds.of(table, EXTREME_IDS), data)
            expected = {(table.number, int(id)): row.tobytes() for id, row in zip(EXTREME_IDS, data, strict=True)}
            check_equal(store, table.group, expected)
    assert len(expected) == 9


@pytest.mark.parametrize("durability", ["commit", "snapshot"])
def test_case_32_a_put_during_compaction_and_a_deletion_survive_kills(
    tmp_path: Path, durability: str, require_tool: Callable[[str], str]
) -> None:
    """Much is deleted and put again, and compacted; each death is at another system call of a compaction or a flush."""
    require_tool("strace")
    kinds = ("put", "delete", "put", "flush", "delete", "compact", "put", "look")
    lives = Lives(tmp_path, durability, seed=32, kinds=kinds)
    for when in (9, 17, 26, 40):
        writer = lives.born()
        strace = Strace(writer.pid, lives.path, CHANGES, f"signal=KILL:when={when}")
        writer.talk.send("go")
        assert writer.end().signal == 9
        strace.end()
        lives.judge()
    assert lives.expected.next_number > len(kinds)


def test_case_33_a_full_disk_is_an_error_and_all_is_well_once_there_is_room(tmp_path: Path) -> None:
    lives = Lives(tmp_path, "commit", seed=33, kinds=("put", "put", "look", "flush"))
    assert lives.live(8).error is None
    lives.judge()
    writer = lives.born(200)
    limit_file_size(writer, (lives.path / "data.mdb").stat().st_size)
    fill_and_make_room(lives, writer, lambda: limit_file_size(writer, -1))
    lives.judge()


def test_case_33_an_fsync_that_fails_is_not_tried_again(tmp_path: Path, require_tool: Callable[[str], str]) -> None:
    """Only the first fails; the store refuses to go on all the same, until it is reopened."""
    require_tool("strace")
    lives = Lives(tmp_path, "commit", seed=34, kinds=("put", "flush"))
    assert lives.live(8).error is None
    lives.judge()
    writer = Child(_flush_twice, lives.path)
    strace = Strace(writer.pid, lives.path, "fdatasync", "error=EIO:when=1")
    writer.talk.send("go")
    assert writer.end().value() == ["StoreIOError", "StoreIOError", "StoreIOError"]
    strace.end()
    lives.judge()


def _flush_twice(talk: Connection, path: Path) -> list[str]:
    talk.recv()
    store = LmdbStore(path, config=config())
    one = RowIds.of(store.open_table("a", schema_of(8)), np.array([10**9]))
    said = []
    for verb in (lambda: (store.put(one, np.zeros((1, 32), np.uint8)), store.flush()), store.flush, store.close):
        try:
            verb()
        except StorageError as error:
            said.append(type(error).__name__)
    return said


def test_case_34_a_flipped_bit_is_found_by_id_and_a_cut_file_is_an_error(tmp_path: Path) -> None:
    lives = Lives(tmp_path, "commit", seed=35)
    assert lives.live(30).error is None
    live = lives.judge()
    flips = some_flips(np.random.default_rng(0), spans(lives.path, live, "rows"), 20)
    assert flip_all(lives.path, live, lives.expected.note, flips) == 20
    size = (lives.path / "data.mdb").stat().st_size
    assert call(cut_short, lives.path, live, np.linspace(0, size - (1 << 17), 20).astype(np.int64)) == 40
    (lives.path / "data.mdb").unlink()
    assert isinstance(call(refusal, lives.path, False), NotAStoreError)


def test_case_34_the_error_names_the_row(tmp_path: Path) -> None:
    with LmdbStore(tmp_path / "s") as store:
        table = store.open_table("t", schema_of(8))
        store.put(RowIds.of(table, np.array([41, 42])), np.frombuffer(b"a" * 32 + b"b" * 32, np.uint8).reshape(2, 32))
    data = (tmp_path / "s" / "data.mdb").read_bytes()
    (tmp_path / "s" / "data.mdb").write_bytes(data.replace(b"b" * 32, b"b" * 31 + b"c"))
    with LmdbStore(tmp_path / "s") as store:
        assert read(store, RowIds.of(table, np.array([41])), 32) == [b"a" * 32]
        with pytest.raises(CorruptRowError, match="row with id 42") as caught:
            read(store, RowIds.of(table, np.array([42])), 32)
        assert (caught.value.table, caught.value.id) == (table.number, 42)


def test_case_35_a_second_writer_is_refused_although_the_first_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "s")
    lives = Lives(tmp_path, "commit", seed=36)
    writer = lives.born(20)
    writer.talk.send("go")
    wait_for(writer, "open")
    wait_for(writer, "done")
    writer.kill(19)
    for path in (lives.path, tmp_path / "link"):
        error = call(refusal, path, False)
        assert isinstance(error, StoreLockedError) and f"process {writer.pid}" in str(error)
    call(inspect, lives.path, "commit", True)
    writer.kill(18)
    writer.talk.send("close")
    assert writer.end().error is None
    lives.judge()


def test_case_36_a_fork_reads_and_is_refused_to_write(tmp_path: Path) -> None:
    assert call(_fork, tmp_path / "s") == (0, 0)


def _fork(talk: Connection, path: Path) -> tuple[int, int]:
    store = LmdbStore(path, config=config())
    rows = RowIds.of(store.open_table("t", schema_of(8)), np.arange(5))
    data = np.ones((5, 32), np.uint8)
    store.put(rows, data)
    child = os.fork()
    if child == 0:
        try:
            seen = read(store, rows, 32)
            store.put(rows, data)
        except StorageError as error:
            os._exit(0 if type(error).__name__ == "StoreForkedError" and seen == [b"\1" * 32] * 5 else 1)
        os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    store.put(rows, data * 2)
    store.close()
    with LmdbStore(path) as store:
        return code, int(read(store, rows, 32) != [b"\2" * 32] * 5)


def test_case_37_a_directory_removed_under_a_store_is_noticed(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "s")
    rows = RowIds.of(store.open_table("t", schema_of(8)), np.arange(5))
    shutil.rmtree(tmp_path / "s")
    store.put(rows, np.zeros((5, 32), np.uint8))
    with pytest.raises(StoreIOError, match="removed"):
        store.flush()
    store.abandon()


def test_case_37_a_reader_left_open_does_not_let_the_file_grow(tmp_path: Path) -> None:
    """Or the reader is named. It is in the middle of a scan, of which each block is a view of its own."""
    with LmdbStore(tmp_path / "s", config=config()) as store:
        rows = RowIds.of(store.open_table("t", schema_of(8)), np.arange(500))
        store.put(rows, np.zeros((500, 32), np.uint8))
        store.flush()
        program = [sys.executable, str(ROOT / "tests" / "faults" / "idle_reader.py"), str(tmp_path / "s"), "get"]
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None and reader.stdout.readline() == "reading\n"
            for step in range(40):
                store.put(rows, np.full((500, 32), step, np.uint8))
                store.flush()
            assert store.stats().disk_bytes < 1 << 20
            reader.communicate("enough\n")


def test_case_38_what_is_stored_is_as_at_the_call(tmp_path: Path) -> None:
    """The caller overwrites ids and rows at once, a thousand times, while commits are under way."""
    sizes = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 15, index_shards=16)
    with LmdbStore(tmp_path / "s", config=sizes) as store:
        table = store.open_table("t", schema_of(8))
        ids, data, tables = np.zeros(16, np.int64), np.zeros((16, 32), np.uint8), np.full(16, table.number, np.uint32)
        expected = {}
        for step in range(1000):
            ids[:], data[:] = np.arange(16) + 8 * step, step % 251
            store.put(RowIds(table.group, tables, ids), data)
            expected.update({(table.number, int(id)): bytes([step % 251]) * 32 for id in ids})
            ids[:], data[:] = -1, 0xEE
        check_equal(store, table.group, expected)
    with LmdbStore(tmp_path / "s") as store:
        check_equal(store, table.group, expected)
