"""Tiers of odd sizes, budgets that hold, and a Store that fails: cases 19 and 24, and the invariants of moving rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from storage import HeapStore, MemoryStore
from storage.errors import CorruptRowError, StoreFullError
from storage.schema import table_number
from storage.store import RowIds
from tiered_emb import (
    SGD,
    ConfigError,
    JaggedIds,
    Normal,
    RowwiseAdagrad,
    TableConfig,
    TierCapacityError,
    TierConfig,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
)
from tiered_emb.cache import POLICIES, Directory
from tiered_emb.cold import Table
from tiered_emb.engine import row_schema
from tiered_emb.group import TableGroup
from tiered_emb.plan import Bags
from tiered_emb.tier import Bookkeeping, Slab, Tier
from tiered_emb.workers import WorkerPool

SIZES = [0, 1, 7, 1023]


def group_of(top_rows: int, lower_rows: int, store: Any, policy: str = "lru", admission: str = "always") -> TableGroup:
    ref = store.open_table("t", row_schema(3, RowwiseAdagrad(0.1)))
    tiers = [
        Tier(name, Directory(rows, policy), Slab(rows, 3, 1, torch.device("cpu")), Bookkeeping(policy, 1, admission))
        for name, rows in (("hbm", top_rows), ("ddr", lower_rows))
        if rows
    ]
    group = TableGroup(ref.group, ref.schema, store, tiers, WorkerPool(1))
    group.add_table(Table("t", ref.number, Normal(), 5))
    return group


def batch_of(group: TableGroup, ids: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
    return group.dedupe(ids, np.array([0, len(ids)]), np.array([table_number("t")], np.uint32), one_a_bag(len(ids)))


def one_a_bag(ids: int) -> Bags:
    return Bags(torch.arange(ids + 1), None, "sum")


def add_one(group: TableGroup, ids: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """A step that adds 1 to every number of the rows, through the seven verbs."""
    batch = batch_of(group, ids)
    plan = group.plan(batch)
    rows = group.fetch(plan)
    group.commit(plan, rows)
    group.overwrite(plan, group.read_rows(batch.tables, batch.ids) + 1)
    group.release(plan)


def initial(ids: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    rows = np.zeros((len(ids), 4), np.float32)
    weights = np.empty((len(ids), 3), np.float32)
    Normal().fill(5, np.full(len(ids), table_number("t"), np.uint32), ids, weights)
    rows[:, :3] = weights
    return rows


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("lower_rows", SIZES)
@pytest.mark.parametrize("top_rows", SIZES)
def test_case_19_tiers_of_any_size(top_rows: int, lower_rows: int, policy: str) -> None:
    if top_rows == lower_rows == 0:
        with pytest.raises(ConfigError, match="both 0"):
            TierConfig(0, 0)
        return
    group, rng = group_of(top_rows, lower_rows, HeapStore(), policy), np.random.default_rng(1)
    room, counts = group.top.capacity_rows, np.zeros(3000, np.int64)
    for _ in range(60):
        ids = np.unique(rng.integers(0, 3000, min(room, int(rng.integers(1, 200)))))
        add_one(group, ids)
        counts[ids] += 1
    every = np.arange(3000)
    tables = np.full(3000, table_number("t"), np.uint32)
    expected = initial(every)
    for step in range(int(counts.max())):
        expected[counts > step] += 1
    assert np.array_equal(group.read_rows(tables, every), expected)
    group.write_back()
    stored = {int(row_id): row for ids, rows in group_rows(group) for row_id, row in zip(ids, rows, strict=True)}
    assert sorted(stored) == np.flatnonzero(counts).tolist()
    assert all(np.array_equal(stored[row_id], expected[row_id]) for row_id in stored)
    with pytest.raises(TierCapacityError, match=rf"{room + 1} distinct rows .* {(room + 1) * 16} bytes"):
        add_one(group, np.arange(room + 1))
    assert np.array_equal(group.read_rows(tables, every), expected)


def group_rows(group: TableGroup) -> Iterator[tuple[Any, Any]]:
    for rows, data in group.cold._store.scan(group.number):
        yield rows.ids, data.view(np.float32)


def test_case_19_cached_and_uncached_tables_mixed() -> None:
    """One collection over an HBM tier alone beside one over both tiers, trained in one step."""
    tables = [TableConfig("a", None, 4), TableConfig("b", None, 6)]
    one = TieredEmbeddingBagCollection(tables, tiers=TierConfig("2KiB", 0), optimizer=SGD(1.0), seed=1)
    two = TieredEmbeddingBagCollection(tables, tiers=TierConfig("2KiB", "1MiB"), optimizer=SGD(1.0), seed=1)
    with one, two:
        for step in range(20):
            part = (torch.arange(step * 30, step * 30 + 40), torch.ones(40, dtype=torch.int64))
            batch = JaggedIds.from_dict({"a": part, "b": part})
            outs = [*one(batch).values(), *two(batch).values()]
            assert torch.equal(outs[0], outs[2])
            assert torch.equal(outs[1], outs[3])
            sum(out.sum() for out in outs).backward()  # type: ignore[union-attr]
        assert torch.equal(one.rows("b", torch.arange(600)), two.rows("b", torch.arange(600)))


class Watched(HeapStore):
    """Looks at the engine's host memory each time a row passes, which is in the middle of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.bag: TieredEmbeddingBag | None = None
        self.seen = 0

    def _look(self) -> None:
        if self.bag is not None and self.bag._opened:
            self.seen = max(self.seen, host_memory(self.bag))

    def get(self, *args: Any) -> None:
        super().get(*args)
        self._look()

    def put(self, *args: Any) -> None:
        super().put(*args)
        self._look()


