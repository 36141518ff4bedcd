"""verify_store and describe_store, on good stores, beside a writer, and on stores damaged in one place each."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import lmdb
import numpy as np
import pytest

from storage import (
    Column,
    CorruptSegmentError,
    LmdbStore,
    NotAStoreError,
    RowIds,
    RowSchema,
    StoreConfig,
    StoreLockedError,
    StoreMissingError,
    describe_store,
    verify_store,
)
from storage import verify as verify_module
from storage.describe import Moment
from storage.row_log import survey as survey_module
from storage.row_log.log import RowLog
from storage.row_log.segment import HEADER_BYTES
from storage.testing import schema_of

SCHEMA = RowSchema((Column("weight", "uint8", 60),))
OTHER = RowSchema((Column("weight", "float32", 4), Column("sum", "float32", 1)))
ROWS = 3000
SMALL = StoreConfig(segment_bytes=1 << 15, write_buffer_bytes=1 << 18, compact_bytes_per_s=0)


def _rows(count: int, seed: int = 0, width: int = 60) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(1, 256, (count, width), dtype=np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store: 3,000 rows of "ads", of which the first 100 were put twice and 10 deleted; 50 of each of two others."""
    with LmdbStore(tmp_path / "store", config=SMALL) as store:
        ads, users = store.open_table("ads", SCHEMA), store.open_table("users", SCHEMA)
        wide = store.open_table("wide", OTHER)
        store.put(RowIds.of(ads, np.arange(ROWS)), _rows(ROWS))
        store.put(RowIds.of(users, np.arange(50)), _rows(50, 1))
        store.put(RowIds.of(wide, np.arange(50)), _rows(50, 2, 20))
        store.flush()
        store.put(RowIds.of(ads, np.arange(100)), _rows(100, 3))
        store.delete(RowIds.of(ads, np.arange(200, 210)))
        store.flush(b"a note")
    return tmp_path / "store"


def _flip(path: Path, needle: bytes, at: int = 0, most: int | None = None) -> None:
    """Change one byte of the data file: `at` bytes into where `needle` is found.

    Wherever it is: LMDB uses buffers again without clearing them, so free space in its pages may hold old rows.
    """
    data = (path / "data.mdb").read_bytes()
    with open(path / "data.mdb", "r+b") as file:
        for found in list(re.finditer(re.escape(needle), data))[:most]:
            file.seek(found.start() + at)
            file.write(bytes([data[found.start() + at] ^ 4]))


def test_a_good_store_is_good(path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = verify_store(path, lambda done, total: seen.append((done, total)))
    assert report.good
    assert report.damages == []
    assert (report.rows, report.live_rows) == (ROWS + 50 + 50 + 100 + 10, ROWS - 10 + 50 + 50)
    assert report.segments == len(seen) == describe_store(path).segments > 5
    assert seen[-1] == (report.bytes, report.bytes)
    assert report.bytes == describe_store(path).segment_bytes


def test_every_damaged_row_is_named_by_table_and_id_and_the_rest_is_read(path: Path) -> None:
    rows = _rows(ROWS)
    for id in (7, 150, 2999):
        _flip(path, rows[id].tobytes(), 33)
    _flip(path, _rows(50, 1)[20].tobytes(), 59)
    _flip(path, _rows(50, 2, 20)[49].tobytes(), 0)
    report = verify_store(path)
    assert not report.good
    found = [(damage.table, damage.id, damage.live) for damage in report.damages]
    assert found == [
        ("ads", 7, False),  # it was put again
        ("ads", 150, True),
        ("ads", 2999, True),
        ("users", 20, True),
        ("wide", 49, True),
    ]
    assert report.damage_count == 5
    assert report.rows == ROWS + 50 + 50 + 100 + 10
    assert "superseded row with id 7 of table ads: its bytes do not match" in report.damages[0].message
    with LmdbStore(path) as store:  # and the store agrees
        ads = store.open_table("ads", SCHEMA)
        out, found_rows = np.zeros((1, 60), np.uint8), np.zeros(1, np.bool_)
        store.get(RowIds.of(ads, np.array([7])), out, found_rows)
        assert np.array_equal(out[0], _rows(100, 3)[7])


def test_damages_beyond_the_list_are_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "MAX_DAMAGES", 2)
    for id in (150, 151, 152):
        _flip(path, _rows(ROWS)[id].tobytes())
    report = verify_store(path)
    assert (len(report.damages), report.damage_count) == (2, 3)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (0, "begins with"),
        (48, "damaged header"),
        (HEADER_BYTES, "damaged block of ids"),
    ],
)
def test_a_segment_that_cannot_be_read_is_named_and_the_others_are_read(path: Path, at: int, message: str) -> None:
    before = verify_store(path)
    _flip(path, b"TEROWSEG", at, most=1)
    report = verify_store(path)
    (damage,) = report.damages
    assert (damage.file, damage.table, damage.id) == ("data.mdb", None, None)
    assert damage.segment is not None
    assert message in damage.message
    assert (report.segments, report.unread_segments) == (before.segments - 1, 1)
    assert 0 < report.rows < before.rows
    assert describe_store(path).damages == (damage,)


