from __future__ import annotations

import tracemalloc
from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from tiered_emb.cache import Admission, Directory

Row = tuple[int, int]
EXTREME_IDS = [-(2**63), -5, -1, 0, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1]


def named(rows: Iterable[Row]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    listed = list(rows)
    return np.array([row[0] for row in listed], np.uint32), np.array([row[1] for row in listed], np.int64)


def find(directory: Directory, rows: Iterable[Row]) -> NDArray[np.int32]:
    tables, ids = named(rows)
    slots = np.full(len(ids), -7, np.int32)
    assert directory.find(tables, ids, slots) == np.count_nonzero(slots >= 0)
    return slots


def admit(directory: Directory, rows: Iterable[Row], count: int = 1) -> Admission:
    tables, ids = named(rows)
    return directory.admit(tables, ids, np.full(len(ids), count, np.int32), np.empty(len(ids), np.int32))


def touch(directory: Directory, rows: Iterable[Row], count: int = 1) -> None:
    slots = find(directory, rows)
    directory.touch(slots, np.full(len(slots), count, np.int32))


def victims(admission: Admission) -> list[Row]:
    assert admission.evicted == len(admission.victim_ids)
    return list(zip(admission.victim_tables.tolist(), admission.victim_ids.tolist(), strict=True))


@pytest.fixture(params=["lru", "lfu"])  # two orders show what is the Directory's: test_policies.py has them all
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_nine_extreme_ids_in_three_tables_are_27_rows(policy: str) -> None:
    directory = Directory(27, policy)
    rows = [(table, id) for table in (0, 1, 2**32 - 1) for id in EXTREME_IDS]
    assert (find(directory, rows) == -1).all()
    admission = admit(directory, rows)
    assert admission.evicted == 0
    assert sorted(admission.slots.tolist()) == list(range(27))
    np.testing.assert_array_equal(find(directory, rows), admission.slots)
    tables, ids = named(rows)
    np.testing.assert_array_equal(directory.slot_tables[admission.slots], tables)
    np.testing.assert_array_equal(directory.slot_ids[admission.slots], ids)


def test_find_of_nothing_and_in_nothing(policy: str) -> None:
    directory = Directory(4, policy)
    assert len(find(directory, [])) == 0
    assert find(directory, [(0, 0), (0, 0)]).tolist() == [-1, -1]
    assert admit(directory, []).evicted == 0
    assert directory.rows == 0


@pytest.mark.parametrize("stride", [1, 8, 2**20, 2**32, 2**40 + 1])
def test_capacity_ids_fit_without_an_eviction(policy: str, stride: int) -> None:
    """Case 22: room for C rows and C distinct ids, whatever they are multiples of."""
    capacity = 1 << 12
    directory = Directory(capacity, policy)
    ids = np.arange(capacity, dtype=np.int64) * stride
    tables, counts, slots = np.zeros(capacity, np.uint32), np.ones(capacity, np.int32), np.empty(capacity, np.int32)
    for first in range(0, capacity, 100):
        part = slice(first, first + 100)
        assert directory.admit(tables[part], ids[part], counts[part], slots[part]).evicted == 0
    assert directory.rows == capacity
    assert directory.find(tables, ids, slots) == capacity


def test_lfu_gives_up_the_row_requested_least(policy: str) -> None:
    """Case 20: room for 2, batch [A, A, A, B], then C: B goes, and A's count is 3 (or LRU: A, the older, goes)."""
    directory = Directory(2, policy)
    tables, ids = named([(0, 10), (0, 11)])
    directory.admit(tables, ids, np.array([3, 1], np.int32), np.empty(2, np.int32))
    assert victims(admit(directory, [(0, 12)])) == [(0, 11 if policy == "lfu" else 10)]


def test_a_reused_slot_starts_at_the_new_rows_count() -> None:
    directory = Directory(2, "lfu")
    admit(directory, [(0, 1)], count=50)
    admit(directory, [(0, 2)], count=60)
    assert victims(admit(directory, [(0, 3)], count=2)) == [(0, 1)]
    assert victims(admit(directory, [(0, 4)], count=1)) == [(0, 3)]


def test_lfu_count_is_kept_to_the_last_request() -> None:
    directory = Directory(2, "lfu")
    admit(directory, [(0, 1), (0, 2)])
    touch(directory, [(0, 1)], count=2)
    touch(directory, [(0, 2)], count=3)
    assert victims(admit(directory, [(0, 3)])) == [(0, 1)]


def test_pinned_rows_stay_and_too_few_others_change_nothing(policy: str) -> None:
    directory = Directory(4, policy)
    slots = admit(directory, [(0, id) for id in range(4)]).slots
    directory.pin(slots[:3])
    directory.pin(slots[:1])
    assert (directory.pinned_rows, directory.room()) == (3, 1)
    with pytest.raises(ValueError, match="2 rows cannot be admitted: 1 of 4 slots are without a pin"):
        admit(directory, [(0, 8), (0, 9)])
    np.testing.assert_array_equal(find(directory, [(0, id) for id in range(4)]), slots)
    assert victims(admit(directory, [(0, 8)])) == [(0, 3)]
    directory.unpin(slots[:3])
    assert directory.pinned_rows == 1
    assert {row[1] for row in victims(admit(directory, [(0, id) for id in (20, 21, 22)]))} == {1, 2, 8}
    directory.unpin(slots[:1])
    assert directory.room() == 4


def test_rows_admitted_together_do_not_evict_each_other(policy: str) -> None:
    directory = Directory(3, policy)
    admit(directory, [(0, 1), (0, 2)], count=9)
    assert victims(admit(directory, [(0, 3), (0, 4), (0, 5)])) == [(0, 1), (0, 2)]


def test_unpinning_more_than_was_pinned_is_noticed(policy: str) -> None:
    directory = Directory(2, policy)
    slots = admit(directory, [(0, 1)]).slots
    with pytest.raises(AssertionError, match="without a pin"):
        directory.unpin(slots)


def test_pins_do_not_overflow() -> None:
    directory = Directory(1)
    slots = np.zeros(0xFFFF, np.int32)
    admit(directory, [(0, 1)])
    directory.pin(slots)
    with pytest.raises(AssertionError, match="more than 65535 pins"):
        directory.pin(slots[:1])
    directory.unpin(slots)
    assert directory.pinned_rows == 0


def test_removing_a_row_twice_or_under_a_pin_is_noticed(policy: str) -> None:
    directory = Directory(3, policy)
    slots = admit(directory, [(0, 1), (0, 2)]).slots
    directory.pin(slots[1:])
    with pytest.raises(AssertionError, match="pinned"):
        directory.remove(slots[1:])
    directory.remove(slots[:1])
    with pytest.raises(AssertionError, match="holds no row"):
        directory.remove(slots[:1])
    assert directory.rows == 1


def test_removed_slots_are_used_before_any_row_is_evicted(policy: str) -> None:
    directory = Directory(5, policy)
    slots = admit(directory, [(0, id) for id in range(5)]).slots
    directory.remove(slots[1:3])
    admission = admit(directory, [(0, 8), (0, 9)])
    assert admission.evicted == 0
    assert set(admission.slots.tolist()) == set(slots[1:3].tolist())


def test_resize_keeps_slots_below_the_new_capacity(policy: str) -> None:
    directory = Directory(6, policy)
    slots = admit(directory, [(7, id) for id in range(6)]).slots
    touch(directory, [(7, 0)], count=3)
    directory.remove(slots[1:2])
    gone = directory.resize(4)
    assert gone.slots.tolist() == [4, 5]
    assert list(zip(gone.tables.tolist(), gone.ids.tolist(), strict=True)) == [(7, 4), (7, 5)]
    assert find(directory, [(7, id) for id in range(6)]).tolist() == [0, -1, 2, 3, -1, -1]
    assert directory.occupied().tolist() == [0, 2, 3]
    assert len(directory.resize(5).slots) == 0
    admission = admit(directory, [(7, 10), (7, 11), (7, 12)])
    assert sorted(admission.slots.tolist()) == [1, 2, 4]
    assert victims(admission) == [(7, 2)]


def test_resize_over_a_pinned_row_changes_nothing(policy: str) -> None:
    directory = Directory(4, policy)
    slots = admit(directory, [(0, id) for id in range(4)]).slots
    directory.pin(slots[3:])
    with pytest.raises(ValueError, match="1 rows in slots at or above 2 are pinned"):
        directory.resize(2)
    assert (directory.capacity_rows, directory.rows) == (4, 4)


def test_clear_forgets_rows_pins_and_order(policy: str) -> None:
    directory = Directory(3, policy)
    directory.pin(admit(directory, [(0, 1), (0, 2), (0, 3)], count=5).slots)
    directory.clear()
    assert (directory.rows, directory.pinned_rows, directory.room()) == (0, 0, 3)
    assert admit(directory, [(0, 3), (0, 4), (0, 5)]).evicted == 0
    assert victims(admit(directory, [(0, 6)])) == [(0, 3)]


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="1 to 2147483646 rows, not 0"):
        Directory(0)
    with pytest.raises(ValueError, match=r"unknown cache policy 'mru': expected one of .*lfu, .*lru"):
        Directory(8, "mru")


