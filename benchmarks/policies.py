"""Do the policies miss what they should, and what do they cost?

- **Golden.** Every row of `../shared/traces/golden.csv`: miss ratios of libcachesim, object by object. `golden_unequal`
  counts those of FIFO, LRU, LFU, CLOCK, SIEVE, S3-FIFO, ARC and Belady that differ at six digits, `golden_near` is the
  greatest difference of 2Q, W-TinyLFU and LIRS, whose papers leave choices open. W-TinyLFU below 100 objects is left
  out: libcachesim's window of 1% rounds to none there.
- **Replay.** Single requests of a real trace in one thread, `Directory.replay` beside cachetools in Python and beside
  libcachesim's `process_trace` in C++, which reads the trace as records in a memory map. Sides take turns; caches,
  readers and lists are made before the clock runs, and the clock is the thread's. `libcachesim` has a hash table that
  suits the cache, `libcachesim_default` the one of 2^24 buckets that it has unless told otherwise, most of which is
  waiting for memory. Ratios are medians over neighbouring turns, times as fast as theirs; `slowest_vs_libcachesim` is
  the least of all policies but LRU and LFU.
- **Planning.** A Directory with 10 M rows under LRU, batches of 100,000 different ids whose popularity is Zipf 1.05:
  find, touch, pin, admit, pin, unpin. Ids are spread over all 64 bits. About 13% of a batch are missing, and each
  evicts a row.
- **SHARDS.** LRU's curve from 1% of the rows against the exact one at 100 sizes, linear, for ten seeds, of two real
  traces and three made-up ones of 2 M requests: the worst mean absolute error of any seed and trace; SHARDS-adj, and
  our correction by classes (`tiered_emb.sim.shards`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import numpy as np

from benchmarks import policies_sides as sides
from benchmarks.options import at_least
from benchmarks.policies_golden import EXACT, NEAR, SHARED, Golden, compare, load_trace
from benchmarks.policies_samples import compare_samples, made_up
from benchmarks.report import Figure, Report
from benchmarks.timing import ratio, spread, take_turns
from tiered_emb.cache import POLICIES, Directory
from tiered_emb.sim import Requests
from tiered_emb.sim.curves import BELADY

QUESTION = "the policies: golden miss ratios, replay beside cachetools and libcachesim, planning, SHARDS"
REPLAYED, SHARE = "scarab_recs", 10  # the trace that is timed, and the share of its rows that the cache holds
SAMPLED = ("scarab_recs", "oltp")
OURS, CACHETOOLS, LIBCACHESIM, DEFAULT = SIDES = ("ours", "cachetools", "libcachesim", "libcachesim_default")
COLUMNS = ("policy", "ours", "cachetools", "libcachesim", "default", "/ cachet.", "/ libc.", "/ default")
_COUNTERPARTS = {"lru", "lfu"}  # of cachetools


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this question."""
    for name, least, default, text in (
        ("--rounds", 2, 5, "turns of every side of the replays"),
        ("--requests", 1, 1 << 40, "requests of the replayed and sampled traces, at most"),
        ("--resident", 1, 10_000_000, "rows of the Directory that plans"),
        ("--batch", 1, 100_000, "different ids of a planned batch"),
        ("--batches", 2, 30, "planned batches"),
        ("--seeds", 1, 10, "samples"),
    ):
        what = text if default > 1 << 30 else f"{text} (default {default:,})"
        parser.add_argument(name, metavar="N", type=at_least(least), default=default, help=what)
    parser.add_argument("--golden", metavar="TRACE,...", help="compare these traces' golden rows only")


def measure(options: argparse.Namespace) -> Report:
    """All figures of the question."""
    report = Report("policies", COLUMNS)
    have_traces = (SHARED / "golden.csv").exists()
    if have_traces:
        _say("golden")
        _golden(report, compare(options.golden.split(",") if options.golden else None))
    else:
        reason = f"{SHARED} is not there"
        report.figures |= dict.fromkeys(("golden_rows", "golden_unequal", "golden_near")) | {"golden_missing": reason}
        report.notes.append(f"Golden miss ratios were not compared, and the trace is made up: {reason}")
    _say("replay")
    _replays(report, _requests(REPLAYED, options.requests, have_traces), options.rounds)
    _say("planning")
    _planning(report, options)
    _say("samples")
    real = {name: _requests(name, options.requests, have_traces) for name in (SAMPLED if have_traces else ())}
    compare_samples(report, real | made_up(options.requests), options.seeds)
    return report


