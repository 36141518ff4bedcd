"""What does a row cost in the store, beside one LMDB record a row, RocksDB and the bare disk?

Rows of 128 bytes (8 M) and of 516 bytes (2 M; figures with the suffix `_wide`), one table, ids from 0 on:

- **Warm reads.** Batches of 65,536 random ids through `LmdbStore.get`, index look-up and checksum included, beside the
  same ids from the two baselines (`benchmarks.store_sides` says how those are set up, and why so). Every row of
  every side is read once before, which also proves that all sides give the same bytes. One thread asks; a get divides
  a batch among the processors, as it does by default, the baselines do not. `get_one_thread_ns` is without that.
- **Cold reads.** The page cache of the file is dropped, one thread asks for a batch and reads it alone: distinct 4 KiB
  pages a second that hold its rows, beside fio's random reads of the same file at depth 32. null where the cache
  cannot be dropped or fio is missing.
- **Updates.** 65,536 random rows a batch, committed. `write_amplification` is what the process had written for each
  byte put, before compaction: the bytes of its write calls, which is what reaches the device when all is synced.
- **Updates with upkeep.** What an update leaves behind is paid for later: superseded rows here, tables to be merged
  there. So `vs_rocksdb_update` is of turns of 24 batches, each side with its default upkeep, and the clock of a turn
  runs until nothing is due. Without that the ratio is `vs_rocksdb_update_without_upkeep`.
- **Steady state.** Uniform random updates with compaction on: the store is rewritten once, and then three times with
  the clock and the counters running. Space is disk bytes for each live byte, the greatest seen.
- **Latency.** p99.9 of gets and puts of 4,096 rows at a fixed rate beside growth and compaction, divided by that
  without (`benchmarks.store_latency`); the worse of the two.
- **Index.** Bytes for each row while a store of random 64-bit ids grows, the greatest from 10^5 rows on.
- **Opening.** 10 M rows of 128 bytes. Recovery: the process that writes them is killed (SIGKILL) while it puts, the
  page cache stays warm. Clean: after `close`. Both also with the page cache dropped, as figures of their own.

Ratios are times as fast as the baseline; those of reads, updates and cold reads are medians over neighbouring turns.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import store_phases as phases
from benchmarks.disk import scratch
from benchmarks.options import at_least
from benchmarks.report import Figure, Report
from benchmarks.store_latency import PacedLoad, beside_compaction
from benchmarks.store_phases import Workload
from benchmarks.store_sides import LMDB_ROWS, OURS, ROCKSDICT, LmdbRows, Ours, RocksRows, Side
from benchmarks.timing import ratio

QUESTION = "the store: reads, updates, space, opening, beside LMDB records, RocksDB and fio"
ROW_BYTES, WIDE_ROW_BYTES = 128, 516
BATCH = 65_536
WIDE = "_wide"
_BASELINES = {LMDB_ROWS: "vs_lmdb_rows", ROCKSDICT: "vs_rocksdb"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this question."""
    for name, kind, least, default, text in (
        ("--rows", int, 1, 8_000_000, "rows of 128 bytes"),
        ("--wide-rows", int, 0, 2_000_000, "rows of 516 bytes; 0 leaves them out"),
        ("--open-rows", int, 1, 10_000_000, "rows of the stores that are opened, and to which an index grows"),
        ("--rounds", int, 1, 12, "turns of every side of the warm reads"),
        ("--update-rounds", int, 1, 12, "turns of every side of the updates"),
        ("--upkeep-batches", int, 1, 24, "batches of updates in each of 4 turns in which upkeep counts"),
        ("--rewrites", float, 1, 3.0, "times that the steady state rewrites the store"),
        ("--cold-rounds", int, 1, 4, "turns of cold reads and of fio"),
        ("--turns", int, 1, 4, "turns of the latencies, with and without compaction"),
        ("--turn-seconds", float, 0.1, 6.0, "length of a turn of the latencies"),
        ("--pace", float, 10, 100.0, "gets, and puts, of 4,096 rows a second of the latencies"),
    ):
        what = f"{text} (default {default:,})"
        parser.add_argument(name, metavar="N", type=at_least(least, kind), default=default, help=what)
    parser.add_argument(
        "--directory", metavar="DIR", help="where the stores are written; what is made there is removed"
    )


