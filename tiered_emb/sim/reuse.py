"""Reuse distances: LRU at every size from one pass over the requests.

A request hits in LRU exactly where the size is at least its *reuse distance*: how many different rows were requested
since the last request for its row, that row included (Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for
storage hierarchies", 1970). They are counted by a tree of partial sums over the positions of each row's last request
(Bennett and Kruskal, "LRU stack processing", 1975; Fenwick, "A new data structure for cumulative frequency tables",
1994): O(log N) a request.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray


def reuse_distances(rows: NDArray[np.int32], distinct: int) -> NDArray[np.int32]:
    """The reuse distance of each request (N,); 0 = the first one for its row, which hits nowhere.

    `rows` (N,) are numbers below `distinct`.
    """
    distances = np.empty(len(rows), np.int32)
    _measure(rows, np.full(distinct, -1, np.int64), np.zeros(len(rows) + 1, np.int32), distances)
    return distances


def lru_hits(
    distances: NDArray[np.int32], sizes: NDArray[np.int64], weights: NDArray[np.float64] | None = None
) -> NDArray[Any]:
    """Hits of LRU at each of `sizes` (rows, 0 included); with weights (N,) a hit counts what its request weighs."""
    at_distance = np.bincount(distances, weights)
    at_distance[0] = 0
    hits: NDArray[Any] = np.cumsum(at_distance)[np.minimum(sizes, len(at_distance) - 1)]
    return hits


@njit(nogil=True, cache=True)
def _measure(rows, last, sums, distances):  # type: ignore[no-untyped-def]
    """`sums` is the tree, of one mark at the last position of every row met so far; position i is its item i + 1."""
    met = 0
    for i in range(len(rows)):
        row = rows[i]
        before = last[row]
        if before < 0:
            distances[i] = 0
            met += 1
        else:
            distances[i] = met - _marks_up_to(sums, before)
            _add(sums, before, -1)
        _add(sums, i, 1)
        last[row] = i


@njit(forceinline=True)
def _marks_up_to(sums, position):  # type: ignore[no-untyped-def]
    """Marks before `position`: those of rows whose last request is longer ago."""
    marks, item = 0, position
    while item > 0:
        marks += sums[item]
        item &= item - 1
    return marks


@njit(forceinline=True)
def _add(sums, position, change):  # type: ignore[no-untyped-def]
    item = position + 1
    while item < len(sums):
        sums[item] += change
        item += item & -item
