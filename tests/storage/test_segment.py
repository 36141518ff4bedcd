"""The bytes of a segment and of a state, against docs/formats.md and against files written by earlier versions.

The golden files of the version that is written now are made by `python tests/storage/test_segment.py`, once, and never
again; those of earlier versions stay as they are.
"""

from __future__ import annotations

import shutil
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from storage import CorruptSegmentError, LmdbStore, RowIds, StoreConfigError
from storage.row_log.group_rows import GroupRows
from storage.row_log.hashing import checksum
from storage.row_log.places import EPOCH, place_at, stored_epoch
from storage.row_log.recovery import LAST_EPOCH, replay_slots
from storage.row_log.segment import bounds_of, pack_epochs, pack_ids, pack_tables, read_header
from storage.row_log.state import State
from storage.row_log.write_buffer import WriteBuffer, buffer_bytes
from storage.testing import EXTREME_IDS, check_equal, schema_of

GOLDEN = Path(__file__).parent / "golden"
STORE = UUID("00112233-4455-6677-8899-aabbccddeeff").bytes
ROW_BYTES, WIDE_ROW_BYTES = 20, 250
NARROW_IDS = np.array([0, 1, 2, 2**16, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 77])
MOVED_EPOCHS = [300, 600, 301, 300, 555, 557, 599]


def golden_group(row_bytes: int = ROW_BYTES) -> GroupRows:
    """Group 3, with two tables and no rows."""
    group = GroupRows(3, row_bytes, 2, "a test")
    for table in (5, 0xFFFFFFFF):
        group.add_table(table)
    return group


def sealed(group: GroupRows) -> NDArray[np.uint8]:
    group.seal(STORE)
    return np.frombuffer(group.sealed[0][1], np.uint8).copy()


def golden_segment(ids: NDArray[np.int64] = EXTREME_IDS) -> NDArray[np.uint8]:
    """Nine rows of two tables, then a tombstone for the fifth: segment 7 of group 3."""
    group = golden_group()
    group.open = WriteBuffer(ROW_BYTES, 4096, 4096)
    group.open.begin(group.segments, 7)
    tables = np.array([5, 0xFFFFFFFF, 5, 5, 5, 0xFFFFFFFF, 5, 5, 5], np.uint32)
    data = np.arange(9 * ROW_BYTES, dtype=np.uint8).reshape(9, ROW_BYTES)
    rows = RowIds(3, tables, ids)
    group.append(rows, data, lambda group: group.open)
    group.bury(RowIds(3, tables[4:5], ids[4:5]), lambda group: group.open)
    return sealed(group)


def moved_segment() -> NDArray[np.uint8]:
    """Six rows and a tombstone of one table, moved here from segments 300 to 600: segment 1000 of group 3."""
    group = golden_group()
    group.open = WriteBuffer(ROW_BYTES, 4096, 4096, moved=True)
    group.open.begin(group.segments, 1000)
    ids, tables = np.arange(6), np.full(6, 5, np.uint32)
    data = np.arange(6 * ROW_BYTES, dtype=np.uint8).reshape(6, ROW_BYTES)
    group.append(RowIds(3, tables, ids), data, lambda group: group.open)
    group.bury(RowIds(3, tables[2:3], ids[2:3]), lambda group: group.open)
    group.open.epochs[:7] = MOVED_EPOCHS
    return sealed(group)


def wide_segment() -> NDArray[np.uint8]:
    """Five rows of 250 bytes: segment 7 of group 3."""
    group = golden_group(WIDE_ROW_BYTES)
    group.open = WriteBuffer(WIDE_ROW_BYTES, 4096, 4096)
    group.open.begin(group.segments, 7)
    group.append(RowIds(3, np.full(5, 5, np.uint32), np.arange(5)), wide_rows(), lambda group: group.open)
    return sealed(group)


def wide_rows() -> NDArray[np.uint8]:
    return (np.arange(5 * WIDE_ROW_BYTES) % 251).astype(np.uint8).reshape(5, WIDE_ROW_BYTES)


