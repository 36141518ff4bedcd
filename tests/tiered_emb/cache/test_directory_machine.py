"""A Directory with every policy against a slow model in plain Python, over any interleaving of its verbs.

The model knows which rows are there, where, and with how many pins. Of LRU and LFU it also knows who leaves next; of
the others the victims are only held to be rows that may leave, and those that a saved and loaded Directory would give.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from tiered_emb.cache import POLICIES, Directory

Row = tuple[int, int]
TABLES = st.sampled_from([0, 1, 2**32 - 1])
IDS = st.one_of(st.integers(0, 12), st.sampled_from([-1, -(2**63), 2**63 - 1, 2**20, 2**32, 3 * 2**32]))
ROWS = st.lists(st.tuples(TABLES, IDS), max_size=12, unique=True)
COUNTS = st.integers(1, 5)


@dataclass
class Held:
    """What the model knows of a row: its slot, pins, requests since admission, and when it last got one."""

    slot: int
    count: int
    moment: int
    pins: int = 0


@dataclass
class Model:
    """The rows of a Directory, their victims found by looking at all of them."""

    policy: str
    held: dict[Row, Held] = field(default_factory=dict)
    moment: int = 0

    def request(self, row: Row, count: int) -> None:
        self.moment += 1
        self.held[row].count += count
        self.held[row].moment = self.moment

    @property
    def is_exact(self) -> bool:
        return self.policy in ("lru", "lfu")

    def victims(self, n: int) -> list[Row]:
        def rank(row: Row) -> tuple[int, int]:
            held = self.held[row]
            return (held.count if self.policy == "lfu" else 0, held.moment)

        return sorted((row for row, held in self.held.items() if held.pins == 0), key=rank)[:n]


def named(rows: list[Row]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    return np.array([row[0] for row in rows], np.uint32), np.array([row[1] for row in rows], np.int64)


class DirectoryMachine(RuleBasedStateMachine):
    policy = "lru"

    @initialize(capacity=st.integers(1, 12))
    def make(self, capacity: int) -> None:
        self.directory = Directory(capacity, self.policy)
        self.saved: Directory | None = None  # what the directory in use was loaded from; gets the same requests
        self.model = Model(self.policy)

    @property
    def both(self) -> list[Directory]:
        return [self.directory] if self.saved is None else [self.directory, self.saved]

    def slots_of(self, rows: list[Row]) -> NDArray[np.int32]:
        return np.array([self.model.held[row].slot for row in rows], np.int32)

    def present(self, rows: list[Row]) -> list[Row]:
        return [row for row in rows if row in self.model.held]

    @rule(rows=ROWS)
    def find(self, rows: list[Row]) -> None:
        slots = np.empty(len(rows), np.int32)
        assert self.directory.find(*named(rows), slots) == len(self.present(rows))
        assert slots.tolist() == [self.model.held[row].slot if row in self.model.held else -1 for row in rows]

    @rule(rows=ROWS, counts=st.lists(COUNTS, min_size=12, max_size=12))
    def touch(self, rows: list[Row], counts: list[int]) -> None:
        hits = self.present(rows)
        for directory in self.both:
            directory.touch(self.slots_of(hits), np.array(counts[: len(hits)], np.int32))
        for row, count in zip(hits, counts, strict=False):
            self.model.request(row, count)

    @rule(rows=ROWS)
    def pin(self, rows: list[Row]) -> None:
        hits = self.present(rows)
        for directory in self.both:
            directory.pin(self.slots_of(hits))
        for row in hits:
            self.model.held[row].pins += 1

    @rule(rows=ROWS)
    def unpin(self, rows: list[Row]) -> None:
        pinned = [row for row in self.present(rows) if self.model.held[row].pins]
        for directory in self.both:
            directory.unpin(self.slots_of(pinned))
        for row in pinned:
            self.model.held[row].pins -= 1

    @rule(rows=ROWS, counts=st.lists(COUNTS, min_size=12, max_size=12))
    def admit(self, rows: list[Row], counts: list[int]) -> None:
        misses = [row for row in rows if row not in self.model.held]
        wanted = np.array(counts[: len(misses)], np.int32)
        slots = np.empty(len(misses), np.int32)
        if len(misses) > self.directory.room():
            with pytest.raises(ValueError, match="cannot be admitted"):
                self.directory.admit(*named(misses), wanted, slots)
            return
        few = max(0, len(misses) - (self.directory.capacity_rows - len(self.model.held)))
        admission = self.directory.admit(*named(misses), wanted, slots)
        victims = list(zip(admission.victim_tables.tolist(), admission.victim_ids.tolist(), strict=True))
        if self.model.is_exact:
            assert victims == self.model.victims(few)
        assert len(set(victims)) == few
        assert all(self.model.held[row].pins == 0 for row in victims)
        assert admission.victim_slots.tolist() == self.slots_of(victims).tolist()
        if self.saved is not None:
            again = self.saved.admit(*named(misses), wanted, np.empty(len(misses), np.int32))
            assert list(zip(again.victim_tables.tolist(), again.victim_ids.tolist(), strict=True)) == victims
            np.testing.assert_array_equal(again.slots, slots)
        for row in victims:
            del self.model.held[row]
        for row, slot, count in zip(misses, slots.tolist(), counts, strict=False):
            self.model.held[row] = Held(slot, 0, 0)
            self.model.request(row, count)

    @rule(rows=ROWS)
    def remove(self, rows: list[Row]) -> None:
        gone = [row for row in self.present(rows) if not self.model.held[row].pins]
        for directory in self.both:
            directory.remove(self.slots_of(gone))
        for row in gone:
            del self.model.held[row]

    @rule(capacity=st.integers(1, 16))
    def resize(self, capacity: int) -> None:
        leaving = {row: held for row, held in self.model.held.items() if held.slot >= capacity}
        if any(held.pins for held in leaving.values()):
            with pytest.raises(ValueError, match="pinned"):
                self.directory.resize(capacity)
            return
        gone, *_ = [directory.resize(capacity) for directory in self.both]
        rows = list(zip(gone.tables.tolist(), gone.ids.tolist(), strict=True))
        assert dict(zip(rows, gone.slots.tolist(), strict=True)) == {row: held.slot for row, held in leaving.items()}
        assert self.directory.capacity_rows == capacity
        for row in leaving:
            del self.model.held[row]

    @precondition(lambda self: len(self.model.held) > 8)
    @rule()
    def clear(self) -> None:
        for directory in self.both:
            directory.clear()
        self.model.held.clear()

    @rule()
    def save_and_load(self) -> None:
        self.saved = self.directory
        self.directory = Directory(self.saved.capacity_rows, self.policy)
        self.directory.load(self.saved.save())
        for held in self.model.held.values():
            self.directory.pin(np.full(held.pins, held.slot, np.int32))

    @invariant()
    def every_slot_is_free_or_holds_one_row(self) -> None:
        held = self.model.held
        slots = sorted(entry.slot for entry in held.values())
        assert len(set(slots)) == len(slots) == self.directory.rows <= self.directory.capacity_rows
        assert self.directory.occupied().tolist() == slots
        for row, entry in held.items():
            assert (int(self.directory.slot_tables[entry.slot]), int(self.directory.slot_ids[entry.slot])) == row
        assert self.directory.pinned_rows == sum(entry.pins > 0 for entry in held.values())


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_slot_is_lost_or_held_twice(policy: str) -> None:
    machine = type(f"{policy.title()}Machine", (DirectoryMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))
