"""Each policy's order: its contract, and exact LRU and LFU against cachetools and against libcachesim's miss ratios."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import cachetools
import numpy as np
import pytest
from numpy.typing import NDArray

from tiered_emb.cache import POLICIES, ArrayPolicy, Directory
from tiered_emb.cache.verbs import _FUNCTIONS, Guard, _no_ghost

CACHETOOLS = {"lru": cachetools.LRUCache, "lfu": cachetools.LFUCache, "fifo": cachetools.FIFOCache}
GOLDEN = {"lru": "LRU", "lfu": "LFU", "fifo": "FIFO", "clock": "Clock", "sieve": "Sieve"}
OLDEST_FIRST = ("lru", "lfu", "fifo", "clock", "lookahead")  # of rows requested once
ORDERED = ("lru", "lfu", "fifo", "clock", "lookahead")  # pinned slots have a place in one order, and keep it


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def i32(*numbers: int) -> NDArray[np.int32]:
    return np.array(numbers, np.int32)


def insert(policy: ArrayPolicy[Any], slots: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
    """Rows of table 0 with the slots' numbers as ids."""
    tables, codes = np.zeros(len(slots), np.uint32), np.zeros(len(slots), np.int8)
    policy.insert(slots, tables, slots.astype(np.int64), counts, codes)


def test_bytes_for_what_misses_say_are_held_where_they_say_something(policy: str) -> None:
    kind = POLICIES[policy]
    assert kind.has_ghosts == (_FUNCTIONS["miss"][type(kind(8).state)] is not _no_ghost)


def order(policy: ArrayPolicy[Any], n: int, pins: NDArray[np.uint16] | None = None) -> list[int]:
    """Slots in the order in which the policy gives them up to new rows, all of them taken."""
    guard = Guard.of_pins(np.zeros(100, np.uint16))
    guard.pins[: 0 if pins is None else len(pins)] = 0 if pins is None else pins
    out, codes = np.empty(n, np.int32), np.empty(n, np.int8)
    taken = policy.make_room(guard, np.ones(n, np.uint32), np.arange(n), 0, codes, out)
    return out[:taken].tolist()


class TestContract:
    """What every policy keeps, whatever its order."""

    def test_every_slot_is_given_once(self, policy: str) -> None:
        made = POLICIES[policy](100)
        slots = np.random.default_rng(0).permutation(100).astype(np.int32)
        insert(made, slots, np.full(100, 1, np.int32))
        made.touch(slots[:50], np.full(50, 2, np.int32))
        made.remove(slots[40:60])
        assert sorted(order(made, 100)) == sorted(slots[:40].tolist() + slots[60:].tolist())
        assert order(made, 100) == []

    def test_pinned_slots_are_passed_over_and_keep_their_place(self, policy: str) -> None:
        made, twin = POLICIES[policy](8), POLICIES[policy](8)
        for each in (made, twin):
            insert(each, np.arange(8, dtype=np.int32), np.ones(8, np.int32))
            each.touch(i32(1, 4, 6), i32(1, 2, 1))
        pins = np.zeros(8, np.uint16)
        pins[[0, 4, 7]] = 1
        free_ones = order(made, 8, pins)
        rest = order(made, 8)
        whole = order(twin, 8)
        assert set(rest) == {0, 4, 7}
        assert sorted(free_ones) == [1, 2, 3, 5, 6]
        if policy not in ORDERED:
            return
        assert free_ones == [slot for slot in whole if slot not in rest]
        assert rest == [slot for slot in whole if slot in rest]

    def test_touch_of_k_is_k_touches(self, policy: str) -> None:
        random = np.random.default_rng(3)
        once, often = POLICIES[policy](50), POLICIES[policy](50)
        for each in (once, often):
            insert(each, np.arange(50, dtype=np.int32), np.ones(50, np.int32))
        for _ in range(40):
            slots = random.permutation(50)[:9].astype(np.int32)
            counts = random.integers(1, 30, 9).astype(np.int32)
            once.touch(slots, counts)
            often.touch(np.repeat(slots, counts), np.ones(counts.sum(), np.int32))
        assert order(once, 50) == order(often, 50)

    def test_a_row_that_comes_with_k_requests_was_touched_k_less_1_times(self, policy: str) -> None:
        if policy == "wtinylfu":  # counts requests that a row comes with, and none that find it in the window
            return
        random = np.random.default_rng(4)
        once, often = POLICIES[policy](50), POLICIES[policy](50)
        for _ in range(3):
            slots, counts = random.permutation(50).astype(np.int32), random.integers(1, 6, 50).astype(np.int32)
            insert(once, slots, counts)
            for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
                insert(often, i32(slot), i32(1))
                often.touch(i32(*[slot] * (count - 1)), np.ones(count - 1, np.int32))
            given = order(once, 30)
            assert given == order(often, 30)
            for each in (once, often):
                each.remove(np.setdiff1d(np.arange(50), given).astype(np.int32))

    def test_resize_and_clear(self, policy: str) -> None:
        made = POLICIES[policy](4)
        insert(made, i32(3, 1, 0, 2), i32(1, 1, 1, 1))
        made.remove(i32(3))
        made.resize(3)
        made.resize(6)
        insert(made, i32(5), i32(1))
        given = order(made, 2)
        assert policy not in OLDEST_FIRST or given == [1, 0]
        assert sorted(given + order(made, 6)) == [0, 1, 2, 5]
        insert(made, i32(4), i32(1))
        made.clear()
        assert order(made, 6) == []

    def test_it_takes_no_more_memory_than_it_says(self, policy: str) -> None:
        kind = POLICIES[policy]
        for capacity in (1, 7, 100, 5000):
            made = kind(capacity)
            insert(made, np.arange(capacity, dtype=np.int32), np.arange(1, capacity + 1, dtype=np.int32))
            assert made.memory_bytes <= capacity * kind.bytes_per_slot + kind.reserve_bytes(capacity)

    def test_saved_and_loaded_it_gives_the_same_victims(self, policy: str) -> None:
        random = np.random.default_rng(1)
        made = POLICIES[policy](60)
        insert(made, np.arange(60, dtype=np.int32), random.integers(1, 4, 60).astype(np.int32))
        made.touch(random.permutation(60)[:30].astype(np.int32), np.ones(30, np.int32))
        again = POLICIES[policy](60)
        again.load(made.save())
        assert order(made, 20) == order(again, 20)
        with pytest.raises(ValueError, match="not"):
            POLICIES[policy](61).load(made.save())
        with pytest.raises(ValueError, match="has arrays"):
            again.load({"something": np.zeros(3)})
        assert order(made, 60) == order(again, 60)


