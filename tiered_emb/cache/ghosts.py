"""Ghosts: names of rows that left, in the order in which they left. A policy may treat a row that returns otherwise.

A ghost is a 64-bit key and no row. The set holds a fixed number of them, in two lists: a key's lowest bit says which
list it belongs to, and `key_of` gives keys of the first one (add 1 for the other). A policy with one kind of ghost uses
only the first. Who is added when all places are taken replaces the oldest of its list, or of the other one if its own
is empty.

A key is 63 bits of the row's name (`probing.name_of`). Two rows share one with a probability of 2^-63, so with 10^7
ghosts one look-up in 10^12 takes a row for another, and what comes of it is a row in the wrong queue: keys are not
compared with rows.

Found by the hash table of `probing.py`, with the key's upper half as its tag. A ghost's place is a number, its item,
from `add` until it goes.

Invariants: the two lists hold exactly the items that the table holds; `ledger` counts them; every other item below
`ledger[FRESH]` is chained at `ledger[FREE]`. Everything is O(1), nothing allocates, a capacity of 0 is legal.
Thread: the Directory's owner.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, uint64
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.cache.groups import GROUP
from tiered_emb.cache.links import cut
from tiered_emb.cache.probing import bucket_count, name_of, probe, put, take_out
from tiered_emb.cache.queues import BYTES_PER_ITEM, HEAD_BYTES, HEADS, empty_queues, join_queue, newer_of, oldest_of

# Positions of the ledger; the length of list i is at LENGTHS + i.
FREE, FRESH, LENGTHS = 0, 1, 2
_LEDGER_FIELDS = 4
_NO_LIST_BIT = 0xFFFFFFFFFFFFFFFE
FIXED_BYTES = 8 * GROUP + HEAD_BYTES + 8 * _LEDGER_FIELDS


class Ghosts(NamedTuple):
    """See the module's docstring.

    Attributes:
        buckets: uint64, 1.7 an item, the hash table.
        keys: uint64 (G,), of each item.
        links: int32 (2 (G + HEADS),), the two lists, as in `tiered_emb.cache.queues`.
        ledger: int64 (4,), see FREE, FRESH and LENGTHS.
    """

    buckets: NDArray[np.uint64]
    keys: NDArray[np.uint64]
    links: NDArray[np.int32]
    ledger: NDArray[np.int64]


def make_ghosts(capacity: int) -> Ghosts:
    """An empty set for `capacity` ghosts, 0 included."""
    ledger = np.zeros(_LEDGER_FIELDS, np.int64)
    ledger[FREE] = -1
    buckets: NDArray[np.uint64] = zeros(bucket_count(capacity), np.uint64)
    return Ghosts(buckets, zeros(capacity, np.uint64), empty_queues(capacity), ledger)


def resized_ghosts(ghosts: Ghosts, capacity: int) -> Ghosts:
    """A set of another capacity with the newest of these ghosts.

    With two lists: drop what is too many for the new capacity before.
    """
    result = make_ghosts(capacity)
    _copy(ghosts, result)
    return result


def ghosts_bytes(capacity: int) -> int:
    """Bytes of a set of this capacity."""
    return 8 * bucket_count(capacity) + capacity * (8 + BYTES_PER_ITEM) + HEAD_BYTES + 8 * _LEDGER_FIELDS


@njit(forceinline=True)
def key_of(table, id):  # type: ignore[no-untyped-def]
    """The key of a row in the first list."""
    return name_of(table, id) & uint64(_NO_LIST_BIT)


@njit(forceinline=True)
def find_ghost(ghosts, key):  # type: ignore[no-untyped-def]
    """The item of a key, -1 if it is not in the set."""
    return probe(ghosts.buckets, ghosts.keys, key >> uint64(32), key)


@njit(forceinline=True)
def ghosts_in(ghosts, head):  # type: ignore[no-untyped-def]
    """How many are in list 0 or 1."""
    return ghosts.ledger[LENGTHS + head]


@njit(forceinline=True)
def remove_ghost(ghosts, item):  # type: ignore[no-untyped-def]
    """Forget the ghost of an item."""
    key, ledger = ghosts.keys[item], ghosts.ledger
    take_out(ghosts.buckets, key >> uint64(32), item)
    cut(ghosts.links, item + HEADS)
    ledger[LENGTHS + np.int64(key & uint64(1))] -= 1
    ghosts.keys[item] = uint64(ledger[FREE])
    ledger[FREE] = item


@njit(forceinline=True)
def drop_oldest_ghost(ghosts, head):  # type: ignore[no-untyped-def]
    """Forget the oldest ghost of a list that is not empty."""
    remove_ghost(ghosts, oldest_of(ghosts.links, head) - HEADS)


@njit(forceinline=True)
def add_ghost(ghosts, key):  # type: ignore[no-untyped-def]
    """Remember a key, which is not in the set, as the newest of its list; if no place is free the oldest one goes."""
    ledger, head = ghosts.ledger, np.int64(key & uint64(1))
    if len(ghosts.keys) == 0:
        return
    if ledger[FREE] < 0 and ledger[FRESH] == len(ghosts.keys):
        drop_oldest_ghost(ghosts, head if ledger[LENGTHS + head] > 0 else 1 - head)
    item = ledger[FREE]
    if item >= 0:
        ledger[FREE] = np.int64(ghosts.keys[item])
    else:
        item = ledger[FRESH]
        ledger[FRESH] += 1
    ghosts.keys[item] = key
    ledger[LENGTHS + head] += 1
    join_queue(ghosts.links, head, item + HEADS)
    put(ghosts.buckets, key >> uint64(32), item)


@njit(nogil=True, cache=True)
def _copy(ghosts, result):  # type: ignore[no-untyped-def]
    """Add the ghosts to an empty set, each list from its oldest on."""
    for head in range(HEADS):
        node = oldest_of(ghosts.links, head)
        while node >= HEADS:
            add_ghost(result, ghosts.keys[node - HEADS])
            node = newer_of(ghosts.links, node)
