"""Trace: requests in order, and perhaps the batches they came in; and how one is put together block by block.

Shapes: N requests, B batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

Ids: TypeAlias = NDArray[np.int64]
TableNumbers: TypeAlias = NDArray[np.uint32]

_FIRST = 1 << 12  # items of an array that is to grow
_SMALL = 1 << 16  # below it doubles, above it grows by an eighth


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order they were made.

    Attributes:
        name: for tables and plots.
        ids: (N,) int64.
        tables: (N,) uint32 table numbers, or one number that all requests have.
        batches: (B + 1,) int64; batch b is the requests ``batches[b]`` to ``batches[b + 1] - 1``, each id as often as
            it was asked for. None = single requests.
        table_names: number -> name, of the tables whose names are known.
        rate: share of the (table, id) pairs that the trace keeps; see :func:`tiered_emb.trace.sampled`.
        seed: of that sample.
    """

    name: str
    ids: Ids
    tables: TableNumbers | int = 0
    batches: NDArray[np.int64] | None = None
    table_names: Mapping[int, str] = field(default_factory=dict)
    rate: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.ids.dtype == np.int64 and self.ids.ndim == 1, "ids are (N,) int64"
        if isinstance(self.tables, np.ndarray):
            assert self.tables.dtype == np.uint32 and self.tables.shape == self.ids.shape, "tables are (N,) uint32"
        if self.batches is not None:
            assert self.batches[0] == 0 and self.batches[-1] == len(self.ids), "batches run from 0 to N"

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_batches(self) -> int:
        """B; 0 where requests came one by one."""
        return 0 if self.batches is None else len(self.batches) - 1

    def part(self, first: int, stop: int) -> tuple[TableNumbers, Ids]:
        """Table numbers and ids of the requests first .. stop-1."""
        ids = self.ids[first:stop]
        if isinstance(self.tables, np.ndarray):
            return self.tables[first:stop], ids
        return np.full(len(ids), self.tables, np.uint32), ids

    def each_batch(self) -> Iterator[tuple[TableNumbers, Ids]]:
        """Table numbers and ids of each batch; nothing where requests came one by one."""
        ends = [] if self.batches is None else self.batches.tolist()
        return (self.part(first, stop) for first, stop in pairwise(ends))


class Growing:
    """An array that grows in place: the system moves its pages, so that there is never a second copy."""

    def __init__(self, dtype: DTypeLike, expected: int = 0) -> None:
        self.size = 0
        self._data: NDArray[Any] = np.empty(max(expected, _FIRST), dtype)

    def append(self, values: Any, count: int) -> None:
        """Add ``count`` values: an array of them, or one for all."""
        end = self.size + count
        if end > len(self._data):
            more = len(self._data) if len(self._data) < _SMALL else len(self._data) // 8
            self._data.resize(max(end, len(self._data) + more), refcheck=False)
        self._data[self.size : end] = values
        self.size = end

    def whole(self) -> NDArray[Any]:
        """What was added; nothing more can be."""
        self._data.resize(self.size, refcheck=False)
        return self._data


class TraceBuilder:
    """A trace while it is read.

    Attributes:
        table_names, rate, seed: as they will stand in the trace.
    """

    def __init__(self, name: str) -> None:
        self.table_names: dict[int, str] = {}
        self.rate = 1.0
        self.seed = 0
        self._name = name
        self._ids = Growing(np.int64)
        self._table: int | None = None  # of all requests so far
        self._tables: Growing | None = None  # once there are several
        self._ends: Growing | None = None

    def __len__(self) -> int:
        return self._ids.size

    @property
    def num_batches(self) -> int:
        """Batches so far."""
        return 0 if self._ends is None else self._ends.size - 1

    def expect(self, requests: int) -> None:
        """Called before the first :meth:`add`, where the number of requests is known."""
        self._ids = Growing(np.int64, requests)

    def add(self, ids: NDArray[Any], tables: TableNumbers | int = 0) -> None:
        """More requests, of one table or each of its own."""
        self._add_tables(tables, len(ids))
        self._ids.append(ids, len(ids))

    def add_batches(self, ends: NDArray[np.int64]) -> None:
        """More batches, by their ends, counted in requests from the beginning."""
        if self._ends is None:
            self._ends = Growing(np.int64)
            self._ends.append(0, 1)
        self._ends.append(ends, len(ends))

    def trace(self) -> Trace:
        """The whole of it; the builder is of no use any more."""
        tables: TableNumbers | int = (self._table or 0) if self._tables is None else self._tables.whole()
        batches = None if self._ends is None else self._ends.whole()
        return Trace(self._name, self._ids.whole(), tables, batches, self.table_names, self.rate, self.seed)

    def _add_tables(self, tables: TableNumbers | int, count: int) -> None:
        if self._tables is None and not isinstance(tables, np.ndarray) and self._table in (None, tables):
            self._table = tables
            return
        if self._tables is None:
            self._tables = Growing(np.uint32, self._ids.size + count)
            self._tables.append(self._table or 0, self._ids.size)
        self._tables.append(tables, count)
