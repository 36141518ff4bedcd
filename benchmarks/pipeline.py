"""What does a training step cost when the rows are ten times what memory holds, and prefetching brings them in?

10 M rows of 64 floats with row-wise Adagrad in an `LmdbStore`; all host memory of the engine, the store's index
included, is a tenth of the rows' bytes; the policy is LFU, as the law stays the same. Batches of 4,096 samples x 26
ids, one id a bag, of a finite Zipf law with exponent 1.05, scattered over the table: about 37% of a batch's ids are
unique, about 16% are not in memory. The store has been written over once more than it was loaded, so that compaction
has to keep up with what leaves memory. Every figure is of steps after 100 batches; no batch comes twice.

- **Warm.** The store lies in memory (tmpfs) and answers as fast as that. In turns: ours with prefetching, ours with all
  rows resident and no store, FBGEMM with all rows in memory, on the same batches. A turn is some steps of the loop, and
  for ours ends when all that it has begun to prepare is done. Ratios are medians over the turns.
- **Cold.** The store lies on a disk, in a process with so little memory that the page cache holds a small part of it
  (`benchmarks.pipeline_cold`). The limit is the larger of the resident step and of the time that fio needs for what a
  step has the disk do, both in turns with ours. `stall_share` is what forwards waited for beyond what that limit makes
  them wait, as a share of the step.
- **Ablation.** Without prefetching; and without a cache, where memory has room for the rows of the batches on their way
  and for no others. `ablation` is of the store in memory, `ablation_cold` of the one on the disk.
- **Skew.** The same with the law of which 1% of the rows take 95.7% of the requests, as in a published model of a
  retailer: figures whose names begin with `retail_`.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks import sides
from benchmarks.disk import CannotMeasure, scratch
from benchmarks.options import at_least
from benchmarks.pipeline_cold import Law, measure_cold
from benchmarks.pipeline_sides import InMemory, Setting, Side, Tiered, ablation, fill, in_turns, open_store, phase
from benchmarks.report import Figure, Report
from benchmarks.timing import ratio
from benchmarks.workloads import Zipf, exponent_of_skew

QUESTION = "a training step over a table ten times larger than memory, with prefetching: warm, and on the disk"
EXPONENT = 1.05
RETAIL_TOP, RETAIL_SHARE = 0.01, 0.957
RETAIL = "retail_"
WARM, RESIDENT, FBGEMM = "warm", "resident", "fbgemm"
_COLD_KEYS = ("cold_step_ms", "limit_step_ms", "cold_vs_limit", "stall_share")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this question."""
    for name, kind, least, default, text in (
        ("--rows", int, 1000, 10_000_000, "rows of the table"),
        ("--dim", int, 1, 64, "floats a row"),
        ("--share", float, 0.01, 0.1, "share of the rows' bytes that the engine may hold"),
        ("--samples", int, 1, 4096, "samples a batch"),
        ("--features", int, 1, 26, "ids a sample"),
        ("--lookahead", int, 1, 2, "batches prepared ahead"),
        ("--warm-up", int, 1, 100, "batches before the first clock"),
        ("--steps", int, 1, 20, "steps of a turn"),
        ("--rounds", int, 2, 6, "turns of every side"),
        ("--cold-rounds", int, 2, 6, "turns of ours and of fio on the disk"),
        ("--ablation-rounds", int, 0, 2, "turns of each side of the ablation; 0 leaves it out"),
        ("--puts", float, 0, 1.2, "times that the store is written over before, to have compaction at work"),
        ("--cache-mb", int, 16, 256, "page cache left to the store on the disk"),
    ):
        what = f"{text} (default {default:,})"
        parser.add_argument(name, metavar="N", type=at_least(least, kind), default=default, help=what)
    parser.add_argument("--no-cold", action="store_true", help="leave out the store on the disk")
    parser.add_argument("--no-retail", action="store_true", help="leave out the skewed workload")
    parser.add_argument("--memory", metavar="DIR", default="/dev/shm", help="a directory in memory (default /dev/shm)")
    parser.add_argument("--directory", metavar="DIR", help="a directory on a disk; what is made there is removed")


