"""IdIndex: (table, id) -> place of the row's newest version, in about 11 bytes a row.

Ids are spread over shards by the top bits of their hash. A shard is one array of 8-byte entries with linear probing:

    bits 63..40  tag: the 24 bits of the hash that place an id within its shard
    bits 39..0   place (`storage.row_log.places`); an empty position is 0, since no place is

What follows from that:

- An entry holds every bit of the hash that its shard uses. Growing a shard or closing the gap of a removed entry never
  reads an id back from the log, which may be cold: a shard of 64 k rows grows in well under a millisecond.
- A shard grows alone, by a quarter, at a load of 0.8. Their sizes differ by up to a quarter, so that they do not
  grow at the same moment. Loads lie between 0.64 and 0.8: 10 to 12.5 bytes a row, plus one shard during
  its growth. Whoever knows how many ids will come reserves room for them, and trims what was too much.
- A tag is no proof. Readers prove a row by its checksum, which is keyed by table and id, and fall back on the ids
  stored in the segment; writers always compare the stored id and table, so that no id ever takes another's entry,
  and in the row log the checksum too before an id gets an entry, so that none gets a second one. Of an id that is
  known to be here, a tag that no other entry in reach has is proof enough (`sole_match`).
  With S shards of R rows a missing id meets a false tag with odds of about R / 2^24.

The design speaks of 16-bit tags and 48-bit places. With 16 bits a shard of 64 k rows would have to read one stored id
for every missing id looked up, and read back all its ids to grow; 40 bits of place are 2^40 rows, enough for 2^24
segments.

Kernels get `table` and `shift` and use the functions below; Python grows shards between kernel calls. Owned by the
store's lock. The index knows nothing of LMDB and nothing of what rows hold.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.errors import StoreConfigError
from storage.memory import OWN_PAGES_BYTES, held_bytes, zeros
from storage.row_log.hashing import mix
from storage.row_log.places import stored_id, stored_table
from storage.row_log.raw import load64, prefetch, store64, uncounted

ADDRESS, CAPACITY, USED, LIMIT = range(4)
MAX_SHARDS = 1 << 14
_FIRST_CAPACITY = 16
_ARRAY_OVERHEAD = 128  # a numpy array's object and its allocation

_TAG_SHIFT, TAG_BITS, _TAG_MASK = np.uint64(16), np.uint64(24), np.uint64((1 << 24) - 1)
PLACE_BITS, PLACE_MASK = np.uint64(40), np.uint64((1 << 40) - 1)
_0, _1, _8 = np.uint64(0), np.uint64(1), np.uint64(8)
_PREFETCH_AHEAD = 16


@njit(inline="always")
def tag_of(hash: Any) -> Any:
    """The bits of a hash that an entry keeps."""
    return (hash >> _TAG_SHIFT) & _TAG_MASK


@njit(inline="always")
def home_address(shards: Any, shift: Any, hash: Any) -> Any:
    """Where the search for a hash begins: an address, to be prefetched."""
    shard = hash >> shift
    at = (tag_of(hash) * np.uint64(shards[shard, CAPACITY])) >> TAG_BITS
    return np.uint64(shards[shard, ADDRESS]) + at * _8


@njit(inline="always")
def _match(shards: Any, shift: Any, hash: Any, sole: Any) -> Any:
    """The first place whose tag is the hash's, 0 if there is none; with `sole` 0 too if there are several."""
    shard = hash >> shift
    capacity = np.uint64(shards[shard, CAPACITY])
    place = _0
    if capacity > _0:
        base = np.uint64(shards[shard, ADDRESS])
        tag = tag_of(hash)
        at = (tag * capacity) >> TAG_BITS
        entry = load64(base + at * _8)
        while entry != _0:
            if entry >> PLACE_BITS == tag:
                if place != _0:
                    return _0
                place = entry & PLACE_MASK
                if not sole:
                    return place
            at += _1
            if at == capacity:
                at = _0
            entry = load64(base + at * _8)
    return place


