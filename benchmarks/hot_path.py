"""What does a training step on resident rows cost beside the best in-memory engines?

One table of 4 M rows x 64 floats, 4,096 samples x 26 ids a step, Zipf 1.2 (about 19% of a step's ids are unique), one
id a bag, through the public module with autograd; row-wise Adagrad. Beside it torch.nn.EmbeddingBag(sparse=True) with
SGD and with SparseAdam, and FBGEMM's CPU engine where it is installed. Then: what a table of 2^40 rows costs, to
construct and to step on, against one of 10^6 rows with the same number of rows resident; and what 26 tables of a
collection cost against one table with as many ids.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks import sides
from benchmarks.memory import construct_in_new_process
from benchmarks.options import at_least
from benchmarks.report import Report
from benchmarks.timing import Step, interleave, ratio, spread
from benchmarks.workloads import HUGE_ROWS, Workload, click_batches, column_batches, spread_over_huge

QUESTION = "a training step on resident rows: ours beside torch and FBGEMM, and on a table of 2^40 rows"
DIM = 64
SMALL_ROWS = 1_000_000
TABLES = 26
OURS, SGD, ADAM, FBGEMM = "ours", "torch_sgd", "torch_sparse_adam", "fbgemm"
TITLES = {
    OURS: "ours, row-wise Adagrad",
    SGD: "torch EmbeddingBag + SGD",
    ADAM: "torch EmbeddingBag + SparseAdam",
    FBGEMM: "FBGEMM CPU, exact row-wise Adagrad",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this question."""
    parser.add_argument("--rounds", type=at_least(2), default=30, help="turns of every side (default 30)")
    parser.add_argument("--rows", type=at_least(1), default=4_000_000, help="rows of the table (default 4,000,000)")


def measure(options: argparse.Namespace) -> Report:
    """All figures of the question."""
    workload = click_batches(options.rows, DIM)
    report = Report(
        f"hot path: {options.rows:,} x {DIM}, {workload.ids_a_step:,} ids a step, {workload.unique_share:.0%} unique",
        ("engine", "ns/id", "quartiles", "ours / theirs"),
    )
    _engines(report, workload, options.rounds)
    _huge(report, options.rounds)
    _collection(report, options)
    return report


def _engines(report: Report, workload: Workload, rounds: int) -> None:
    """Ours and each baseline on the same batches."""
    steps: dict[str, Step] = {
        OURS: sides.tiered(workload),
        SGD: sides.torch_sgd(workload),
        ADAM: sides.torch_sparse_adam(workload),
    }
    try:
        steps[FBGEMM] = sides.fbgemm_rowwise_adagrad(workload)
    except (ImportError, OSError) as error:
        report.figures["fbgemm_missing"] = str(error)
        report.notes.append(f"FBGEMM was not measured: {error} (`make bench` installs it)")
    seconds = interleave(steps, rounds)
    for name, title in TITLES.items():
        measured = name in seconds
        against = ratio(seconds, OURS, name) if measured else None
        nanoseconds = [one / workload.ids_a_step * 1e9 for one in seconds.get(name, [])]
        report.figures[f"{name}_ns"] = round(statistics.median(nanoseconds), 1) if measured else None
        if name != OURS:
            key = "vs_fbgemm_rowwise_adagrad" if name == FBGEMM else f"vs_{name}"
            report.figures[key] = round(against, 3) if against is not None else None
        report.lines.append(_line(title, nanoseconds, None if name == OURS else against))
    report.figures["unique_share"] = round(workload.unique_share, 3)


def _huge(report: Report, rounds: int) -> None:
    """A table of 2^40 rows: to construct, and to step on beside a table of 10^6 rows."""
    built = construct_in_new_process(HUGE_ROWS, DIM)
    report.figures["huge_construct_s"] = round(built["seconds"], 4)
    report.figures["huge_construct_mb"] = round(built["mb"], 1)
    workload = click_batches(SMALL_ROWS, DIM)
    seconds = interleave(
        {"huge": sides.tiered(workload, HUGE_ROWS, spread_over_huge), "small": sides.tiered(workload)}, rounds
    )
    report.figures["huge_vs_small"] = round(ratio(seconds, "huge", "small"), 3)
    for name, title in (("small", "ours, table of 10^6 rows"), ("huge", "ours, table of 2^40 rows, 10^6 resident")):
        nanoseconds = [one / workload.ids_a_step * 1e9 for one in seconds[name]]
        report.figures[f"{name}_ns"] = round(statistics.median(nanoseconds), 1)
        report.lines.append(_line(title, nanoseconds, None))
    report.notes.append(
        f"2^40 rows x {DIM} constructed in {built['seconds']:.3f} s and {built['mb']:.1f} MB; "
        f"a step costs {report.figures['huge_vs_small']} of the step on 10^6 rows"
    )


def _collection(report: Report, options: argparse.Namespace) -> None:
    """The tables of a collection, in one call, beside one table with as many ids."""
    workload = column_batches(options.rows, DIM, TABLES)
    steps = {"collection": sides.tiered_collection(workload, TABLES), "single": sides.tiered(workload)}
    seconds = interleave(steps, options.rounds)
    report.figures["collection_vs_single"] = round(ratio(seconds, "collection", "single"), 3)
    for name, title in (
        ("collection", f"ours, {TABLES} tables in a collection"),
        ("single", "ours, the same as one table"),
    ):
        nanoseconds = [one / workload.ids_a_step * 1e9 for one in seconds[name]]
        report.figures[f"{name}_ns"] = round(statistics.median(nanoseconds), 1)
        report.lines.append(_line(title, nanoseconds, None))
    report.notes.append(f"{TABLES} tables in one call cost {report.figures['collection_vs_single']} of one table")


def _line(title: str, nanoseconds: list[float], against: float | None) -> tuple[str, ...]:
    if not nanoseconds:
        return title, "-", "-", "-"
    first, middle, third = spread(nanoseconds)
    return title, f"{middle:.0f}", f"{first:.0f} - {third:.0f}", "" if against is None else f"{against:.2f}"