@pytest.mark.parametrize("capacity", [1, 7, 1023, 200_000])
def test_memory_stays_within_the_planned_bytes(policy: str, capacity: int) -> None:
    """Case 24: even where every row has a count of its own, which needs the most classes of LFU."""
    directory = Directory(capacity, policy)
    rows = min(capacity, 3000)
    admit(directory, [(0, id) for id in range(rows)])
    slots = find(directory, [(0, id) for id in range(rows)])
    directory.touch(slots, np.arange(rows, 0, -1, dtype=np.int32))
    directory.touch(slots, np.full(rows, 2 * rows, np.int32))
    assert directory.memory_bytes <= Directory.bytes_for(capacity, policy)


def test_at_most_40_bytes_a_slot(policy: str) -> None:
    assert Directory.bytes_for(10_000_000, policy) / 10_000_000 <= 40


@pytest.mark.parametrize("budget", [0, 999, 1 << 20, (1 << 31) + 5])
def test_capacity_for_a_budget_is_the_largest_that_fits(policy: str, budget: int) -> None:
    capacity = Directory.capacity_for(budget, 256, policy)
    assert capacity * 256 + Directory.bytes_for(capacity, policy) <= budget or capacity == 0
    assert (capacity + 1) * 256 + Directory.bytes_for(capacity + 1, policy) > budget


def test_a_batch_allocates_nothing(policy: str) -> None:
    directory, n = Directory(40_000, policy), 16_384
    tables, counts, slots = np.zeros(n, np.uint32), np.ones(n, np.int32), np.empty(n, np.int32)
    batches = [np.arange(first, first + n) for first in range(0, 16 * n, n)]

    def run(ids: NDArray[np.int64]) -> int:
        directory.find(tables, ids, slots)
        evicted = directory.admit(tables, ids, counts, slots).evicted
        directory.pin(slots)
        directory.touch(slots, counts)
        directory.unpin(slots)
        return evicted

    for ids in batches[:6]:
        run(ids)
    tracemalloc.start()
    try:
        assert [run(ids) for ids in batches[6:]] == [n] * 10
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < n  # not one byte a row: views only