def test_lfu_order_is_by_count_then_by_when_it_was_reached() -> None:
    lfu = POLICIES["lfu"](6)
    insert(lfu, i32(0, 1, 2, 3, 4, 5), i32(1, 1, 3, 2, 9, 2))
    lfu.touch(i32(1, 0), i32(2, 1))  # 1 has 3 now, after slot 2; 0 has 2, after 3 and 5
    assert order(lfu, 6) == [3, 5, 0, 2, 1, 4]


def misses(trace: NDArray[np.int64], capacity: int, policy: str) -> NDArray[np.bool_]:
    """Which of single requests missed."""
    missed = np.zeros(len(trace), np.bool_)
    Directory(capacity, policy).replay(np.zeros(len(trace), np.uint32), trace, missed)
    return missed


def misses_by_verbs(trace: NDArray[np.int64], capacity: int, policy: str) -> NDArray[np.bool_]:
    """The same by the verbs of a batch, one request each."""
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


@pytest.mark.parametrize("capacity", [1, 5, 90])
def test_a_replay_is_what_single_requests_do(policy: str, capacity: int) -> None:
    trace = (np.random.default_rng(capacity).zipf(1.3, 4000) % 300).astype(np.int64)
    np.testing.assert_array_equal(misses(trace, capacity, policy), misses_by_verbs(trace, capacity, policy))


@cache
def trace(loader: Path, name: str) -> NDArray[np.int64]:
    spec = importlib.util.spec_from_file_location("shared_traces", loader)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return np.asarray(module.dense(name), np.int64)


@pytest.mark.parametrize("capacity", [687, 3439])
@pytest.mark.parametrize("policy", sorted(GOLDEN))
def test_miss_ratios_are_libcachesims(policy: str, capacity: int, require_shared: Callable[[str], Path]) -> None:
    with open(require_shared("traces/golden.csv"), newline="") as file:
        golden = {(row["trace"], int(row["cache_objects"]), row["policy"]): row for row in csv.DictReader(file)}
    ids = trace(require_shared("traces/load.py"), "web12")
    ratio = np.count_nonzero(misses(ids, capacity, policy)) / len(ids)
    assert f"{ratio:.6f}" == golden["web12", capacity, GOLDEN[policy]]["miss_ratio"]


def test_lookahead_gives_up_last_what_planned_batches_need() -> None:
    policy = POLICIES["lookahead"](6)
    insert(policy, np.arange(6, dtype=np.int32), np.ones(6, np.int32))
    policy.foresee(i32(0, 1), 2)
    policy.foresee(i32(1, 3), 3)
    policy.advance(1)
    assert order(policy, 4) == [2, 4, 5, 0]
    insert(policy, i32(0, 2, 4, 5), i32(1, 1, 1, 1))
    policy.advance(2)
    assert order(policy, 6) == [0, 2, 4, 5, 1, 3], "the row of a new slot is not the one that was needed"


def test_lookahead_without_foresight_is_lru() -> None:
    ids = (np.random.default_rng(3).zipf(1.2, 5000) % 400).astype(np.int64)
    np.testing.assert_array_equal(misses(ids, 60, "lookahead"), misses(ids, 60, "lru"))
