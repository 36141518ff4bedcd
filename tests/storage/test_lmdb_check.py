"""LMDB's own pages: whatever a flipped bit makes of them, a store opens with the right rows or says what is damaged.

The flips run in child processes, since the wrong answer would kill them. The test makes one in every byte that LMDB
reads; with LMDB_FLIPS=all in the environment it makes all (every bit, and every byte set to 0 and to 255), which
takes a while, as `PYTHONPATH=. python tests/storage/test_lmdb_check.py` does.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from storage import CorruptSegmentError, LmdbStore, RowIds, StorageError, StoreConfig
from storage.row_log import lmdb_check
from storage.row_log.lmdb_check import check_meta_pages, check_pages
from storage.row_log.lmdb_nodes import read_nodes
from storage.testing import Rows, contents, schema_of

PAGE = 4096
CONFIG = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 22, index_shards=2)
IDS = 2600
PROCESSES = 2
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


def make_store(path: Path) -> None:
    """Branches and leaves, free pages, deleted segments and a note that takes pages of its own."""
    with LmdbStore(path, durability="snapshot", config=CONFIG) as store:
        table = store.open_table("t", schema_of(8))
        for step in range(3):
            for first in range(0, IDS, 10):  # segments of one page
                rows = RowIds.of(table, np.arange(first, first + 10))
                store.put(rows, np.full((10, 32), step + 1, np.uint8))
                group = store._session.groups[0]
                group.seal(store._session.manifest.uuid.bytes)
            store.flush(b"note" * 700)
        store.delete(RowIds.of(table, np.arange(40)))
        store.flush()
        store.flush(b"note" * 800)


def test_a_short_value_may_have_pages_of_its_own_in_the_free_list() -> None:
    """LMDB leaves one there that it has made shorter in the same transaction; a reader beside a writer met it."""
    page = np.zeros(PAGE, np.uint8)
    struct.pack_into("<HHH", page, 12, 18, PAGE - 24, PAGE - 24)
    struct.pack_into("<HHHHQQ", page, PAGE - 24, 100, 0, 1, 8, 7, 5)  # 100 bytes under key 7, on page 5
    nodes, sizes = np.zeros((PAGE // 8, 6), np.int64), np.zeros(PAGE, np.int64)
    assert read_nodes(page, False, True, nodes, sizes) == (1, 0)
    assert read_nodes(page, False, False, nodes, sizes) == (1, 5)


def rows_of(store: LmdbStore) -> Rows:
    number = store.open_table("t", schema_of(8)).number
    return {(number, id): bytes([3] * 32) for id in range(40, IDS)}


def transaction_of(data: Path) -> int:
    with open(data, "rb") as file:
        return max(lmdb_check._read_meta(file.fileno(), i, i * PAGE, data).transaction for i in (0, 1))


def walk_of(data: Path) -> lmdb_check._Walk:
    """A finished walk over the newest transaction of a file, for what it has seen."""
    file, number = os.open(data, os.O_RDONLY), transaction_of(data) % 2
    meta = lmdb_check._read_meta(file, number, number * PAGE, data)
    walk = lmdb_check._Walk(file, data, meta, os.fstat(file).st_size // PAGE)
    walk.check()
    os.close(file)
    return walk


def pages_in_use(data: Path) -> tuple[set[int], set[int]]:
    """Pages of trees, and pages of large values."""
    walk = walk_of(data)
    runs = [(first, count) for firsts, counts in walk._runs for first, count in zip(firsts, counts, strict=True)]
    return walk._tree_pages, {int(first) + i for first, count in runs for i in range(int(count))}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "s"
    make_store(path)
    return path


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "s")
    return tmp_path / "s" / "data.mdb"


class TestWholeFiles:
    def test_the_store_of_these_tests_has_every_kind_of_page(self, data: Path) -> None:
        walk = walk_of(data)
        assert walk._meta.free.entries > 0 and walk._meta.main.entries == 3
        assert len(walk._runs) > 3 and sum(len(free) for free in walk._free) > 100
        kinds = [int.from_bytes(data.read_bytes()[page * PAGE + 10 :][:2], "little") for page in walk._tree_pages]
        assert set(kinds) == {1, 2}

    def test_pass_after_every_commit_of_a_random_life(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        with LmdbStore(tmp_path / "s", config=CONFIG) as store:
            table = store.open_table("t", schema_of(8))
            for step in range(150):
                first, count = (int(n) for n in rng.integers(1, 600, 2))
                rows = RowIds.of(table, np.arange(first, first + count))
                store.put(rows, np.full((count, 32), step, np.uint8))
                if step % 5 == 0:
                    store.delete(RowIds.of(table, np.arange(first, first + count // 2)))
                store.flush(b"n" * int(rng.integers(0, 5000)))
                check_meta_pages(tmp_path / "s" / "data.mdb")
                walk = walk_of(tmp_path / "s" / "data.mdb")
                assert check_pages(tmp_path / "s" / "data.mdb", walk._meta.transaction)
                used = len(walk._tree_pages) + sum(int(counts.sum()) for _, counts in walk._runs)
                assert 2 + used + sum(len(free) for free in walk._free) == walk._meta.pages, "every page has one use"

    @pytest.mark.parametrize("entries", [0, 1, 5000])
    def test_pass_whoever_made_them(self, tmp_path: Path, entries: int) -> None:
        """Long keys, values of all sizes, three levels, a free list in pages of its own."""
        rng = np.random.default_rng(entries)
        with lmdb.open(str(tmp_path), map_size=1 << 30, max_dbs=2, sync=False) as env:
            names = env.open_db(b"names")
            for part in range(2):
                with env.begin(write=True, db=names) as txn:
                    for i in rng.permutation(entries).tolist():
                        key = str(i).encode() * (1 + i % 90)
                        txn.put(key[:500], bytes(int(rng.integers(0, 6000)) if i % 10 == 0 else 10 + part))
                with env.begin(write=True, db=names) as txn:
                    for i in range(0, entries, 3):
                        txn.delete((str(i).encode() * (1 + i % 90))[:500])
        check_meta_pages(tmp_path / "data.mdb")
        assert check_pages(tmp_path / "data.mdb", transaction_of(tmp_path / "data.mdb"))

    def test_a_transaction_that_was_overtaken_is_said_to_be(self, data: Path) -> None:
        newest = transaction_of(data)
        assert check_pages(data, newest)
        assert not check_pages(data, newest - 2) and not check_pages(data, newest + 2)

    def test_a_check_that_is_overtaken_begins_again(self, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        answers = [False, False, True]
        monkeypatch.setattr("storage.row_log.log.check_pages", lambda data, transaction: answers.pop(0))
        LmdbStore(made, read_only=True).close()
        assert not answers


class TestCutShort:
    def test_behind_the_last_page_in_use_nothing_is_missing(self, data: Path) -> None:
        trees, large = pages_in_use(data)
        os.truncate(data, (max(trees | large) + 1) * PAGE)
        with LmdbStore(data.parent, read_only=True) as store:
            assert contents(store, 0) == rows_of(store)
        with LmdbStore(data.parent, config=CONFIG) as store:
            store.put(RowIds.of(store.open_table("t", schema_of(8)), np.arange(40)), np.full((40, 32), 3, np.uint8))
            store.flush()
        with LmdbStore(data.parent) as store:
            assert len(contents(store, 0)) == IDS

    @pytest.mark.parametrize("missing", [1, PAGE])
    def test_within_it_is_an_error(self, data: Path, missing: int) -> None:
        trees, large = pages_in_use(data)
        os.truncate(data, (max(trees | large) + 1) * PAGE - missing)
        for read_only in (True, False):
            with pytest.raises(CorruptSegmentError, match=r"data\.mdb"):
                LmdbStore(data.parent, read_only=read_only)


class TestMessages:
    """What is wrong is said, with the page."""

    def patched(self, data: Path, at: int, new: bytes) -> str:
        with open(data, "r+b") as file:
            os.pwrite(file.fileno(), new, at)
        with pytest.raises(CorruptSegmentError) as caught:
            LmdbStore(data.parent, read_only=True)
        assert str(data) in str(caught.value) and "restore it from a copy" in str(caught.value)
        return str(caught.value)

    @pytest.mark.parametrize(
        ("offset", "new", "says"),
        [
            (0, b"\7", "page 0 of .*it is no meta page of LMDB's data format 1"),
            (16, b"\7", "page 0 of .*it is no meta page of LMDB's data format 1"),
            (40, b"\1", "page 0 of .*it says that pages have 4097 bytes"),
            (41, b"\x20", "page 1 of .*it says that pages have 4096 bytes, page 0 says 8192|no meta page"),
            (44, b"\0", "page 0 of .*it describes trees with flags 0 and 0"),
            (144, b"\xff\xff", "has meta pages of transactions 65535 and"),
        ],
    )
    def test_of_meta_pages(self, data: Path, offset: int, new: bytes, says: str) -> None:
        assert re.search(says, self.patched(data, offset, new), re.DOTALL)

    @pytest.mark.parametrize(
        ("offset", "new", "says"),
        [
            (0, b"\xff\xff", "it says it is page 65535 with flags"),
            (10, b"\3", "with flags 3"),
            (12, b"\1", "its bounds are impossible"),
            (12, b"\x10\0", "it has 0 nodes|do not ascend|overlap or leave a gap"),
            (16, b"\1\0", "a node lies outside of it"),
        ],
    )
    def test_of_tree_pages(self, data: Path, offset: int, new: bytes, says: str) -> None:
        page = max(pages_in_use(data)[0])
        text = self.patched(data, page * PAGE + offset, new)
        assert re.search(says, text) and f"page {page} of" in text

    def test_of_a_page_with_two_uses(self, data: Path) -> None:
        trees, large = pages_in_use(data)
        free, i, used = next(
            (free, i, used)
            for free in walk_of(data)._free
            for i in range(1, len(free) - 1)
            for used in range(free[i + 1] + 1, free[i - 1])
            if used in trees | large
        )
        listed, other = free[i - 1 : i + 2], np.array([free[i - 1], used, free[i + 1]], "<u8")
        data.write_bytes(data.read_bytes().replace(listed.astype("<u8").tobytes(), other.tobytes()))
        text = self.patched(data, 0, bytes(1))
        assert f"page {used} of" in text and "it has two uses, or is used and on the free list" in text


@pytest.mark.parametrize("read_only", [True, False])
def test_a_key_that_is_no_number_of_a_segment_is_an_error(data: Path, read_only: bool) -> None:
    """The top bit of numbers in turn: as int64 they would be negative."""
    raw = data.read_bytes()
    places, last = [], []
    for page in pages_in_use(data)[0]:
        for i in range((struct.unpack_from("<H", raw, page * PAGE + 12)[0] - 16) // 2):
            node = page * PAGE + struct.unpack_from("<H", raw, page * PAGE + 16 + 2 * i)[0]
            if struct.unpack_from("<HH", raw, node + 4) == (1, 8):  # a large value under a key of 8 bytes
                places.append(node + 8)
        last += places[-1:]
    assert len(places) > 200
    for at in {*places[::20], *last}:  # the greatest number is found by no check of pages
        data.write_bytes(raw[:at] + bytes([raw[at] ^ 0x80]) + raw[at + 1 :])
        with pytest.raises(StorageError, match=r"no number of one|do not ascend|does not lead to its keys"):
            LmdbStore(data.parent, read_only=read_only, config=CONFIG)


def test_a_damaged_header_of_a_segment_is_found_before_its_pages_are_freed(data: Path) -> None:
    """The rows are whole, so the store opens; LMDB would free whatever pages the header names."""
    firsts = [int(first) for firsts, counts in walk_of(data)._runs for first in firsts]
    whole = data.read_bytes()
    segments = [page for page in firsts if whole[page * PAGE + 16 :][:8] == b"TEROWSEG"]
    with open(data, "r+b") as file:
        for page in segments:
            os.pwrite(file.fileno(), b"\x50", page * PAGE + 12)  # 80 pages in place of 1
    store = LmdbStore(data.parent, durability="snapshot", config=CONFIG)
    assert contents(store, 0) == rows_of(store)

    def overwrite(times: int) -> None:
        for _ in range(times):
            rows = RowIds.of(store.open_table("t", schema_of(8)), np.arange(IDS))
            store.put(rows, np.full((IDS, 32), 4, np.uint8))
            store.flush()

    with pytest.raises(CorruptSegmentError, match=r"page \d+ of data\.mdb, the first of segment \d+, has a damaged"):
        overwrite(times=3)
    store.abandon()


# ---- flips, in child processes


def places_to_flip(data: Path, every: bool) -> list[tuple[int, int]]:
    """(offset, byte to write) in all that LMDB reads: meta pages, trees, headers of runs.

    Not in records of commits, which prove themselves and hold no row.
    """
    trees, _ = pages_in_use(data)
    raw = data.read_bytes()
    spans = [(page * PAGE, page * PAGE + 152) for page in (0, 1)]
    for page in sorted(trees):
        lower, upper = (int.from_bytes(raw[page * PAGE + at :][:2], "little") for at in (12, 14))
        spans += [(page * PAGE, page * PAGE + lower), (page * PAGE + upper, (page + 1) * PAGE)]
        spans += [(page * PAGE + lower, page * PAGE + lower + 16)]
    for firsts, _ in walk_of(data)._runs:
        spans += [(first * PAGE, first * PAGE + 16) for first in firsts.tolist()[: 20 if every else 3]]
    places = []
    own = set()
    for found in re.finditer(b"TECOMMIT", raw):
        new, deleted = (int.from_bytes(raw[found.start() + at :][:4], "little") for at in (32, 36))
        page_end = (found.start() // PAGE + 1) * PAGE  # what a page has left of another one may say any size
        own |= set(range(found.start(), min(found.start() + 96 + 8 * (new + deleted) + 8, page_end)))
    for first, last in spans:
        for at in sorted(set(range(first, min(last, len(raw)))) - own):
            bits = range(8) if every else [(at * 7 + at // PAGE) % 8]
            others = {raw[at] ^ 1 << bit for bit in bits} | ({0, 255} if every else set())
            places += [(at, byte) for byte in sorted(others - {raw[at]})]
    return places


def outcome(directory: Path) -> str:
    """What a store does: opens with the right rows (and takes writes without losing any), or says what is damaged."""
    try:
        with LmdbStore(directory, read_only=True, config=CONFIG) as store:
            expected = rows_of(store)
            if contents(store, 0) != expected:
                return "wrong rows"
    except StorageError:
        return "error"
    try:
        with LmdbStore(directory, durability="snapshot", config=CONFIG) as store:
            table = store.open_table("t", schema_of(8))
            for step in range(3):
                store.put(RowIds.of(table, np.arange(600)), np.full((600, 32), 10 + step, np.uint8))
                store.flush(b"later")
    except StorageError:
        return "error of the writer"
    with LmdbStore(directory, read_only=True, config=CONFIG) as store:
        expected |= {(table.number, id): bytes([12] * 32) for id in range(600)}
        return "right" if contents(store, 0) == expected else "wrong rows after writing"


def flip_all(made: Path, places: Iterator[tuple[int, int]], report: Any) -> None:
    """Try one after the other on copies of a store; a line in `report` before and after each."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as scratch:
        directory = Path(scratch) / "s"
        shutil.copytree(made, directory)
        raw = (made / "data.mdb").read_bytes()
        for at, byte in places:
            with open(directory / "data.mdb", "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), bytes([byte]), at)
            print(at, byte, end=" ", file=report, flush=True)
            seen = outcome(directory)
            print(seen, file=report, flush=True)
            if seen == "error":
                with open(directory / "data.mdb", "r+b", buffering=0) as file:
                    os.pwrite(file.fileno(), raw[at : at + 1], at)
            else:
                (directory / "data.mdb").write_bytes(raw)


def run_flips(made: Path, scratch: Path, every: bool) -> list[str]:
    """The outcome of every flip, "offset byte outcome"; a flip without an outcome killed its process, or hung it."""
    count = len(places_to_flip(made / "data.mdb", every))
    batches = -(-count // 20_000) * PROCESSES
    lines: list[str] = []
    died = False
    for first in range(0, batches, PROCESSES):
        children = []
        for batch in range(first, first + PROCESSES):
            arguments = [str(made), str(scratch / f"{batch}"), str(batch), str(batches), str(int(every))]
            children.append(subprocess.Popen([sys.executable, __file__, *arguments], env=ENVIRONMENT))
        for batch, child in zip(range(first, first + PROCESSES), children, strict=True):
            code = child.wait(timeout=3600)
            lines += (scratch / f"{batch}").read_text().splitlines()
            if code:
                died = True
                lines.append(f"{lines.pop()} killed its process: {code}")
    assert died or len(lines) == count
    return lines


def test_a_flip_in_lmdbs_pages_gives_the_right_rows_or_an_error(made: Path, tmp_path: Path) -> None:
    lines = run_flips(made, tmp_path, os.environ.get("LMDB_FLIPS") == "all")
    bad = [line for line in lines if line.split(maxsplit=2)[2] not in ("error", "error of the writer", "right")]
    assert not bad, bad[:20]
    assert sum(line.endswith(" error") for line in lines) > len(lines) / 2
    assert any(line.endswith(" right") for line in lines)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        source, target, batch, batches, every = sys.argv[1:]
        mine = places_to_flip(Path(source) / "data.mdb", bool(int(every)))[int(batch) :: int(batches)]
        with open(target, "w") as report:
            flip_all(Path(source), iter(mine), report)
    else:
        with tempfile.TemporaryDirectory() as directory:
            make_store(Path(directory) / "s")
            seen = run_flips(Path(directory) / "s", Path(directory), every=True)
        kinds = [line.split(maxsplit=2)[2] for line in seen]
        print({kind: kinds.count(kind) for kind in sorted(set(kinds))})