def test_zeros_behind_the_rows_that_are_no_zeros_are_damage(tmp_path: Path) -> None:
    with LmdbStore(tmp_path / "store") as store:
        table = store.open_table("one", SCHEMA)
        store.put(RowIds.of(table, np.arange(1)), _rows(1))
    _flip(tmp_path / "store", _rows(1)[0].tobytes(), 200)
    (damage,) = verify_store(tmp_path / "store").damages
    assert damage.segment == 1
    assert "bytes other than zero behind its rows" in damage.message


def test_a_damaged_manifest_costs_the_names_only(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    number = json.loads(text)["tables"][0]["number"]
    (path / "manifest.json").write_text(text.replace('"ads"', '"adz"'))
    _flip(path, _rows(ROWS)[150].tobytes())
    manifest, row = verify_store(path).damages
    assert (manifest.file, row.file) == ("manifest.json", "data.mdb")
    assert "checksum" in manifest.message
    assert (row.table, row.id, row.live) == (f"number {number}", 150, True)
    described = describe_store(path)
    assert described.tables == ()
    assert (described.rows, described.groups) == (ROWS + 90, 2)
    assert described.uuid == json.loads(text)["uuid"]
    (path / "manifest.json").write_text(text[:100])
    assert verify_store(path).damages[0].file == "manifest.json"


def test_a_damaged_state_is_named(path: Path) -> None:
    _flip(path, b"a note", 2)
    (damage,) = verify_store(path).damages
    assert "state record" in damage.message
    assert describe_store(path).state == -1


def test_a_data_file_that_was_cut_short_is_damage_of_the_file(path: Path) -> None:
    os.truncate(path / "data.mdb", (path / "data.mdb").stat().st_size - 200_000)
    report = verify_store(path)
    (damage,) = report.damages
    assert (damage.file, damage.segment, report.segments) == ("data.mdb", None, 0)
    assert describe_store(path).rows == 0


def test_another_stores_data_file_is_damage_of_the_file(path: Path, tmp_path: Path) -> None:
    with LmdbStore(tmp_path / "other"):
        pass
    shutil.copy(tmp_path / "other" / "data.mdb", path)
    (damage,) = verify_store(path).damages
    assert "they do not fit" in damage.message


def test_segments_of_another_store_are_damage(path: Path, tmp_path: Path) -> None:
    with LmdbStore(path, config=SMALL) as store:
        store._session.manifest.groups.clear()
        store._session.manifest.tables.clear()
        store._session.manifest.save(path)
    report = verify_store(path)
    assert report.segments == 0
    assert all("manifest.json does not know" in damage.message for damage in report.damages)
    assert len(report.damages) == report.unread_segments > 5


def test_where_no_store_is_there_is_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(StoreMissingError):
        verify_store(tmp_path / "nothing")
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "data.mdb").write_bytes(bytes(8192))
    with pytest.raises(NotAStoreError, match=r"is not the manifest of a store"):
        verify_store(tmp_path)


def test_a_store_that_this_process_has_open_is_refused(path: Path) -> None:
    with LmdbStore(path), pytest.raises(StoreLockedError, match="use the store object that has it"):
        verify_store(path)


def test_a_description_counts_what_is_there(path: Path) -> None:
    described = describe_store(path)
    assert [(table.name, table.rows, table.row_bytes) for table in described.tables] == [
        ("ads", ROWS - 10, 60),
        ("users", 50, 60),
        ("wide", 50, 20),
    ]
    assert [table.columns for table in described.tables][2] == "weight float32[4] + sum float32[1]"
    assert (described.groups, described.rows) == (2, ROWS + 90)
    assert described.live_bytes == sum(table.live_bytes for table in described.tables) == 60 * (ROWS + 40) + 20 * 50
    assert (described.stored_rows, described.tombstones) == (ROWS + 210, 10)
    assert described.state == 2
    assert described.note_bytes == len("a note")
    assert described.disk_bytes == (path / "data.mdb").stat().st_blocks * 512
    assert described.space_ratio == described.disk_bytes / described.live_bytes
    assert described.live_share == (ROWS + 90) / (ROWS + 210)
    assert described.damages == ()
    json.dumps(described.to_json())


def test_ages_go_from_the_oldest_rows_to_the_newest(path: Path) -> None:
    with LmdbStore(path, config=SMALL) as store:
        ads = store.open_table("ads", SCHEMA)
        store.put(RowIds.of(ads, np.arange(0, 1000, 2)), _rows(500, 4))
    ages = describe_store(path).ages
    assert 1 < len(ages) <= 10
    assert sum(band.segments for band in ages) == describe_store(path).segments
    assert [band.first_epoch for band in ages] == sorted(band.first_epoch for band in ages)
    shares = [band.live_bytes / band.bytes for band in ages]
    assert 0.2 < shares[0] < 0.6  # every second row was put again
    assert shares[-1] > 0.8


