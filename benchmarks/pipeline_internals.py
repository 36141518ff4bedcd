"""What the public interface of modules, prefetching and stores does not tell, and what measuring needs, in one place.

Shapes: N ids, M missing rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.store_internals import pages_of
from storage import LmdbStore, RowIds, StoreConfig
from tiered_emb import TierConfig, TieredEmbeddingBag, stores
from tiered_emb.pipeline import Prefetch


def store_sizes(path: Path, budget_bytes: int) -> StoreConfig:
    """The sizes that an engine of this budget gives its store; makes an empty one at `path` unless there is one."""
    store, _ = stores.open_store(TierConfig(ddr_bytes=budget_bytes, store=path))
    assert isinstance(store, LmdbStore)
    with store:
        return store.config


def wait_for_prepared(steps: Prefetch[object]) -> None:
    """Return once everything that was handed over to be prepared is, or was refused."""
    for entry in steps._entries:
        entry.done.wait()


class RequestCounts:
    """Counts what batches find in the top tier, by requests and by rows."""

    def __init__(self) -> None:
        self._ids = self._found_ids = self._rows = self._found_rows = 0

    def add(self, bag: TieredEmbeddingBag, table: str, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count a batch (N,) before it is trained on; its missing rows (M,), of one table."""
        group, ref = bag._opened[table]
        unique, requests = np.unique(ids, return_counts=True)
        slots = np.empty(len(unique), np.int32)
        group.top.directory.find(np.full(len(unique), ref.number, np.uint32), unique, slots)
        found = slots >= 0
        self._ids += len(ids)
        self._rows += len(unique)
        self._found_ids += int(requests[found].sum())
        self._found_rows += int(found.sum())
        missing: NDArray[np.int64] = unique[~found]
        return missing

    def figures(self, steps: int) -> dict[str, float]:
        """Shares found, and rows a step."""
        return {
            "hit_ids": self._found_ids / self._ids,
            "hit_unique": self._found_rows / self._rows,
            "unique_share": self._rows / self._ids,
            "unique": self._rows / steps,
            "missing": (self._rows - self._found_rows) / steps,
        }


def cold_pages(store: LmdbStore, bag: TieredEmbeddingBag, table: str, ids: NDArray[np.int64]) -> int:
    """Distinct pages of the data file that rows (M,) lie on; about right, since some may wait to be committed."""
    _, ref = bag._opened[table]
    return pages_of(store, RowIds.of(ref, ids))
