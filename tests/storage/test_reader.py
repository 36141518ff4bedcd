"""A reader follows a writer in another process: by the records of commits, from any distance, nothing left over."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage import LmdbStore, StoreConfig
from storage.row_log.places import IDS, NUMBER
from storage.row_log.reader import Reader
from storage.testing import Rows, contents, schema_of

GOLDEN = Path(__file__).parent / "golden"
TINY = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 14, index_shards=16)

_WRITER = """
import sys
import numpy as np
from storage import LmdbStore, RowIds, StoreConfig
from storage.row_log.log import Commit
from storage.testing import schema_of
config = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 14, index_shards=16)
store = LmdbStore(sys.argv[1], durability=sys.argv[2], config=config)
def put(ids, byte):
    table, ids = store.open_table("t", schema_of(8)), np.array(ids)
    store.put(RowIds.of(table, ids), np.full((len(ids), 32), byte, np.uint8))
def delete(ids):
    store.delete(RowIds.of(store.open_table("t", schema_of(8)), np.array(ids)))
def flush(ids, byte):
    put(ids, byte)
    store.flush()
print("open", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Writer:
    """A store open for writing in another process, which does what it is told line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.hears("open")

    def hears(self, expected: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == expected

    def do(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        self.hears("done")


@contextmanager
def writing(path: Path, durability: str = "commit") -> Iterator[Writer]:
    command = [sys.executable, "-c", _WRITER, str(path), durability]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Writer(process)
        process.communicate()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with LmdbStore(tmp_path / "s", config=TINY) as store:
        store.open_table("t", schema_of(8))
    return tmp_path / "s"


def reading(path: Path, durability: str = "commit") -> LmdbStore:
    return LmdbStore(path, durability=durability, config=TINY, read_only=True)  # type: ignore[arg-type]


def follower(store: LmdbStore) -> Reader:
    assert store._session.reader is not None
    return store._session.reader


def check(store: LmdbStore, rows: dict[int, int]) -> None:
    """The store holds these rows by id, each of equal bytes, and knows no segment that is not there."""
    table = store.open_table("t", schema_of(8)).number
    expected: Rows = {(table, id): bytes([byte] * 32) for id, byte in rows.items()}
    assert contents(store, 0) == expected
    for _ in range(100):  # the writer's compaction may commit between the two looks, some times
        with store._session.reading():
            lines = store._session.groups[0].segments
            known = [int(lines.lines[slot, NUMBER]) for slot in lines.slots()] + follower(store)._later
        with store._session.log.reading() as txn:
            there = store._session.log.numbers(txn).tolist()
        if sorted(known) == there:
            return
    assert sorted(known) == there


def test_every_commit_is_followed_without_starting_over(path: Path) -> None:
    with writing(path) as writer, reading(path) as store:
        rows: dict[int, int] = {}
        for step in range(1, 20):  # each replaces half of the rows of the one before, so segments die
            ids = range(step * 250, step * 250 + 500)
            writer.do(f"flush(range({ids.start}, {ids.stop}), {step})")
            rows |= dict.fromkeys(ids, step)
            check(store, rows)
            writer.do(f"delete(range({step * 250}, {step * 250 + 9})); store.flush()")
            for id in range(step * 250, step * 250 + 9):
                del rows[id]
            check(store, rows)
        assert follower(store).starts == 1
        segments = store._session.groups[0].segments
        assert len(segments) < segments.lines[:, NUMBER].max() - 10, "segments that died were dropped"


@pytest.mark.parametrize("durability", ["commit", "snapshot"])
def test_a_reader_sees_what_is_there_from_any_distance(path: Path, durability: str) -> None:
    rng = np.random.default_rng(0)
    with writing(path, durability) as writer, reading(path, durability) as store:
        rows: dict[int, int] = {}
        for step in range(1, 80):
            first, count = (int(n) for n in rng.integers(1, 1500, 2))
            writer.do(f"flush(range({first}, {first + count}), {step})")
            rows |= dict.fromkeys(range(first, first + count), step)
            if step % 3 == 0:
                writer.do(f"delete(range({first}, {first + 40})); store.flush()")
                for id in range(first, first + 40):
                    rows.pop(id, None)
            if rng.random() < 0.4:
                check(store, rows)
        check(store, rows)


def test_a_reader_that_missed_too_many_commits_starts_over(path: Path) -> None:
    with writing(path) as writer, reading(path) as store:
        writer.do("flush([1], 1)")
        check(store, {1: 1})
        writer.do("[flush([i], i % 256) for i in range(300)]")
        check(store, {i: i % 256 for i in range(300)})
        assert follower(store).starts == 2
        writer.do("flush([7], 8)")
        check(store, {i: i % 256 for i in range(300)} | {7: 8})
        assert follower(store).starts == 2, "from there on it follows again"


def test_segments_wait_for_the_state_that_covers_them(path: Path) -> None:
    with writing(path, "snapshot") as writer, reading(path, "snapshot") as store:
        writer.do("put(range(2000), 1)")
        check(store, {})
        assert follower(store)._later
        writer.do("put(range(2000), 2)")
        check(store, {})
        writer.do("store.flush()")
        check(store, dict.fromkeys(range(2000), 2))
        assert not follower(store)._later and follower(store).starts == 1


def test_rows_of_a_state_that_the_writer_went_back_to_are_found_again(path: Path) -> None:
    with reading(path) as store:
        with writing(path, "snapshot") as writer:
            writer.do("flush(range(2000), 1)")
            check(store, dict.fromkeys(range(2000), 1))
            writer.do("put(range(1000), 2)")
            table = store.open_table("t", schema_of(8)).number
            assert bytes([2] * 32) in contents(store, 0).values()
            writer.do("store.abandon()")
        with writing(path, "snapshot"):
            check(store, dict.fromkeys(range(2000), 1))
        assert follower(store).starts == 2
        assert contents(store, 0)[table, 0] == bytes([1] * 32)


def test_a_log_that_keeps_no_records_is_followed_by_the_numbers_of_its_segments(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "store_v1", tmp_path / "s")
    with reading(tmp_path / "s") as store:
        before = contents(store, 0)
        assert follower(store)._commit is None
        with writing(tmp_path / "s") as writer:
            assert contents(store, 0) == before
            writer.do("flush([1], 7)")
            writer.do("flush([1], 8)")
            tables = sorted(store.open_table(name, schema).group for name, schema in _tables(store))
            assert contents(store, 0) == before and follower(store).starts == 1
            assert list(contents(store, tables[-1]).values())[-1] == bytes([8] * 32)
            assert follower(store)._commit == 2
            writer.do("flush([1], 9)")
            assert list(contents(store, tables[-1]).values())[-1] == bytes([9] * 32)
            assert follower(store).starts == 1


def _tables(store: LmdbStore) -> list[tuple[str, Any]]:
    store._session.refresh()
    return [
        (name, store._session.manifest.groups[group]) for name, (_, group) in store._session.manifest.tables.items()
    ]


class TestStartingOver:
    """Where following would not give what is there; each time the reader notices by itself."""

    @pytest.fixture
    def store(self, path: Path) -> Iterator[tuple[Writer, LmdbStore]]:
        with writing(path) as writer, reading(path) as store:
            writer.do("flush(range(500), 1)")
            check(store, dict.fromkeys(range(500), 1))
            yield writer, store

    def test_ids_of_a_segment_that_went_are_overwritten(self, store: tuple[Writer, LmdbStore]) -> None:
        writer, reader = store
        group = reader._session.groups[0]
        slot = group.segments.slots()[0]
        writer.do("flush(range(500), 2); store.flush(); flush([501], 3)")
        at = _offset_in_file(int(group.segments.lines[slot, IDS]))
        with open(reader.path / "data.mdb", "r+b") as file:
            os.pwrite(file.fileno(), b"\xff" * 8, at)
        check(reader, dict.fromkeys(range(500), 2) | {501: 3})
        assert follower(reader).starts == 2

    def test_the_count_of_segments_is_another(
        self, store: tuple[Writer, LmdbStore], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writer, reader = store
        monkeypatch.setattr(reader._session.log, "segment_count", lambda txn: 10**6)
        writer.do("flush([600], 2)")
        check(reader, dict.fromkeys(range(500), 1) | {600: 2})
        assert follower(reader).starts == 2


def _offset_in_file(address: int) -> int:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("data.mdb"):
            span, _, offset, *_ = line.split()
            first, last = (int(end, 16) for end in span.split("-"))
            if first <= address < last:
                return address - first + int(offset, 16)
    raise AssertionError(f"address {address:x} is in no map of a data.mdb")


@pytest.mark.parametrize("looks", ["always", "before", "after", "at last"])
@pytest.mark.parametrize("durability", ["commit", "snapshot"])
def test_rows_of_a_state_that_was_begun_come_after_newer_ones(path: Path, durability: str, looks: str) -> None:
    """Also if they have been moved on by the time that the reader looks again."""
    with writing(path, durability) as writer, reading(path, durability) as store:
        writer.do("flush(range(1000), 1)")
        check(store, dict.fromkeys(range(1000), 1))
        now = dict.fromkeys(range(1000), 1)
        for turn in range(1, 6):
            first = 10_000 * turn
            writer.do("t = store.open_table('t', schema_of(8)); store.begin_state({0: 600})")
            writer.do(f"put(range({first}, {first + 200}), 2)")
            writer.do(f"put(range(0, 1000, {turn + 1}), {10 + turn})")
            if looks in ("always", "before"):
                store.stats()
            writer.do(
                f"ids = np.arange({first + 100}, {first + 700}); "
                "store.put_as_begun(RowIds.of(t, ids), np.full((600, 32), 3, np.uint8))"
            )
            writer.do("store.complete_state(b'')")
            if looks in ("always", "after"):
                store.stats()
            writer.do("store.compact()")
            now |= dict.fromkeys(range(first, first + 200), 2) | dict.fromkeys(range(first + 200, first + 700), 3)
            now |= dict.fromkeys(range(0, 1000, turn + 1), 10 + turn)
            if looks != "at last":
                check(store, now)
        check(store, now)
