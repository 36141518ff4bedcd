"""A Directory walked along random requests beside a slow model of its policy: the same rows leave, in the same order.

A model is written on rows and Python lists and does what `tiered_emb.cache.verbs` says, in the same order: of a batch,
hits first, then `miss` for each new row and `victim` for each beyond the free slots, then `insert` for each.
"""

from __future__ import annotations

import csv
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiered_emb.cache import POLICIES, Directory

Row = tuple[int, int]


class Model(ABC):
    """A policy's order of rows."""

    @abstractmethod
    def hit(self, row: Row, count: int) -> None: ...

    def miss(self, row: Row) -> int:
        return 0

    @abstractmethod
    def victim(self, pinned: set[Row]) -> Row: ...

    @abstractmethod
    def insert(self, row: Row, count: int, code: int) -> None: ...

    @abstractmethod
    def remove(self, row: Row) -> None: ...

    @abstractmethod
    def resize(self, capacity: int) -> None: ...


def named(rows: Iterable[Row]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    listed = list(rows)
    return np.array([row[0] for row in listed], np.uint32), np.array([row[1] for row in listed], np.int64)


class Walk:
    """Requests, pins, removals, savings and resizes of a Directory and its model."""

    def __init__(self, policy: str, capacity: int, model: Model, seed: int, ids: int) -> None:
        self.directory, self.model = Directory(capacity, policy), model
        self.random = np.random.default_rng(seed)
        self.held: dict[Row, int] = {}
        self.pinned: set[Row] = set()
        self.ids = ids

    def slots(self, rows: Iterable[Row]) -> NDArray[np.int32]:
        return np.array([self.held[row] for row in rows], np.int32)

    def some_rows(self, most: int) -> list[Row]:
        """Distinct rows, low ids more often, of two tables."""
        ids = np.minimum((self.random.pareto(0.7, self.random.integers(1, most + 1)) * 3).astype(np.int64), self.ids)
        return list(dict.fromkeys((int(self.random.integers(2)), int(id)) for id in ids))

    def request(self, rows: list[Row], counts: list[int]) -> list[Row]:
        """A batch through Directory and model; asserts the same victims and returns them."""
        count_of = dict(zip(rows, counts, strict=True))
        hits = [row for row in rows if row in self.held]
        self.directory.touch(self.slots(hits), np.array([count_of[row] for row in hits], np.int32))
        for row in hits:
            self.model.hit(row, count_of[row])
        self.directory.pin(self.slots(hits))
        new = [row for row in rows if row not in self.held][: self.directory.room()]
        victims = self.admit(new, [count_of[row] for row in new], self.pinned | set(hits))
        self.directory.unpin(self.slots(hits))
        return victims

    def admit(self, new: list[Row], counts: list[int], pinned: set[Row]) -> list[Row]:
        free = self.directory.capacity_rows - self.directory.rows
        codes, expected = [], []
        for i, row in enumerate(new):
            codes.append(self.model.miss(row))
            if i >= free:
                expected.append(self.model.victim(pinned))
        admission = self.directory.admit(*named(new), np.array(counts, np.int32), np.empty(len(new), np.int32))
        victims = list(zip(admission.victim_tables.tolist(), admission.victim_ids.tolist(), strict=True))
        assert victims == expected
        for row in victims:
            del self.held[row]
        for row, slot, count, code in zip(new, admission.slots.tolist(), counts, codes, strict=True):
            self.held[row] = slot
            self.model.insert(row, count, code)
        assert len(set(self.held.values())) == len(self.held) == self.directory.rows
        return victims

    def remove(self) -> None:
        free = [row for row in self.held if row not in self.pinned]
        for i in self.random.permutation(len(free))[: self.random.integers(1, 4)]:
            self.directory.remove(self.slots([free[i]]))
            self.model.remove(free[i])
            del self.held[free[i]]

    def pin_others(self) -> None:
        """Let all pins go, and pin some rows that stay pinned through the batches to come."""
        self.directory.unpin(self.slots(self.pinned))
        rows = list(self.held)
        self.pinned = {rows[i] for i in self.random.permutation(len(rows))[: self.random.integers(0, len(rows) + 1)]}
        self.directory.pin(self.slots(self.pinned))

    def save_and_load(self) -> None:
        """Go on with another Directory that was loaded with what this one saved."""
        other = Directory(self.directory.capacity_rows, self.directory.policy_name)
        other.load(self.directory.save())
        other.pin(self.slots(self.pinned))
        self.directory = other

    def resize(self, most: int) -> None:
        self.directory.unpin(self.slots(self.pinned))
        self.pinned = set()
        capacity = int(self.random.integers(1, most + 1))
        for row in [row for row, slot in sorted(self.held.items(), key=lambda item: item[1]) if slot >= capacity]:
            self.model.remove(row)
            del self.held[row]
        self.directory.resize(capacity)
        self.model.resize(capacity)

    def go(self, steps: int, most_rows: int, most_count: int) -> int:
        """Random steps; returns how many rows left as victims."""
        capacity, left = self.directory.capacity_rows, 0
        for step in range(steps):
            rows = self.some_rows(most_rows if step % 3 else 1)
            left += len(self.request(rows, self.random.integers(1, most_count + 1, len(rows)).tolist()))
            kind = self.random.integers(40)
            if kind < 4:
                self.remove()
            elif kind < 8:
                self.pin_others()
            elif kind == 8:
                self.save_and_load()
            elif kind == 9:
                self.resize(capacity)
            kind, size = POLICIES[self.directory.policy_name], self.directory.capacity_rows
            assert self.directory._policy.memory_bytes <= kind.bytes_per_slot * size + kind.reserve_bytes(size)
        return left


def replayed(model: Model, capacity: int, requests: list[Row]) -> Iterator[bool]:
    """Whether each of single requests misses, by the model alone."""
    held: set[Row] = set()
    for row in requests:
        yield row not in held
        if row in held:
            model.hit(row, 1)
            continue
        code = model.miss(row)
        if len(held) == capacity:
            held.remove(model.victim(set()))
        held.add(row)
        model.insert(row, 1, code)


def missed(policy: str, capacity: int, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of single requests miss, by `Directory.replay`."""
    out = np.empty(len(ids), np.bool_)
    Directory(capacity, policy).replay(np.zeros(len(ids), np.uint32), ids, out)
    return out


def mixed_trace(seed: int, length: int = 6000) -> NDArray[np.int64]:
    """Zipf's law, whose favourites change, mixed with a loop and with ids that come once."""
    random = np.random.default_rng(seed)
    favourites = (random.zipf(1.2, length) + np.arange(length) // 2000 * 50) % 500
    loop, once = 1000 + np.arange(length) % 90, 10_000 + np.arange(length)
    kind = random.integers(0, 10, length)
    return np.where(kind < 6, favourites, np.where(kind < 9, loop, once)).astype(np.int64)


@cache
def trace(loader: Path, name: str) -> NDArray[np.int64]:
    """A trace of ../shared/traces."""
    spec = importlib.util.spec_from_file_location("shared_traces", loader)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return np.asarray(module.dense(name), np.int64)


def golden(require_shared: Callable[[str], Path], name: str, policy: str) -> dict[int, float]:
    """libcachesim's miss ratio of a trace by capacity."""
    with open(require_shared("traces/golden.csv"), newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["trace"], row["policy"]) == (name, policy)]
    return {int(row["cache_objects"]): float(row["miss_ratio"]) for row in rows}


def policy_bytes(policy: str, capacity: int) -> tuple[int, int]:
    """Bytes that a new policy holds, and the most that it says it may."""
    kind = POLICIES[policy]
    return kind(capacity).memory_bytes, kind.bytes_per_slot * capacity + kind.reserve_bytes(capacity)