GOLDENS = {
    "segment_v3_wide": wide_segment,
    "segment_v2": golden_segment,
    "segment_v2_narrow": lambda: golden_segment(NARROW_IDS),
    "segment_v2_moved": moved_segment,
}


@pytest.mark.parametrize("name", GOLDENS)
def test_a_segment_is_written_as_it_always_was(name: str) -> None:
    assert GOLDENS[name]().tobytes() == (GOLDEN / f"{name}.bin").read_bytes()


def replayed(name: str, row_bytes: int = ROW_BYTES) -> tuple[GroupRows, NDArray[np.uint8]]:
    """A group that has opened a golden segment, and the segment, which must outlive it."""
    segment = np.frombuffer((GOLDEN / f"{name}.bin").read_bytes(), np.uint8).copy()
    header = read_header(segment, 1000 if "moved" in name else 7, "a test")
    group = golden_group(row_bytes)
    replay_slots(group, np.array([group.adopt(header, segment.ctypes.data)]), LAST_EPOCH)
    return group, segment


@pytest.mark.parametrize(
    ("name", "ids"), [("segment_v1", EXTREME_IDS), ("segment_v2", EXTREME_IDS), ("segment_v2_narrow", NARROW_IDS)]
)
def test_golden_segments_of_every_version_still_load(name: str, ids: NDArray[np.int64]) -> None:
    group, _segment = replayed(name)
    tables = np.array([5, 0xFFFFFFFF, 5, 5, 5, 0xFFFFFFFF, 5, 5, 5], np.uint32)
    out, found = np.zeros((9, ROW_BYTES), np.uint8), np.zeros(9, np.bool_)
    group.get(RowIds(3, tables, ids), out, found)
    assert found.tolist() == [True] * 4 + [False] + [True] * 4
    assert (out[found] == np.arange(9 * ROW_BYTES, dtype=np.uint8).reshape(9, ROW_BYTES)[found]).all()
    assert group.index.rows == 8


def test_a_golden_segment_of_moved_rows_still_loads() -> None:
    group, _segment = replayed("segment_v2_moved")
    out, found = np.zeros((6, ROW_BYTES), np.uint8), np.zeros(6, np.bool_)
    group.get(RowIds(3, np.full(6, 5, np.uint32), np.arange(6)), out, found)
    assert found.tolist() == [True, True, False, True, True, True]
    assert (out[found] == np.arange(6 * ROW_BYTES, dtype=np.uint8).reshape(6, ROW_BYTES)[found]).all()


def test_a_golden_segment_of_wide_rows_still_loads() -> None:
    group, _segment = replayed("segment_v3_wide", WIDE_ROW_BYTES)
    out, found = np.zeros((6, WIDE_ROW_BYTES), np.uint8), np.zeros(6, np.bool_)
    group.get(RowIds(3, np.full(6, 5, np.uint32), np.arange(6)), out, found)
    assert found.tolist() == [True] * 5 + [False]
    assert (out[:5] == wide_rows()).all()


@pytest.mark.parametrize(("make", "version"), [(wide_segment, 2), (wide_segment, 1), (moved_segment, 3)])
def test_rows_with_checksums_of_another_kind_are_refused(make: Callable[[], NDArray[np.uint8]], version: int) -> None:
    segment = make()
    number = int.from_bytes(segment[48:56].tobytes(), "little")
    segment[8] = version
    if version == 1:
        segment[44] = 0
    segment[120:128] = np.frombuffer(checksum(segment[:120]).to_bytes(8, "little"), np.uint8)
    with pytest.raises(CorruptSegmentError, match=f"version {version} and rows of .* bytes, whose checksums"):
        read_header(segment, number, "a test")


