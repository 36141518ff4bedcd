"""Floors and quotas: what a table keeps and may not exceed, whatever the policy; impossible ones are refused."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tiered_emb.cache import POLICIES, Directory, Shortage, room

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
    with pytest.raises(ValueError, match=f"table {CAPPED} may have 3"):
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


def test_a_quota_that_was_lowered_is_kept_by_a_loaded_directory_too(policy: str) -> None:
    """More rows leave than come; what was said of rows of earlier batches must not matter."""
    directory = Directory(40, policy, max_rows={CAPPED: 40})
    for first in (0, 30, 0, 15, 0):  # rows come back
        ids = np.arange(first, first + 30)
        found = np.empty(30, np.int32)
        directory.find(np.full(30, CAPPED, np.uint32), ids, found)
        admit(directory, CAPPED, ids[found < 0])
    loaded = Directory(40, policy, max_rows={CAPPED: 40})
    loaded.load(directory.save())
    victims = []
    for one in (directory, loaded):
        one.set_shares({}, {CAPPED: 10})
        slots = np.empty(1, np.int32)
        gone = one.admit(np.array([CAPPED], np.uint32), np.array([1000]), np.ones(1, np.int32), slots)
        victims.append(gone.victim_ids.tolist())
        assert rows_of(one, CAPPED) == 10
    assert victims[0] == victims[1]


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


def test_a_tier_may_become_smaller_than_a_quota() -> None:
    """The quota limits nothing any more, and does again in a larger tier."""
    directory = Directory(10, max_rows={CAPPED: 8})
    admit(directory, CAPPED, np.arange(8))
    directory.resize(5)
    admit(directory, CAPPED, np.arange(100, 105))
    assert rows_of(directory, CAPPED) == directory.rows == 5
    directory.resize(20)
    admit(directory, CAPPED, np.arange(200, 206))
    assert rows_of(directory, CAPPED) == 8


def test_a_table_at_its_floor_exchanges_its_own_rows(policy: str) -> None:
    """Where nobody else can give a slot: what comes counts towards the floor."""
    directory = Directory(10, policy, min_rows={KEPT: 6})
    admit(directory, KEPT, np.arange(6))
    directory.pin(admit(directory, OTHER, np.arange(4)))
    admit(directory, KEPT, np.arange(20, 25))
    assert rows_of(directory, KEPT) == 6


def test_shares_of_rows_that_are_there_already(policy: str) -> None:
    directory = Directory(20, policy)
    admit(directory, KEPT, np.arange(10))
    pinned = admit(directory, CAPPED, np.arange(10))
    directory.pin(pinned)
    with pytest.raises(ValueError, match="floors of 20 rows leave none"):
        directory.set_shares({KEPT: 20}, {})
    directory.set_shares({KEPT: 10}, {CAPPED: 12})
    assert room.shortage(directory, np.full(1, CAPPED, np.uint32)) == Shortage(None, 21, 20)
    directory.unpin(pinned)
    admit(directory, OTHER, np.arange(8))
    assert (rows_of(directory, KEPT), rows_of(directory, CAPPED)) == (10, 2)
    directory.set_shares({}, {CAPPED: 1})
    admit(directory, CAPPED, np.arange(50, 51))
    assert rows_of(directory, CAPPED) == 1


def test_questions_agree_with_admissions(policy: str) -> None:
    """Rows of any tables, beside any pins: what the room says fits is admitted, one row more is refused."""
    random = np.random.default_rng(3)
    directory = Directory(40, policy, min_rows={KEPT: 9, 8: 4}, max_rows={CAPPED: 7, KEPT: 20})
    refused = 0
    for step in range(300):
        tables = random.choice(np.array([KEPT, 8, CAPPED, OTHER], np.uint32), int(random.integers(1, 50)))
        ids = np.arange(1000 * step, 1000 * step + len(tables))
        occupied = directory.occupied()
        pinned = random.permutation(occupied)[: int(random.integers(0, 1 + len(occupied)))].astype(np.int32)
        directory.pin(pinned)
        slots, ones = np.empty(len(tables), np.int32), np.ones(len(tables), np.int32)
        fits = room.fitting(directory, tables)
        assert fits.all() == (room.shortage(directory, tables) is None)
        if not fits.all():
            refused += 1
            left_out = int(np.flatnonzero(~fits)[-1])
            more = np.concatenate([tables[left_out : left_out + 1], tables[left_out + 1 :][fits[left_out + 1 :]]])
            assert room.shortage(directory, more) is not None
            with pytest.raises(ValueError, match=r"cannot be admitted|pins and floors keep"):
                directory.admit(tables, ids, ones, slots)
        directory.admit(tables[fits], ids[fits], ones[fits], slots[fits])
        found = np.empty(int(fits.sum()), np.int32)
        assert directory.find(tables[fits], ids[fits], found) == len(found)
        directory.unpin(pinned)
        assert rows_of(directory, CAPPED) <= 7
        assert rows_of(directory, KEPT) <= 20
    assert refused > 50


def test_the_rows_that_floors_miss_come_back_newest_first() -> None:
    directory = Directory(10, min_rows={KEPT: 4})
    admit(directory, OTHER, np.arange(5))
    admit(directory, KEPT, np.arange(5))
    gone = directory.resize(6)
    assert gone.tables.tolist() == [KEPT] * 4
    assert room.lacking(directory, gone.tables).tolist() == [False, True, True, True]


@pytest.mark.parametrize("capacity", [1, 1000, 100_000])
def test_memory_stays_within_the_planned_bytes(policy: str, capacity: int) -> None:
    quotas = dict.fromkeys(range(50), 1)
    directory = Directory(capacity, policy, max_rows=quotas)
    assert directory.memory_bytes <= Directory.bytes_for(capacity, policy, 50)
    assert directory.memory_bytes > Directory(capacity, policy).memory_bytes


def test_what_a_lowered_quota_drives_out_depends_on_nothing_that_is_not_saved(policy: str) -> None:
    """More victims than rows come: none of them is chosen by what an earlier batch left in a buffer."""

    def request(directory: Directory, ids: NDArray[np.int64]) -> list[int]:
        tables, slots = np.zeros(len(ids), np.uint32), np.empty(len(ids), np.int32)
        directory.find(tables, ids, slots)
        hits, missing = slots[slots >= 0], ids[slots < 0]
        directory.touch(hits, np.ones(len(hits), np.int32))
        n = len(missing)
        admitted = directory.admit(tables[:n], missing, np.ones(n, np.int32), np.empty(n, np.int32))
        return admitted.victim_ids.tolist()

    for seed in range(60):
        rng = np.random.default_rng(seed)
        directory, again = Directory(12, policy), Directory(12, policy)
        for _ in range(30):
            request(directory, np.unique(rng.integers(0, 30, 6)))
        again.load(directory.save())
        ids = np.array([40, 41])
        for one in (directory, again):
            one.set_shares({}, {0: 4})
        assert request(directory, ids) == request(again, ids)
