"""Anonymous memory that an export and an import take; prints one JSON object. Run by `test_export.py`."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet  # noqa: F401  (part of the imported interpreter)

from storage import Column, LmdbStore, RowIds, RowSchema, StoreConfig

SCHEMA = RowSchema((Column("weight", "float32", 64), Column("sum", "float32", 1)))
ROWS, BLOCK = 600_000, 20_000


def anonymous_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("RssAnon:"))


def peak_mb(call: Callable[[], Any]) -> float:
    """The most that a call takes above what there was before."""
    before, most, ended = anonymous_mb(), [0.0], threading.Event()

    def look() -> None:
        while not ended.is_set():
            most[0] = max(most[0], anonymous_mb())
            time.sleep(0.002)

    looker = threading.Thread(target=look)
    looker.start()
    call()
    ended.set()
    looker.join()
    return most[0] - before


def fill(store: LmdbStore, rows: int) -> None:
    ref = store.open_table("a", SCHEMA)
    for start in range(0, rows, BLOCK):
        data = np.random.default_rng(start).standard_normal((BLOCK, 65), np.float32)
        store.put(RowIds.of(ref, np.arange(start, start + BLOCK)), data.view(np.uint8))
    store.snapshot("one")


def main(path: Path) -> dict[str, float]:
    config = StoreConfig(write_buffer_bytes=8 << 20)
    with LmdbStore(path / "small", config=config) as store, LmdbStore(path / "little", config=config) as other:
        fill(store, BLOCK)  # compiles
        store.export(path / "x0", snapshot="one")
        other.import_(path / "x0")
    with LmdbStore(path / "s", config=config) as store:
        fill(store, ROWS)
        with store.at("one") as view:
            index_mb = view.stats().memory_bytes / 1e6
        export_mb = peak_mb(lambda: store.export(path / "x", snapshot="one"))
    with LmdbStore(path / "t", config=config) as store:
        import_mb = peak_mb(lambda: store.import_(path / "x"))
        store_mb = store.memory_after(0) / 1e6
    return {"index_mb": index_mb, "export_mb": export_mb, "import_mb": import_mb, "store_mb": store_mb}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
