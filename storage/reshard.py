"""Rows of some stores, divided anew among others: from so many shards to however many there will be.

A shard is a store that holds a part of every table's ids; which part, the caller knows: a function of (table, id) that
says to which of the new shards a row belongs. Rows are copied as they are, optimizer state and all, so what is computed
from them is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage.errors import StoreConfigError
from storage.lmdb_store import LmdbStore
from storage.snapshot import SnapshotView
from storage.store import Ids, RowIds, Store, TableRef, Tables

ShardOf: TypeAlias = Callable[[Tables, Ids], NDArray[Any]]


def reshard(
    sources: Sequence[LmdbStore | SnapshotView],
    targets: Sequence[Store],
    shard_of: ShardOf,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Put every row of `sources` into one of `targets`, and make each of these one complete state.

    Args:
        sources: shards, or views of snapshots of them, which hold different ids.
        targets: stores without rows.
        shard_of: is given table numbers (N,) and ids (N,), and gives the position in `targets` of each, integers (N,).
        progress: called now and then with rows done and in all.

    Raises:
        StoreConfigError: a target has rows; `shard_of` gives no position; an id is in several sources.
        CorruptionError, StoreFullError, StoreIOError: of a source, or of a target. Whatever was put by then is no
            part of a complete state.
    """
    total = sum(source.stats().rows for source in sources)
    for number, target in enumerate(targets):
        if held := target.stats().rows:
            raise StoreConfigError(f"target {number} has {held:,} rows already: expected stores without any")
    done = 0
    for source in sources:
        for table in source.tables():
            homes = [target.open_table(table.name, table.schema) for target in targets]
            for rows, data in source.scan(table.group, table=table.number):
                _divide(rows, data, targets, homes, shard_of)
                done += len(rows)
                if progress is not None:
                    progress(done, total)
    if (put := sum(target.stats().rows for target in targets)) != done:
        raise StoreConfigError(f"{done:,} rows of the sources have {put:,} ids: shards must hold different ones")
    for target in targets:
        target.flush()


def _divide(
    rows: RowIds, data: NDArray[np.uint8], targets: Sequence[Store], homes: Sequence[TableRef], shard_of: ShardOf
) -> None:
    shards = np.asarray(shard_of(rows.tables, rows.ids))
    if shards.shape != rows.ids.shape or ((shards < 0) | (shards >= len(targets))).any():
        raise StoreConfigError(
            f"shard_of gave {shards.dtype} {shards.shape} from {shards.min(initial=0)} to {shards.max(initial=0)}; "
            f"expected ({len(rows)},) from 0 to {len(targets) - 1}"
        )
    for number, (target, home) in enumerate(zip(targets, homes, strict=True)):
        mine = shards == number
        if mine.any():
            target.put(RowIds(home.group, rows.tables[mine], rows.ids[mine]), np.ascontiguousarray(data[mine]))
