"""What do rows at rest in fewer bits save, and what do they cost?

- **Quality.** The main job's model on its synthetic stream (`benchmarks.precision_training`): AUC on the held-out tenth
  with fp32 rows, and with a cache of fp32 rows, 5% of those that exist, over rows that rest in int8, bf16 and fp16 with
  stochastic rounding. Sides of one seed have the same clicks, rows and MLPs, so a drop is the mean over seeds of paired
  differences, fp32's AUC less the side's; `_sd` is their standard deviation. `auc_mixed` is int8's, after Yang et al.:
  "Mixed-precision embedding using a cache" (arXiv 2010.11305).
- **Memory.** `memory_ratio`: what the engine charges for a tier of all fp32 rows and its bookkeeping, divided by what
  the cache, its bookkeeping and buffers, and the int8 rows at rest with their index take together; the mean over
  seeds, `least_memory_ratio` the least. Of a row at rest 8 bytes of scale and bias, 4 of optimizer state and about 24
  of id and index shrink for no codec, and the cache takes 5% of the fp32 table, so the ratio grows with the dimension:
  it is not the stream's usual 32 but one at which there is enough to save. Such rows want a smaller learning rate than
  the stream's usual 0.05: with that, 131,072 samples and 288 floats an fp32 table comes to an AUC of 0.7460, with 0.02
  to 0.7490, with 0.01 to 0.7531, and what the slightest change of any number moves the AUC by shrinks likewise.
- **Bytes.** `bf16_bytes_ratio`: bytes of rows that go to and from a store in memory, bf16 divided by fp32, without
  optimizer state; `bf16_segment_bytes_ratio`: those of the segments that a store on disk writes
  (`benchmarks.precision_bytes`).
- **Speed.** `pack_gb_per_s`, `unpack_gb_per_s`: of float32 numbers, in one thread (`benchmarks.precision_speed`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.disk import scratch
from benchmarks.options import at_least
from benchmarks.precision_bytes import disk_bytes, moved_bytes
from benchmarks.precision_speed import DIRECTIONS, UNPACK, speeds
from benchmarks.precision_training import Outcome, Side, in_new_process
from benchmarks.report import Figure, Report
from tiered_emb.reference.settings import SYNTHETIC_SAMPLES

QUESTION = "precision: AUC and memory of rows at rest in int8, bf16 and fp16 beside fp32; bytes moved, GB/s of codecs"
FP32, MIXED = "fp32", "int8"
PRECISIONS = (FP32, MIXED, "bf16", "fp16")
NAMES = {FP32: "fp32", MIXED: "mixed", "bf16": "bf16", "fp16": "fp16"}  # in figures
CACHE_SHARE = 0.05
BYTES_DIM, SPEED_DIM, SPEED_ROUNDS = 64, 128, 7

Runs = Mapping[str, Sequence[Outcome]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this question."""
    parser.add_argument("--lr", type=at_least(1e-6, float), default=0.01, help="of the row rule (default 0.01)")
    for name, least, default, text in (
        ("--seeds", 1, 5, "runs of each precision"),
        ("--samples", 1000, SYNTHETIC_SAMPLES, "of the stream, held-out tenth included"),
        ("--dim", 1, 288, "floats a row"),
        ("--rows", 1000, 100_000, "of the tables whose bytes are counted, and of the codecs' speed"),
        ("--jobs", 1, min(2, os.cpu_count() or 1), "runs side by side"),
    ):
        parser.add_argument(
            name, metavar="N", type=at_least(least), default=default, help=f"{text} (default {default:,})"
        )
    parser.add_argument("--directory", metavar="DIRECTORY", help="where files go (default: a temporary one on a disk)")


def measure(options: argparse.Namespace) -> Report:
    """All figures of the question."""
    report = Report("precision", ("rows at rest", "AUC", "drop", "bytes a row", "pack GB/s", "drawn", "unpack"))
    _say("codecs")
    rates = speeds(options.rows, SPEED_DIM, SPEED_ROUNDS)
    _say("bytes")
    _bytes(report, options)
    runs = _trained(options)
    report.figures |= {"seeds": options.seeds, "samples": options.samples, "dim": options.dim, "lr": options.lr}
    _quality(report, runs)
    _memory(report, runs)
    report.figures["pack_gb_per_s"] = {
        f"{name} {way}": found[way] for name, found in rates.items() for way in DIRECTIONS if way != UNPACK
    }
    report.figures["unpack_gb_per_s"] = {name: found[UNPACK] for name, found in rates.items()}
    report.lines.extend(_lines(runs, rates))
    return report