def host_memory(bag: TieredEmbeddingBag) -> int:
    """What is really allocated, counted from the arrays."""
    total = 0
    for group in bag._engine.groups.values():
        total += group.moves.memory_bytes
        for tier in group.tiers:
            total += tier.directory.memory_bytes + tier.admission.memory_bytes + 3 * tier.capacity_rows
            total += tier.slab_bytes if tier.name == "ddr" else 0
    return total


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(
    ("hbm", "more"),
    [
        (0, {}),
        ("8KiB", {}),
        (0, {"min_rows": {"embedding": 100}, "max_rows": {f"table {i}": 9 for i in range(100)}}),
        ("8KiB", {"max_rows": {"embedding": 500}, "admission": "tinylfu:1"}),
    ],
)
def test_case_24_the_budget_holds_in_the_middle_of_a_step(hbm: int | str, more: dict[str, Any], policy: str) -> None:
    store, limit = Watched(), 100_000
    tiers = TierConfig(hbm, limit, store, policy, **more)
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=tiers, optimizer=RowwiseAdagrad(0.1), seed=1) as bag:
        store.bag = bag
        rng = np.random.default_rng(2)
        for step in range(200):
            ids = torch.from_numpy(rng.integers(0, 20_000, int(rng.integers(1, 300 if step % 50 else 380))))
            bag(ids.unsqueeze(1)).sum().backward()
            assert host_memory(bag) <= limit
            for tier in bag.stats().tiers:
                assert tier.bytes <= tier.peak_bytes <= tier.capacity_bytes
            assert host_memory(bag) <= tier.bytes
        assert 0 < store.seen <= limit
        assert bag.stats().tiers[-1].evictions > 0


@pytest.mark.parametrize("admission", ["always", "tinylfu", "probability:0.1"])
@pytest.mark.parametrize("rows", [1, 100, 50_000])
def test_case_24_floors_and_admission_count(rows: int, admission: str) -> None:
    kind = Bookkeeping("lru", 1, admission)
    tier = Tier("ddr", Directory(rows, max_rows={7: 1}), Slab(rows, 3, 1, torch.device("cpu")), kind)
    held = tier.directory.memory_bytes + tier.admission.memory_bytes
    held += tier.dirty.nbytes + tier.stored.nbytes + tier.unsaved.nbytes
    assert held <= tier.directory_bytes <= held + 100 + 3 * 4096  # whole pages, and the like
    fits = kind.capacity_for(rows * 60, 16)
    assert kind.bytes_for(fits) + 16 * fits <= rows * 60 or fits == 0
    assert kind.bytes_for(fits + 1) + 16 * (fits + 1) > rows * 60


