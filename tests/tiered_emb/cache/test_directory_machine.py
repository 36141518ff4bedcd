"""A Directory against a slow model in plain Python, over any interleaving of its verbs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from tiered_emb.cache import Directory

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
        self.model = Model(self.policy)

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
        self.directory.touch(self.slots_of(hits), np.array(counts[: len(hits)], np.int32))
        for row, count in zip(hits, counts, strict=False):
            self.model.request(row, count)

    @rule(rows=ROWS)
    def pin(self, rows: list[Row]) -> None:
        hits = self.present(rows)
        self.directory.pin(self.slots_of(hits))
        for row in hits:
            self.model.held[row].pins += 1

    @rule(rows=ROWS)
    def unpin(self, rows: list[Row]) -> None:
        pinned = [row for row in self.present(rows) if self.model.held[row].pins]
        self.directory.unpin(self.slots_of(pinned))
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
        room = self.directory.capacity_rows - len(self.model.held)
        expected = self.model.victims(max(0, len(misses) - room))
        admission = self.directory.admit(*named(misses), wanted, slots)
        victims = zip(admission.victim_tables.tolist(), admission.victim_ids.tolist(), strict=True)
        assert list(victims) == expected
        assert admission.victim_slots.tolist() == self.slots_of(expected).tolist()
        for row in expected:
            del self.model.held[row]
        for row, slot, count in zip(misses, slots.tolist(), counts, strict=False):
            self.model.held[row] = Held(slot, 0, 0)
            self.model.request(row, count)

    @rule(rows=ROWS)
    def remove(self, rows: list[Row]) -> None:
        gone = [row for row in self.present(rows) if not self.model.held[row].pins]
        self.directory.remove(self.slots_of(gone))
        for row in gone:
            del self.model.held[row]

    @rule(capacity=st.integers(1, 16))
    def resize(self, capacity: int) -> None:
        leaving = {row: held for row, held in self.model.held.items() if held.slot >= capacity}
        if any(held.pins for held in leaving.values()):
            with pytest.raises(ValueError, match="pinned"):
                self.directory.resize(capacity)
            return
        gone = self.directory.resize(capacity)
        rows = list(zip(gone.tables.tolist(), gone.ids.tolist(), strict=True))
        assert dict(zip(rows, gone.slots.tolist(), strict=True)) == {row: held.slot for row, held in leaving.items()}
        assert self.directory.capacity_rows == capacity
        for row in leaving:
            del self.model.held[row]

    @precondition(lambda self: len(self.model.held) > 8)
    @rule()
    def clear(self) -> None:
        self.directory.clear()
        self.model.held.clear()

    @invariant()
    def every_slot_is_free_or_holds_one_row(self) -> None:
        held = self.model.held
        slots = sorted(entry.slot for entry in held.values())
        assert len(set(slots)) == len(slots) == self.directory.rows <= self.directory.capacity_rows
        assert self.directory.occupied().tolist() == slots
        for row, entry in held.items():
            assert (int(self.directory.slot_tables[entry.slot]), int(self.directory.slot_ids[entry.slot])) == row
        assert self.directory.pinned_rows == sum(entry.pins > 0 for entry in held.values())


class LfuMachine(DirectoryMachine):
    policy = "lfu"


TestLru = DirectoryMachine.TestCase
TestLfu = LfuMachine.TestCase
TestLru.settings = TestLfu.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
