"""The phases of `benchmarks.store`, each a function that returns figures. Sizes are in rows, times in seconds."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.disk import CannotMeasure, drop_page_cache, fio_pages_per_s, written_bytes
from benchmarks.report import Figure
from benchmarks.store_internals import index_bytes, one_thread, pages_of, store_config
from benchmarks.store_sides import Batch, Data, LmdbRows, Ours, Side, open_rows
from benchmarks.store_writer import write_and_kill
from benchmarks.timing import Step, interleave
from storage import LmdbStore, RowIds

INDEX_FROM_ROWS = 100_000
_GROWTH_BATCH = 8192
_POOL_BATCHES = 12
_TURN_BATCHES = 4
_OPENS = 5


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows of one width.

    Attributes:
        rows, row_bytes: ids are those below `rows`.
        batch: rows of a batch.
    """

    rows: int
    row_bytes: int
    batch: int

    def data(self, seed: int) -> Data:
        """Random bytes for a batch of rows."""
        return np.random.default_rng(seed).integers(0, 256, (self.batch, self.row_bytes), dtype=np.uint8)

    def random_ids(self, seed: int) -> NDArray[np.int64]:
        """A batch of ids, drawn with repetition."""
        return np.random.default_rng(seed).integers(0, self.rows, self.batch)


def compile_kernels(directory: Path) -> None:
    """Have every kernel of the store compiled before anything is timed."""
    side = Ours(directory, 8)
    batch, data = Batch.of(np.arange(1000)), np.zeros((1000, 8), np.uint8)
    for _ in range(2):
        side.update(batch, data)
        side.read(batch)
    side.close()
    _open_seconds(side.path, 1000, close=True)
    shutil.rmtree(side.path)


