"""Engines over their life: where their store is, who shares it, what a budget must be, and stores that fail."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from storage import MemoryStore
from storage.errors import CorruptRowError, StoreFullError
from tiered_emb import (
    SGD,
    Adam,
    JaggedIds,
    RowwiseAdagrad,
    TableConfig,
    TierCapacityError,
    TierConfig,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
)
from tiered_emb.testing import DenseOracle
from tiered_emb.tier import Slab


def ids_of(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def make(tiers: TierConfig, seed: int = 1, name: str = "t") -> TieredEmbeddingBag:
    return TieredEmbeddingBag(None, 4, mode="sum", tiers=tiers, optimizer=SGD(1.0), seed=seed, name=name)


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of a relative path is closed and let go of under the place it was opened at."""
    tiers = TierConfig(0, "1MiB", "rows")
    monkeypatch.chdir(tmp_path)
    bag = make(tiers)
    bag(ids_of(1), ids_of(0)).sum().backward()
    expected = bag.rows(ids_of(1))
    os.chdir("/")
    bag.close()
    os.chdir(tmp_path)
    with make(tiers) as bag:
        assert torch.equal(bag.rows(ids_of(1)), expected)


class Failing(MemoryStore):
    """Raises one error at its n-th get or put, before or after it has done its work, and at the next few."""

    def __init__(self, error: Exception | None, at: int, after: bool) -> None:
        super().__init__()
        self.error, self.calls, self.at, self.after = error, 0, at, after

    def _call(self) -> None:
        self.calls += 1
        if self.error is not None and self.at <= self.calls < self.at + 3:
            raise self.error

    def get(self, *args: Any) -> None:
        if not self.after:
            self._call()
        super().get(*args)
        if self.after:
            self._call()

    def put(self, *args: Any) -> None:
        if not self.after:
            self._call()
        super().put(*args)
        if self.after:
            self._call()


TABLES = [TableConfig("a", None, 4), TableConfig("b", None, 6, mode="mean")]
RULE = RowwiseAdagrad(0.1)
STEPS = 14


def train(store: Failing, hbm: int) -> int:
    """Train beside the oracle, which skips the steps that fail; how many did. Every row must be as the oracle's."""
    oracle = DenseOracle(TABLES, optimizer=RULE, seed=3)
    bags = TieredEmbeddingBagCollection(TABLES, tiers=TierConfig(hbm, 66_000, store), optimizer=RULE, seed=3)
    rng, failed = np.random.default_rng(0), 0
    for _ in range(STEPS):
        parts = {name: (torch.from_numpy(rng.integers(0, 2000, 100)), torch.full((50,), 2)) for name in "ab"}
        batch = JaggedIds.from_dict(parts)
        try:
            outs = bags(batch)
        except type(store.error or Exception()):
            failed += 1
            continue
        expected = oracle(batch)
        assert all(torch.equal(outs[name], expected[name]) for name in "ab")
        for out in (outs, expected):
            (out["a"].square().sum() + out["b"].square().sum()).backward()
        del outs
    store.error = None
    found = {
        (name, row_id): row.tobytes() for name, ids, rows in bags.scan() for row_id, row in zip(ids, rows, strict=True)
    }
    for name, (ids, rows) in oracle.touched().items():
        assert all(found[name, row_id] == row.tobytes() for row_id, row in zip(ids, rows, strict=True))
    for group in bags._engine.groups.values():
        group.release_dropped()
        assert group.top.directory.pinned_rows == 0
    bags.close()
    return failed


@pytest.mark.parametrize("error", [RuntimeError("x"), OSError(5, "EIO"), StoreFullError("full"), CorruptRowError(1, 2)])
@pytest.mark.parametrize("after", [False, True])
def test_a_store_that_raises_anything_anywhere_loses_no_row(error: Exception, after: bool) -> None:
    hbm = 0 if after else 150 * 4 * 12
    whole = Failing(None, 0, after)
    assert train(whole, hbm) == 0
    assert sum(train(Failing(error, at, after), hbm) for at in range(1, whole.calls, 7)) > 5


BUDGETS = [  # dimensions, unique rows of each table in a batch, an LmdbStore below, an HBM tier above
    ([4], [300], False, False),
    ([64], [2600], False, False),
    ([4, 64], [1900, 190], True, False),
    ([1, 1], [1200, 400], False, True),
    ([1, 16], [2900, 2400], True, True),
    ([16, 1], [2700, 100], False, False),
    ([64, 16, 1], [700, 2300, 1000], False, False),
    ([4, 64, 1], [1400, 1300, 1900], True, False),
    ([1, 64, 4], [2400, 2900, 1300], True, True),
]