def test_a_segment_is_what_the_documentation_says() -> None:
    """Read with nothing but the offsets in docs/formats.md."""
    raw = golden_segment().tobytes()
    assert len(raw) == 4080, "padded to one page of LMDB less its header of 16 bytes"
    assert raw[:8] == b"TEROWSEG"
    assert struct.unpack_from("<8I", raw, 8) == (2, 128, 3, 10, 1, ROW_BYTES, 32, 2)
    assert struct.unpack_from("<4BI", raw, 40) == (1, 0, 1, 0, 8)
    assert struct.unpack_from("<6Q", raw, 48) == (7, 7, 7, 128, 128 + 80 + 8 + 10 + 10 + 4, 4080)
    assert raw[96:112] == STORE
    assert struct.unpack_from("<Q", raw, 112)[0] == checksum(raw[128:240], 7)
    assert struct.unpack_from("<Q", raw, 120)[0] == checksum(raw[:120])
    assert np.frombuffer(raw, "<i8", 10, 128).tolist() == [*EXTREME_IDS.tolist(), 2**31 - 1]
    assert np.frombuffer(raw, "<u4", 2, 208).tolist() == [5, 0xFFFFFFFF]
    assert list(raw[216:226]) == [0, 1, 0, 0, 0, 1, 0, 0, 0, 0]
    assert list(raw[226:236]) == [0] * 9 + [1]
    check_rows(raw, 240, [*EXTREME_IDS.tolist(), 2**31 - 1])


def check_rows(raw: bytes, rows_at: int, ids: list[int]) -> None:
    """Nine rows as `golden_segment` writes them, a tombstone, zeros."""
    for i, id in enumerate(ids):
        row = raw[rows_at + 32 * i : rows_at + 32 + 32 * i]
        expected = bytes(range(ROW_BYTES * i, ROW_BYTES * (i + 1))) if i < 9 else bytes(ROW_BYTES)
        table = 0xFFFFFFFF if i in (1, 5) else 5
        seed = (id * 0x165667B19E3779F9 + table * 0x27D4EB2F165667C5) % 2**64
        assert row[8:] == expected + bytes(4)
        assert int.from_bytes(row[:8], "little") == checksum(expected, seed)
    assert raw[rows_at + 320 :] == bytes(4080 - rows_at - 320)


def test_ids_below_2_to_the_32_take_4_bytes_each() -> None:
    raw = golden_segment(NARROW_IDS).tobytes()
    assert struct.unpack_from("<I", raw, 44) == (4,)
    assert struct.unpack_from("<Q", raw, 80)[0] == 200, "128 + 40 + 8 + 10 + 10, rounded up"
    assert np.frombuffer(raw, "<u4", 10, 128).tolist() == [*NARROW_IDS.tolist(), NARROW_IDS[4]]
    assert np.frombuffer(raw, "<u4", 2, 168).tolist() == [5, 0xFFFFFFFF]
    check_rows(raw, 200, [*NARROW_IDS.tolist(), int(NARROW_IDS[4])])


def test_moved_rows_keep_their_epochs() -> None:
    raw = moved_segment().tobytes()
    assert struct.unpack_from("<4BI", raw, 40) == (0, 2, 1, 0, 4), "no codes, epochs of 2 bytes, flags"
    assert struct.unpack_from("<3Q", raw, 48) == (1000, 300, 600), "number, least and greatest epoch"
    assert np.frombuffer(raw, "<u4", 7, 128).tolist() == [0, 1, 2, 3, 4, 5, 2]
    assert np.frombuffer(raw, "<u2", 7, 156).tolist() == [epoch - 300 for epoch in MOVED_EPOCHS]
    group, _segment = replayed("segment_v2_moved")
    assert stored_epochs(group.segments.lines, 1, 7).tolist() == MOVED_EPOCHS


@njit
def stored_epochs(lines, slot, rows):
    out = np.zeros(rows, np.int64)
    for row in range(rows):
        out[row] = stored_epoch(lines, place_at(slot, row))
    return out