@dataclass
class _Clock:
    """How long each phase took; says on stderr which one has begun."""

    seconds: dict[str, Figure] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        print(f"{name} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 1)


def measure(options: argparse.Namespace) -> Report:
    """All figures of the question."""
    report = Report(
        f"store: {options.rows:,} rows of 128 B, {options.wide_rows:,} of 516 B", ("what", "128 B", "516 B")
    )
    clock = _Clock()
    with scratch(options.directory) as directory:
        phases.compile_kernels(directory)
        for rows, row_bytes, suffix in ((options.rows, ROW_BYTES, ""), (options.wide_rows, WIDE_ROW_BYTES, WIDE)):
            if rows:
                work = Workload(rows, row_bytes, min(BATCH, rows))
                report.figures |= _one_width(directory, work, options, suffix, clock)
        with clock.phase("index growth"):
            grown = phases.index_growth(directory, options.open_rows)
            report.figures["index_bytes_per_row"] = round(grown, 2)
        with clock.phase("opening"):
            report.figures |= phases.opening(directory, options.open_rows, ROW_BYTES)
    report.figures["phase_seconds"] = clock.seconds
    _show(report)
    return report


def _one_width(
    directory: Path, work: Workload, options: argparse.Namespace, suffix: str, clock: _Clock
) -> dict[str, Figure]:
    """Figures of rows of one width, with the suffix behind their names."""
    place = directory / f"rows{suffix}"
    place.mkdir()
    figures: dict[str, Figure] = {}
    sides: dict[str, Side] = {OURS: Ours(place, work.row_bytes), LMDB_ROWS: LmdbRows(place, work.row_bytes)}
    try:
        sides[ROCKSDICT] = RocksRows(place, work.row_bytes)
    except ImportError as error:
        figures["rocksdict_missing"] = f"{error} (`make bench` installs it)"
    with clock.phase(f"load{suffix}"):
        figures |= {f"{name}_load_ns": round(one, 1) for name, one in phases.load(sides, work).items()}
    with clock.phase(f"warm reads{suffix}"):
        figures |= _read_figures(phases.warm_reads(sides, work, options.rounds))
    ours = sides[OURS]
    assert isinstance(ours, Ours)
    with clock.phase(f"cold reads{suffix}"):
        figures |= phases.cold_reads(ours, work, options.cold_rounds, min(2.0, options.turn_seconds))
    with clock.phase(f"updates{suffix}"):
        figures |= _update_figures(*phases.updates(sides, work, options.update_rounds))
    for name in (OURS, LMDB_ROWS):
        sides.pop(name).close()
    shutil.rmtree(place / LMDB_ROWS)
    compacting = Ours(place, work.row_bytes, compacting=True)
    with clock.phase(f"updates with upkeep{suffix}"):
        figures |= _upkeep_figures(phases.upkeep({OURS: compacting, **sides}, work, options.upkeep_batches))
    for name, side in sides.items():
        side.close()
        shutil.rmtree(place / name)
    with clock.phase(f"steady state{suffix}"):
        figures |= phases.steady_state(compacting, work, options.rewrites)
        compacting.close()
    if not suffix:
        with clock.phase("latency"):
            paced = PacedLoad(ours.path, work.row_bytes, work.rows, True, options.pace, options.turn_seconds)
            figures |= beside_compaction(paced, options.turns)
    shutil.rmtree(place)
    return {f"{name}{suffix}": figure for name, figure in figures.items()}


def _read_figures(nanoseconds: dict[str, list[float]]) -> dict[str, Figure]:
    names = {
        OURS: "get_ns",
        "ours_one_thread": "get_one_thread_ns",
        LMDB_ROWS: "lmdb_rows_ns",
        ROCKSDICT: "rocksdict_ns",
        "lmdb_rows_buffers": "lmdb_rows_buffers_ns",
    }
    figures: dict[str, Figure] = {}
    for name, key in names.items():
        figures[key] = round(statistics.median(nanoseconds[name]), 1) if name in nanoseconds else None
    return figures | _ratios(nanoseconds, "read")


def _update_figures(nanoseconds: dict[str, list[float]], written: dict[str, float]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for name in (OURS, *_BASELINES):
        measured = name in nanoseconds
        figures["update_ns" if name == OURS else f"{name}_update_ns"] = (
            round(statistics.median(nanoseconds[name]), 1) if measured else None
        )
        figures["write_amplification" if name == OURS else f"{name}_write_amplification"] = (
            round(written[name], 3) if measured else None
        )
    ratios = _ratios(nanoseconds, "update")
    ratios["vs_rocksdb_update_without_upkeep"] = ratios.pop("vs_rocksdb_update")
    return figures | ratios


def _upkeep_figures(nanoseconds: dict[str, list[float]]) -> dict[str, Figure]:
    """Means over all blocks: upkeep comes when it is due, and not evenly."""
    mean = {name: statistics.mean(figures) for name, figures in nanoseconds.items()}
    theirs = mean.get(ROCKSDICT)
    return {
        "update_upkeep_ns": round(mean[OURS], 1),
        "rocksdict_update_upkeep_ns": round(theirs, 1) if theirs else None,
        "vs_rocksdb_update": round(theirs / mean[OURS], 2) if theirs else None,
    }


def _ratios(nanoseconds: dict[str, list[float]], verb: str) -> dict[str, Figure]:
    """How many times as fast as each baseline ours is."""
    return {
        f"{key}_{verb}": round(ratio(nanoseconds, name, OURS), 2) if name in nanoseconds else None
        for name, key in _BASELINES.items()
    }


_LINES = (
    ("get, warm: ours", "get_ns", "ns a row"),
    ("  in one thread", "get_one_thread_ns", "ns a row"),
    ("  LMDB, a record a row", "lmdb_rows_ns", "ns a row"),
    ("  rocksdict", "rocksdict_ns", "ns a row"),
    ("  times as fast as LMDB records", "vs_lmdb_rows_read", ""),
    ("  times as fast as rocksdict", "vs_rocksdb_read", ""),
    ("get, cold: ours", "cold_pages_per_s", "pages/s"),
    ("  fio, depth 32", "fio_pages_per_s", "pages/s"),
    ("  ours / fio", "cold_read_vs_fio", ""),
    ("update, committed: ours", "update_ns", "ns a row"),
    ("  LMDB, a record a row", "lmdb_rows_update_ns", "ns a row"),
    ("  rocksdict", "rocksdict_update_ns", "ns a row"),
    ("  times as fast as LMDB records", "vs_lmdb_rows_update", ""),
    ("  times as fast as rocksdict", "vs_rocksdb_update_without_upkeep", ""),
    ("update, upkeep included: ours", "update_upkeep_ns", "ns a row"),
    ("  rocksdict", "rocksdict_update_upkeep_ns", "ns a row"),
    ("  times as fast as rocksdict", "vs_rocksdb_update", ""),
    ("bytes written / bytes put: ours", "write_amplification", ""),
    ("  LMDB, a record a row", "lmdb_rows_write_amplification", ""),
    ("  rocksdict", "rocksdict_write_amplification", ""),
    ("steady state: update", "update_steady_ns", "ns a row"),
    ("  bytes written / bytes put", "write_amplification_steady", ""),
    ("  disk bytes / live bytes", "space_amplification_steady", ""),
    ("p99.9 beside compaction / alone", "p999_beside_compaction", ""),
    ("  gets beside", "p999_gets_beside_ms", "ms"),
    ("  gets alone", "p999_gets_alone_ms", "ms"),
    ("  puts beside", "p999_puts_beside_ms", "ms"),
    ("  puts alone", "p999_puts_alone_ms", "ms"),
    ("index, greatest", "index_bytes_per_row", "B a row"),
    ("open after kill -9", "recovery_rows_per_s", "rows/s"),
    ("  page cache cold", "recovery_cold_rows_per_s", "rows/s"),
    ("open after close", "clean_open_s", "s"),
    ("  page cache cold", "clean_open_cold_s", "s"),
)


def _show(report: Report) -> None:
    """The table's lines and the notes, from the figures."""
    for text, key, unit in _LINES:
        report.lines.append((text, *(report.shown(key + suffix, unit) for suffix in ("", WIDE))))
    for key in ("rocksdict_missing", "cold_read_reason"):
        if report.figures.get(key):
            report.notes.append(f"Not measured: {report.figures[key]}")
    report.note_seconds()
