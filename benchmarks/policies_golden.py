"""The golden miss ratios beside the repository, and ours."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiered_emb.sim import POLICY_NAMES, Requests, miss_ratio_curve

SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "traces"
EXACT = {
    "FIFO": "fifo",
    "LRU": "lru",
    "LFU": "lfu",
    "Clock": "clock",
    "Sieve": "sieve",
    "S3FIFO": "s3fifo",
    "ARC": "arc",
    "Belady": "belady",
}
NEAR = {"TwoQ": "2q", "WTinyLFU": "wtinylfu", "LIRS": "lirs"}
_LEAST_WTINYLFU = 100  # objects: below, libcachesim's window holds none, and everything misses


@dataclass(frozen=True)
class Golden:
    """What came of the comparison.

    Attributes:
        rows: compared.
        unequal: those of exact policies that differ, named.
        near: the greatest difference of the others, and of which row.
    """

    rows: int
    unequal: tuple[str, ...]
    near: float
    nearest: str


def compare(traces: Sequence[str] | None = None) -> Golden:
    """Replay every golden row, or those of some traces; rows of policies that there are not are left out."""
    rows, unequal, near = 0, [], (0.0, "none")
    for trace, size, policy, golden, exact in _rows(traces):
        (curve,) = miss_ratio_curve(_requests(trace), [policy], [size])
        rows += 1
        name, ours = f"{trace} {size} {policy}", curve.miss_ratios[0]
        if not exact:
            near = max(near, (abs(ours - float(golden)), name))
        elif f"{ours:.6f}" != golden:
            unequal.append(f"{name}: {ours:.6f}, not {golden}")
    return Golden(rows, tuple(unequal), *near)


def load_trace(name: str) -> NDArray[np.int64]:
    """A trace's ids, renumbered by first appearance as the golden runs had them."""
    spec = importlib.util.spec_from_file_location("shared_traces", SHARED / "load.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return np.asarray(module.dense(name), np.int64)


@cache
def _requests(name: str) -> Requests:
    return Requests.of(0, load_trace(name))


def _rows(traces: Sequence[str] | None) -> Iterator[tuple[str, int, str, str, bool]]:
    with open(SHARED / "golden.csv", newline="") as file:
        for row in csv.DictReader(file):
            policy = EXACT.get(row["policy"]) or NEAR.get(row["policy"])
            size = int(row["cache_objects"])
            unknown = policy not in POLICY_NAMES or (traces is not None and row["trace"] not in traces)
            if policy is None or unknown or (policy == "wtinylfu" and size < _LEAST_WTINYLFU):
                continue
            yield row["trace"], size, policy, row["miss_ratio"], row["policy"] in EXACT