def _say(phase: str) -> None:
    print(f"{phase} ...", file=sys.stderr, flush=True)


def _bytes(report: Report, options: argparse.Namespace) -> None:
    moved = {name: moved_bytes(options.rows, BYTES_DIM, name) for name in (FP32, "bf16")}
    with scratch(options.directory) as place:
        disk = {name: disk_bytes(options.rows, BYTES_DIM, name, place / name) for name in (FP32, "bf16")}
    report.figures |= {
        "bf16_bytes_ratio": round(moved["bf16"] / moved[FP32], 4),
        "bf16_segment_bytes_ratio": round(disk["bf16"] / disk[FP32], 4),
        **{f"{name}_moved_bytes": each for name, each in moved.items()},
        **{f"{name}_segment_bytes": each for name, each in disk.items()},
    }


def _trained(options: argparse.Namespace) -> Runs:
    """Outcomes of each precision, seed by seed."""
    sides = [
        Side(name, seed, options.samples, options.dim, 1.0 if name == FP32 else CACHE_SHARE, options.lr)
        for seed in range(options.seeds)
        for name in PRECISIONS
    ]
    runs: dict[str, list[Outcome]] = {name: [] for name in PRECISIONS}
    with ThreadPoolExecutor(options.jobs) as pool:  # threads that wait, each for a process
        for side, outcome in zip(sides, pool.map(in_new_process, sides), strict=True):
            _say(f"seed {side.seed}, {side.precision}: AUC {outcome.auc:.5f}")
            runs[side.precision].append(outcome)
    return runs


def _drops(runs: Runs, name: str) -> list[float]:
    """By how much each seed's AUC is below fp32's."""
    return [ours.auc - theirs.auc for ours, theirs in zip(runs[FP32], runs[name], strict=True)]


def _quality(report: Report, runs: Runs) -> None:
    report.figures["planted_auc"] = round(statistics.mean(one.planted_auc for one in runs[FP32]), 6)
    for name, each in runs.items():
        report.figures[f"auc_{NAMES[name]}"] = round(statistics.mean(one.auc for one in each), 6)
        if name != FP32:
            prefix = "auc" if name == MIXED else f"auc_{name}"
            drops = _drops(runs, name)
            report.figures |= {
                f"{prefix}_drop": round(statistics.mean(drops), 6),
                f"{prefix}_drop_sd": round(statistics.stdev(drops), 6) if len(drops) > 1 else None,
                f"{prefix}_drops": list[Figure](round(drop, 6) for drop in drops),
            }


def _memory(report: Report, runs: Runs) -> None:
    ratios = [
        whole.tier_bytes / (mixed.tier_bytes + mixed.rest_bytes)
        for whole, mixed in zip(runs[FP32], runs[MIXED], strict=True)
    ]
    whole, mixed = runs[FP32][0], runs[MIXED][0]
    report.figures |= {
        "memory_ratio": round(statistics.mean(ratios), 3),
        "least_memory_ratio": round(min(ratios), 3),
        "rows": mixed.rows,
        "cache_share": round(mixed.cache_rows / mixed.rows, 4),
        "fp32_bytes": whole.tier_bytes,
        "cache_bytes": mixed.tier_bytes,
        "int8_rest_bytes": mixed.rest_bytes,
    }
    report.notes.append(
        f"Memory down {report.figures['memory_ratio']} times with int8 rows under a cache of "
        f"{report.figures['cache_share']:.1%} of them ({mixed.rows:,} rows, first seed)."
    )


def _lines(runs: Runs, rates: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, ...]]:
    for name, each in runs.items():
        auc, drop = statistics.mean(one.auc for one in each), statistics.mean(_drops(runs, name))
        held = (each[0].tier_bytes + each[0].rest_bytes) / each[0].rows
        speed = (f"{rates[name][way]:.2f}" for way in DIRECTIONS) if name in rates else ("", "", "")
        yield (name, f"{auc:.5f}", f"{drop:+.5f}" if name != FP32 else "", f"{held:.1f}", *speed)
