"""What the store's public interface does not tell, and what measuring needs of it, in one place."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from storage import LmdbStore, RowIds, StoreConfig
from storage.row_log.places import MAX_SEGMENT_ROWS, ROWS


def store_config(*, compacting: bool) -> StoreConfig:
    """The default, or the default with compaction off."""
    return StoreConfig() if compacting else StoreConfig(compact_bytes_per_s=0)


@contextmanager
def one_thread(store: LmdbStore) -> Iterator[None]:
    """Within this block the thread that gets rows reads them alone."""
    config = store.config
    store.config = replace(config, read_threads=1)
    try:
        yield
    finally:
        store.config = config


def index_bytes(store: LmdbStore) -> int:
    """Host memory of the index alone; `StoreStats.memory_bytes` counts buffers and segment tables too."""
    return sum(group.index.memory_bytes for group in store._session.groups)


def pages_of(store: LmdbStore, rows: RowIds) -> int:
    """Distinct pages of the data file that the rows of a batch lie on; all of them exist and are committed."""
    group = store._session.groups[rows.group]
    places = group.index.find(group.segments.lines, rows.tables, rows.ids).astype(np.int64)
    first = group.segments.lines[places // MAX_SEGMENT_ROWS, ROWS] + places % MAX_SEGMENT_ROWS * group.stride
    last = first + group.stride - 1
    most = group.stride // mmap.PAGESIZE + 1  # pages that a row may reach into beyond its first
    pages = [np.minimum(first // mmap.PAGESIZE + more, last // mmap.PAGESIZE) for more in range(most + 1)]
    return len(np.unique(np.concatenate(pages)))
