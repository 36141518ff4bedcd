"""An export and an import beside a synced copy of the exported files, for whatever asks: no question of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.report import Figure
from benchmarks.timing import ratio, take_turns
from storage import Column, LmdbStore, RowIds, RowSchema, StoreConfig

_BLOCK = 100_000
_CONFIG = StoreConfig(write_buffer_bytes=128 << 20)  # as `tiered-emb store import`


def export_vs_copy(rows: int, dim: int, directory: Path, rounds: int = 9) -> dict[str, Figure]:
    """Speeds of an export and an import as shares of that of a synced copy, `cp` and fsync, of the exported files.

    A store of `rows` rows of `dim` floats and one of state. Sides take turns; each finds its input in the page cache
    and ends with its output on the disk. All files are removed.

    Args:
        directory: on the disk that is measured.

    Returns:
        `export_ratio_to_copy`, `import_ratio_to_copy` (medians over neighbouring turns), the smaller as
        `export_vs_copy`; seconds of each side; bytes of the files.
    """
    place = directory / "export-copy"
    place.mkdir()
    try:
        with LmdbStore(place / "store", config=_CONFIG) as store:
            _fill(store, rows, dim)
            done = store.export(place / "export", snapshot="all")
            sides = _sides(store, place)
            seconds = take_turns(
                {name: partial(_warmed, side, place, done.file_bytes) for name, side in sides.items()}, rounds
            )
    finally:
        shutil.rmtree(place, ignore_errors=True)
    shares = {side: round(ratio(seconds, "copy", side), 3) for side in ("export", "import")}
    return {
        "export_vs_copy": min(shares.values()),
        **{f"{side}_ratio_to_copy": share for side, share in shares.items()},
        **{f"{side}_seconds": [round(one, 3) for one in times] for side, times in seconds.items()},
        "export_file_bytes": done.file_bytes,
        "export_row_bytes": done.row_bytes,
    }


def _warmed(side: Callable[[], float], place: Path, file_bytes: int) -> float:
    """A side's seconds, begun with memory that was in use a moment ago: twice what its output takes.

    A virtual machine gives memory that is free for some seconds back to its host, and the page cache grows at half the
    speed where it has to be fetched again. That would be charged to the side that writes longest.
    """
    block, path = bytes(1 << 20), place / "warm"
    with open(path, "wb", buffering=0) as file:
        for _ in range(2 * file_bytes >> 20):
            file.write(block)
    path.unlink()
    return side()


def _fill(store: LmdbStore, rows: int, dim: int) -> None:
    """Rows as an initialiser and an optimizer leave them, under ids in no order."""
    table = store.open_table("items", RowSchema((Column("weight", "float32", dim), Column("sum", "float32", 1))))
    rng = np.random.default_rng(0)
    ids = rng.permutation(8 * rows)[:rows]
    for start in range(0, rows, _BLOCK):
        some = ids[start : start + _BLOCK]
        numbers = rng.standard_normal((len(some), dim + 1), np.float32) * np.float32(0.05)
        store.put(RowIds.of(table, some), numbers.view(np.uint8))
    store.snapshot("all")


def _sides(store: LmdbStore, place: Path) -> dict[str, Callable[[], float]]:
    def export() -> float:
        return _timed(lambda: store.export(place / "again", snapshot="all"), place / "again")

    def copy() -> float:
        return _timed(lambda: _copy(place / "export", place / "copy"), place / "copy")

    def import_() -> float:
        with LmdbStore(place / "other", durability="snapshot", config=_CONFIG) as other:
            start = time.perf_counter()
            other.import_(place / "export")
            seconds = time.perf_counter() - start
        shutil.rmtree(place / "other")
        os.sync()
        return seconds

    return {"copy": copy, "export": export, "import": import_}


def _timed(work: Callable[[], object], made: Path) -> float:
    """Seconds of work whose output is removed afterwards, so that nobody else's turn writes it."""
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    shutil.rmtree(made)
    os.sync()
    return seconds


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for file in sorted(source.iterdir()):
        subprocess.run(["cp", "--reflink=never", str(file), str(target / file.name)], check=True)
        with open(target / file.name, "rb") as copied:
            os.fsync(copied.fileno())
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
