"""The bytes of a segment and of a state, against docs/formats.md and against files written by earlier versions.

The golden files are written by `python tests/storage/test_segment.py`, once per format version, and never again.
"""

from __future__ import annotations

import shutil
import struct
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
from numpy.typing import NDArray

from storage import CorruptSegmentError, LmdbStore, RowIds, StoreConfig, StoreConfigError
from storage.row_log.group_rows import GroupRows
from storage.row_log.hashing import checksum
from storage.row_log.segment import pack_tables, read_header
from storage.row_log.state import State
from storage.row_log.write_buffer import WriteBuffer
from storage.testing import EXTREME_IDS, check_equal, schema_of

GOLDEN = Path(__file__).parent / "golden"
STORE = UUID("00112233-4455-6677-8899-aabbccddeeff").bytes
ROW_BYTES = 20


def golden_segment() -> NDArray[np.uint8]:
    """Nine rows of two tables, then a tombstone for the fifth: segment 7 of group 3."""
    group = GroupRows(3, ROW_BYTES, 2, "a test")
    for table in (5, 0xFFFFFFFF):
        group.add_table(table)
    group.open = WriteBuffer(ROW_BYTES, 4096, 4096)
    group.open.begin(group.segments, 7)
    tables = np.array([5, 0xFFFFFFFF, 5, 5, 5, 0xFFFFFFFF, 5, 5, 5], np.uint32)
    data = np.arange(9 * ROW_BYTES, dtype=np.uint8).reshape(9, ROW_BYTES)
    rows = RowIds(3, tables, EXTREME_IDS)
    group.append(rows, data, lambda group: group.open)
    group.bury(RowIds(3, tables[4:5], EXTREME_IDS[4:5]), lambda group: group.open)
    group.seal(STORE)
    return np.frombuffer(group.sealed[0][1], np.uint8).copy()


def test_a_segment_is_written_as_it_always_was() -> None:
    assert golden_segment().tobytes() == (GOLDEN / "segment_v1.bin").read_bytes()


def test_a_segment_is_what_the_documentation_says() -> None:
    """Read with nothing but the offsets in docs/formats.md."""
    raw = golden_segment().tobytes()
    assert len(raw) == 4080, "padded to one page of LMDB less its header of 16 bytes"
    assert raw[:8] == b"TEROWSEG"
    assert struct.unpack_from("<8I", raw, 8) == (1, 128, 3, 10, 1, ROW_BYTES, 32, 2)
    assert struct.unpack_from("<4BI", raw, 40) == (1, 0, 1, 0, 0)
    assert struct.unpack_from("<6Q", raw, 48) == (7, 7, 7, 128, 128 + 80 + 8 + 10 + 10 + 4, 4080)
    assert raw[96:112] == STORE
    assert struct.unpack_from("<Q", raw, 112)[0] == checksum(raw[128:240], 7)
    assert struct.unpack_from("<Q", raw, 120)[0] == checksum(raw[:120])
    assert np.frombuffer(raw, "<i8", 10, 128).tolist() == [*EXTREME_IDS.tolist(), 2**31 - 1]
    assert np.frombuffer(raw, "<u4", 2, 208).tolist() == [5, 0xFFFFFFFF]
    assert list(raw[216:226]) == [0, 1, 0, 0, 0, 1, 0, 0, 0, 0]
    assert list(raw[226:236]) == [0] * 9 + [1]
    for i, id in enumerate([*EXTREME_IDS.tolist(), 2**31 - 1]):
        row = raw[240 + 32 * i : 272 + 32 * i]
        expected = bytes(range(ROW_BYTES * i, ROW_BYTES * (i + 1))) if i < 9 else bytes(ROW_BYTES)
        table = 0xFFFFFFFF if i in (1, 5) else 5
        seed = (id * 0x165667B19E3779F9 + table * 0x27D4EB2F165667C5) % 2**64
        assert row[8:] == expected + bytes(4)
        assert int.from_bytes(row[:8], "little") == checksum(expected, seed)
    assert raw[240 + 320 :] == bytes(4080 - 560)


def test_reading_gives_what_was_written() -> None:
    header = read_header(golden_segment(), 7, "a test")
    assert (header.group, header.rows, header.tombstones, header.first_epoch, header.last_epoch) == (3, 10, 1, 7, 7)
    assert header.store == STORE and header.code_bytes == 1 and header.tables == 2


