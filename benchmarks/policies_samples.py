"""How far curves from a sample of the rows are from the exact ones, for real traces and for made-up ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Report
from tiered_emb.sim import Requests, exact_lru_curve, sampled_curve
from tiered_emb.sim.shards import Correction

RATE, SIZES = 0.01, 100
_MADE_UP_REQUESTS = 2_000_000
_ROWS, _UNIFORM_ROWS = 1_000_000, 200_000
_ERRORS: dict[Correction, str] = {"adj": "shards_error", "classes": "shards_classes_error"}


def made_up(most: int) -> dict[str, Requests]:
    """Traces of 2 M requests, or `most`: rows that are very popular, a little, and not at all, with scans."""
    n = min(most, _MADE_UP_REQUESTS)
    ids = {"zipf_1.05": _zipf(n, 1.05), "zipf_0.8": _zipf(n, 0.8), "uniform_with_scans": _uniform_with_scans(n)}
    return {name: Requests.of(0, each) for name, each in ids.items()}


def _zipf(n: int, skew: float) -> NDArray[np.int64]:
    """Ids (n,) below _ROWS, of id k with a probability proportional to (k + 1)^-skew."""
    chances = np.cumsum(np.arange(1, _ROWS + 1) ** -skew)
    return np.searchsorted(chances, np.random.default_rng(0).random(n) * chances[-1])


def _uniform_with_scans(n: int) -> NDArray[np.int64]:
    """Ids (n,): every other one is of a loop over twice as many other rows."""
    ids = np.random.default_rng(0).integers(0, _UNIFORM_ROWS, n)
    ids[::2] = _UNIFORM_ROWS + np.arange(len(ids[::2])) % (2 * _UNIFORM_ROWS)
    return ids


def compare_samples(report: Report, traces: Mapping[str, Requests], seeds: int) -> None:
    """The worst mean error of any seed and trace, of each correction."""
    for correction, key in _ERRORS.items():
        errors = {name: worst_error(requests, correction, seeds) for name, requests in traces.items()}
        worst = max(errors, key=lambda name: errors[name])
        report.figures |= {key: round(errors[worst], 5), f"{key}_trace": worst}
    report.notes.append(
        f"SHARDS at {RATE:.0%}, worst mean error of {seeds} seeds and {len(traces)} traces: SHARDS-adj "
        f"{report.figures['shards_error']}, by classes {report.figures['shards_classes_error']}"
    )


def worst_error(requests: Requests, correction: Correction, seeds: int) -> float:
    """Of seeds 0 to `seeds` - 1 the greatest mean absolute error of LRU's curve, over 100 sizes on a linear scale."""
    sizes = [max(1, requests.distinct * k // SIZES) for k in range(1, SIZES + 1)]
    exact = exact_lru_curve(requests, sizes).miss_ratios
    curves = (sampled_curve(requests, "lru", sizes, RATE, seed, correction) for seed in range(seeds))
    return float(max(np.mean(np.abs(np.subtract(curve.miss_ratios, exact))) for curve in curves))