def test_history_is_that_of_the_commits_that_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(number: int, file_bytes: int) -> SimpleNamespace:
        totals = SimpleNamespace(
            put_bytes=1, written_bytes=2, moved_bytes=3, live_bytes=4, file_bytes=file_bytes, live_rows=5
        )
        return SimpleNamespace(number=number, time_us=1_500_000 * number, totals=totals)

    records = [record(1, 0), record(2, 6), record(4, 7)]
    monkeypatch.setattr(RowLog, "history", lambda log, txn: records, raising=False)
    monkeypatch.setattr(RowLog, "oldest_reader", lambda log: (99, 17), raising=False)
    described = describe_store(path)
    assert described.history == (Moment(2, 3.0, 4, 6, 1, 2, 3), Moment(4, 6.0, 4, 7, 1, 2, 3))
    assert (described.oldest_reader, described.oldest_reader_commits) == (99, 17)


def test_a_damaged_record_of_a_commit_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(log: RowLog, txn: object) -> list[object]:
        raise CorruptSegmentError("the record of commit 3 is damaged")

    monkeypatch.setattr(RowLog, "history", damaged, raising=False)
    (damage,) = verify_store(path).damages
    assert (damage.file, damage.message) == ("data.mdb", "the record of commit 3 is damaged")
    assert (describe_store(path).history, describe_store(path).rows) == ((), ROWS + 90)


def test_a_store_without_rows_has_no_ratio(tmp_path: Path) -> None:
    with LmdbStore(tmp_path / "store"):
        pass
    described = describe_store(tmp_path / "store")
    assert (described.rows, described.space_ratio, described.live_share, described.ages) == (0, None, None, ())
    assert verify_store(tmp_path / "store").good


def _write(path: Path, ready: object, go_on: object) -> None:
    with LmdbStore(path, config=SMALL) as store:
        ads = store.open_table("ads", SCHEMA)
        store.put(RowIds.of(ads, np.arange(10_000, 10_100)), _rows(100, 5))
        store.flush()
        ready.set()  # type: ignore[attr-defined]
        go_on.wait()  # type: ignore[attr-defined]
        for seed in range(4):  # what the survey has seen is deleted and its pages written again
            store.put(RowIds.of(ads, np.arange(ROWS)), _rows(ROWS, 10 + seed))
            store.flush()
        ready.set()  # type: ignore[attr-defined]


def test_beside_a_writer_what_was_committed_is_verified(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("spawn")
    ready, go_on = context.Event(), context.Event()
    writer = context.Process(target=_write, args=(path, ready, go_on))
    writer.start()
    assert ready.wait(60)
    ready.clear()
    assert verify_store(path).live_rows == ROWS + 190
    monkeypatch.setattr(survey_module, "_BATCH_BYTES", 1)  # a transaction a segment
    segments = describe_store(path).segments

    def progress(done: int, total: int) -> None:
        if not go_on.is_set():
            go_on.set()
            assert ready.wait(60)

    report = verify_store(path, progress)
    assert report.good
    assert 0 < report.segments < segments  # the others were deleted meanwhile
    writer.join(60)
    assert writer.exitcode == 0


class TestSnapshots:
    def test_a_segment_that_only_a_snapshot_needs_and_that_is_gone_is_named(self, tmp_path: Path) -> None:
        with LmdbStore(tmp_path / "s", durability="snapshot") as store:
            table = store.open_table("t", schema_of(8))
            for byte in (1, 2):
                store.put(RowIds.of(table, np.arange(500)), np.full((500, 32), byte, np.uint8))
                store.snapshot(f"number {byte}")
        assert verify_store(tmp_path / "s").good
        with lmdb.open(str(tmp_path / "s"), max_dbs=4) as env, env.begin(write=True) as txn:
            txn.delete((1).to_bytes(8, "big"), db=env.open_db(b"segments", txn=txn))
        report = verify_store(tmp_path / "s")
        assert [damage.snapshot for damage in report.damages] == ["number 1"]
        assert (
            "snapshot 'number 1'" in report.damages[0].message
            and "lacks 1 segments, 1 first" in report.damages[0].message
        )
        assert report.unread_segments == 0

    def test_a_damaged_row_that_only_a_snapshot_has_says_so(self, tmp_path: Path) -> None:
        with LmdbStore(tmp_path / "s", durability="snapshot") as store:
            table = store.open_table("t", schema_of(8))
            for byte in (1, 2):
                store.put(RowIds.of(table, np.arange(50)), np.full((50, 32), byte, np.uint8))
                store.snapshot(f"number {byte}")
        data = bytearray((tmp_path / "s" / "data.mdb").read_bytes())
        data[data.index(bytes([1] * 32)) + 3] ^= 1
        (tmp_path / "s" / "data.mdb").write_bytes(data)
        (damage,) = verify_store(tmp_path / "s").damages
        assert damage.message.startswith("superseded row with id 0")
        assert damage.message.endswith("which snapshot 'number 1' holds)") and damage.live is False
