"""IdIndex over a made-up segment table: exactness, growth, memory."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from storage import StoreConfigError
from storage.id_index import ADDRESS, CAPACITY, LIMIT, USED, IdIndex, remove_entry, seek, set_entry
from storage.row_log.hashing import mix
from storage.row_log.places import CODES, COUNT, IDS, NUMBER, WIDTHS, place_at

ROWS = 1 << 16


@njit
def _hashes(tables, ids, out):
    for i in range(len(ids)):
        out[i] = mix(tables[i], ids[i])


@njit
def _insert(shards, shift, segments, tables, ids, start):
    for i in range(start, len(ids)):
        hash = mix(tables[i], ids[i])
        shard = np.int64(hash >> shift)
        position = seek(shards, shift, hash, segments, tables[i], ids[i])
        if position >= 0:
            continue
        if shards[shard, USED] >= shards[shard, LIMIT]:
            return i, shard
        shards[shard, USED] += 1
        set_entry(shards, shift, hash, -1 - position, place_at(1 + i // 65536, i % 65536))
    return len(ids), -1


@njit
def _remove(shards, shift, segments, tables, ids):
    for i in range(len(ids)):
        hash = mix(tables[i], ids[i])
        position = seek(shards, shift, hash, segments, tables[i], ids[i])
        if position >= 0:
            remove_entry(shards, shift, hash, position)


class Log:
    """Ids and tables as open segments store them; row i of the whole lies in slot 1 + i // 65536."""

    def __init__(self, tables: NDArray[np.uint32], ids: NDArray[np.int64]) -> None:
        self.tables, self.ids = tables, ids
        count = -(-len(ids) // ROWS)
        self.segments = np.zeros((count + 1, 8), np.int64)
        for slot in range(1, count + 1):
            first = (slot - 1) * ROWS
            self.segments[slot, IDS] = ids.ctypes.data + 8 * first
            self.segments[slot, CODES] = tables.ctypes.data + 4 * first
            self.segments[slot, [WIDTHS, NUMBER, COUNT]] = 4, slot, min(ROWS, len(ids) - first)

    def fill(self, index: IdIndex, upto: int | None = None) -> None:
        at, shard = 0, 0
        while shard >= 0:
            args = (self.segments, self.tables[:upto], self.ids[:upto], at)
            at, shard = _insert(index.table, index.shift, *args)
            if shard >= 0:
                index.grow(shard)

    def places(self) -> NDArray[np.uint64]:
        i = np.arange(len(self.ids))
        return ((1 + i // ROWS) << 16 | i % ROWS).astype(np.uint64)


def random_log(count: int, seed: int = 0) -> Log:
    rng = np.random.default_rng(seed)
    ids = np.unique(rng.integers(-(2**63), 2**63 - 1, count))
    rng.shuffle(ids)
    return Log(rng.integers(0, 5, len(ids)).astype(np.uint32), ids)


@pytest.mark.parametrize("shards", [2, 16, 256])
def test_every_id_is_found_where_it_was_put_and_no_other(shards: int) -> None:
    log, index = random_log(100_000), IdIndex(shards)
    log.fill(index)
    assert index.rows == len(log.ids)
    assert (index.find(log.segments, log.tables, log.ids) == log.places()).all()
    assert (index.find(log.segments, log.tables + np.uint32(5), log.ids) == 0).all()


def test_removal_leaves_the_others_where_they_are() -> None:
    log, index = random_log(30_000), IdIndex(2)
    log.fill(index)
    gone = np.random.default_rng(1).random(len(log.ids)) < 0.6
    _remove(index.table, index.shift, log.segments, log.tables[gone], log.ids[gone])
    assert (index.find(log.segments, log.tables, log.ids) == np.where(gone, 0, log.places())).all()
    log.fill(index)
    assert (index.find(log.segments, log.tables, log.ids) == log.places()).all()


def test_ids_with_one_tag_in_one_shard_are_told_apart() -> None:
    ids = np.arange(40_000)
    hashes = np.zeros(len(ids), np.uint64)
    _hashes(np.zeros(len(ids), np.uint32), ids, hashes)
    shown = hashes >> np.uint64(16) & np.uint64(0xFFFFFF) | (hashes >> np.uint64(63)) << np.uint64(24)
    order = np.argsort(shown, kind="stable")
    same = np.flatnonzero(shown[order][1:] == shown[order][:-1])
    assert len(same) > 10, "the test needs ids that an index of two shards cannot tell apart"
    pairs = np.ascontiguousarray(np.concatenate([ids[order[same]], ids[order[same + 1]]]))
    log, index = Log(np.zeros(len(pairs), np.uint32), pairs), IdIndex(2)
    log.fill(index, upto=len(same))
    found = index.find(log.segments, log.tables, log.ids)
    assert (found[: len(same)] != 0).all() and (found[len(same) :] == 0).all()
    log.fill(index)
    assert index.rows == len(pairs)


def test_memory_is_at_most_16_bytes_a_row_growth_included() -> None:
    log, index = random_log(400_000), IdIndex(256)
    worst = 0.0
    for upto in range(100_000, len(log.ids), 3_333):
        log.fill(index, upto)
        growing = 8 * int(index.table[:, CAPACITY].max())
        worst = max(worst, (index.memory_bytes + growing) / upto)
    assert worst <= 14


def test_reserved_room_is_enough_and_no_more_than_16_bytes_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    log, index, grown = random_log(300_000), IdIndex(256), []
    log.fill(index, upto=1000)
    index.reserve(len(log.ids))
    assert (index.find(log.segments, log.tables, log.ids)[:1000] == log.places()[:1000]).all()
    monkeypatch.setattr(
        IdIndex, "grow", lambda self, shard, grow=IdIndex.grow: (grown.append(shard), grow(self, shard))
    )
    log.fill(index)
    assert len(grown) < 30, "of 256 shards, those that got more than their share"
    assert (index.find(log.segments, log.tables, log.ids) == log.places()).all()
    assert index.memory_bytes <= 14 * len(log.ids)
    before = index.memory_bytes
    index.reserve(1000)
    index.trim()
    assert 0.8 * before <= index.memory_bytes <= before, "some shards got less than their share"
    for shard, used in enumerate(index.table[:, USED].tolist()):
        assert index._level_for(shard, used) == index._level[shard], "neither too small nor too large"


@pytest.mark.parametrize(("rows", "reserved"), [(100_000, 1_000_000), (100_000, 130_000), (0, 100_000)])
def test_room_that_was_too_much_is_trimmed(rows: int, reserved: int) -> None:
    log, index = random_log(100_000), IdIndex(64)
    index.reserve(reserved)
    log.fill(index, upto=rows)
    index.trim()
    assert index.memory_bytes <= 15 * rows + (1 << 16)
    assert (index.find(log.segments, log.tables, log.ids)[:rows] == log.places()[:rows]).all()
    bound = index.memory_after(100_000 - rows)
    log.fill(index)
    assert index.memory_bytes <= bound
    assert (index.find(log.segments, log.tables, log.ids) == log.places()).all()


def test_shards_do_not_grow_together() -> None:
    index = IdIndex(256)
    log = random_log(256 * 500)
    log.fill(index)
    loads = index.table[:, USED] / index.table[:, CAPACITY]
    assert loads.min() < 0.7 and loads.max() > 0.75
    assert len(np.unique(index.table[:, CAPACITY])) > 50


@pytest.mark.parametrize("one_shard", [False, True])
def test_memory_after_is_a_bound_wherever_ids_fall(one_shard: bool) -> None:
    log, index = random_log(60_000, seed=2), IdIndex(16)
    if one_shard:
        hashes = np.zeros(len(log.ids), np.uint64)
        _hashes(log.tables, log.ids, hashes)
        kept = hashes >> np.uint64(60) == 3
        log = Log(log.tables[kept], log.ids[kept])
    rng, done = np.random.default_rng(3), 0
    while done < len(log.ids):
        more = min(len(log.ids) - done, int(rng.choice([1, 2, 5, 30, 300, 3000])))
        bound = index.memory_after(more)
        log.fill(index, done + more)
        done += more
        assert index.memory_bytes <= bound


def test_addresses_are_those_of_the_entries() -> None:
    index = IdIndex(2)
    assert (index.table[:, [ADDRESS, CAPACITY]] == 0).all(), "a shard without rows takes no memory"
    index.grow(1)
    assert index.table[0, ADDRESS] == 0 and index.table[1, ADDRESS] != 0


@pytest.mark.parametrize("shards", [0, 1, 3, 1 << 15])
def test_numbers_of_shards_that_make_no_sense(shards: int) -> None:
    with pytest.raises(StoreConfigError, match="power of two"):
        IdIndex(shards)


def test_the_bound_of_growth_follows_shards_that_have_grown() -> None:
    """A shard that has grown and was filled to the same headroom costs more the next time."""
    index = IdIndex(2)
    index.table[:, USED] = index.table[:, LIMIT]
    index.jump_bytes(1)
    for _ in range(20):
        for shard in range(2):
            index.grow(shard)
        index.table[:, USED] = index.table[:, LIMIT]
        dearest = int(index._jump_bytes.max()) + int(index._grown_bytes.max())
        assert index.jump_bytes(1) >= dearest
