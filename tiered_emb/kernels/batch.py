"""What a batch of ids is, worked out on the host: unique ids, and where in the batch each one stands.

Arrays in and out are numpy; no row is read here. Every kernel is serial, releases the GIL and visits the batch in
order, so that the order of unique ids (first appearance) and of each id's positions (batch order) is defined by the
batch alone. That order is what makes the sum of a row's gradients reproducible to the bit.

Shapes: N ids, U unique ids, F segments (features) of a batch, B bags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from tiered_emb.intrinsics import prefetch2
from tiered_emb.scratch import Scratch

_GENERATIONS = 1 << 31  # tags hold a generation in their upper half; all are used up after that many tables seen
_AHEAD = 8  # ids whose place in the hash table is asked for before it is needed


@dataclass(frozen=True, slots=True)
class UniqueIds:
    """Room for what `Deduper.dedupe` finds: the first U items of `ids`, `tables` and `counts`, and all of `inverse`.

    ids int64 (N,), tables uint32 (N,), counts int32 (N,): a unique id, its table number, how often the batch has it.
    inverse int32 (N,): position p of the batch holds unique id number inverse[p].
    """

    ids: npt.NDArray[np.int64]
    tables: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.int32]
    inverse: npt.NDArray[np.int32]

    @classmethod
    def empty(cls, n: int) -> UniqueIds:
        """Room for a batch of n ids, not initialised."""
        return cls(np.empty(n, np.int64), np.empty(n, np.uint32), np.empty(n, np.int32), np.empty(n, np.int32))


class Deduper:
    """Finds the unique (table, id) of a batch, in order of first appearance.

    A hash table with open addressing, kept from batch to batch. Each place holds an id and a tag = (generation,
    number of the unique id). Every table of every batch gets a generation of its own, so clearing is free and two
    tables that have the same id never meet; any 64-bit id is data. The table grows to at least twice the ids of the
    largest batch seen.

    Not thread-safe: one Deduper belongs to one thread at a time.
    """

    def __init__(self) -> None:
        self._places = np.zeros((0, 2), np.int64)
        self._generation = 1

    @property
    def memory_bytes(self) -> int:
        """Bytes of the hash table: 32 to 64 for each id of the largest batch seen."""
        return self._places.nbytes

    def dedupe(
        self,
        ids: npt.NDArray[np.int64],
        segments: npt.NDArray[np.int64],
        tables: npt.NDArray[np.uint32],
        out: UniqueIds,
    ) -> int:
        """Fill `out` and return U. ids (N,); segment f is ids[segments[f]:segments[f + 1]], of the table tables[f].

        Requires: segments (F + 1,) starts at 0, does not decrease and ends at N; out has room for N. Segments of one
        table share its ids, wherever they stand.
        """
        n = len(ids)
        assert n < 1 << 31 and len(out.inverse) >= n and segments[-1] == n, (n, segments)
        if len(self._places) < 2 * n or self._generation + len(tables) >= _GENERATIONS:
            self._places = np.zeros((1 << max(4, (2 * n - 1).bit_length()), 2), np.int64)
            self._generation = 1
        # Used up first: after a Ctrl-C in the kernel's wake the next batch must not find this one's places.
        generation, self._generation = self._generation, self._generation + len(tables)
        unique = _dedupe(ids, segments, tables, self._places, generation, out.ids, out.tables, out.counts, out.inverse)
        return int(unique)


@dataclass(frozen=True, slots=True)
class Parted:
    """The U unique rows of a batch, those that a tier holds apart from those it lacks, each in the batch's order.

    hits, hit_counts: int32 (U - M,), slots and counts of those it holds. missing int32, tables uint32, ids int64 and
    counts int32 (M,): position in the batch, table, id and count of those it lacks. All but `missing` last until the
    next batch is parted.
    """

    hits: npt.NDArray[np.int32]
    hit_counts: npt.NDArray[np.int32]
    missing: npt.NDArray[np.int32]
    tables: npt.NDArray[np.uint32]
    ids: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int32]


def parted(
    slots: npt.NDArray[np.int32],
    tables: npt.NDArray[np.uint32],
    ids: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int32],
    found: int,
    scratch: Scratch,
) -> Parted:
    """Part a batch by its slots (U,), of which all but ``found`` are negative; the other arrays are (U,) too."""
    lacking = len(slots) - found
    parts = Parted(
        scratch.take("hits", found, np.int32),
        scratch.take("hit counts", found, np.int32),
        np.empty(lacking, np.int32),
        scratch.take("tables", lacking, np.uint32),
        scratch.take("ids", lacking, np.int64),
        scratch.take("counts", lacking, np.int32),
    )
    missing = parts.missing, parts.tables, parts.ids, parts.counts
    _part(slots, tables, ids, counts, parts.hits, parts.hit_counts, *missing)
    return parts


def group_positions(
    inverse: npt.NDArray[np.int32],
    unique: int,
    start: npt.NDArray[np.int64],
    position: npt.NDArray[np.int32],
) -> None:
    """Positions of each unique id in batch order: those of number u are position[start[u]:start[u + 1]].

    A counting sort. inverse (N,) as made by `Deduper`, start (>= unique + 1,) and position (N,) are written.
    """
    assert len(start) > unique and len(position) >= len(inverse), (len(start), len(position), unique)
    _group_positions(inverse, unique, start, position)


def bags_of(offsets: npt.NDArray[np.int64], out: npt.NDArray[np.int32]) -> None:
    """out[p] = number of the bag that position p is in. offsets (B + 1,) from 0 to N, not decreasing; out (N,)."""
    _bags_of(offsets, out)


def mark(flags: npt.NDArray[np.bool_], at: npt.NDArray[np.int32]) -> None:
    """flags[at[i]] = True for every i: numpy does the same with a copy of `at`."""
    _mark(flags, at)


def check_offsets(offsets: npt.NDArray[np.int64], n: int) -> int:
    """First place where `offsets` is no list of bag boundaries over n ids, or -1.

    Wrong is: offsets[0] != 0 (place 0), offsets[i] < offsets[i - 1] (place i), a last one other than n (the last
    place). offsets (B + 1,), at least one item.
    """
    return int(_check_offsets(offsets, n))


def first_out_of_range(ids: npt.NDArray[np.int64], low: int, high: int) -> int:
    """Position of the first id that is not in [low, high), or -1. ids (N,)."""
    return int(_first_out_of_range(ids, low, high))


@njit(nogil=True, cache=True)
def _home(row_id: Any, shift: Any) -> Any:
    """Upper bits of a mix of the id (the finaliser of MurmurHash3): ids that are multiples of anything spread well."""
    bits = np.uint64(row_id)
    bits ^= bits >> np.uint64(33)
    bits *= np.uint64(0xFF51AFD7ED558CCD)
    bits ^= bits >> np.uint64(33)
    bits *= np.uint64(0xC4CEB9FE1A85EC53)
    return np.int64(bits >> shift)


@njit(nogil=True, cache=True)
def _generation_of(f: Any, tables: Any, generation: Any) -> Any:
    """That of the first segment of the same table."""
    for earlier in range(f):
        if tables[earlier] == tables[f]:
            return generation + earlier
    return generation + f


@njit(nogil=True, cache=True)
def _dedupe(
    ids: Any,
    segments: Any,
    tables: Any,
    places: Any,
    generation: Any,
    unique_ids: Any,
    unique_tables: Any,
    counts: Any,
    inverse: Any,
) -> Any:
    mask = len(places) - 1
    bits = 0
    while (1 << bits) <= mask:
        bits += 1
    shift = np.uint64(64 - bits)
    unique = 0
    for f in range(len(tables)):
        mine = _generation_of(f, tables, generation)
        salt = np.int64(tables[f]) << 32
        for p in range(segments[f], segments[f + 1]):
            if p + _AHEAD < segments[f + 1]:
                prefetch2(places, _home(ids[p + _AHEAD] ^ salt, shift), 0)
            row_id = ids[p]
            place = _home(row_id ^ salt, shift)
            while True:
                tag = places[place, 1]
                if tag >> 32 < generation:
                    places[place, 0] = row_id
                    places[place, 1] = (mine << 32) | unique
                    unique_ids[unique] = row_id
                    unique_tables[unique] = tables[f]
                    counts[unique] = 1
                    inverse[p] = unique
                    unique += 1
                    break
                if places[place, 0] == row_id and tag >> 32 == mine:
                    number = tag & 0xFFFFFFFF
                    counts[number] += 1
                    inverse[p] = number
                    break
                place = (place + 1) & mask
    return unique


@njit(nogil=True, cache=True)
def _part(
    slots: Any,
    tables: Any,
    ids: Any,
    counts: Any,
    hits: Any,
    hit_counts: Any,
    missing: Any,
    missing_tables: Any,
    missing_ids: Any,
    missing_counts: Any,
) -> None:
    found = lacking = 0
    for u in range(len(slots)):
        if slots[u] >= 0:
            hits[found], hit_counts[found] = slots[u], counts[u]
            found += 1
        else:
            missing[lacking], missing_tables[lacking], missing_ids[lacking] = u, tables[u], ids[u]
            missing_counts[lacking] = counts[u]
            lacking += 1


@njit(nogil=True, cache=True)
def _group_positions(inverse: Any, unique: Any, start: Any, position: Any) -> None:
    for u in range(unique + 1):
        start[u] = 0
    for p in range(len(inverse)):
        start[inverse[p] + 1] += 1
    for u in range(unique):
        start[u + 1] += start[u]
    for p in range(len(inverse)):
        u = inverse[p]
        position[start[u]] = p
        start[u] += 1
    for u in range(unique, 0, -1):  # start[u] has moved to the end of u's positions: the start of the next one's
        start[u] = start[u - 1]
    start[0] = 0


@njit(nogil=True, cache=True)
def _bags_of(offsets: Any, out: Any) -> None:
    for b in range(len(offsets) - 1):
        for p in range(offsets[b], offsets[b + 1]):
            out[p] = b


@njit(nogil=True, cache=True)
def _mark(flags: Any, at: Any) -> None:
    for i in range(len(at)):
        flags[at[i]] = True


@njit(nogil=True, cache=True)
def _check_offsets(offsets: Any, n: Any) -> Any:
    if offsets[0] != 0:
        return 0
    for i in range(1, len(offsets)):
        if offsets[i] < offsets[i - 1]:
            return i
    return -1 if offsets[-1] == n else len(offsets) - 1


@njit(nogil=True, cache=True)
def _first_out_of_range(ids: Any, low: Any, high: Any) -> Any:
    for p in range(len(ids)):
        if ids[p] < low or ids[p] >= high:
            return p
    return -1
