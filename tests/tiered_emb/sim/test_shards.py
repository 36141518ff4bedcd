from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiered_emb.errors import ConfigError
from tiered_emb.sim import Requests, exact_lru_curve, miss_ratio_curve, sampled_curve, shards
from tiered_emb.sim.reuse import lru_hits, reuse_distances
from tiered_emb.sim.shards import Correction


def slow_distances(ids: list[int]) -> list[int]:
    """How many different rows since the last request for the same one, itself counted; 0 = none before."""
    distances = []
    for i, id in enumerate(ids):
        before = max((j for j in range(i) if ids[j] == id), default=None)
        distances.append(0 if before is None else len(set(ids[before:i])))
    return distances


@given(st.lists(st.integers(0, 12), min_size=1, max_size=120))
def test_reuse_distances_are_those_counted_by_hand(ids: list[int]) -> None:
    requests = Requests.of(0, np.array(ids, np.int64))
    assert reuse_distances(requests.rows, requests.distinct).tolist() == slow_distances(ids)


def test_hits_from_distances() -> None:
    distances = np.array([0, 0, 1, 3, 0, 1, 3], np.int32)  # two hit from one row on, two more from three on
    sizes = np.array([0, 1, 2, 3, 100])
    assert lru_hits(distances, sizes).tolist() == [0, 2, 2, 4, 4]
    assert lru_hits(distances, sizes, np.arange(7.0)).tolist() == [0, 7, 7, 16, 16]


def test_the_exact_curve_is_that_of_the_directory() -> None:
    ids = (np.random.default_rng(2).zipf(1.2, 9000) % 800).astype(np.int64)
    requests, sizes = Requests.of(0, ids), [1, 2, 9, 100, 799, 5000]
    (replayed,) = miss_ratio_curve(requests, ["lru"], sizes)
    assert exact_lru_curve(requests, sizes).misses == replayed.misses


@pytest.mark.parametrize("correction", ["adj", "classes"])
@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "belady"])
def test_a_sample_of_everything_is_exact(policy: str, correction: Correction) -> None:
    ids = (np.random.default_rng(3).zipf(1.3, 5000) % 700).astype(np.int64)
    requests, sizes = Requests.of(0, ids), [3, 40, 400]
    (exact,) = miss_ratio_curve(requests, [policy], sizes)
    assert sampled_curve(requests, policy, sizes, 1.0, correction=correction).misses == exact.misses


def keep(monkeypatch: pytest.MonkeyPatch, *ids: int) -> None:
    """Let the sample be these ids."""
    monkeypatch.setattr(shards, "sampled", lambda tables, all_ids, rate, seed: np.isin(all_ids, ids))


def test_the_adjustment_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of four rows, so 6 of 12 requests are expected; the sample 1 2 1 2 2 1 2 2 has 8: two hits too many.

    Distances: 2 2 1 2 2 1, that is 4 and 2 of whole rows: 2 hits from two rows on, 6 from four on. Less the two, 0 of 6
    at two rows and 4 of 6 at four.
    """
    ids = np.array([1, 3, 2, 1, 2, 2, 4, 1, 2, 3, 2, 4], np.int64)
    requests = Requests.of(0, ids)
    keep(monkeypatch, 1, 2)
    curve = sampled_curve(requests, "lru", [1, 2, 3, 4, 50], 0.5, correction="adj")
    assert curve.miss_ratios == pytest.approx([1, 1, 1, 1 / 3, 1 / 3])  # one row: -2 of 6 hits, cut off at none
    keep(monkeypatch, 3, 4)  # 3 4 3 4: two requests are missing, so two more hits
    curve = sampled_curve(requests, "lru", [1, 2, 4], 0.5, correction="adj")
    assert curve.miss_ratios == pytest.approx([2 / 3, 2 / 3, 1 / 3])


def test_the_adjustment_takes_the_share_that_the_sample_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of eight rows is asked for and half of them come: distances and hits count twice, not four times.

    Each row is requested twice on end: 8 of 16 hit from one sampled row on, which is two. Nothing is left to adjust.
    """
    keep(monkeypatch, 1, 3, 4, 7)
    requests = Requests.of(0, np.repeat(np.arange(8), 2))
    assert sampled_curve(requests, "lru", [1, 2, 8], 0.25, correction="adj").misses == (16, 8, 8)
    loop = Requests.of(0, np.tile(np.arange(8), 2))  # of four sampled rows all four come in between
    assert sampled_curve(loop, "lru", [7, 8], 0.25, correction="adj").misses == (16, 8)