@njit(inline="always")
def first_match(shards: Any, shift: Any, hash: Any) -> Any:
    """The first place whose tag is the hash's, 0 if there is none. The row there may be another id's."""
    return _match(shards, shift, hash, False)


@njit(inline="always")
def sole_match(shards: Any, shift: Any, hash: Any) -> Any:
    """The place whose tag is the hash's, 0 if there is none, or several. Of an id that is known to be here it is the
    place, without a look at the ids stored there."""
    return _match(shards, shift, hash, True)


@njit(inline="always")
def seek(shards: Any, shift: Any, hash: Any, segments: Any, table: Any, id: Any) -> Any:
    """Position of an id's entry in its shard, or -1 - the empty position where it would go. Compares stored ids."""
    shard = hash >> shift
    capacity = np.uint64(shards[shard, CAPACITY])
    position = np.int64(-1)
    if capacity > _0:
        base = np.uint64(shards[shard, ADDRESS])
        tag = tag_of(hash)
        at = (tag * capacity) >> TAG_BITS
        while True:
            entry = load64(base + at * _8)
            if entry == _0:
                position = -1 - np.int64(at)
                break
            if entry >> PLACE_BITS == tag:
                place = entry & PLACE_MASK
                if stored_id(segments, place) == id and stored_table(segments, place) == np.uint64(table):
                    position = np.int64(at)
                    break
            at += _1
            if at == capacity:
                at = _0
    return position


@njit(inline="always")
def place_of(shards: Any, shift: Any, hash: Any, position: Any) -> Any:
    """The place in the entry at a position that `seek` gave."""
    return load64(np.uint64(shards[hash >> shift, ADDRESS]) + np.uint64(position) * _8) & PLACE_MASK


@njit(inline="always")
def seek_place(shards: Any, shift: Any, hash: Any, place: Any) -> Any:
    """Position of the entry that leads to just this place, whose row has the hash; -1 if there is none."""
    shard = hash >> shift
    capacity = np.uint64(shards[shard, CAPACITY])
    position = np.int64(-1)
    if capacity > _0:
        base = np.uint64(shards[shard, ADDRESS])
        tag = tag_of(hash)
        wanted = (tag << PLACE_BITS) | place
        at = (tag * capacity) >> TAG_BITS
        entry = load64(base + at * _8)
        while entry != _0:
            if entry == wanted:
                position = np.int64(at)
                break
            at += _1
            if at == capacity:
                at = _0
            entry = load64(base + at * _8)
    return position


@njit(inline="always")
def set_entry(shards: Any, shift: Any, hash: Any, position: Any, place: Any) -> None:
    """Write the entry at a position (0 or more) of the hash's shard."""
    entry = (tag_of(hash) << PLACE_BITS) | place
    store64(np.uint64(shards[hash >> shift, ADDRESS]) + np.uint64(position) * _8, entry)


@njit(inline="always")
def remove_entry(shards: Any, shift: Any, hash: Any, position: Any) -> None:
    """Take an entry out and close the gap: entries behind it that may move up to it do."""
    shard = hash >> shift
    base = np.uint64(shards[shard, ADDRESS])
    capacity = np.uint64(shards[shard, CAPACITY])
    gap = np.uint64(position)
    at = gap
    while True:
        at += _1
        if at == capacity:
            at = _0
        entry = load64(base + at * _8)
        if entry == _0:
            break
        home = ((entry >> PLACE_BITS) * capacity) >> TAG_BITS
        from_home = at - home if at >= home else at + capacity - home
        from_gap = at - gap if at >= gap else at + capacity - gap
        if from_home >= from_gap:
            store64(base + gap * _8, entry)
            gap = at
    store64(base + gap * _8, _0)
    shards[shard, USED] -= 1


@njit(nogil=True, cache=True)
def _move_entries(source: Any, target: Any) -> None:
    """Put every entry of one array (uint64) into another, which has room for all."""
    source, target = uncounted(source), uncounted(target)
    capacity = np.uint64(len(target))
    for entry in source:
        if entry != _0:
            at = ((entry >> PLACE_BITS) * capacity) >> TAG_BITS
            while target[at] != _0:
                at += _1
                if at == capacity:
                    at = _0
            target[at] = entry


