"""What do the kernels do on a GPU: the bits of their references, how near a copy's bandwidth, and what do tiers cost?

- **Bits.** Every kernel is run beside its reference on the device, or the host's codec, and has to give the same bits.
- **Kernels.** Nanoseconds an id (of a row, where a kernel is given unique rows) by the device's clock, and the bytes
  that have to move as a share of what a copy on the same device moves in the time. Ids are drawn evenly, so that caches
  do not help; `click_ns` is of ids by Zipf's law with exponent 1.2, where a row that is asked for very often is one
  long sum.
- **Steps.** Forward, backward and update of one table with row-wise Adagrad: all rows in HBM, and spread over HBM, DDR
  and SSD, with and without prefetching. `prefetch_hides` is the share of what the tiers add that prefetching takes
  away.

Without a GPU there is nothing to measure: `gpu` is null then, and so are all other figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.gpu_kernels import (
    Batch,
    Case,
    batch_of,
    codec_cases,
    copied_bytes_a_second,
    row_cases,
    rule_cases,
    same_bits,
    seconds_of,
)
from benchmarks.gpu_steps import Steps, measure_steps
from benchmarks.options import at_least
from benchmarks.pipeline_sides import phase
from benchmarks.report import Figure, Report
from benchmarks.workloads import click_batches
from tiered_emb.kernels import has_triton

QUESTION = "the kernels on a GPU: their bits, their bandwidth, and what tiers cost with and without prefetching"
BAG = 16  # ids of a bag of the kernels' batches
KEYS = ("different", "copy_gb_s", "kernels", "step_ms", "tiers_vs_hbm", "prefetched_vs_hbm", "prefetch_hides")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this question."""
    for name, kind, least, default, text in (
        ("--rows", int, 1000, 2_000_000, "rows of the table"),
        ("--dim", int, 1, 64, "floats a row"),
        ("--ids", int, 16, 4_000_000, "ids of the kernels' batches"),
        ("--samples", int, 1, 4096, "samples of a step"),
        ("--features", int, 1, 26, "ids a sample"),
        ("--hbm-share", float, 0.001, 0.2, "share of the rows' bytes in HBM, where there are all tiers"),
        ("--ddr-share", float, 0.001, 0.2, "and in DDR"),
        ("--lookahead", int, 1, 2, "batches prepared ahead"),
        ("--warm-up", int, 1, 20, "batches before the first clock"),
        ("--steps", int, 1, 20, "steps of a turn"),
        ("--rounds", int, 2, 5, "turns of every side, and rounds of every kernel"),
    ):
        what = f"{text} (default {default:,})"
        parser.add_argument(name, metavar="N", type=at_least(least, kind), default=default, help=what)
    parser.add_argument("--directory", metavar="DIR", help="a directory on a disk; what is made there is removed")


def measure(options: argparse.Namespace) -> Report:
    """All figures of the question; none without a GPU."""
    report = Report("gpu", ("kernel", "ns an id", "of a copy's bandwidth", "clicks, ns an id"))
    report.figures |= {"gpu": None, **dict.fromkeys(KEYS)}
    if not torch.cuda.is_available():
        report.notes.append("There is no GPU here: nothing was measured.")
    elif not has_triton():
        report.notes.append("Triton is missing (the extra `gpu` installs it): nothing was measured.")
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        report.figures["gpu"] = torch.cuda.get_device_name(device)
        measure_on(device, options, report)
    return report


def measure_on(device: torch.device, options: argparse.Namespace, report: Report) -> None:
    """The figures of a device, which may be the host where a test asks for it."""
    seconds: dict[str, Figure] = {}
    with phase("kernels", seconds):
        _kernels(device, options, report)
    with phase("steps", seconds):
        told = ("rows", "dim", "samples", "features", "hbm_share", "ddr_share", "lookahead", "warm_up", "steps")
        setting = Steps(**{name: getattr(options, name) for name in (*told, "rounds", "directory")})
        report.figures |= measure_steps(setting, device)
    report.figures["phase_seconds"] = seconds
    _show(report)


def _kernels(device: torch.device, options: argparse.Namespace, report: Report) -> None:
    """Bits and times of all kernels."""
    rows, dim = options.rows, options.dim
    drawn = np.random.default_rng(0).integers(0, rows, options.ids)
    batch = batch_of(drawn, rows, dim, BAG, device)
    copied = copied_bytes_a_second(batch.weight, options.rounds)
    different: list[Figure] = []
    kernels: dict[str, Figure] = {}
    for case in _cases(batch):
        if not same_bits(case):
            different.append(case.name)
        took = seconds_of(case.ours, device, options.rounds)
        share = round(case.bytes / took / copied, 4)
        kernels[case.name] = {"ns": round(took / case.ids * 1e9, 4), "copy_share": share, "click_ns": None}
    clicks = click_batches(rows, 1, batches=1, samples=options.samples, features=options.features).batch(0).numpy()
    for case in _cases(batch_of(clicks, rows, dim, 1, device)):
        figures = kernels[case.name]
        assert isinstance(figures, dict)
        figures["click_ns"] = round(seconds_of(case.ours, device, options.rounds) / case.ids * 1e9, 4)
    report.figures |= {"different": different, "copy_gb_s": round(copied / 1e9, 1), "kernels": kernels}
    report.failed = bool(different)


def _cases(batch: Batch) -> Iterator[Case]:
    """Every kernel on a batch."""
    from tiered_emb.kernels import gpu, gpu_codecs
    from tiered_emb.optim._gpu import LAUNCHES

    yield from row_cases(gpu, batch)
    yield from rule_cases(LAUNCHES, batch)
    yield from codec_cases(gpu_codecs, batch)


def _show(report: Report) -> None:
    """The table's lines and the notes, from the figures."""
    figures, kernels, steps = report.figures, report.figures["kernels"], report.figures["step_ms"]
    assert isinstance(kernels, dict) and isinstance(steps, dict)
    for name, one in kernels.items():
        assert isinstance(one, dict)
        report.lines.append((name, str(one["ns"]), str(one["copy_share"]), str(one["click_ns"])))
    different = figures["different"]
    found = f"NOT as their references define them: {different}" if different else "as their references, to the bit"
    report.notes.append(f"{figures['gpu']}: a copy moves {figures['copy_gb_s']} GB/s. Kernels are {found}.")
    report.notes.append("Steps: " + ", ".join(f"{name} {one} ms" for name, one in steps.items()))
    report.notes.append(f"Of what the tiers add to a step, prefetching hides {figures['prefetch_hides']}.")
    report.note_seconds()
