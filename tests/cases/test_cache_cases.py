"""The cache engine: case 21, rows that were popular once."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tiered_emb.cache import Directory


def hit_rate(directory: Directory, ids: NDArray[np.int64]) -> float:
    """The hit rate of one batch of distinct ids, admitted after it."""
    tables, slots = np.zeros(len(ids), np.uint32), np.empty(len(ids), np.int32)
    hits = directory.find(tables, ids, slots)
    here = slots[slots >= 0]
    directory.touch(here, np.ones(len(here), np.int32))
    directory.pin(here)
    new = ids[slots < 0]
    admitted = np.empty(len(new), np.int32)
    directory.admit(tables[: len(new)], new, np.ones(len(new), np.int32), admitted)
    directory.unpin(here)
    return hits / len(ids)


def batch(random: np.random.Generator, first: int) -> NDArray[np.int64]:
    """16 rows of the hot set, and 16 that come once in a while."""
    hot = first + random.permutation(100)[:16]
    return np.concatenate([hot, 10_000 + random.permutation(5_000)[:16]])


def rate_on(directory: Directory, first: int, rounds: int) -> list[float]:
    random = np.random.default_rng(first)
    return [hit_rate(directory, batch(random, first)) for _ in range(rounds)]


@pytest.mark.parametrize(("policy", "recovers"), [("lfu-aged", True), ("lfu", False)])
def test_case_21_a_hot_set_gives_way_to_the_next(policy: str, recovers: bool) -> None:
    """Room for 120 rows; set 1 is hot for 1,000 rounds, then set 2. LFU with ageing hits it again within 150 batches.

    4 periods of 1,200 requests: by then counts of set 1 are a sixteenth of what they were. LFU without ageing has not
    got over it: set 1's rows have 160 requests each, and set 2's have to pass them all.
    """
    directory = Directory(120, policy)
    before = np.mean(rate_on(directory, 0, 1000)[-100:])
    assert before > 0.45
    rate_on(directory, 1000, 150)
    after = np.mean(rate_on(directory, 1000, 50))
    assert (after > 0.9 * before) == recovers