def test_case_24_the_index_of_the_store_counts(tmp_path: object) -> None:
    tiers = TierConfig(0, "256KiB", f"{tmp_path}/rows")
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=tiers, optimizer=SGD(0.1), seed=1) as bag:
        first = bag.stats().tiers[0].capacity_rows
        for start in range(0, 9_000, 100):
            bag(torch.arange(start, start + 100).unsqueeze(1)).sum().backward()
            (tier,) = bag.stats().tiers
            used = host_memory(bag) + bag.stats().store.memory_bytes
            assert used <= tier.peak_bytes <= tier.capacity_bytes
        assert tier.capacity_rows < first  # the index grew at the cost of rows
        expected = bag.rows(torch.arange(9_000))
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=tiers, optimizer=SGD(0.1), seed=1) as bag:
        assert torch.equal(bag.rows(torch.arange(9_000)), expected)


def test_a_batch_too_large_for_the_budget_leaves_the_tiers_as_they_were() -> None:
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=TierConfig(0, 100_000), optimizer=SGD(0.1), seed=1) as bag:
        bag(torch.arange(100).unsqueeze(1)).sum().backward()
        before = bag.stats()
        with pytest.raises(TierCapacityError, match="ddr_bytes is 100000: raise it to at least"):
            bag(torch.arange(100_000).unsqueeze(1))
        assert bag.stats().tiers == before.tiers


def test_the_budget_that_is_named_is_near_what_does(tmp_path: Path) -> None:
    """The index of a Store does not grow with the budget, as its buffers do; once it was taken for that."""

    def trained(budget: int) -> str:
        tiers = TierConfig(0, budget, str(tmp_path / str(budget)))
        ids = torch.from_numpy(np.random.default_rng(1).integers(0, 1_000_000, (8, 40_000, 1)))
        with TieredEmbeddingBag(None, 8, mode="sum", tiers=tiers, optimizer=SGD(0.1), seed=1) as bag:
            try:
                for step in ids:
                    bag(step).sum().backward()
            except TierCapacityError as error:
                return str(error)
        return ""

    refused = re.search(r"needs (\d+) bytes", trained(10_000_000))
    assert refused is not None
    enough = int(refused[1])
    assert 10_000_000 < enough < 14_000_000
    assert trained(enough) == ""


class Failing(MemoryStore):
    """Refuses puts or gets while told to."""

    def __init__(self) -> None:
        super().__init__()
        self.full = self.corrupt = False

    def get(self, rows: RowIds, out: Any, found: Any) -> None:
        if self.corrupt and len(rows):
            raise CorruptRowError("t", int(rows.ids[0]), "test")
        super().get(rows, out, found)

    def put(self, rows: RowIds, data: Any) -> None:
        if self.full and len(rows):
            raise StoreFullError("no space left")
        super().put(rows, data)


BELOW = [(0, "always"), (5, "always"), (40, "always"), (40, "probability:0.5"), (40, "tinylfu")]


@pytest.mark.parametrize(("lower_rows", "admission"), BELOW)
def test_a_full_store_stops_training_and_loses_nothing(lower_rows: int, admission: str) -> None:
    store = Failing()
    group, rng, expected = (
        group_of(20, lower_rows, store, "lru", admission),
        np.random.default_rng(3),
        initial(np.arange(200)),
    )
    tables = np.full(200, table_number("t"), np.uint32)
    refused = 0
    for step in range(120):
        store.full = step % 10 in (3, 4, 5)
        ids = np.unique(rng.integers(0, 200, 12))
        try:
            plan = group.prepare(batch_of(group, ids))
        except StoreFullError:
            refused += 1
            assert np.array_equal(group.read_rows(tables, np.arange(200)), expected)
            continue
        group.overwrite(plan, group.read_rows(plan.batch.tables, plan.batch.ids) + 1)
        group.release(plan)
        expected[ids] += 1
    assert refused > 5
    group.release_dropped()
    assert group.top.directory.pinned_rows == 0
    store.full = False
    group.write_back()
    assert group.cold.unwritten == 0
    stored = {int(row_id): row for ids, rows in group_rows(group) for row_id, row in zip(ids, rows, strict=True)}
    assert all(np.array_equal(stored[row_id], expected[row_id]) for row_id in stored)


