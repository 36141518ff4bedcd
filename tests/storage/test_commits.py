"""Records of commits: their bytes, which of them are kept, and what a log says of its commits, readers and close."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from storage import CorruptSegmentError, LmdbStore, RowIds, StoreConfig, StoreFullError
from storage.row_log.commits import KEPT_COMMITS, CommitRecord, Totals, commit_key, thinned
from storage.row_log.hashing import checksum
from storage.row_log.log import Commit, RowLog
from storage.row_log.state import State
from storage.testing import schema_of

GOLDEN = Path(__file__).parent / "golden"
TOTALS = Totals(1, 2, 3, 4, 5, 6, 7)
RECORD = CommitRecord(9, 1_700_000_000_123_456, (21, 22, 2**40), (3,), True, False, TOTALS)
STORE = bytes(range(16))


@pytest.fixture
def log(tmp_path: Path) -> RowLog:
    (tmp_path / "s").mkdir()
    log = RowLog(tmp_path / "s", 1 << 30, read_only=False, sync_meta=False, create=True)
    log.create(STORE)
    return log


def segment(number: int) -> tuple[int, memoryview]:
    return number, memoryview(bytes(5000))


def commit_often(log: RowLog, count: int) -> None:
    """Commits without a sync each, as `RowLog.commit` makes them."""
    for _ in range(count):
        with log._env.begin(write=True) as txn:
            log._record(txn, Commit())


class TestRecord:
    def test_is_what_the_documentation_says(self) -> None:
        """Read with nothing but the offsets in docs/formats.md."""
        raw = RECORD.pack()
        assert raw[:8] == b"TECOMMIT"
        assert struct.unpack_from("<II", raw, 8) == (1, 1)
        assert struct.unpack_from("<Qq", raw, 16) == (9, 1_700_000_000_123_456)
        assert struct.unpack_from("<II", raw, 32) == (3, 1)
        assert struct.unpack_from("<7Q", raw, 40) == (1, 2, 3, 4, 5, 6, 7)
        assert struct.unpack_from("<4Q", raw, 96) == (21, 22, 2**40, 3)
        assert len(raw) == 136 and struct.unpack_from("<Q", raw, 128)[0] == checksum(raw[:128])

    def test_is_written_as_it_always_was(self) -> None:
        assert RECORD.pack() == (GOLDEN / "commit_v1.bin").read_bytes()

    @pytest.mark.parametrize("record", [RECORD, CommitRecord(1, 0, (), (), False, True, Totals())])
    def test_reading_gives_what_was_written(self, record: CommitRecord) -> None:
        assert CommitRecord.unpack(record.pack(), record.number, "a test") == record

    def test_every_flipped_bit_is_found(self) -> None:
        raw = bytearray(RECORD.pack())
        for bit in range(8 * len(raw)):
            raw[bit // 8] ^= 1 << bit % 8
            with pytest.raises(CorruptSegmentError, match="commit 9 of a test is damaged"):
                CommitRecord.unpack(bytes(raw), 9, "a test")
            raw[bit // 8] ^= 1 << bit % 8

    @pytest.mark.parametrize("size", [0, 8, 103, 135])
    def test_one_that_was_cut_short_is_refused(self, size: int) -> None:
        with pytest.raises(CorruptSegmentError, match="damaged"):
            CommitRecord.unpack(RECORD.pack()[:size], 9, "a test")

    def test_one_under_another_number_is_refused(self) -> None:
        with pytest.raises(
            CorruptSegmentError, match="commit 8 of a test has 136 bytes and says that it is of commit 9"
        ):
            CommitRecord.unpack(RECORD.pack(), 8, "a test")

    @pytest.mark.parametrize(("at", "says"), [(0, "begins with"), (8, "version 2")])
    def test_another_format_is_refused_by_name(self, at: int, says: str) -> None:
        raw = bytearray(RECORD.pack()[:-8])
        raw[at] += 1
        with pytest.raises(CorruptSegmentError, match=says):
            CommitRecord.unpack(bytes(raw) + checksum(raw).to_bytes(8, "little"), 9, "a test")


class TestRetention:
    def test_the_spacing_of_records_doubles_with_their_age(self) -> None:
        kept: set[int] = set()
        for number in range(1, 5000):
            kept.add(number)
            kept.discard(thinned(number))
            expected = {
                old for old in range(1, number + 1)
                if all(number - old < KEPT_COMMITS << j or old % (2 << j) == 0 for j in range(16))
            } if number % 97 == 0 else kept  # fmt: skip
            assert kept == expected
        assert len(kept) < 256 + 128 * 5

    def test_of_one_log(self, log: RowLog) -> None:
        commit_often(log, 700)
        with log.reading() as txn:
            numbers = [record.number for record in log.history(txn)]
        assert numbers == [*range(4, 189, 4), *range(190, 445, 2), *range(445, 701)]
        log.close()


class TestLog:
    def test_a_commit_says_what_it_changed(self, log: RowLog) -> None:
        log.commit(Commit((segment(1), segment(2)), (), None))
        log.commit(Commit((), (1,), State(1, 2, b""), TOTALS))
        log.commit(Commit())
        with log.reading() as txn:
            records = log.history(txn)
            assert log.last_commit(txn) == records[-1]
            assert log.segment_count(txn) == 1
        assert [record.number for record in records] == [1, 2, 3]
        assert [(record.new, record.deleted) for record in records] == [((1, 2), ()), ((), (1,)), ((), ())]
        assert [record.made_state for record in records] == [False, True, False]
        assert [record.totals for record in records] == [Totals(), TOTALS, TOTALS], "carried on where none are given"
        assert records[0].time_us <= records[1].time_us <= records[2].time_us
        log.close()

    def test_what_was_committed_since(self, log: RowLog) -> None:
        with log.reading() as txn:
            assert log.last_commit(txn) is None
            assert log.commits_since(txn, 0) == []
            assert log.commits_since(txn, 1) is None, "no commit of this log"
        commit_often(log, 300)
        with log.reading() as txn:
            for seen in (300, 299, 44):
                assert [r.number for r in log.commits_since(txn, seen) or []] == list(range(seen + 1, 301))
            for seen in (0, 1, 42, 301):
                assert log.commits_since(txn, seen) is None
        log.close()

    def test_a_gap_among_the_records_is_no_answer(self, log: RowLog) -> None:
        commit_often(log, 10)
        with log._env.begin(write=True) as txn:
            txn.delete(commit_key(5), db=log._commits)
        with log.reading() as txn:
            assert log.commits_since(txn, 2) is None
            assert log.commits_since(txn, 5) is not None
        log.close()

    def test_a_token_stays_until_the_next_commit(self, log: RowLog) -> None:
        def token() -> bytes | None:
            with log.reading() as txn:
                return log.closed_token(txn)

        assert token() is None
        log.commit(Commit(token=b"t" * 16))
        assert token() == b"t" * 16
        log.commit(Commit((segment(1),)))
        assert token() is None
        log.close()

    def test_transactions_are_counted(self, log: RowLog) -> None:
        def transaction() -> int:
            with log.reading() as txn:
                return log.transaction(txn)

        before = transaction()
        log.commit(Commit())
        assert transaction() == before + 1
        log.close()

    def test_a_store_of_an_earlier_program_gets_records_when_it_is_written(self, tmp_path: Path) -> None:
        shutil.copytree(GOLDEN / "store_v1", tmp_path / "s")
        reader = RowLog(tmp_path / "s", 1 << 30, read_only=True, sync_meta=True)
        with reader.reading() as txn:
            assert (reader.last_commit(txn), reader.commits_since(txn, 0), reader.history(txn)) == (None, None, [])
        reader.close()
        with LmdbStore(tmp_path / "s") as store:
            with store._session.log.reading() as txn:
                assert store._session.log.commits_since(txn, 0) == []
            store.flush(b"new")
        with LmdbStore(tmp_path / "s", read_only=True) as again, again._session.log.reading() as txn:
            records = again._session.log.history(txn)
            assert [record.made_state for record in records] == [True, False], "the flush, and the token of the close"

    def test_a_damaged_record_is_an_error_that_names_it(self, log: RowLog) -> None:
        commit_often(log, 2)
        with log._env.begin(write=True) as txn:
            txn.put(commit_key(2), replace(RECORD, number=2).pack()[:-1] + b"!", db=log._commits)
        with log.reading() as txn, pytest.raises(CorruptSegmentError, match=r"commit 2 of .*/s is damaged"):
            log.last_commit(txn)
        log.close()


_LAGGARD = """
import sys
from storage import LmdbStore
with LmdbStore(sys.argv[1], read_only=True)._session.reading():
    print("reading", flush=True)
    sys.stdin.readline()
