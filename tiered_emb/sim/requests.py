"""Requests: a trace as the laboratory works on it. Batches: the same requests as training makes them.

N requests, U unique rows of batches, B batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tiered_emb.cache import Directory
from tiered_emb.cache.belady import next_uses
from tiered_emb.errors import ConfigError
from tiered_emb.trace import Trace

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Requests:
    """Rows in the order in which they are requested.

    Attributes:
        tables: uint32 (N,).
        ids: int64 (N,).
        rows: int32 (N,), a number of each request's row, by first appearance; below `distinct`.
        distinct: different rows.
        bounds: int64 (B + 1,), batch b is the requests bounds[b] to bounds[b + 1] - 1; None = single requests.
    """

    tables: NDArray[np.uint32]
    ids: NDArray[np.int64]
    rows: NDArray[np.int32]
    distinct: int
    bounds: Positions | None = None

    def __len__(self) -> int:
        """N."""
        return len(self.ids)

    @staticmethod
    def of(tables: NDArray[np.uint32] | int, ids: NDArray[np.int64], bounds: Positions | None = None) -> Requests:
        """The requests of arrays (N,), or of one table, and (B + 1,). Raises ConfigError if there are none."""
        if len(ids) == 0:
            raise ConfigError("there are no requests: a miss ratio needs one or more")
        ids = np.ascontiguousarray(ids, np.int64)
        tables = np.ascontiguousarray(np.broadcast_to(np.asarray(tables, np.uint32), ids.shape))
        directory = Directory(len(ids), "fifo")  # room for all: the slots are the numbers
        directory.replay(tables, ids, np.empty(len(ids), np.bool_))
        rows = np.empty(len(ids), np.int32)
        directory.find(tables, ids, rows)
        return Requests(tables, ids, rows, directory.rows, bounds)

    @staticmethod
    def of_trace(trace: Trace) -> Requests:
        """The requests of a trace that was read. Raises ConfigError if there are none."""
        return Requests.of(trace.tables, trace.ids, trace.batches)

    def taken(self, positions: Positions) -> Requests:
        """The requests at positions, in their order; rows keep their numbers, batches stay where they are."""
        return Requests(self.tables[positions], self.ids[positions], self.rows[positions], self.distinct, self.bounds)

    @cached_property
    def next_use(self) -> Positions:
        """int64 (N,): the position of the next request for the same row, -1 if there is none."""
        result = np.empty(len(self), np.int64)
        next_uses(self.rows, self.distinct, result)
        return result

    def every(self, batch_requests: int) -> Requests:
        """The same requests in batches of so many; the last one may be smaller."""
        bounds = np.append(np.arange(0, len(self), batch_requests, dtype=np.int64), len(self))
        return Requests(self.tables, self.ids, self.rows, self.distinct, bounds)

    @cached_property
    def batches(self) -> Batches:
        """The unique rows of each batch. Raises ConfigError if the trace does not say where batches begin."""
        if self.bounds is None:
            raise ConfigError("this trace does not say where its batches begin; say how many requests make a batch")
        firsts, counts, ends = [], [], [0]
        for start, end in pairwise(self.bounds.tolist()):
            _, first, count = np.unique(self.rows[start:end], return_index=True, return_counts=True)
            order = np.argsort(first)
            firsts.append(start + first[order])
            counts.append(count[order])
            ends.append(ends[-1] + len(order))
        unique = self.taken(np.concatenate(firsts).astype(np.int64))
        return Batches(unique, np.concatenate(counts).astype(np.int32), np.array(ends, np.int64))


@dataclass(frozen=True)
class Batches:
    """Batch after batch its unique rows, in order of first appearance.

    Attributes:
        unique: U requests, one for each row of each batch.
        counts: int32 (U,), how many ids of the batch named the row.
        ends: int64 (B + 1,): batch b is ends[b] to ends[b + 1].
    """

    unique: Requests
    counts: NDArray[np.int32]
    ends: Positions

    @property
    def number(self) -> int:
        """B."""
        return len(self.ends) - 1

    def rows_of(self, batch: int) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int32]]:
        """Tables, ids and counts of the rows of one batch, 0 to B - 1: views."""
        rows = slice(self.ends[batch], self.ends[batch + 1])
        return self.unique.tables[rows], self.unique.ids[rows], self.counts[rows]

    @property
    def largest(self) -> int:
        """Unique rows of the largest batch: no tier of fewer can hold them all at once."""
        return int(np.diff(self.ends).max())