@pytest.mark.parametrize(("lower_rows", "admission"), BELOW)
def test_a_read_that_fails_changes_no_row(lower_rows: int, admission: str) -> None:
    store = Failing()
    group, rng, expected = (
        group_of(20, lower_rows, store, "lru", admission),
        np.random.default_rng(4),
        initial(np.arange(200)),
    )
    tables = np.full(200, table_number("t"), np.uint32)
    failed = 0
    for step in range(120):
        ids = np.unique(rng.integers(0, 200, 12))
        store.corrupt = step % 4 == 3
        try:
            plan = group.prepare(batch_of(group, ids))
        except CorruptRowError:
            failed += 1
            store.corrupt = False
            assert np.array_equal(group.read_rows(tables, np.arange(200)), expected)
            continue
        store.corrupt = False
        group.overwrite(plan, group.read_rows(plan.batch.tables, plan.batch.ids) + 1)
        group.release(plan)
        expected[ids] += 1
    assert failed > 5
    group.release_dropped()
    assert group.top.directory.pinned_rows == 0


@pytest.mark.parametrize("changed", ["t", "u"])
def test_rows_may_change_places_while_they_are_written_back(changed: str) -> None:
    """The tier is lowered in the middle, and rows that floors keep get slots that were looked through already, or those
    of changed rows. What was not changed is not written."""
    group = group_of(0, 40, HeapStore())
    other = group.cold._store.open_table("u", group.schema)
    group.add_table(Table("u", other.number, Normal(), 5))
    group.top.directory.set_shares({table_number("t"): 30}, {})
    us = group.dedupe(np.arange(10), np.array([0, 10]), np.array([other.number], np.uint32), one_a_bag(10))
    for name, batch in (("u", us), ("t", batch_of(group, np.arange(30)))):
        plan = group.prepare(batch)
        if name == changed:
            group.overwrite(plan, group.read_rows(batch.tables, batch.ids) + 1)
        group.release(plan)
    calls = iter([False, True])  # at the second of chunks of five rows

    def make_room(missing: int, unique: int, floored: int) -> bool:
        if next(calls, False) and group.top.capacity_rows == 40:
            group.shrink(group.top, 32)
        return False

    group.make_room = make_room
    group.write_back()
    assert group.top.capacity_rows == 32
    assert not group.top.dirty.any()
    numbers = [int(number) for rows, _ in group.cold._store.scan(group.number) for number in rows.tables]
    assert numbers == [table_number(changed)] * len(numbers)
    stored = {int(row_id): row for ids, rows in group_rows(group) for row_id, row in zip(ids, rows, strict=True)}
    assert sorted(stored) == list(range(30 if changed == "t" else 10))
    expected = group.read_rows(np.full(len(stored), table_number(changed), np.uint32), np.arange(len(stored)))
    assert all(np.array_equal(stored[row_id], row) for row_id, row in enumerate(expected))


def test_closing_over_a_full_store_can_be_tried_again() -> None:
    store = Failing()
    bag = TieredEmbeddingBag(None, 4, mode="sum", tiers=TierConfig(0, "64KiB", store), optimizer=SGD(1.0), seed=1)
    bag(torch.arange(5).unsqueeze(1)).sum().backward()
    expected = bag.rows(torch.arange(5))
    store.full = True
    with pytest.raises(StoreFullError):
        bag.close()
    assert torch.equal(bag.rows(torch.arange(5)), expected)
    store.full = False
    bag.close()
    with TieredEmbeddingBag(
        None, 4, mode="sum", tiers=TierConfig(0, "64KiB", store), optimizer=SGD(1.0), seed=1
    ) as bag:
        assert torch.equal(bag.rows(torch.arange(5)), expected)
