"""S3-FIFO, 2Q and ARC against plain models, against libcachesim, and against its miss ratios of real traces."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.tiered_emb.cache.models import MODELS, Row
from tiered_emb.cache import POLICIES, Directory
from tiered_emb.cache.queues import HEADS

NAMES = {"s3fifo": "S3FIFO", "2q": "TwoQ", "arc": "ARC"}
ADMITS_FROM = {"s3fifo": 20, "2q": 4, "arc": 1}  # slots below which libcachesim admits nothing
CAPACITIES = [1, 2, 3, 4, 7, 10, 19, 20, 41, 200]


@pytest.fixture(params=sorted(MODELS))
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def traces(capacity: int) -> dict[str, NDArray[np.int64]]:
    """Skewed requests, loops a little larger than the cache, and both in turn, which moves ARC's target to and fro."""
    random, n = np.random.default_rng(capacity), 6000
    zipf = (random.zipf(1.2, n) % (20 * capacity + 5)).astype(np.int64)
    loop = np.arange(n, dtype=np.int64) % (capacity + 1 + capacity // 3)
    phases = np.where(np.arange(n) // (7 * capacity + 3) % 2 == 0, zipf, loop)
    return {"zipf": zipf, "loop": loop, "phases": phases, "even": random.integers(0, 2 * capacity + 1, n)}


def missed(directory: Directory, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of single requests for rows of table 0 miss."""
    out = np.empty(len(ids), np.bool_)
    directory.replay(np.zeros(len(ids), np.uint32), ids, out)
    return out


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_single_requests_miss_as_in_the_model(policy: str, capacity: int) -> None:
    for name, ids in traces(capacity).items():
        model = MODELS[policy](capacity)
        expected = [model.request((0, id)) for id in ids.tolist()]
        np.testing.assert_array_equal(missed(Directory(capacity, policy), ids), expected, name)


@pytest.mark.parametrize(
    ("policy", "capacity"), [(name, slots) for name in NAMES for slots in CAPACITIES if slots >= ADMITS_FROM[name]]
)
def test_single_requests_miss_as_in_libcachesim(policy: str, capacity: int) -> None:
    libcachesim = pytest.importorskip("libcachesim")
    for name, ids in traces(capacity).items():
        cache, request = getattr(libcachesim, NAMES[policy])(capacity, hashpower=10), libcachesim.Request()
        request.obj_size = 1
        expected = np.empty(len(ids), np.bool_)
        for i, id in enumerate(ids.tolist()):
            request.obj_id = id
            expected[i] = not cache.get(request)
        np.testing.assert_array_equal(missed(Directory(capacity, policy), ids), expected, name)


@pytest.mark.parametrize("capacity", [687, 3439])
def test_miss_ratios_are_libcachesims(policy: str, capacity: int, require_shared: Callable[[str], Path]) -> None:
    with open(require_shared("traces/golden.csv"), newline="") as file:
        golden = {(row["trace"], int(row["cache_objects"]), row["policy"]): row for row in csv.DictReader(file)}
    spec = importlib.util.spec_from_file_location("shared_traces", require_shared("traces/load.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ids = np.asarray(module.dense("web12"), np.int64)
    ratio = np.count_nonzero(missed(Directory(capacity, policy), ids)) / len(ids)
    assert f"{ratio:.6f}" == golden["web12", capacity, NAMES[policy]]["miss_ratio"]


class Pair:
    """A Directory and a model that are told the same."""

    def __init__(self, policy: str, capacity: int, seed: int) -> None:
        self.directory, self.model = Directory(capacity, policy), MODELS[policy](capacity)
        self.random = np.random.default_rng(seed)
        self.pinned: list[Row] = []

    def pick(self, rows: list[Row], most: int) -> list[Row]:
        n = int(self.random.integers(0, min(most, len(rows)) + 1))
        return [rows[i] for i in self.random.permutation(len(rows))[:n]]

    def slots(self, rows: list[Row]) -> NDArray[np.int32]:
        found = np.empty(len(rows), np.int32)
        assert self.directory.find(*named(rows), found) == sum(row in self.model for row in rows)
        return found

    def counts(self, n: int) -> NDArray[np.int32]:
        return self.random.choice(np.array([1, 1, 1, 2, 3, 6], np.int32), n)

    def touch(self) -> None:
        hits = self.pick(self.model.rows, 20)
        counts = self.counts(len(hits))
        self.directory.touch(self.slots(hits), counts)
        for row, count in zip(hits, counts.tolist(), strict=True):
            self.model.hit(row, count)

    def repin(self) -> None:
        self.directory.unpin(self.slots(self.pinned))
        self.pinned = self.pick(self.model.rows, self.directory.capacity_rows)
        self.directory.pin(self.slots(self.pinned))

    def admit(self) -> None:
        """As many as there may be room for, many of them ghosts."""
        left = [row for queue in self.model.ghosts for row in queue]
        fresh = [(int(self.random.integers(0, 3)), int(id)) for id in self.random.integers(-500, 500, 100)]
        wanted = [row for row in dict.fromkeys([*self.pick(left, 50), *fresh]) if row not in self.model]
        rows = self.pick(wanted, self.directory.room())
        counts, slots = self.counts(len(rows)), np.empty(len(rows), np.int32)
        expected = self.model.admit(rows, counts.tolist(), set(self.pinned))
        admission = self.directory.admit(*named(rows), counts, slots)
        gone = zip(admission.victim_tables.tolist(), admission.victim_ids.tolist(), strict=True)
        assert list(gone) == expected

    def remove(self) -> None:
        gone = self.pick([row for row in self.model.rows if row not in self.pinned], 5)
        self.directory.remove(self.slots(gone))
        for row in gone:
            self.model.remove(row)

    def resize(self) -> None:
        self.directory.unpin(self.slots(self.pinned))
        self.pinned = []
        capacity = int(self.random.integers(1, 2 * self.directory.capacity_rows + 2))
        gone = self.directory.resize(min(capacity, 60))
        for row in zip(gone.tables.tolist(), gone.ids.tolist(), strict=True):
            self.model.remove(row)
        self.model.resize(self.directory.capacity_rows)

    def save_and_load(self) -> None:
        twin = Directory(self.directory.capacity_rows, self.directory.policy_name)
        twin.load(self.directory.save())
        twin.pin(self.slots(self.pinned))
        self.directory = twin

    def compare(self) -> None:
        """Every row is in the same place of the same queue, and the lengths that the policy counts are true."""
        state = self.directory._policy.state
        names = list(zip(self.directory.slot_tables.tolist(), self.directory.slot_ids.tolist(), strict=True))
        for head, queue in enumerate(self.model.queues):
            rows, node = [], int(state.links[2 * head + 1])
            while node >= HEADS:
                rows.append(names[node - HEADS])
                node = int(state.links[2 * node + 1])
            assert rows == list(queue)
            assert state.ledger[head] == len(rows)
        assert state.ghost_ledger[2:].tolist() == [len(ghosts) for ghosts in self.model.ghosts]
        assert self.directory.rows == len(self.model.rows)


def named(rows: list[Row]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    return np.array([row[0] for row in rows], np.uint32), np.array([row[1] for row in rows], np.int64)


@pytest.mark.parametrize("capacity", [1, 2, 3, 8, 25, 60])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_batches_with_pins_take_the_models_victims(policy: str, capacity: int, seed: int) -> None:
    pair = Pair(policy, capacity, seed)
    verbs = [pair.touch, pair.repin, pair.admit, pair.remove, pair.resize, pair.save_and_load]
    for verb in pair.random.choice(6, 400, p=[0.3, 0.15, 0.4, 0.09, 0.03, 0.03]):
        verbs[verb]()
        pair.compare()


def test_a_batch_of_all_slots_evicts_every_row(policy: str) -> None:
    directory, slots = Directory(50, policy), np.empty(50, np.int32)
    for first in range(0, 500, 50):
        ids = np.arange(first, first + 50)
        admission = directory.admit(np.zeros(50, np.uint32), ids, np.ones(50, np.int32), slots)
        assert sorted(admission.victim_ids.tolist()) == (list(range(first - 50, first)) if first else [])


def test_pins_are_passed_once_a_batch(policy: str) -> None:
    """The cursor says where to go on: from the start for each victim it would be 10^11 steps, past the timeout."""
    n, free = 1_000_000, 200_000
    directory, slots = Directory(n, policy), np.empty(n, np.int32)
    zeros, ones = np.zeros(n, np.uint32), np.ones(n, np.int32)
    directory.admit(zeros, np.arange(n), ones, slots)
    directory.touch(slots[::3].copy(), ones[::3] + 1)
    directory.pin(slots[: n - free])
    admission = directory.admit(zeros[:free], np.arange(n, n + free), ones[:free], np.empty(free, np.int32))
    assert sorted(admission.victim_ids.tolist()) == list(range(n - free, n))


def test_no_victim_if_none_may_leave(policy: str) -> None:
    directory, slots = Directory(30, policy), np.empty(30, np.int32)
    zeros, ones = np.zeros(30, np.uint32), np.ones(30, np.int32)
    directory.admit(zeros, np.arange(30), ones, slots)
    directory.touch(slots[::2].copy(), ones[::2] + 1)
    directory.pin(slots)
    made, codes, out = directory._policy, np.zeros(5, np.int8), np.empty(5, np.int32)
    assert made.make_room(directory._guard, zeros[:5], np.arange(30, 35), 0, codes, out) == 0
    directory.unpin(slots)
    assert made.make_room(directory._guard, zeros, np.arange(30, 60), 0, np.zeros(30, np.int8), slots) == 30
    assert sorted(slots.tolist()) == list(range(30))


def test_s3fifo_looks_again_at_main_for_what_small_moved_there() -> None:
    """All of main is pinned and was looked at, and the only row of small has earned its move."""
    directory, slots, one = Directory(20, "s3fifo"), np.empty(20, np.int32), np.ones(1, np.int32)
    zeros, slot = np.zeros(20, np.uint32), np.empty(1, np.int32)
    directory.admit(zeros, np.arange(20), np.ones(20, np.int32), slots)  # 0 and 1 in small, 18 rows in main
    directory.touch(slots[:1], one + 1)
    assert directory.admit(zeros[:1], np.array([20]), one, slot).victim_ids.tolist() == [1]  # 0 moves
    directory.touch(slot, one + 1)
    directory.pin(np.delete(slots, 1))
    assert directory.admit(zeros[:1], np.array([21]), one, slot).victim_ids.tolist() == [20]


@pytest.mark.parametrize("capacity", [1, 2, 9, 10, 11, 100, 12345])
def test_memory_is_at_most_what_is_said(policy: str, capacity: int) -> None:
    kind = POLICIES[policy]
    made = kind(capacity)
    assert made.memory_bytes <= capacity * kind.bytes_per_slot + kind.reserve_bytes(capacity)
    made.resize(capacity + 1)
    made.resize(capacity)
    assert made.memory_bytes <= capacity * kind.bytes_per_slot + kind.reserve_bytes(capacity)


def test_saved_state_of_another_capacity_is_refused(policy: str) -> None:
    with pytest.raises(ValueError, match="not"):
        Directory(10, policy).load(Directory(11, policy).save())