@pytest.mark.parametrize("rule", [SGD(0.1), Adam(0.1)])
@pytest.mark.parametrize(("dims", "unique", "on_disk", "hbm"), BUDGETS)
def test_the_number_of_bytes_in_the_error_is_enough(
    tmp_path: Path, rule: Any, dims: list[int], unique: list[int], on_disk: bool, hbm: bool
) -> None:
    """One error says what a row of each kind needs, one what the batch needs; then it trains."""
    tables = [TableConfig(f"t{at}", None, dim) for at, dim in enumerate(dims)]
    batch = JaggedIds.from_dict(
        {table.name: (torch.arange(count), ids_of(count)) for table, count in zip(tables, unique, strict=True)}
    )
    budget, messages = 20_000, []
    for attempt in range(3):
        store = tmp_path / str(attempt) if on_disk else None
        tiers = TierConfig(sum(dims) * 3 * 4 * 4000 if hbm else 0, budget, store)
        try:
            with TieredEmbeddingBagCollection(tables, tiers=tiers, optimizer=rule, seed=1) as bags:
                sum(out.sum() for out in bags(batch).values()).backward()  # type: ignore[union-attr]
                assert all(tier.peak_bytes <= tier.capacity_bytes for tier in bags.stats().tiers)
            break
        except TierCapacityError as error:
            messages.append(str(error))
            budget = int(re.search(r"(?:needs|use at least) (\d+) bytes", str(error))[1])  # type: ignore[index]
    else:
        pytest.fail("\n".join(messages))
    assert messages


def test_hbm_bytes_in_the_error_are_enough() -> None:
    """Groups share them."""
    tables = [TableConfig("a", None, 4), TableConfig("b", None, 8)]
    batch = JaggedIds.from_dict({name: (torch.arange(100), ids_of(100)) for name in "ab"})
    with pytest.raises(TierCapacityError, match=r"it needs \d+ bytes") as error:
        TieredEmbeddingBagCollection(tables, tiers=TierConfig("2KiB", 0), optimizer=SGD(0.1))(batch)
    enough = int(re.search(r"it needs (\d+) bytes", str(error.value))[1])  # type: ignore[index]
    with TieredEmbeddingBagCollection(tables, tiers=TierConfig(enough, 0), optimizer=SGD(0.1)) as bags:
        assert bags(batch)["b"].shape == (1, 8)


def test_reading_wide_rows_takes_no_more_memory_than_a_part_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    dim = 1 << 14
    tiers = TierConfig(0, "64MiB")
    with TieredEmbeddingBag(None, dim, mode="sum", tiers=tiers, optimizer=Adam(0.1), seed=1) as bag:
        group, most = bag._lookup.group, 0
        real = group.read_rows

        def watched(tables: Any, ids: Any) -> Any:
            nonlocal most
            rows = real(tables, ids)
            most = max(most, rows.nbytes)
            return rows

        monkeypatch.setattr(group, "read_rows", watched)
        assert bag.rows(torch.arange(100)).shape == (100, dim)
        assert 0 < most <= 1 << 22


def test_a_forward_of_several_look_ups_keeps_the_room_made_for_it(tmp_path: Path) -> None:
    """Planning the first may not push out slots that the second one counts on."""
    tables = [TableConfig("a", None, 64), TableConfig("b", None, 16)]
    tiers = TierConfig(0, 1_900_000, tmp_path / "rows")
    with TieredEmbeddingBagCollection(tables, tiers=tiers, optimizer=RowwiseAdagrad(0.1), seed=1) as bags:
        batch = JaggedIds.from_dict({"a": (torch.arange(988), ids_of(988)), "b": (torch.arange(1062), ids_of(1062))})
        (bags(batch)["a"].sum() + 0).backward()
        assert bags.stats().tiers[0].peak_bytes <= 1_900_000


@pytest.mark.parametrize("budget", [{"ddr_bytes": "256KiB"}, {"hbm_bytes": "64KiB", "ddr_bytes": 0}])
def test_a_module_that_could_not_be_made_leaves_no_group_behind(
    budget: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses the second of its two groups; the first one would keep a part of the budget for nobody."""
    tiers, asked = TierConfig(store=MemoryStore(), **budget), []

    def slab(*args: Any) -> Slab:
        asked.append(args)
        if len(asked) == 2:
            raise MemoryError("not so much")
        return Slab(*args)

    with make(tiers) as bag:
        bag(ids_of(1), ids_of(0)).sum().backward()
        monkeypatch.setattr("tiered_emb.engine.Slab", slab)
        with pytest.raises(TierCapacityError, match="not so much"):
            TieredEmbeddingBagCollection([TableConfig("a", None, 8), TableConfig("b", None, 12)], tiers=tiers)
        assert [group.dim for group in bag._engine.groups.values()] == [4]
        with TieredEmbeddingBag(None, 16, mode="sum", tiers=tiers, name="wide", optimizer=SGD(1.0)) as wide:
            wide(ids_of(*range(50)), ids_of(0)).sum().backward()
            assert all(tier.bytes <= tier.peak_bytes <= tier.capacity_bytes for tier in wide.stats().tiers)
        with pytest.raises(TierCapacityError, match="or use smaller batches"):
            bag(torch.arange(100_000), ids_of(0))