def test_classes_of_frequency_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 9 has 8 requests and no sampled row in its class; 1, 2 and 3 have 2 or 3, so 4 repeats; 4 and 5 have one.

    The sample 1 4 1, two rows of six, has one repeat at distance 2, that is 6 of whole rows: it stands for 4.
    """
    ids = np.array([9, 9, 9, 9, 1, 2, 3, 2, 9, 4, 9, 3, 1, 9, 9, 2, 5], np.int64)
    keep(monkeypatch, 1, 4)
    curve = sampled_curve(Requests.of(0, ids), "lru", [1, 5, 6], 0.5)
    assert curve.misses == (10, 10, 6)
    assert sampled_curve(Requests.of(0, ids), "fifo", [3, 6], 0.5).misses == (10, 6)


def test_other_policies_replay_the_sample_in_a_tier_of_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.array([1, 3, 2, 1, 2, 2, 4, 1, 2, 3, 2, 4], np.int64)
    keep(monkeypatch, 1, 2)
    # 1 2 1 2 2 1 2 2 in one slot misses 6 and hits 2; in two it misses 2 and hits 6. Two hits are taken off, of 6.
    curve = sampled_curve(Requests.of(0, ids), "fifo", [2, 4], 0.5, correction="adj")
    assert curve.miss_ratios == pytest.approx([1, 1 / 3])


def test_a_seed_draws_another_sample_and_the_same_one_again() -> None:
    requests = Requests.of(0, np.arange(5000))
    drawn = (shards._sample(requests, 0.1, seed, "adj").requests.ids for seed in (1, 1, 2))
    first, again, other = (set(ids.tolist()) for ids in drawn)
    assert first == again != other
    assert 400 < len(first) < 600


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, float("nan")])
def test_rates_that_make_no_sense_are_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate is"):
        sampled_curve(Requests.of(0, np.arange(5)), "lru", [3], rate)


def test_an_empty_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match="no row of 5 is in a sample of 1e-09; take a larger rate"):
        sampled_curve(Requests.of(0, np.arange(5)), "lru", [3], 1e-9, seed=1)


def zipf(requests: int, rows: int, skew: float) -> NDArray[np.int64]:
    chances = np.cumsum(np.arange(1, rows + 1) ** -skew)
    return np.searchsorted(chances, np.random.default_rng(0).random(requests) * chances[-1])


def uniform_with_scans(requests: int, rows: int) -> NDArray[np.int64]:
    """Every other request is of a loop over twice as many other rows."""
    ids = np.random.default_rng(0).integers(0, rows, requests)
    ids[::2] = rows + np.arange(len(ids[::2])) % (2 * rows)
    return ids


MADE_UP: dict[str, Callable[[], NDArray[np.int64]]] = {
    "zipf_0.8": lambda: zipf(1_000_000, 1_000_000, 0.8),
    "zipf_1.05": lambda: zipf(1_000_000, 1_000_000, 1.05),
    "uniform": lambda: np.random.default_rng(0).integers(0, 50_000, 1_000_000),
    "uniform_with_scans": lambda: uniform_with_scans(1_000_000, 100_000),
}


@pytest.mark.parametrize("name", MADE_UP)
def test_at_a_hundredth_of_a_made_up_trace_the_error_is_at_most_two_hundredths(name: str) -> None:
    check_ten_samples(Requests.of(0, MADE_UP[name]()))


def test_at_a_hundredth_of_a_real_trace_the_error_is_at_most_two_hundredths(
    require_shared: Callable[[str], Path],
) -> None:
    spec = importlib.util.spec_from_file_location("shared_traces", require_shared("traces/load.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    check_ten_samples(Requests.of(0, np.asarray(module.load("scarab_recs"), np.int64)))


def check_ten_samples(requests: Requests) -> None:
    """LRU over 100 sizes on a linear scale."""
    sizes = [requests.distinct * k // 100 for k in range(1, 101)]
    exact = exact_lru_curve(requests, sizes).miss_ratios
    worst = {"adj": 0.02, "classes": 0.01}
    for correction in get_args(Correction):
        for seed in range(10):
            sampled = sampled_curve(requests, "lru", sizes, 0.01, seed, correction).miss_ratios
            assert np.mean(np.abs(np.subtract(sampled, exact))) <= worst[correction]
