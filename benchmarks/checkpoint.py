"""What do snapshots, checkpoints and going back cost, and does a run that was killed go on as if nothing had been?

- **Snapshots.** 10 M rows of 64 floats and their optimizer state are put into a store and kept as a snapshot; then
  random 1% of them are put again and kept as another, which is gone back from. `snapshot_1pct_vs_full` is the second
  one's time, puts included, by the first one's; `rollback_vs_rewrite` that of going back by that of putting all rows.
- **Saving twice.** `rows_written_second_save`: rows that a second `save_checkpoint` without a step between writes.
- **Training.** Two models of one kind, with a checkpoint beside it every 50 steps and without, in turns: medians of the
  turns' ratios, and the ratio of the 99th percentiles of all steps.
- **Kills.** Runs of `tiered-emb train` that are killed at a random moment and resumed (`benchmarks.checkpoint_kills`).
- **Export.** Export and import of a snapshot beside a synced copy of the exported files: `export_vs_copy` is the copy's
  time by the slower one's.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np

from benchmarks.checkpoint_kills import killed_runs
from benchmarks.checkpoint_store import snapshots
from benchmarks.checkpoint_training import Size, Trainer, second_save
from benchmarks.disk import scratch
from benchmarks.export_copy import export_vs_copy
from benchmarks.options import at_least
from benchmarks.pipeline_sides import phase
from benchmarks.report import Figure, Report
from benchmarks.workloads import Zipf

QUESTION = "snapshots, checkpoints beside training, going back, resuming after kills, exports"
EXPONENT = 1.05
_SHARE = 0.01
_WARM_ROWS = 100_000
_WARM_TURNS = 3
_KILL_EVERY = 10  # steps from one checkpoint to the next of runs that are killed
_LINES = (
    ("snapshot: first, all rows put", "first_snapshot_s", "s"),
    ("snapshot: 1% put again", "snapshot_1pct_s", "s"),
    ("  by the first one", "snapshot_1pct_vs_full", ""),
    ("going back from 1%", "rollback_1pct_s", "s"),
    ("  by rewriting", "rollback_vs_rewrite", ""),
    ("rows written by a second save", "rows_written_second_save", ""),
    ("a step without checkpoints", "step_ms", "ms"),
    ("  with one every few steps", "step_with_ms", "ms"),
    ("  with / without", "train_with_vs_without", ""),
    ("  99th percentiles, with / without", "p99_step_ratio", ""),
    ("runs killed", "kills", ""),
    ("  resumed with equal hashes", "resumed_identical", ""),
    ("a synced copy by export or import", "export_vs_copy", ""),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this question."""
    for name, kind, least, default, text in (
        ("--rows", int, 10_000, 10_000_000, "rows of the store whose snapshots are timed"),
        ("--dim", int, 1, 64, "floats a row"),
        ("--snapshot-rounds", int, 1, 3, "snapshots of changed rows, and ways back"),
        ("--train-rows", int, 10_000, 1_000_000, "rows of the tables that are trained"),
        ("--share", float, 0.01, 0.25, "share of their bytes that an engine may hold"),
        ("--samples", int, 1, 2048, "samples a batch"),
        ("--features", int, 1, 26, "ids a sample"),
        ("--every", int, 1, 50, "steps from one checkpoint to the next"),
        ("--turns", int, 1, 14, "turns of two checkpoints with and without them"),
        ("--kills", int, 0, 50, "runs that are killed"),
        ("--kill-samples", int, 1000, 12_000, "samples of each of them"),
        ("--export-rows", int, 0, 2_000_000, "rows that are exported; 0 leaves it out"),
    ):
        what = f"{text} (default {default:,})"
        parser.add_argument(name, metavar="N", type=at_least(least, kind), default=default, help=what)
    parser.add_argument(
        "--directory", metavar="DIR", help="where the stores are written; what is made there is removed"
    )


def measure(options: argparse.Namespace) -> Report:
    """All figures of the question."""
    seconds: dict[str, Figure] = {}
    report = Report(f"checkpoint: {options.rows:,} rows x {options.dim}", ("what", ""))
    with scratch(options.directory) as directory:
        with phase("snapshots", seconds):
            snapshots(_made(directory / "warm-up"), _WARM_ROWS, options.dim, _SHARE, 1)  # kernels are compiled here
            place = _made(directory / "snapshots")
            report.figures |= snapshots(place, options.rows, options.dim, _SHARE, options.snapshot_rounds)
        with phase("training", seconds):
            report.figures |= _training(_made(directory / "training"), options)
        with phase("kills", seconds):
            found = killed_runs(_made(directory / "kills"), options.kills, options.kill_samples, _KILL_EVERY)
            report.figures |= {"kills": found.kills, "resumed": found.resumed, "resumed_identical": found.identical}
            report.failed |= found.identical < options.kills
        if options.export_rows:
            with phase("export", seconds):
                report.figures |= export_vs_copy(options.export_rows, options.dim, _made(directory / "export"))
    report.figures["phase_seconds"] = seconds
    for name, key, unit in _LINES:
        report.lines.append((name, report.shown(key, unit)))
    report.note_seconds()
    return report


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def _training(directory: Path, options: argparse.Namespace) -> dict[str, Figure]:
    size = Size(options.train_rows, options.dim, options.share, options.samples, options.features, options.every)
    law, steps = Zipf(size.rows, EXPONENT), 2 * size.every
    sides = [Trainer(_made(directory / name), size, law, saves=saves) for name, saves in (("off", False), ("on", True))]
    turns: list[list[float]] = [[], []]
    for side in sides:
        side.run(_WARM_TURNS * steps)  # then compaction is at work
        side.step_s.clear()
    for number in range(options.turns):
        for at in (0, 1) if number % 2 == 0 else (1, 0):
            turns[at].append(sides[at].run(steps))
    off, on = (np.quantile(side.step_s, 0.99) for side in sides)
    within = [side.peak_bytes <= size.budget_bytes for side in sides]
    figures: dict[str, Figure] = {
        "step_ms": round(statistics.median(turns[0]) * 1000, 2),
        "step_with_ms": round(statistics.median(turns[1]) * 1000, 2),
        "train_with_vs_without": round(statistics.median(b / a for a, b in zip(*turns, strict=True)), 3),
        "p99_step_ms": round(float(off) * 1000, 2),
        "p99_step_with_ms": round(float(on) * 1000, 2),
        "p99_step_ratio": round(float(on / off), 3),
        "checkpoints": sides[1].checkpoints,
        "within_budget": all(within),
        "rows_written_second_save": second_save(sides[1]),
    }
    for side in sides:
        side.close()
    return figures