def measure(options: argparse.Namespace) -> Report:
    """All figures of the question."""
    setting = Setting(
        **{name: getattr(options, name) for name in ("rows", "dim", "share", "samples", "features", "lookahead")},
        **{name: getattr(options, name) for name in ("warm_up", "steps", "rounds", "puts")},
    )
    laws = {"": EXPONENT}
    if not options.no_retail:
        laws[RETAIL] = exponent_of_skew(setting.rows, RETAIL_TOP, RETAIL_SHARE)
    seconds: dict[str, Figure] = {}
    report = Report(f"pipeline: {setting.rows:,} rows x {setting.dim}, {setting.share:.0%} in memory", ("what", ""))
    with _stores(options) as (memory, disk):
        with phase("load", seconds), open_store(memory, setting) as store:
            fill(store, setting, Zipf(setting.rows, EXPONENT))
        if disk is not None:
            with phase("copy to the disk", seconds):
                shutil.copytree(memory, disk)
        with phase("rows in memory", seconds):
            in_memory = _in_memory(report, setting)
        for name, exponent in laws.items():
            with phase(f"warm {name}".strip(" _"), seconds):
                report.figures |= _named(name, _warm(memory, setting, exponent, in_memory))
        in_memory.clear()
        if options.ablation_rounds:
            with phase("ablation", seconds), open_store(memory, setting) as store:
                law = Zipf(setting.rows, EXPONENT)
                report.figures["ablation"] = ablation(store, setting, law, options.ablation_rounds)
        shutil.rmtree(memory)
        with phase("cold", seconds):
            _cold(report, disk, setting, laws, options)
    report.figures["phase_seconds"] = seconds
    _show(report)
    return report


@contextmanager
def _stores(options: argparse.Namespace) -> Iterator[tuple[Path, Path | None]]:
    """Where the stores lie: in memory, and on a disk unless that is left out."""
    memory = Path(tempfile.mkdtemp(prefix="pipeline-", dir=options.memory))
    try:
        if options.no_cold:
            yield memory / "store", None
        else:
            with scratch(options.directory) as directory:
                yield memory / "store", directory / "store"
    finally:
        shutil.rmtree(memory, ignore_errors=True)


def _in_memory(report: Report, setting: Setting) -> dict[str, torch.nn.Module]:
    """The modules with all rows in memory."""
    modules: dict[str, torch.nn.Module] = {RESIDENT: sides.resident_bag(setting.rows, setting.dim)}
    try:
        modules[FBGEMM] = sides.fbgemm_module(setting.rows, setting.dim)
    except (ImportError, OSError) as error:
        report.figures["fbgemm_missing"] = str(error)
    return modules


def _warm(path: Path, setting: Setting, exponent: float, modules: dict[str, torch.nn.Module]) -> dict[str, Figure]:
    """Turns of ours over the store in memory and of modules with all rows in memory."""
    stream = setting.stream(Zipf(setting.rows, exponent))
    with open_store(path, setting) as store:
        ours = Tiered(store, setting, stream)
        ours.warm_up(setting)
        turning: dict[str, Side] = {name: InMemory(module, stream) for name, module in modules.items()}
        for side in turning.values():
            side.run(setting.warm_up - 1, 1)
        before, stalled = store.stats(), ours.stalled
        seconds = in_turns({WARM: ours, **turning}, stream, setting, setting.warm_up)
        after, steps = store.stats(), setting.rounds * setting.steps
        counted, tier = ours.counted(), ours.bag.stats().tiers[0]
        figures: dict[str, Figure] = {
            f"{name}_step_ms": round(statistics.median(seconds[name]) * 1000, 2) if name in seconds else None
            for name in (WARM, RESIDENT, FBGEMM)
        }
        for name in (RESIDENT, FBGEMM):
            against = round(ratio(seconds, WARM, name), 3) if name in seconds else None
            figures[f"{WARM}_vs_{name}"] = against
        figures |= {
            "warm_stall_ms": round((ours.stalled - stalled) / steps * 1000, 2),
            "hit_rates": {
                "hbm_ids": None,
                "ddr_ids": round(counted["hit_ids"], 4),
                "hbm_unique": None,
                "ddr_unique": round(counted["hit_unique"], 4),
            },
            "unique_share": round(counted["unique_share"], 4),
            "unique_a_step": round(counted["unique"]),
            "missing_a_step": round(counted["missing"]),
            "cache_rows": tier.capacity_rows,
            "moved_per_put": round(
                (after.rows_moved - before.rows_moved) / max(1, after.rows_written - before.rows_written), 3
            ),
            "store_mb": round(after.disk_bytes / 1e6),
            "live_mb": round(after.live_bytes / 1e6),
        }
        ours.close()
    return figures