def _say(phase: str) -> None:
    print(f"{phase} ...", file=sys.stderr, flush=True)


def _requests(name: str, most: int, have_traces: bool) -> Requests:
    """The first requests of a trace; made up ones of the same kind where there are no traces."""
    if have_traces:
        return Requests.of(0, load_trace(name)[:most])
    return Requests.of(0, sides.zipf_ids(np.random.default_rng(0), min(most, 1_000_000), 1 << 24))


def _golden(report: Report, golden: Golden) -> None:
    report.figures |= {
        "golden_rows": golden.rows,
        "golden_unequal": len(golden.unequal),
        "golden_near": round(golden.near, 6),
        "golden_unequal_rows": list(golden.unequal),
    }
    missing = sorted({*EXACT.values(), *NEAR.values()} - set(POLICIES) - {BELADY})
    if missing:
        report.figures["golden_without"] = list[Figure](missing)
        report.notes.append(f"There is no policy {', '.join(missing)}")
    report.notes.append(
        f"Golden: {golden.rows} rows, {len(golden.unequal)} unequal; 2Q, W-TinyLFU and LIRS within {golden.near:.6f} "
        f"({golden.nearest})"
    )


def _replays(report: Report, requests: Requests, rounds: int) -> None:
    size, against = max(1, requests.distinct // SHARE), dict[str, dict[str, float]]()
    missing = sides.libcachesim_missing()
    if missing is not None:
        report.figures["libcachesim_missing"] = missing
        report.notes.append(f"libcachesim was not measured: {missing} (`make bench` installs it)")
    with sides.record_file(requests) as records:
        for policy in (*POLICIES, BELADY):
            turns: dict[str, Callable[[], float]] = {OURS: sides.ours(requests, policy, size)}
            if policy in _COUNTERPARTS:
                turns[CACHETOOLS] = sides.cachetools_side(requests, policy, size)
            if missing is None and policy in sides.LIBCACHESIM:
                turns |= sides.libcachesim_sides(records, policy, size)
            against[policy] = _one_policy(report, policy, len(requests), take_turns(turns, rounds))
    for side in (LIBCACHESIM, DEFAULT):
        others = {one: times[side] for one, times in against.items() if side in times and one not in _COUNTERPARTS}
        slowest = min(others, key=lambda policy: others[policy], default=None)
        report.figures[f"slowest_vs_{side}"] = None if slowest is None else round(others[slowest], 2)
        if side == LIBCACHESIM:
            report.figures["slowest"] = slowest
        for policy in sorted(_COUNTERPARTS):
            report.figures.setdefault(f"{policy}_vs_{side}", None)
            report.figures.setdefault(f"{side}_{policy}_per_s", None)
    report.title = f"policies: millions of requests a second, {len(requests):,} requests, {size:,} rows"


def _one_policy(report: Report, policy: str, n: int, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Figures and a line of one policy; how many times as fast as each other side it is."""
    rates = {side: n / statistics.median(each) for side, each in seconds.items()}
    against = {side: ratio(seconds, side, OURS) for side in seconds if side != OURS}
    for side, rate in rates.items():
        report.figures[f"{policy}_per_s" if side == OURS else f"{side}_{policy}_per_s"] = round(rate)
    report.figures |= {f"{policy}_vs_{side}": round(times, 2) for side, times in against.items()}
    cells = [f"{rates[side] / 1e6:.2f}" if side in rates else "" for side in SIDES]
    cells += [f"{against[side]:.2f}" if side in against else "" for side in SIDES[1:]]
    report.lines.append((policy, *cells))
    return against


def _planning(report: Report, options: argparse.Namespace) -> None:
    plans = sides.plan_batches(options.resident, options.batch, options.batches)
    nanoseconds = [one / options.batch * 1e9 for one in plans.seconds]
    first, middle, third = spread(nanoseconds)
    slots = options.resident
    report.figures |= {
        "plan_ns_per_id": round(middle, 1),
        "plan_misses": round(plans.misses, 3),
        "bytes_per_slot": round(max(Directory.bytes_for(slots, policy) / slots for policy in ("lru", "lfu")), 2),
    }
    report.notes.append(
        f"Planning {options.batch:,} ids, {plans.misses:.1%} missing, {slots:,} resident: {middle:.0f} ns an id "
        f"({first:.0f} - {third:.0f}); index and policy {report.figures['bytes_per_slot']} bytes a slot"
    )
