"""Do the tiers, the store and the pipeline change a bit? Random runs beside whole tables in memory.

Each run draws its configuration, its batches and what the body of the loop does with them from (seed, number)
(`benchmarks.identity_draw` says what there is to draw), and plays them on the engine and on
`tiered_emb.testing.DenseOracle`. Compared as bits: every output, every gradient of per-sample weights, every row that
is read on the way, and at the end every row ever changed with its optimizer state.

`differences` counts runs that differ, or end with an error; each is printed with its configuration, and the command
ends with 1. `--only N` plays one run again. The order in which threads get on is not drawn and does not repeat: a run
that differs once may do so one time in many.

Beside that, figures count what the runs went through, so that it can be seen that they went through it; `enlarged` are
runs that were begun again with larger budgets because a batch did not fit.
"""

from __future__ import annotations

import argparse
import pprint
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from benchmarks.disk import scratch
from benchmarks.identity_draw import Run, draw
from benchmarks.identity_play import Difference, Player
from benchmarks.options import at_least
from benchmarks.report import Figure, Report
from tiered_emb.errors import TierCapacityError

QUESTION = "identity: random configurations beside whole tables in memory, bit for bit"
COUNTS = {
    "steps": "batches that a loop was given",
    "forwards": "forwards",
    "outputs": "numbers compared in outputs",
    "rows": "rows compared at the end",
    "evictions": "rows evicted from a tier",
    "write_backs": "changed rows that left for the store",
    "rows_read": "rows read from the store",
    "rows_moved": "rows moved by the store's compaction",
    "prepared": "forwards that found their batch prepared",
    "unprepared": "forwards that prepared their own",
    "refused": "batches without room beside others",
    "prepare_failed": "batches whose preparation met an error",
    "stalls": "forwards that waited for what was prepared",
    "skip": "batches skipped",
    "renamed": "batches with other ids or weights than announced",
    "late": "batches used again after the next came",
    "early": "batches used before they came",
    "twice": "batches used twice in one backward pass",
    "again": "batches used twice in a row",
    "dropped": "forwards without a backward pass",
    "failed_backwards": "backward passes that failed",
    "raised": "loops ended by an error of their body",
    "reopened": "closed and opened again",
    "eval": "forwards that leave no trace",
    "set_rows": "rows assigned in mid-loop",
    "flush": "flushes in mid-loop",
    "lr": "learning rate changed",
    "enlarged": "runs begun again with larger budgets",
}
_EVERY = 20  # runs between two lines of progress
_LARGER, _TRIES = 1.5, 8
_SHOWN = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this question."""
    parser.add_argument("--runs", metavar="N", type=at_least(1), default=200, help="runs (default 200)")
    parser.add_argument("--seed", metavar="N", type=at_least(0), default=0, help="of all runs (default 0)")
    parser.add_argument("--only", metavar="N", type=at_least(0), help="the run of this number, from 0 on, alone")
    parser.add_argument("--directory", metavar="DIR", help="where stores are written; what is made there is removed")


def measure(options: argparse.Namespace) -> Report:
    """Play the runs."""
    numbers = range(options.runs) if options.only is None else [options.only]
    counts: Counter[str] = Counter()
    differences: list[str] = []
    begin = time.perf_counter()
    with scratch(options.directory) as directory:
        for done, number in enumerate(numbers):
            if done % _EVERY == 0:
                print(f"run {done} of {len(numbers)}, {len(differences)} differences ...", file=sys.stderr, flush=True)
            run = draw(options.seed, number)
            place = directory / str(number)
            place.mkdir()
            if found := _play(run, place, counts):
                differences.append(f"run {number} of seed {options.seed}: {found}")
                print(f"{differences[-1]}\n{pprint.pformat(run, width=120)}", file=sys.stderr, flush=True)
    return _report(len(numbers), options.seed, differences, counts, time.perf_counter() - begin)


def _play(run: Run, directory: Path, counts: Counter[str]) -> str | None:
    """Play one run and add up what happened; what differs, if anything does."""
    for attempt in range(_TRIES):
        place = directory / str(attempt)
        place.mkdir()
        player = Player(run, place, _LARGER**attempt)
        try:
            player.play()
        except TierCapacityError:
            counts["enlarged"] += attempt == 0
            continue
        except Difference as difference:
            return str(difference)
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
        finally:
            counts.update(player.counts)
        return None
    return f"no budget up to {_LARGER ** (_TRIES - 1):.0f} times what should do is enough"


def _report(runs: int, seed: int, differences: list[str], counts: Counter[str], seconds: float) -> Report:
    report = Report(f"identity: {runs} random runs, seed {seed}", ("what", "count"))
    figures: dict[str, Figure] = {"runs": runs, "differences": len(differences)}
    report.figures = figures | {name: counts[name] for name in COUNTS} | {"seed": seed, "seconds": round(seconds, 1)}
    report.lines = [("runs", f"{runs:,}"), ("runs that differ", f"{len(differences):,}")]
    report.lines += [(text, f"{counts[name]:,}") for name, text in COUNTS.items()]
    report.failed = bool(differences)
    report.notes += [f"Differs: {one}" for one in differences[:_SHOWN]]
    return report
