"""Each policy's order: its contract, and exact LRU and LFU against cachetools and against libcachesim's miss ratios."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path

import cachetools
import numpy as np
import pytest
from numpy.typing import NDArray

from tiered_emb.cache import POLICIES, Directory, Policy

CACHETOOLS = {"lru": cachetools.LRUCache, "lfu": cachetools.LFUCache}


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def i32(*numbers: int) -> NDArray[np.int32]:
    return np.array(numbers, np.int32)


def order(policy: Policy, n: int, pins: NDArray[np.uint16] | None = None) -> list[int]:
    """Slots in the order in which the policy gives them up, all of them taken."""
    out = np.empty(n, np.int32)
    taken = policy.victims(n, np.zeros(n, np.uint16) if pins is None else pins, out)
    return out[:taken].tolist()


class TestContract:
    """What every policy keeps, whatever its order."""

    def test_every_slot_is_given_once(self, policy: str) -> None:
        made = POLICIES[policy](100)
        slots = np.random.default_rng(0).permutation(100).astype(np.int32)
        made.insert(slots, np.full(100, 1, np.int32))
        made.touch(slots[:50], np.full(50, 2, np.int32))
        made.remove(slots[40:60])
        assert sorted(order(made, 100)) == sorted(slots[:40].tolist() + slots[60:].tolist())
        assert order(made, 100) == []

    def test_pinned_slots_are_passed_over_and_keep_their_place(self, policy: str) -> None:
        made, twin = POLICIES[policy](8), POLICIES[policy](8)
        for each in (made, twin):
            each.insert(np.arange(8, dtype=np.int32), np.ones(8, np.int32))
            each.touch(i32(1, 4, 6), i32(1, 2, 1))
        pins = np.zeros(8, np.uint16)
        pins[[0, 4, 7]] = 1
        free_ones = order(made, 8, pins)
        rest = order(made, 8)
        whole = order(twin, 8)
        assert set(rest) == {0, 4, 7}
        assert free_ones == [slot for slot in whole if slot not in rest]
        assert rest == [slot for slot in whole if slot in rest]

    def test_touch_of_k_is_k_touches(self, policy: str) -> None:
        random = np.random.default_rng(3)
        once, often = POLICIES[policy](50), POLICIES[policy](50)
        for each in (once, often):
            each.insert(np.arange(50, dtype=np.int32), np.ones(50, np.int32))
        for _ in range(40):
            slots = random.permutation(50)[:9].astype(np.int32)
            counts = random.integers(1, 30, 9).astype(np.int32)
            once.touch(slots, counts)
            often.touch(np.repeat(slots, counts), np.ones(counts.sum(), np.int32))
        assert order(once, 50) == order(often, 50)

    def test_resize_and_clear(self, policy: str) -> None:
        made = POLICIES[policy](4)
        made.insert(i32(3, 1, 0, 2), i32(1, 1, 1, 1))
        made.remove(i32(3))
        made.resize(3)
        made.resize(6)
        made.insert(i32(5), i32(1))
        assert order(made, 2) == [1, 0]
        made.clear()
        assert order(made, 6) == []


def test_lfu_order_is_by_count_then_by_when_it_was_reached() -> None:
    lfu = POLICIES["lfu"](6)
    lfu.insert(i32(0, 1, 2, 3, 4, 5), i32(1, 1, 3, 2, 9, 2))
    lfu.touch(i32(1, 0), i32(2, 1))  # 1 has 3 now, after slot 2; 0 has 2, after 3 and 5
    assert order(lfu, 6) == [3, 5, 0, 2, 1, 4]


def misses(trace: NDArray[np.int64], capacity: int, policy: str) -> NDArray[np.bool_]:
    """Which of single requests missed."""
    directory, missed = Directory(capacity, policy), np.zeros(len(trace), np.bool_)
    table, one, slot = np.zeros(1, np.uint32), np.ones(1, np.int32), np.empty(1, np.int32)
    for i in range(len(trace)):
        id = trace[i : i + 1]
        if directory.find(table, id, slot):
            directory.touch(slot, one)
        else:
            missed[i] = True
            directory.admit(table, id, one, slot)
    return missed


@pytest.mark.parametrize("policy", sorted(CACHETOOLS))
@pytest.mark.parametrize(("capacity", "skew"), [(1, 1.3), (50, 1.2), (400, 1.5)])
def test_the_same_requests_miss_as_in_cachetools(policy: str, capacity: int, skew: float) -> None:
    trace = (np.random.default_rng(capacity).zipf(skew, 12_000) % 3000).astype(np.int64)
    reference = CACHETOOLS[policy](capacity)
    expected = np.zeros(len(trace), np.bool_)
    for i, id in enumerate(trace.tolist()):
        if reference.get(id) is None:
            expected[i] = True
            reference[id] = True
    np.testing.assert_array_equal(misses(trace, capacity, policy), expected)


@cache
def trace(loader: Path, name: str) -> NDArray[np.int64]:
    spec = importlib.util.spec_from_file_location("shared_traces", loader)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return np.asarray(module.dense(name), np.int64)


@pytest.mark.parametrize("capacity", [687, 3439])
def test_miss_ratios_are_libcachesims(policy: str, capacity: int, require_shared: Callable[[str], Path]) -> None:
    with open(require_shared("traces/golden.csv"), newline="") as file:
        golden = {(row["trace"], int(row["cache_objects"]), row["policy"]): row for row in csv.DictReader(file)}
    ids = trace(require_shared("traces/load.py"), "web12")
    ratio = np.count_nonzero(misses(ids, capacity, policy)) / len(ids)
    assert f"{ratio:.6f}" == golden["web12", capacity, policy.upper()]["miss_ratio"]
