"""A process that writes a store and waits to be killed: ``python -m benchmarks.store_writer PATH ROWS ROW_BYTES``.

Prints ``written`` once all rows are durable and some of them were put again; then it goes on putting until it dies.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.store_internals import store_config
from benchmarks.store_sides import open_rows
from storage import LmdbStore, RowIds

BATCH = 65_536
_AGAIN = 8  # batches put again before the kill


def write(path: str, rows: int, row_bytes: int) -> None:
    """Write every row, then rows drawn at random, for ever."""
    store = LmdbStore(path, config=store_config(compacting=False))
    table = open_rows(store, row_bytes)
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (BATCH, row_bytes), dtype=np.uint8)
    for first in range(0, rows, BATCH):
        ids = np.arange(first, min(rows, first + BATCH))
        store.put(RowIds.of(table, ids), data[: len(ids)])
    store.flush()
    batches = 0
    while True:
        store.put(RowIds.of(table, random.integers(0, rows, BATCH)), data)
        batches += 1
        if batches == _AGAIN:
            print("written", flush=True)


def write_and_kill(path: Path, rows: int, row_bytes: int) -> None:
    """Have a process write a store, and kill it (SIGKILL) while it is putting rows."""
    command = [sys.executable, "-m", "benchmarks.store_writer", str(path), str(rows), str(row_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as writer:
        assert writer.stdout is not None
        line = writer.stdout.readline()
        writer.kill()
    if line != "written\n":
        raise RuntimeError(f"the process that writes {path} ended early, with exit code {writer.returncode}")


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