def test_a_buffer_of_moved_rows_admits_to_no_epoch_until_it_is_sealed() -> None:
    """A tombstone goes when every other segment begins later: that must not be believed of rows yet to come."""
    group = golden_group()
    buffer = WriteBuffer(ROW_BYTES, 4096, 4096, moved=True)
    buffer.begin(group.segments, 9)
    assert group.segments.lines[buffer.slot, EPOCH] == 0
    group.open = buffer
    rows = RowIds(3, np.full(2, 5, np.uint32), np.arange(2))
    group.append(rows, np.zeros((2, ROW_BYTES), np.uint8), lambda group: group.open)
    buffer.epochs[:2] = 8, 3
    sealed(group)
    assert group.segments.lines[buffer.slot, EPOCH] == 3


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("segment_bytes", [300, 4096, 1 << 16])
@pytest.mark.parametrize("wide", [False, True])
def test_a_full_segment_keeps_to_its_size_and_its_buffer_to_its_bytes(
    moved: bool, segment_bytes: int, wide: bool
) -> None:
    group = golden_group()
    tracemalloc.start()
    buffer = WriteBuffer(ROW_BYTES, segment_bytes, 4096, moved)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held <= buffer.bytes + 512, "the object itself is not counted"
    assert buffer.bytes == buffer_bytes(segment_bytes, ROW_BYTES, 4096, moved)
    buffer.begin(group.segments, 9)
    group.open, n = buffer, buffer.capacity
    rng = np.random.default_rng(0)
    tables = rng.choice(np.array([5, 0xFFFFFFFF], np.uint32), n) if wide else np.full(n, 5, np.uint32)
    rows = RowIds(3, tables, rng.integers(-(2**63) if wide else 0, 2**63 - 1 if wide else 2**32, n))
    group.append(rows, np.zeros((n, ROW_BYTES), np.uint8), lambda group: group.open)
    buffer.epochs[:] = rng.integers(0, 2**40 if wide else 300, len(buffer.epochs))
    segment = sealed(group)
    assert read_header(segment, 9, "a test").rows == n
    more = n * (4 + 1 + 6 * moved) + 8 if wide else 0  # ids, tables and epochs that take more than they usually do
    assert segment_bytes - 64 - more <= len(segment) - more <= max(segment_bytes, 4080)


@pytest.mark.parametrize(
    ("least", "most", "width"),
    [(5, 5, 0), (5, 260, 1), (5, 261, 2), (0, 1 << 16, 4), (1, 1 << 32, 4), (0, 1 << 32, 8), (0, 2**63 - 1, 8)],
)
def test_epochs_take_as_few_bytes_as_they_can(least: int, most: int, width: int) -> None:
    epochs = np.array([most, least, most])
    packed = pack_epochs(epochs, *bounds_of(epochs))
    assert packed.itemsize * (len(packed) > 0) == width
    assert width == 0 or (packed.astype(np.int64) + least == epochs).all()


@pytest.mark.parametrize(
    ("ids", "width"), [([0], 4), ([2**32 - 1, 0], 4), ([2**32], 8), ([-1, 3], 8), ([-(2**63), 2**63 - 1], 8)]
)
def test_ids_take_4_bytes_if_all_of_them_fit(ids: list[int], width: int) -> None:
    packed = pack_ids(np.array(ids))
    assert packed.itemsize == width and packed.tolist() == ids


def test_reading_gives_what_was_written() -> None:
    header = read_header(golden_segment(), 7, "a test")
    assert (header.group, header.rows, header.tombstones, header.first_epoch, header.last_epoch) == (3, 10, 1, 7, 7)
    assert header.store == STORE and header.code_bytes == 1 and header.tables == 2


@pytest.mark.parametrize(("ids", "rows_at"), [(EXTREME_IDS, 240), (NARROW_IDS, 200)])
def test_every_flipped_bit_of_header_and_ids_is_found(ids: NDArray[np.int64], rows_at: int) -> None:
    segment = golden_segment(ids)
    for bit in range(8 * rows_at):
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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"version": 4}, r"version 4 .*reads versions up to 3"),
        ({"version": 0}, "version 0 "),
        ({"id_bytes": 5}, "do not fit the offsets"),
        ({"version": 1, "id_bytes": 4}, "do not fit the offsets"),
    ],
)
def test_headers_that_this_version_cannot_read_are_refused_by_name(wrong: dict[str, int], message: str) -> None:
    segment = golden_segment()
    segment[:128] = np.frombuffer(replace(read_header(segment, 7, "a test"), **wrong).pack(), np.uint8)
    with pytest.raises(CorruptSegmentError, match=message):
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
    for name, segment in GOLDENS.items():
        (GOLDEN / f"{name}.bin").write_bytes(segment().tobytes())


if __name__ == "__main__":
    write_golden_files()