def test_every_flipped_bit_of_header_and_ids_is_found() -> None:
    segment = golden_segment()
    for bit in range(8 * 240):
        segment[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptSegmentError, match="segment 7 of a test"):
            read_header(segment, 7, "a test")
        segment[bit // 8] ^= 1 << bit % 8
    read_header(segment, 7, "a test")


@pytest.mark.parametrize("size", [0, 8, 127, 128, 200, 4079])
def test_a_segment_that_was_cut_short_is_refused(size: int) -> None:
    with pytest.raises(CorruptSegmentError):
        read_header(golden_segment()[:size], 7, "a test")


def test_a_segment_under_another_number_is_refused() -> None:
    with pytest.raises(CorruptSegmentError, match="says it is segment 7"):
        read_header(golden_segment(), 8, "a test")


def test_a_newer_version_is_refused_by_name() -> None:
    segment = golden_segment()
    newer = replace(read_header(segment, 7, "a test"), version=2)
    segment[:128] = np.frombuffer(newer.pack(), np.uint8)
    with pytest.raises(CorruptSegmentError, match=r"version 2 .*reads version 1"):
        read_header(segment, 7, "a test")


@pytest.mark.parametrize(
    ("tables", "rows", "width"),
    [(1, 50, 0), (2, 50, 1), (256, 5000, 1), (257, 5000, 2), (3000, 5000, 4), (2, 2, 4), (2, 3, 1)],
)
def test_table_numbers_take_as_few_bytes_as_they_can(tables: int, rows: int, width: int) -> None:
    known = np.sort(np.random.default_rng(tables).choice(2**32, tables + 5, replace=False)).astype(np.uint32)
    numbers = known[np.arange(rows) % tables + 3]
    dictionary, codes, code_bytes = pack_tables(numbers, known)
    assert code_bytes == width
    assert len(codes) == width * rows
    decoded = codes.view(np.uint32) if width == 4 else dictionary[codes.view(f"u{width}") if width else 0]
    assert (decoded == numbers).all()


def test_states_are_read_as_written_and_checked() -> None:
    record = State(3, 99, b"note").pack()
    assert record == b"TESTATE\0" + struct.pack("<IIQQQ", 1, 4, 3, 99, 0) + b"note" + record[-8:]
    assert State.unpack(record, "a test") == State(3, 99, b"note")
    for bit in range(8 * len(record)):
        bad = bytearray(record)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptSegmentError, match="state record of a test"):
            State.unpack(bytes(bad), "a test")
    with pytest.raises(CorruptSegmentError, match="missing"):
        State.unpack(None, "a test")
    with pytest.raises(StoreConfigError, match="65536"):
        State(1, 1, bytes(65537))


def test_a_store_of_version_1_still_loads(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "store_v1", tmp_path / "store")
    with LmdbStore(tmp_path / "store", durability="snapshot") as store:
        check_golden_store(store)


def check_golden_store(store: LmdbStore) -> None:
    a, b = store.open_table("ads", schema_of(3)), store.open_table("users", schema_of(2, 1))
    rows = {(a.number, int(id)): bytes([i] * 12) for i, id in enumerate(EXTREME_IDS) if id != -5}
    check_equal(store, a.group, rows)
    check_equal(store, b.group, {(b.number, 1): bytes(12), (b.number, 2): b"\xff" * 12})
    assert store.note == b"golden"


def write_golden_files() -> None:
    GOLDEN.mkdir(exist_ok=True)
    (GOLDEN / "segment_v1.bin").write_bytes(golden_segment().tobytes())
    shutil.rmtree(GOLDEN / "store_v1", ignore_errors=True)
    config = StoreConfig(segment_bytes=8192, write_buffer_bytes=16384)
    with LmdbStore(GOLDEN / "store_v1", durability="snapshot", config=config) as store:
        a, b = store.open_table("ads", schema_of(3)), store.open_table("users", schema_of(2, 1))
        for i, id in enumerate(EXTREME_IDS):
            store.put(RowIds.of(a, np.array([id])), np.full((1, 12), i, np.uint8))
        store.put(RowIds.of(b, np.array([1, 2])), np.repeat(np.array([[0], [255]], np.uint8), 12, axis=1))
        store.flush(b"golden")
        store.delete(RowIds.of(a, np.array([-5])))
    for name in ("owner", "lock.mdb"):
        (GOLDEN / "store_v1" / name).unlink()


if __name__ == "__main__":
    write_golden_files()