def _cold(
    report: Report, disk: Path | None, setting: Setting, laws: dict[str, float], options: argparse.Namespace
) -> None:
    """The figures of the store on the disk, or nulls and the reason."""
    for name in laws:
        report.figures |= _named(name, dict.fromkeys(_COLD_KEYS))
    if options.ablation_rounds:
        report.figures["ablation_cold"] = None
    try:
        if disk is None:
            raise CannotMeasure("it was left out (--no-cold)")
        resident = {name: report.figures[f"{name}{RESIDENT}_step_ms"] for name in laws}
        told = {name: Law(laws[name], float(str(step)) / 1000) for name, step in resident.items()}
        few = Setting(**{**setting.told, "rounds": options.cold_rounds})  # type: ignore[arg-type]
        figures = measure_cold(disk, few, told, options.cache_mb << 20, options.ablation_rounds)
    except CannotMeasure as error:
        report.figures["cold_reason"] = str(error)
        return
    for name, one in figures.items():
        report.figures |= _named(name, one)


def _named(prefix: str, figures: dict[str, Figure]) -> dict[str, Figure]:
    return {f"{prefix}{name}": figure for name, figure in figures.items()}


_LINES = (
    ("store in memory, prefetching", "warm_step_ms", "ms"),
    ("  all rows resident", "resident_step_ms", "ms"),
    ("  FBGEMM, in memory", "fbgemm_step_ms", "ms"),
    ("  ours / resident", "warm_vs_resident", ""),
    ("  ours / FBGEMM", "warm_vs_fbgemm", ""),
    ("store on the disk, prefetching", "cold_step_ms", "ms"),
    ("  the limit", "limit_step_ms", "ms"),
    ("  ours / limit", "cold_vs_limit", ""),
    ("  stalled beyond it", "stall_share", "of a step"),
    ("unique ids", "unique_share", "of ids"),
    ("missing rows", "missing_a_step", "a step"),
    ("rows that memory holds", "cache_rows", ""),
)


def _show(report: Report) -> None:
    """The table's lines and the notes, from the figures."""
    report.columns = ("what", "Zipf 1.05", "skewed")
    for text, key, unit in _LINES:
        report.lines.append((text, *(report.shown(f"{name}{key}", unit) for name in ("", RETAIL))))
    for key, text in (("ablation", "in memory"), ("ablation_cold", "on the disk")):
        if isinstance(figures := report.figures.get(key), dict):
            told = ", ".join(f"{name} {one} ms" for name, one in figures.items())
            report.notes.append(f"Ablation, store {text}: {told}")
    if "fbgemm_missing" in report.figures:
        report.notes.append(f"FBGEMM was not measured: {report.figures['fbgemm_missing']} (`make bench` installs it)")
    if "cold_reason" in report.figures:
        report.notes.append(f"The store on the disk was not measured: {report.figures['cold_reason']}")
    report.note_seconds()
