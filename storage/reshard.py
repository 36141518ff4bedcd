"""Rows of some stores, divided anew among others: from so many shards to however many there will be.

A shard is a store that holds a part of every table's ids. Whoever trains or serves knows which part: a function of
(table, id) that says to which of the new shards a row belongs. Each new shard is one complete state in the end; rows
are moved as they are, optimizer state and all, so what is computed from them is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage.errors import StoreConfigError
from storage.schema import RowSchema
from storage.store import Ids, RowIds, Store, StoreStats, TableRef, Tables

ShardOf: TypeAlias = Callable[[Tables, Ids], NDArray[np.integer]]


class Source(Protocol):
    """What rows are read from: an `LmdbStore` or a `SnapshotView` of one."""

    def tables(self) -> dict[str, RowSchema]:
        """Schemas of its tables by name."""

    def open_table(self, name: str, schema: RowSchema) -> TableRef:
        """As `Store.open_table`."""

    def scan(self, group: int, *, table: int | None = None) -> object:
        """As `Store.scan`."""

    def stats(self) -> StoreStats:
        """As `Store.stats`."""
