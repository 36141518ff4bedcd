"""Snapshots, going back and rewriting, timed on one store for `benchmarks.checkpoint`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Figure
from storage import LmdbStore, RowIds
from storage.schema import Column, RowSchema
from storage.store import TableRef

_BLOCK_ROWS = 1 << 16


def snapshots(directory: Path, rows: int, dim: int, share: float, rounds: int) -> dict[str, Figure]:
    """Seconds of a first snapshot with the puts of all rows, of one after a share of them changed, of going back to the
    former and of rewriting everything; the store ends as large as it began.

    Rows are what training puts: random float32, a share of them in random places, in the order of neither table nor
    log.
    """
    schema = RowSchema((Column("weight", "float32", dim), Column("sum", "float32", 1)))
    random = np.random.default_rng(0)
    changed = int(rows * share)
    with LmdbStore(directory / "store", durability="snapshot") as store:
        table = store.open_table("rows", schema)
        ids = random.permutation(rows).astype(np.int64)
        first_s = _timed(lambda: _put_and_keep(store, table, ids, "first"))
        some_s, back_s = [], []
        for _ in range(rounds):
            some = random.choice(rows, changed, replace=False).astype(np.int64)
            some_s.append(_timed(lambda some=some: _put_and_keep(store, table, some, "next")))  # type: ignore[misc]
            back_s.append(_timed(lambda: store.rollback("first", drop_later=True)))
        rewrite_s = _timed(lambda: _put_and_keep(store, table, ids, "rewritten"))
        again_s = _timed(lambda: store.snapshot("again"))
    return {
        "first_snapshot_s": round(first_s, 3),
        "snapshot_1pct_s": round(statistics.median(some_s), 3),
        "snapshot_1pct_vs_full": round(statistics.median(some_s) / first_s, 4),
        "snapshot_unchanged_s": round(again_s, 4),
        "rollback_1pct_s": round(statistics.median(back_s), 3),
        "rewrite_s": round(rewrite_s, 3),
        "rollback_vs_rewrite": round(statistics.median(back_s) / rewrite_s, 4),
    }


def _put_and_keep(store: LmdbStore, table: TableRef, ids: NDArray[np.int64], name: str) -> None:
    rows = np.random.default_rng(len(ids)).standard_normal((_BLOCK_ROWS, table.schema.row_bytes // 4), np.float32)
    for at in range(0, len(ids), _BLOCK_ROWS):
        part = ids[at : at + _BLOCK_ROWS]
        store.put(RowIds.of(table, part), rows[: len(part)].view(np.uint8))
    store.snapshot(name)


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
