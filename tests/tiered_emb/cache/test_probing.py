"""The hash table below the Directory: that it spreads ids, and that rows which share a tag are told apart."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from tiered_emb.cache import Directory
from tiered_emb.cache.probing import _SPREAD, home_of, tag_of

CAPACITY = 20_000


@njit
def tags_of(tables, ids):
    return np.array([tag_of(tables[i], ids[i]) for i in range(len(ids))])


@njit
def mean_distance(buckets):
    """Mean number of buckets between a row's home and its place."""
    total, rows = 0, 0
    for bucket in range(len(buckets)):
        word = buckets[bucket]
        if word != 0:
            total += (bucket - home_of(word >> np.uint64(32), buckets)) % len(buckets)
            rows += 1
    return total / rows


def expected_distance(load: float) -> float:
    """Of linear probing with random homes (Knuth, TAOCP vol. 3, 6.4)."""
    return 0.5 * (1 + 1 / (1 - load)) - 1


def full(tables: NDArray[np.uint32], ids: NDArray[np.int64]) -> Directory:
    directory = Directory(len(ids))
    directory.admit(tables, ids, np.ones(len(ids), np.int32), np.empty(len(ids), np.int32))
    return directory


@pytest.mark.parametrize("stride", [1, 3, 8, 64, 2**12, 2**20, 2**31, 2**32, 2**44, -(2**33) + 2**7])
def test_regular_ids_spread_like_random_ones(stride: int) -> None:
    ids = np.arange(CAPACITY, dtype=np.int64) * stride
    directory = full(np.zeros(CAPACITY, np.uint32), ids)
    assert mean_distance(directory._buckets) < 1.3 * expected_distance(CAPACITY / len(directory._buckets))


def test_the_same_ids_in_many_tables_spread_too() -> None:
    tables = np.repeat(np.arange(CAPACITY // 500, dtype=np.uint32), 500)
    ids = np.tile(np.arange(500, dtype=np.int64), CAPACITY // 500)
    directory = full(tables, ids)
    assert mean_distance(directory._buckets) < 1.3 * expected_distance(CAPACITY / len(directory._buckets))


def test_probes_stay_short_after_many_evictions() -> None:
    """Deletion leaves no tombstone: 200 generations later the table is as good as new."""
    n = 2000
    directory = Directory(n)
    tables, counts, slots = np.zeros(n, np.uint32), np.ones(n, np.int32), np.empty(n, np.int32)
    for first in range(0, 200 * n, n):
        directory.admit(tables, np.arange(first, first + n), counts, slots)
    assert directory.rows == n
    assert mean_distance(directory._buckets) < 1.5 * expected_distance(n / len(directory._buckets))


@pytest.mark.parametrize("tag", [0, 1, 0x80000000, 0xFFFFFFFF])
def test_rows_of_one_tag_are_told_apart(tag: int) -> None:
    """A table number can be chosen for any id so that the tag comes out as wanted: 60 rows compete for one home."""
    random = np.random.default_rng(tag)
    ids = random.integers(-(2**63), 2**63 - 1, 120)
    plain = tags_of(np.zeros(len(ids), np.uint32), ids)
    inverse = pow(_SPREAD, -1, 2**32)
    tables = np.array([((int(t) ^ tag) * inverse) % 2**32 for t in plain], np.uint32)
    assert (tags_of(tables, ids) == tag).all()

    directory, slots = Directory(100), np.empty(60, np.int32)
    directory.admit(tables[:60], ids[:60], np.ones(60, np.int32), slots)
    found = np.empty(120, np.int32)
    assert directory.find(tables, ids, found) == 60
    np.testing.assert_array_equal(found[:60], slots)
    assert (found[60:] == -1).all()

    directory.remove(slots[::2].copy())
    assert directory.find(tables, ids, found) == 30
    np.testing.assert_array_equal(found[1:60:2], slots[1::2])
    assert (found[0:60:2] == -1).all()
    directory.admit(tables[60:90], ids[60:90], np.ones(30, np.int32), np.empty(30, np.int32))
    assert directory.find(tables, ids, found) == 60
    assert directory.occupied().tolist() == sorted(found[found >= 0].tolist())
