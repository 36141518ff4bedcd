"""Floors and quotas: what a table keeps and may not exceed, whatever the policy; impossible ones are refused."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tiered_emb.cache import POLICIES, Directory

KEPT, CAPPED, OTHER = 7, 2**32 - 1, 3


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def admit(directory: Directory, table: int, ids: NDArray[np.int64], count: int = 1) -> NDArray[np.int32]:
    n = len(ids)
    slots = np.empty(n, np.int32)
    directory.admit(np.full(n, table, np.uint32), ids, np.full(n, count, np.int32), slots)
    return slots


def rows_of(directory: Directory, table: int) -> int:
    return int(np.count_nonzero(directory.slot_tables[directory.occupied()] == table))


def test_a_table_keeps_its_floor_and_stays_within_its_quota(policy: str) -> None:
    random = np.random.default_rng(0)
    directory = Directory(60, policy, min_rows={KEPT: 10}, max_rows={CAPPED: 15})
    admit(directory, KEPT, np.arange(12))
    fresh = dict.fromkeys((KEPT, CAPPED, OTHER), 100)
    for step in range(200):
        table = (OTHER, CAPPED, OTHER, KEPT)[step % 4] if step > 100 else (OTHER, CAPPED)[step % 2]
        n = int(random.integers(1, 10))
        admit(directory, table, np.arange(fresh[table], fresh[table] + n), int(random.integers(1, 4)))
        fresh[table] += n
        occupied = directory.occupied()
        directory.touch(random.permutation(occupied)[:8].astype(np.int32), np.ones(8, np.int32))
        assert rows_of(directory, KEPT) >= 10
        assert rows_of(directory, CAPPED) <= 15
        assert directory.rows <= 60
    assert rows_of(directory, KEPT) + rows_of(directory, CAPPED) + rows_of(directory, OTHER) == 60


def test_a_table_at_its_quota_makes_room_itself_although_slots_are_free(policy: str) -> None:
    directory = Directory(50, policy, max_rows={CAPPED: 5})
    admit(directory, OTHER, np.arange(4))
    admit(directory, CAPPED, np.arange(5))
    first = admit(directory, CAPPED, np.arange(10, 13))
    assert rows_of(directory, CAPPED) == 5
    assert rows_of(directory, OTHER) == 4
    assert directory.rows == 9
    slots = np.empty(3, np.int32)
    assert directory.find(np.full(3, CAPPED, np.uint32), np.arange(10, 13), slots) == 3
    assert slots.tolist() == first.tolist()
    admit(directory, OTHER, np.arange(100, 141))
    assert directory.rows == 50


def test_what_pins_and_floors_keep_is_said_and_changes_nothing(policy: str) -> None:
    directory = Directory(10, policy, min_rows={KEPT: 6}, max_rows={CAPPED: 3})
    admit(directory, KEPT, np.arange(6))
    capped = admit(directory, CAPPED, np.arange(3))
    directory.pin(capped[:2])
    before = directory.save()
    with pytest.raises(ValueError, match="pins and floors"):
        admit(directory, CAPPED, np.arange(10, 12))
    with pytest.raises(ValueError, match="pins and floors"):
        admit(directory, OTHER, np.arange(3))
    after = directory.save()
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    admit(directory, OTHER, np.arange(2))
    assert rows_of(directory, CAPPED) == 2
    assert rows_of(directory, KEPT) == 6


def test_they_hold_after_resizing_removing_saving_and_clearing(policy: str) -> None:
    directory = Directory(20, policy, min_rows={KEPT: 4}, max_rows={CAPPED: 6})
    kept = admit(directory, KEPT, np.arange(5))
    admit(directory, CAPPED, np.arange(6))
    directory.remove(kept[:1])
    directory.resize(30)
    again = Directory(30, policy, min_rows={KEPT: 4}, max_rows={CAPPED: 6})
    again.load(directory.save())
    for one in (directory, again):
        admit(one, OTHER, np.arange(26))
        assert rows_of(one, KEPT) == 4
        admit(one, CAPPED, np.arange(50, 56))
        assert rows_of(one, CAPPED) <= 6
    directory.clear()
    admit(directory, OTHER, np.arange(30))
    assert directory.rows == 30


@pytest.mark.parametrize(
    ("min_rows", "max_rows", "message"),
    [
        ({1: 10}, {}, "leave none of 10"),
        ({1: 4, 2: 6}, {}, "leave none of 10"),
        ({1: 0}, {}, "table 1 has a floor of 0 rows in a tier of 10"),
        ({}, {5: 11}, "table 5 has a quota of 11 rows in a tier of 10"),
        ({5: 4}, {5: 3}, "table 5 keeps 4 rows at least and 3 at most"),
    ],
)
def test_what_cannot_be_kept_is_refused(min_rows: dict[int, int], max_rows: dict[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Directory(10, min_rows=min_rows, max_rows=max_rows)


def test_a_tier_is_not_made_smaller_than_its_floors() -> None:
    directory = Directory(10, min_rows={1: 5})
    with pytest.raises(ValueError, match="leave none of 5"):
        directory.resize(5)
    assert directory.capacity_rows == 10
