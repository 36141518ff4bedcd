"""A program: a store that is open while a DataLoader forks and spawns workers. Its argument is the store's path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from torch.utils.data import DataLoader, Dataset, get_worker_info

from storage import LmdbStore, RowIds, StoreReadOnlyError
from storage.testing import read, schema_of

ROWS = 64


class Rows(Dataset[int]):
    """The first byte of each row, by the store of the process that made this, or by one opened where it is needed."""

    def __init__(self, path: Path, store: LmdbStore | None) -> None:
        self.path, self.store = path, store

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, id: int) -> int:
        if self.store is None:
            self.store = LmdbStore(self.path, read_only=True)
        one = RowIds.of(self.store.open_table("t", schema_of(8)), np.array([id]))
        (row,) = read(self.store, one, 32)
        assert row is not None
        if get_worker_info() is None:
            return row[0]
        try:
            self.store.put(one, np.zeros((1, 32), np.uint8))
        except StoreReadOnlyError:
            return row[0]
        return -1

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "store": None}


def load(dataset: Rows, workers: int, way: str | None) -> None:
    loader = DataLoader(dataset, batch_size=8, num_workers=workers, multiprocessing_context=way)
    assert [int(x) for batch in loader for x in batch] == list(range(1, ROWS + 1)), (workers, way)
    print(way or workers)


def main(path: Path) -> None:
    with LmdbStore(path) as store:
        rows = RowIds.of(store.open_table("t", schema_of(8)), np.arange(ROWS))
        data = np.repeat(np.arange(1, ROWS + 1, dtype=np.uint8)[:, None], 32, 1)
        store.put(rows, data)
        store.flush()
        store.put(rows, data)  # not flushed: a fork has these in memory
        load(Rows(path, store), 0, None)
        load(Rows(path, store), 2, "fork")
        load(Rows(path, None), 2, "spawn")
        store.put(rows, data)
    with LmdbStore(path, read_only=True) as reader:
        load(Rows(path, reader), 2, "fork")
        assert read(reader, rows, 32) == [row.tobytes() for row in data]
    with LmdbStore(path) as store:
        assert read(store, rows, 32) == [row.tobytes() for row in data]
    print("unharmed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