@njit(nogil=True, cache=True)
def _find_exact(shards: Any, shift: Any, segments: Any, tables: Any, ids: Any, places: Any) -> None:
    shards, segments = uncounted(shards), uncounted(segments)
    n = len(ids)
    for i in range(n):
        if i + _PREFETCH_AHEAD < n:
            ahead = mix(tables[i + _PREFETCH_AHEAD], ids[i + _PREFETCH_AHEAD])
            prefetch(home_address(shards, shift, ahead))
        hash = mix(tables[i], ids[i])
        position = seek(shards, shift, hash, segments, tables[i], ids[i])
        places[i] = place_of(shards, shift, hash, position) if position >= 0 else _0


class IdIndex:
    """See the module's docstring.

    Args:
        shards: a power of two from 2 to 16,384.

    Attributes:
        table: int64 (shards, 4): address of the entries, capacity, entries used, entries at which the shard must grow.
        shift: right shift (uint64) that leaves the shard of a hash.

    Raises:
        StoreConfigError: `shards` is no such number.
    """

    def __init__(self, shards: int) -> None:
        if not 2 <= shards <= MAX_SHARDS or shards & (shards - 1):
            raise StoreConfigError(f"index of {shards} shards: expected a power of two from 2 to {MAX_SHARDS}")
        self.table: NDArray[np.int64] = np.zeros((shards, 4), np.int64)
        self.shift = np.uint64(64 - (shards.bit_length() - 1))
        self._entries: list[NDArray[np.uint64] | None] = [None] * shards
        self._level = np.arange(shards) / shards - 1  # of growth: whole steps so far, and what sets shards apart
        self._array_bytes = np.zeros(shards, np.int64)  # held by each shard's entries
        self._grown_bytes = np.array([_array_bytes(_capacity(level + 1)) for level in self._level.tolist()])
        self._jump_bytes = self._grown_bytes.copy()  # what a shard's next growth costs
        self._needed = np.zeros(shards, np.int64)  # inserts until each shard grows, when last asked
        self._dearest = np.zeros(shards, np.int64), np.zeros(shards, np.int64)  # sums of those and of `_jump_bytes`
        self._grown = True  # a shard has, since then

    @property
    def rows(self) -> int:
        """Ids that have a place."""
        return int(self.table[:, USED].sum())

    @property
    def memory_bytes(self) -> int:
        """Host memory held."""
        of_shards = (self._level, self._array_bytes, self._grown_bytes, self._jump_bytes, self._needed, *self._dearest)
        fixed = self.table.nbytes + sum(array.nbytes for array in of_shards) + 8 * len(self._entries)
        return int(self._array_bytes.sum()) + fixed

    def grow(self, shard: int) -> None:
        """Make room in one shard."""
        self._resize(shard, float(self._level[shard]) + 1)

    def reserve(self, rows: int) -> None:
        """Make room for about `rows` ids in all, so that few shards have to grow while these arrive.

        Call `trim` once the ids are in, in case they were fewer than that.
        """
        share = rows / len(self.table)
        wanted = math.ceil(share * 1.01 + 2 * math.sqrt(share))
        for shard in np.flatnonzero(self.table[:, LIMIT] < wanted).tolist():
            self._resize(shard, self._level_for(shard, wanted))

    def trim(self) -> None:
        """Shrink shards that would do with a step less."""
        used, capacity = self.table[:, USED], self.table[:, CAPACITY]
        for shard in np.flatnonzero(16 * capacity >= 25 * used).tolist():
            level = self._level_for(shard, int(used[shard]))
            if level < self._level[shard]:
                self._resize(shard, level)

    @property
    def steps(self) -> NDArray[np.int64]:
        """Of each shard, how often it has grown, which says how large it is; 0 = it has no entries."""
        return np.rint(self._level + 1 - np.arange(len(self.table)) / len(self.table)).astype(np.int64)

    def entries(self, shard: int) -> NDArray[np.uint64]:
        """The entries of a shard (capacity,), empty positions included. Not a copy."""
        held = self._entries[shard]
        return np.zeros(0, np.uint64) if held is None else held

    def restore(self, shard: int, steps: int, used: int) -> NDArray[np.uint64]:
        """Make an unused shard the size that it had after so many steps; what `entries` gave then must go into it.

        Args:
            used: how many of these entries are not empty.

        Returns:
            The shard's array, zeros, for the caller to fill.
        """
        if steps:
            self._resize(shard, steps - 1 + shard / len(self.table))
            self.table[shard, USED] = used
        return self.entries(shard)

    def _level_for(self, shard: int, rows: int) -> float:
        """The least level at which a shard takes so many rows."""
        level = shard / len(self.table)
        level += max(0, math.floor(math.log(max(1, rows) * 1.25 / _FIRST_CAPACITY, 1.25) - level) - 1)
        while _limit(_capacity(level)) < rows:
            level += 1
        return level

    def _resize(self, shard: int, level: float) -> None:
        """Give a shard an array of another size."""
        self._level[shard] = level
        entries = zeros(_capacity(level), np.uint64, touched=True)
        old = self._entries[shard]
        if old is not None:
            _move_entries(old, entries)
        self._entries[shard] = entries
        self.table[shard, ADDRESS] = entries.ctypes.data
        self.table[shard, CAPACITY] = len(entries)
        self.table[shard, LIMIT] = _limit(len(entries))
        self._plan_growth(shard)

    def _plan_growth(self, shard: int) -> None:
        """Note what the shard holds and what its next growth will cost, so that a bound costs no pass over Python."""
        self._grown = True
        grown = _capacity(float(self._level[shard]) + 1)
        self._array_bytes[shard] = _array_bytes(int(self.table[shard, CAPACITY]))
        self._grown_bytes[shard] = _array_bytes(grown)
        own_pages = mmap.PAGESIZE if 8 * grown >= OWN_PAGES_BYTES else 0
        self._jump_bytes[shard] = self._grown_bytes[shard] - self._array_bytes[shard] + own_pages

    def find(
        self, segments: NDArray[np.int64], tables: NDArray[np.uint32], ids: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        """Places (N,) of ids, 0 where there is none, proved by the stored ids."""
        places = np.empty(len(ids), np.uint64)
        _find_exact(self.table, self.shift, segments, tables, ids, places)
        return places

    def memory_after(self, inserts: int) -> int:
        """An upper bound of `memory_bytes`, growth in progress included, once `inserts` new ids were added."""
        return self.memory_bytes + self.jump_bytes(inserts) + 16 * inserts

    def jump_bytes(self, inserts: int) -> int:
        """The most that `inserts` new ids may cost beside 16 bytes each, whatever shards they fall into.

        A shard's first growth costs its headroom in inserts, so the dearest set of shards that the inserts can push
        over is bounded by a fractional knapsack. Every growth after that is paid for by the inserts that filled the
        shard, with no more than 16 bytes each.
        """
        if inserts <= 0:
            return 0
        needed = self.table[:, LIMIT] - self.table[:, USED] + 1
        if self._grown or not np.array_equal(needed, self._needed):
            order = np.argsort(-self._jump_bytes / needed)  # the dearest growth for an insert first
            self._dearest = np.cumsum(needed[order]), np.cumsum(self._jump_bytes[order])
            self._needed, self._grown = needed, False
        inserted, jumped = self._dearest
        pushed = min(int(np.searchsorted(inserted, inserts, side="left")), len(inserted) - 1)  # perhaps all of them
        return int(jumped[pushed]) + int(self._grown_bytes.max())


def _array_bytes(capacity: int) -> int:
    """Host memory of an array of so many entries."""
    return held_bytes(capacity, 8) + (_ARRAY_OVERHEAD if capacity else 0)


def _limit(capacity: int) -> int:
    """Entries at which an array must grow."""
    return capacity * 4 // 5


def _capacity(level: float) -> int:
    return math.ceil(_FIRST_CAPACITY * math.pow(1.25, level))
