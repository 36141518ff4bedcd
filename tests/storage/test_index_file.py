"""The saved index: it gives back what was saved, or nothing.

The golden file is made by `python tests/storage/test_index_file.py`, once per format version, and never again.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from storage import RowIds, StoreFullError
from storage.row_log import index_file
from storage.row_log.group_rows import GroupRows
from storage.row_log.hashing import checksum
from storage.row_log.index_file import Stamp, load_index, save_index
from storage.row_log.places import IDS, LIVE, NUMBER
from storage.row_log.segment import read_header
from storage.row_log.write_buffer import WriteBuffer

GOLDEN = Path(__file__).parent / "golden" / "index_v1"
STAMP = Stamp(bytes(range(16)), bytes(range(16, 32)), 77)
WIDTHS_OF_ROWS = (8, 20)
Segments = dict[int, NDArray[np.uint8]]


def empty(shards: int = 2) -> list[GroupRows]:
    groups = [GroupRows(i, row_bytes, shards, "a test") for i, row_bytes in enumerate(WIDTHS_OF_ROWS)]
    for group in groups:
        group.add_table(7)
    return groups


def write(group: GroupRows, number: int, ids: NDArray[np.int64], segments: Segments, deletes: int = 0) -> None:
    """Commit a segment of rows, then tombstones for the first of them."""
    rows = RowIds(group.group, np.full(len(ids), 7, np.uint32), ids)
    group.open = WriteBuffer(group.row_bytes, 1 << 17, 4096)
    group.open.begin(group.segments, number)
    group.append(rows, np.full((len(ids), group.row_bytes), number, np.uint8), lambda group: group.open)
    group.bury(RowIds(group.group, rows.tables[:deletes], ids[:deletes]), lambda group: group.open)
    group.seal(STAMP.store)
    buffer, image = group.sealed.pop()
    segments[number] = np.frombuffer(image, np.uint8).copy()
    group.adopt(read_header(segments[number], number, "a test"), segments[number].ctypes.data, buffer.slot)


def filled(shards: int = 2, rows: int = 12) -> tuple[list[GroupRows], Segments]:
    """Two groups with a few segments, of which the first has a free slot, and the second an empty shard."""
    groups, segments = empty(shards), {}
    write(groups[0], 1, np.arange(rows), segments)
    write(groups[0], 2, np.arange(rows), segments, deletes=3)
    write(groups[0], 4, np.arange(100, 100 + rows), segments)
    write(groups[1], 3, np.array([2**62]), segments)
    slot = int(np.flatnonzero(groups[0].segments.lines[:, NUMBER] == 1)[0])
    assert groups[0].segments.lines[slot, LIVE] == 0
    groups[0].segments.give_back(slot)
    del segments[1]
    return groups, segments


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, list[GroupRows], Segments]:
    groups, segments = filled()
    save_index(tmp_path / "index", groups, STAMP)
    return tmp_path / "index", groups, segments


def check_same(loaded: list[GroupRows], groups: list[GroupRows], ids: NDArray[np.int64]) -> None:
    for new, old in zip(loaded, groups, strict=True):
        slots = old.segments.slots()
        assert new.segments.slots().tolist() == slots.tolist() and len(new.segments) == len(old.segments)
        assert (new.segments.lines[slots] == old.segments.lines[slots]).all()
        assert new.index.rows == old.index.rows and new.index.memory_bytes == old.index.memory_bytes
        tables = np.full(len(ids), 7, np.uint32)
        assert (
            new.index.find(new.segments.lines, tables, ids) == old.index.find(old.segments.lines, tables, ids)
        ).all()
        assert new.index.rows == 0 or (new.index.find(new.segments.lines, tables, ids) != 0).any()


def check_untouched(groups: list[GroupRows]) -> None:
    for group in groups:
        assert len(group.segments) == 0 and group.index.rows == 0 and group.seen_epoch == 0


IDS_ASKED = np.array([*range(-3, 200), 2**62])


def test_what_was_saved_is_loaded(saved: tuple[Path, list[GroupRows], Segments]) -> None:
    path, groups, segments = saved
    loaded = empty()
    assert load_index(path, loaded, STAMP, segments)
    check_same(loaded, groups, IDS_ASKED)
    assert [group.seen_epoch for group in loaded] == [4, 3]
    assert [path.name] == os.listdir(path.parent), "nothing else is left"


def test_a_loaded_index_goes_on_like_any_other(saved: tuple[Path, list[GroupRows], Segments]) -> None:
    path, _, segments = saved
    groups = empty()
    assert load_index(path, groups, STAMP, segments)
    write(groups[0], 5, np.arange(3000), segments)
    assert groups[0].index.rows == 3000
    slots = groups[0].segments.slots()
    assert groups[0].segments.lines[slots, NUMBER].tolist() == [2, 4, 5] and 1 in slots, "the free slot is used again"
    assert groups[0].segments.lines[slots, LIVE].tolist() == [0, 0, 3000]
    save_index(path, groups, replace(STAMP, transaction=78))
    again = empty()
    assert not load_index(path, again, STAMP, segments)
    assert load_index(path, again, replace(STAMP, transaction=78), segments)
    check_same(again, groups, np.append(np.arange(3000), 2**62))


def test_an_empty_store_has_an_index_too(tmp_path: Path) -> None:
    save_index(tmp_path / "index", empty(), STAMP)
    groups = empty()
    assert load_index(tmp_path / "index", groups, STAMP, {})
    check_untouched(groups)
    save_index(tmp_path / "index", [], STAMP)
    assert load_index(tmp_path / "index", [], STAMP, {})


def test_no_page_of_a_segment_is_touched(saved: tuple[Path, list[GroupRows], Segments]) -> None:
    path, _, segments = saved
    nowhere = {n: np.ctypeslib.as_array((ctypes.c_uint8 * len(s)).from_address(64)) for n, s in segments.items()}
    loaded = empty()
    assert load_index(path, loaded, STAMP, nowhere)
    assert loaded[0].segments.lines[2, IDS] == 64 + 128


def test_a_large_index(tmp_path: Path) -> None:
    groups, segments = empty(16), {}
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 60_000)
    for number in range(1, 61):
        write(groups[0], number, ids[1000 * number - 1000 : 1000 * number], segments)
    save_index(tmp_path / "index", groups, STAMP)
    loaded = empty(16)
    assert load_index(tmp_path / "index", loaded, STAMP, segments)
    check_same(loaded, groups, ids)


class TestDamage:
    """Never an error, never a wrong index."""

    def test_every_flipped_bit_is_found(self, saved: tuple[Path, list[GroupRows], Segments]) -> None:
        path, _, segments = saved
        whole, groups = path.read_bytes(), empty()
        with open(path, "r+b", buffering=0) as file:
            for bit in range(8 * len(whole)):
                os.pwrite(file.fileno(), bytes([whole[bit // 8] ^ 1 << bit % 8]), bit // 8)
                assert not load_index(path, groups, STAMP, segments), f"bit {bit} was flipped"
                os.pwrite(file.fileno(), whole[bit // 8 : bit // 8 + 1], bit // 8)
        check_untouched(groups)
        assert load_index(path, groups, STAMP, segments)

    def test_every_truncation_and_a_byte_too_many(self, saved: tuple[Path, list[GroupRows], Segments]) -> None:
        path, _, segments = saved
        size, groups = path.stat().st_size, empty()
        os.truncate(path, size + 1)
        assert not load_index(path, groups, STAMP, segments)
        os.truncate(path, size)
        for cut in range(size - 1, -1, -1):
            os.truncate(path, cut)
            assert not load_index(path, groups, STAMP, segments), f"cut to {cut} bytes"
        check_untouched(groups)

    def test_pages_of_two_files_in_one(self, saved: tuple[Path, list[GroupRows], Segments]) -> None:
        """As after a power cut that nobody synced for."""
        path, groups, segments = saved
        old = path.read_bytes()
        write(groups[0], 5, np.arange(3), segments)
        save_index(path, groups, replace(STAMP, transaction=78))
        new, fresh = path.read_bytes(), empty()
        for at in range(1, min(len(old), len(new)), 7):
            for mixed in (old[:at] + new[at:], new[:at] + old[at:]):
                if mixed not in (old, new):
                    path.write_bytes(mixed)
                    assert not load_index(path, fresh, replace(STAMP, transaction=78), segments)
        check_untouched(fresh)

    @pytest.mark.parametrize(
        "stamp",
        [
            replace(STAMP, store=bytes(16)),
            replace(STAMP, token=bytes(16)),
            replace(STAMP, transaction=76),
            replace(STAMP, transaction=78),
        ],
    )
    def test_another_stamp(self, saved: tuple[Path, list[GroupRows], Segments], stamp: Stamp) -> None:
        path, _, segments = saved
        groups = empty()
        assert not load_index(path, groups, stamp, segments)
        check_untouched(groups)

    @pytest.mark.parametrize("what", ["missing", "more", "other", "shorter", "longer", "other of the same size"])
    def test_other_segments(self, saved: tuple[Path, list[GroupRows], Segments], what: str) -> None:
        path, _, segments = saved
        segment, groups = segments[4], empty()
        if what in ("missing", "other"):
            del segments[4]
        if what in ("more", "other"):
            segments[5] = segment
        if what == "shorter":
            segments[4] = segment[: 128 + 4 * 12]
        if what == "longer":
            segments[4] = np.zeros(1 << 16, np.uint8)
        if what == "other of the same size":
            segments[6] = segments.pop(4)
        assert not load_index(path, groups, STAMP, segments)
        check_untouched(groups)

    def test_other_groups(self, saved: tuple[Path, list[GroupRows], Segments]) -> None:
        path, _, segments = saved
        for groups in (empty()[:1], empty()[::-1], [*empty(), *empty()[:1]]):
            assert not load_index(path, groups, STAMP, segments)
            check_untouched(groups)

    def test_no_file_or_no_regular_one(self, tmp_path: Path) -> None:
        assert not load_index(tmp_path / "index", empty(), STAMP, {})
        assert not load_index(tmp_path, empty(), STAMP, {})
        (tmp_path / "index").write_bytes(b"")
        assert not load_index(tmp_path / "index", empty(), STAMP, {})

    @pytest.mark.parametrize(
        ("column", "number"),
        [("slot", 0), ("slot", 1 << 24), ("slot", -1), ("slot", 3), ("number", 4), ("rows", 1 << 20)],
    )
    def test_tables_that_make_no_sense_though_their_checksum_does(
        self, saved: tuple[Path, list[GroupRows], Segments], column: str, number: int
    ) -> None:
        path, _, segments = saved
        whole, groups = bytearray(path.read_bytes()), empty()
        at = 88 + 16 + 8 * ["slot", "number", "rows"].index(column)
        right = int.from_bytes(whole[at : at + 8], "little", signed=True)
        for seen in (right, number):
            whole[at : at + 8] = seen.to_bytes(8, "little", signed=True)
            tables = int.from_bytes(whole[64:72], "little")
            whole[72:80] = checksum(bytes(whole[88 : 88 + tables])).to_bytes(8, "little")
            whole[80:88] = checksum(bytes(whole[:80])).to_bytes(8, "little")
            path.write_bytes(whole)
            if seen != right:
                assert not load_index(path, groups, STAMP, segments)
                check_untouched(groups)
            else:
                assert load_index(path, empty(), STAMP, segments)


def test_the_file_is_what_the_documentation_says(saved: tuple[Path, list[GroupRows], Segments]) -> None:
    """Read with nothing but the offsets in docs/formats.md."""
    path, groups, _ = saved
    raw = path.read_bytes()
    assert struct.unpack_from("<8sII16s16sQQQ", raw) == (
        *(b"TEINDEX\0", 1, 2, STAMP.store, STAMP.token, 77, len(raw)),
        2 * (16 + 2 * 24) + 3 * 64,
    )
    at, entries, tables_end = 88, [], 88 + 2 * (16 + 2 * 24) + 3 * 64
    for group in groups:
        row_bytes, shards, segments = struct.unpack_from("<IIQ", raw, at)
        assert (row_bytes, shards, segments) == (group.row_bytes, 2, len(group.segments))
        at += 16 + 64 * segments
        for shard in range(shards):
            steps, used, of_entries = struct.unpack_from("<QQQ", raw, at)
            capacity = math.ceil(16 * 1.25 ** (steps - 1 + shard / shards)) if steps else 0
            entries.append((capacity, used, of_entries))
            at += 24
    assert at == tables_end
    for capacity, used, of_entries in entries:
        own = raw[at : at + 8 * capacity]
        assert checksum(own) == of_entries and np.count_nonzero(np.frombuffer(own, np.uint64)) == used
        at += 8 * capacity
    assert at == len(raw)


def test_shards_are_those_of_the_file_unless_they_are_far_too_few(tmp_path: Path) -> None:
    groups, segments = filled(4)
    save_index(tmp_path / "index", groups, STAMP)
    for shards, loads in ((2, True), (4, True), (8, True), (16, False)):
        loaded = empty(shards)
        assert load_index(tmp_path / "index", loaded, STAMP, segments) == loads
        assert len(loaded[0].index.table) == (4 if loads else shards)


def test_a_failed_save_leaves_the_old_file_and_no_other(
    saved: tuple[Path, list[GroupRows], Segments], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, groups, segments = saved

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(index_file.os, "fsync", full)
    with pytest.raises(StoreFullError, match=r"the index .*index could not be written: .*free space"):
        save_index(path, groups, replace(STAMP, transaction=78))
    assert os.listdir(path.parent) == [path.name]
    assert load_index(path, empty(), STAMP, segments)


def test_an_index_is_written_as_it_always_was(saved: tuple[Path, list[GroupRows], Segments]) -> None:
    """It fixes `mix` and the layout of shards too: change them, and the version must change."""
    path, _, segments = saved
    assert path.read_bytes() == GOLDEN.read_bytes()
    assert load_index(GOLDEN, empty(), STAMP, segments)


if __name__ == "__main__":
    save_index(GOLDEN, filled()[0], STAMP)
