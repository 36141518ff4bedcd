"""Curves from a sample of the rows, for traces too long to replay at every size.

Spatial sampling takes a row or leaves it, with all its requests, by a hash of its name (SHARDS: Waldspurger, Park,
Garthwaite and Ahmad, "Efficient MRC construction with SHARDS", FAST '15). Of a share R of the rows, about R times as
many different ones come between two requests for one row, so that a sampled row hits in R * size where it hits in
`size` in the whole trace. R is the share that the sample really has. The paper takes the rate that was asked for, since
it does not know how many rows there are: a sample of 1% of 100,000 rows then has 3% too many or too few of them, and
that goes into every ratio.

- **LRU** needs one pass for all sizes: the reuse distances of the sample (`tiered_emb.sim.reuse`), divided by R.
- **Other policies** replay the sample in R * size rows (Waldspurger, Saemundsson, Ahmad and Park, "Cache modeling and
  optimization using miniature simulations", ATC '17).

What a sample gets wrong is mostly how much its rows weigh. A few hot rows make many of the requests; at 1% one of them
is in the sample once in a hundred times, with a hundred times its weight, or more likely is not. Two corrections:

- **"adj"** is SHARDS-adj of the paper, but for R: the sample has n requests where N R are expected, and the difference
  is taken for hits at the smallest size, because hot rows hit nearly everywhere. It needs no count but those of
  requests and rows.
- **"classes"**, which we use where the whole trace is at hand: rows are classed by how often they are requested, in
  powers of two, and the repeated requests of a class's sampled rows stand for those of all its rows
  (post-stratification: Holt and Smith, 1979). Of a class without a sampled row, a hot one, all repeats count as hits.
  First requests are misses and are not estimated. It needs a count for each row, which SHARDS was made to do without.

Of 1% of the rows the mean error over 100 sizes was at most 0.016 with "adj" and 0.010 with "classes", in the worst of
ten seeds, on two real traces and ten made-up ones of 10^6 to 4 * 10^6 requests (Zipf 0.8 and 1.05, uniform with and
without scans); with the rate in place of R, "adj" came to 0.072. `python -m benchmarks policies` measures some of them.

Sampled ratios of sizes below 1 / R rows say little: less than one sampled row is there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered_emb.errors import ConfigError
from tiered_emb.sim.curves import Curve, check_policies, check_sizes, replay_single
from tiered_emb.sim.requests import Requests
from tiered_emb.sim.reuse import lru_hits, reuse_distances
from tiered_emb.trace import sampled

Correction = Literal["adj", "classes"]


class _Sample(NamedTuple):
    """Requests of a sample, n of them, and how to conclude from them to all.

    Attributes:
        requests: of the sampled rows.
        weights: float64 (n,), how many requests of the trace a hit of each stands for.
        scale: rows of the sample for each of the trace.
        sure_hits: requests of the trace that hit at every size and that no weight covers; may be negative.
    """

    requests: Requests
    weights: NDArray[np.float64]
    scale: float
    sure_hits: float


def exact_lru_curve(requests: Requests, sizes: Sequence[int]) -> Curve:
    """LRU's curve over `sizes` (rows), single requests, from one pass over the trace. Raises ConfigError for sizes."""
    check_sizes(sizes)
    start = time.perf_counter()
    hits = lru_hits(reuse_distances(requests.rows, requests.distinct), np.asarray(sizes, np.int64))
    misses = (len(requests) - hits).tolist()
    return Curve("lru", tuple(sizes), tuple(misses), len(requests), time.perf_counter() - start)


def sampled_curve(
    requests: Requests,
    policy: str,
    sizes: Sequence[int],
    rate: float,
    seed: int = 0,
    correction: Correction = "classes",
) -> Curve:
    """A policy's curve over `sizes` (rows), estimated from a share `rate` of the rows; single requests.

    Raises ConfigError for an unknown policy, a size or rate that makes no sense, and a sample without requests.
    """
    check_policies([policy])
    check_sizes(sizes)
    start = time.perf_counter()
    sample = _sample(requests, rate, seed, correction)
    hits = _weighted_hits(sample, policy, np.asarray(sizes, np.float64) * sample.scale) + sample.sure_hits
    misses = np.rint(np.clip(len(requests) - hits, 0, len(requests))).astype(np.int64).tolist()
    return Curve(policy, tuple(sizes), tuple(misses), len(requests), time.perf_counter() - start)


def _weighted_hits(sample: _Sample, policy: str, small: NDArray[np.float64]) -> NDArray[np.float64]:
    """Hits of the sample at each size `small` (rows of the sample, and parts of one)."""
    if policy == "lru":
        distances = reuse_distances(sample.requests.rows, sample.requests.distinct)
        return lru_hits(distances, small.astype(np.int64), sample.weights)
    whole = np.maximum(1, np.rint(small)).astype(np.int64).tolist()
    return np.array([sample.weights[~replay_single(sample.requests, policy, size)].sum() for size in whole])


def _sample(requests: Requests, rate: float, seed: int, correction: Correction) -> _Sample:
    """The requests for about a share `rate` of the rows, as a recorder with this rate and seed would keep them.

    Raises ConfigError for a rate that is not above 0 and at most 1, and where no row is in the sample.
    """
    chosen = np.flatnonzero(sampled(requests.tables, requests.ids, rate, seed))
    if len(chosen) == 0:
        raise ConfigError(f"no row of {requests.distinct} is in a sample of {rate}; take a larger rate")
    taken = Requests.of(requests.tables[chosen], requests.ids[chosen])
    share = taken.distinct / requests.distinct
    if correction == "adj":
        return _Sample(taken, np.full(len(taken), 1 / share), share, len(requests) - len(taken) / share)
    counts = np.bincount(requests.rows, minlength=requests.distinct)
    classes = np.frexp(counts)[1].astype(np.int64)
    chosen_rows = np.zeros(requests.distinct, np.bool_)
    chosen_rows[requests.rows[chosen]] = True
    repeats = np.bincount(classes, counts - 1)
    there = np.bincount(classes[chosen_rows], counts[chosen_rows] - 1, len(repeats))
    weights = np.divide(repeats, there, out=np.zeros(len(repeats)), where=there > 0)
    sure_hits = float(repeats[there == 0].sum())
    return _Sample(taken, weights[classes[requests.rows[chosen]]], share, sure_hits)