def load(sides: Mapping[str, Side], work: Workload) -> dict[str, float]:
    """Write all rows into every side, one after the other; nanoseconds a row."""
    data = work.data(0)
    nanoseconds = {}
    for name, side in sides.items():
        start = time.perf_counter()
        for first in range(0, work.rows, work.batch):
            ids = np.arange(first, min(work.rows, first + work.batch))
            side.load(Batch.of(ids), np.roll(data, first // work.batch, axis=0)[: len(ids)])
        side.loaded()
        nanoseconds[name] = (time.perf_counter() - start) / work.rows * 1e9
    return nanoseconds


def warm_reads(sides: Mapping[str, Side], work: Workload, rounds: int) -> dict[str, list[float]]:
    """Nanoseconds a row of the same random batches, one figure a round, every page touched before.

    A turn is several batches: the first of them finds the processor's caches full of another side's rows.
    """
    for first in range(0, work.rows, work.batch):
        batch = Batch.of(np.arange(first, min(work.rows, first + work.batch)))
        given = {bytes(side.read(batch)) for side in sides.values()}
        if len(given) != 1:
            raise RuntimeError(f"the sides give different bytes for ids {first} to {first + work.batch}")
    batches = [Batch.of(work.random_ids(seed)) for seed in range(_POOL_BATCHES)]
    ours, lmdb_rows = sides["ours"], sides["lmdb_rows"]
    assert isinstance(ours, Ours) and isinstance(lmdb_rows, LmdbRows)

    def read_alone(batch: Batch) -> object:
        with one_thread(ours.store):
            return ours.read(batch)

    steps: dict[str, Step] = {name: _in_turns(side.read, batches) for name, side in sides.items()}
    steps["ours_one_thread"] = _in_turns(read_alone, batches)
    steps["lmdb_rows_buffers"] = _in_turns(lambda batch: lmdb_rows.read_as(batch, buffers=True), batches)
    seconds = interleave(steps, rounds, warm_up=1)
    rows = work.batch * _TURN_BATCHES
    return {name: [one / rows * 1e9 for one in figures] for name, figures in seconds.items()}


def _in_turns(read: Callable[[Batch], object], batches: list[Batch]) -> Step:
    def step(number: int) -> None:
        for at in range(number * _TURN_BATCHES, (number + 1) * _TURN_BATCHES):
            read(batches[at % len(batches)])

    return step


def updates(sides: Mapping[str, Side], work: Workload, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Committed updates of random rows, in turns.

    Returns:
        nanoseconds a row, one figure a round; bytes written for each byte updated.
    """
    nanoseconds: dict[str, list[float]] = {name: [] for name in sides}
    written = dict.fromkeys(sides, 0.0)
    data = work.data(1)
    for number in range(-1, rounds):
        ids = np.unique(work.random_ids(1000 + number))
        batch, rows = Batch.of(ids), np.roll(data, number, axis=0)[: len(ids)]
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            before, start = written_bytes(), time.perf_counter()
            sides[name].update(batch, rows)
            elapsed = time.perf_counter() - start
            sides[name].settle()
            if number >= 0:
                nanoseconds[name].append(elapsed / len(ids) * 1e9)
                written[name] += (written_bytes() - before) / len(ids) / work.row_bytes / rounds
    return nanoseconds, written


def upkeep(sides: Mapping[str, Side], work: Workload, batches: int) -> dict[str, list[float]]:
    """Committed updates in four turns of many batches, each until nothing is left to be done; nanoseconds a row."""
    nanoseconds: dict[str, list[float]] = {name: [] for name in sides}
    data = work.data(5)
    for number in range(4):
        ids = [np.unique(work.random_ids(5000 + number * batches + one)) for one in range(batches)]
        turn = [Batch.of(one) for one in ids]
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            start = time.perf_counter()
            for batch in turn:
                sides[name].update(batch, data[: len(batch.ids)])
            sides[name].settle()
            nanoseconds[name].append((time.perf_counter() - start) / sum(map(len, ids)) * 1e9)
    return nanoseconds


def cold_reads(ours: Ours, work: Workload, rounds: int, fio_seconds: float) -> dict[str, Figure]:
    """Distinct 4 KiB pages a second that one thread's gets bring in, beside fio on the same file, in turns."""
    data_file = ours.path / "data.mdb"
    pages, fio = [], []
    reason = fio_reason = None
    for number in range(rounds):
        ids = work.random_ids(2000 + number)
        needed = pages_of(ours.store, RowIds.of(ours.table, ids))
        batch = Batch.of(ids)
        for ours_now in (True, False) if number % 2 == 0 else (False, True):
            try:
                if ours_now:
                    drop_page_cache(data_file)
                    start = time.perf_counter()
                    with one_thread(ours.store):
                        ours.read(batch)
                    pages.append(needed / (time.perf_counter() - start))
                elif fio_reason is None:
                    fio.append(fio_pages_per_s(data_file, fio_seconds))
            except CannotMeasure as error:
                reason, fio_reason = (str(error), fio_reason) if ours_now else (reason, str(error))
        if reason:
            break
    both = len(pages) == len(fio) == rounds
    return {
        "cold_pages_per_s": round(statistics.median(pages)) if pages else None,
        "fio_pages_per_s": round(statistics.median(fio)) if fio else None,
        "cold_read_vs_fio": round(statistics.median(a / b for a, b in zip(pages, fio, strict=True)), 3)
        if both
        else None,
        **({} if both else {"cold_read_reason": reason or fio_reason}),
    }


def steady_state(ours: Ours, work: Workload, rewrites: float) -> dict[str, Figure]:
    """Uniform random updates with compaction on, committed by batches: once over the store, then `rewrites` times.

    Amplifications are those after the first time over: bytes written by the process, and by the store's own count,
    for each byte put; and the greatest space for each live byte.
    """
    batches = -(-work.rows // work.batch)
    data, random = work.data(3), np.random.default_rng(3)
    space, before, before_stats, start = 0.0, 0, 0, 0.0
    measured = round(batches * rewrites)
    for number in range(-batches, measured):
        if number == 0:
            before, before_stats, start = written_bytes(), ours.store.stats().bytes_written, time.perf_counter()
        ours.update(Batch(random.integers(0, work.rows, work.batch), [], []), data)
        if number >= 0:
            space = max(space, ours.store.stats().disk_bytes / (work.rows * work.row_bytes))
    seconds, put = time.perf_counter() - start, measured * work.batch * work.row_bytes
    return {
        "write_amplification_steady": round((written_bytes() - before) / put, 3),
        "write_amplification_steady_stats": round((ours.store.stats().bytes_written - before_stats) / put, 3),
        "space_amplification_steady": round(space, 3),
        "update_steady_ns": round(seconds / (measured * work.batch) * 1e9, 1),
    }


def index_growth(directory: Path, rows: int) -> float:
    """The greatest number of bytes that the index takes for a row while a store grows to `rows`, from 100,000 on."""
    greatest = 0.0
    path = directory / "growth"
    random, data = np.random.default_rng(4), np.zeros((_GROWTH_BATCH, 8), np.uint8)
    with LmdbStore(path, config=store_config(compacting=False)) as store:
        table = open_rows(store, 8)
        held = 0
        while held < rows:
            store.put(RowIds.of(table, random.integers(-(2**63), 2**63 - 1, _GROWTH_BATCH)), data)
            held += _GROWTH_BATCH
            if held >= min(INDEX_FROM_ROWS, rows):
                greatest = max(greatest, index_bytes(store) / held)
    shutil.rmtree(path)
    return greatest


def opening(directory: Path, rows: int, row_bytes: int) -> dict[str, Figure]:
    """Open a store after its writer was killed, and after it was closed; page cache warm, and cold where it drops."""
    path = directory / "opening"
    write_and_kill(path, rows, row_bytes)
    crashed = [_open_seconds(path, rows, close=False) for _ in range(_OPENS)]
    figures: dict[str, Figure] = {
        "recovery_rows_per_s": round(rows / statistics.median(crashed)),
        "recovery_cold_rows_per_s": None,
        "clean_open_s": None,
        "clean_open_cold_s": None,
    }
    cold = _after_drop(path, rows, close=False)
    figures["recovery_cold_rows_per_s"] = None if cold is None else round(rows / cold)
    store = LmdbStore(path)
    figures["index_bytes_per_row_recovered"] = round(index_bytes(store) / rows, 2)
    store.close()
    figures["clean_open_s"] = round(statistics.median(_open_seconds(path, rows, close=True) for _ in range(3)), 3)
    cold = _after_drop(path, rows, close=True)
    figures["clean_open_cold_s"] = None if cold is None else round(cold, 3)
    shutil.rmtree(path)
    return figures


def _open_seconds(path: Path, rows: int, *, close: bool) -> float:
    """How long an open takes. `close=False` lets go without a flush, so that the next open finds the same crash."""
    start = time.perf_counter()
    store = LmdbStore(path)
    elapsed = time.perf_counter() - start
    seen = store.stats().rows
    store.close() if close else store.abandon()
    if seen != rows:
        raise RuntimeError(f"{path} opened with {seen} rows; {rows} were written")
    return elapsed


def _after_drop(path: Path, rows: int, *, close: bool) -> float | None:
    try:
        for name in os.listdir(path):
            if (path / name).stat().st_size:
                drop_page_cache(path / name)
    except CannotMeasure:
        return None
    return _open_seconds(path, rows, close=close)