"""


def test_the_reader_that_lags_is_known_and_named_when_there_is_no_room(tmp_path: Path) -> None:
    small = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 14, map_size_bytes=1 << 20, index_shards=16)
    with LmdbStore(tmp_path / "s", config=small) as store:
        table, log = store.open_table("t", schema_of(8)), store._session.log

        def update(times: int = 1) -> None:
            for _ in range(times):
                store.put(RowIds.of(table, np.arange(150)), np.ones((150, 32), np.uint8))
                store.flush()

        update()
        assert log.oldest_reader() == (0, 0)
        command = [sys.executable, "-c", _LAGGARD, str(tmp_path / "s")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None and reader.stdout.readline() == "reading\n"
            assert log.oldest_reader() == (0, 0), "it reads what is there"
            update()
            assert log.oldest_reader() == (reader.pid, 1)
            with pytest.raises(StoreFullError, match=rf"end the reader in process {reader.pid}: it keeps .* commits"):
                update(times=1000)
            assert log.oldest_reader()[0] == reader.pid and log.oldest_reader()[1] > 16
            reader.communicate("done\n")
        assert log.oldest_reader() == (0, 0)
        update()
    assert os.path.getsize(tmp_path / "s" / "data.mdb") <= 1 << 20


if __name__ == "__main__":
    (GOLDEN / "commit_v1.bin").write_bytes(RECORD.pack())
