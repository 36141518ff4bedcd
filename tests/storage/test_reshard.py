"""Rows divided anew: every id once, as it was, from any number of shards to any other (case 27 on one process)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from storage import HeapStore, LmdbStore, RowIds, StoreConfigError
from storage.reshard import reshard
from storage.store import Ids, Store, Tables
from storage.testing import Rows, contents, schema_of
from tiered_emb import Adam, RowwiseAdagrad, TierConfig, TieredEmbeddingBag
from tiered_emb.optim import RowRule


def by(count: int):  # type: ignore[no-untyped-def]
    return lambda tables, ids: (ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)) % count


def shards(path: Path, count: int) -> list[LmdbStore]:
    return [LmdbStore(path / f"{count}-{number}", durability="snapshot") for number in range(count)]


def fill(stores: list[LmdbStore], rows: int) -> Rows:
    expected: Rows = {}
    rng = np.random.default_rng(0)
    for name, dim in (("a", 3), ("b", 3), ("c", 7)):
        ids = rng.integers(-(1 << 62), 1 << 62, rows)
        data = rng.integers(0, 256, (rows, 4 * dim), np.uint8)
        home = by(len(stores))(None, ids)
        for number, store in enumerate(stores):
            table = store.open_table(name, schema_of(dim))
            store.put(RowIds.of(table, ids[home == number]), data[home == number])
        expected |= {(table.number, int(id)): row.tobytes() for id, row in zip(ids, data, strict=True)}
    for store in stores:
        store.snapshot("saved")
    return expected


def all_rows(stores: list[Store]) -> Rows:
    found: Rows = {}
    for store in stores:
        for group in (0, 1):
            mine = contents(store, group)
            assert not found.keys() & mine.keys()
            found |= mine
    return found


@pytest.mark.parametrize("to", [1, 3, 8])
def test_case_27_every_id_once_on_any_number_of_shards(tmp_path: Path, to: int) -> None:
    old, new = shards(tmp_path, 2), shards(tmp_path / "new", to)
    expected = fill(old, 3000)
    for store in old:  # what came after the snapshot plays no part
        store.put(RowIds.of(store.open_table("a", schema_of(3)), np.arange(50)), np.zeros((50, 12), np.uint8))
    views, seen = [store.at("saved") for store in old], []
    reshard(views, new, by(to), lambda done, total: seen.append((done, total)))
    assert all_rows(list(new)) == expected
    assert seen[-1] == (9000, 9000)
    for number, store in enumerate(new):
        for table, id in contents(store, 0):
            assert by(to)(None, np.array([id]))[0] == number, table
    for one in [*views, *new, *old]:
        one.close()
    again = shards(tmp_path / "new", to)
    assert all_rows(list(again)) == expected
    for store in again:
        store.close()


def bag(store: LmdbStore, rule: RowRule) -> TieredEmbeddingBag:
    tiers = TierConfig("64KiB", 0, store)
    return TieredEmbeddingBag(None, 4, mode="sum", name="t", tiers=tiers, optimizer=rule, seed=7, device="cpu")


def step(bags: list[TieredEmbeddingBag], ids: torch.Tensor) -> None:
    """A step over shards, one id a bag: each has its ids, and the gradient of its rows."""
    home = torch.from_numpy(by(len(bags))(None, ids.numpy()).astype(np.int64))
    for number, one in enumerate(bags):
        mine = ids[home == number].unsqueeze(1)
        out = one(mine)
        out.backward(torch.sin(out.detach() + mine))


@pytest.mark.parametrize("rule", [RowwiseAdagrad(0.1), Adam(0.05)])
def test_case_27_the_next_step_is_the_same_on_one_shard_and_on_two(tmp_path: Path, rule: RowRule) -> None:
    rng = np.random.default_rng(1)
    batches = [torch.from_numpy(rng.zipf(1.3, 64) % 500) for _ in range(12)]
    (one,), two = shards(tmp_path, 1), shards(tmp_path, 2)
    with bag(one, rule) as whole:
        for batch in batches[:10]:
            step([whole], batch)
        whole.flush()
        steps = whole.steps
        reshard([one], two, by(2))
        parts = [bag(store, rule) for store in two]
        for part in parts:
            part.set_steps(steps)
        for batch in batches[10:]:
            step([whole], batch)
            step(parts, batch)
        whole.flush()
        for part in parts:
            part.flush()
        assert all_rows_of(list(two)) == contents(one, 0)
    for closing in [*parts, one, *two]:
        closing.close()


def all_rows_of(stores: list[LmdbStore]) -> Rows:
    found: Rows = {}
    for store in stores:
        found |= contents(store, 0)
    return found


def test_what_is_refused(tmp_path: Path) -> None:
    old = shards(tmp_path, 2)
    fill(old, 10)
    with HeapStore() as target, pytest.raises(StoreConfigError, match="from 0 to 0"):
        reshard(old, [target], lambda tables, ids: np.ones(len(ids), np.int64))
    with HeapStore() as target, pytest.raises(StoreConfigError, match=r"expected \(\d+,\)"):
        reshard(old, [target], lambda tables, ids: np.zeros(len(ids) + 1, np.int64))
    with HeapStore() as target:
        with pytest.raises(StoreConfigError, match="different"):
            reshard([old[0], old[0]], [target], nowhere)
        with pytest.raises(StoreConfigError, match="target 0 has"):
            reshard(old, [target], nowhere)
    for store in old:
        store.close()


def nowhere(tables: Tables, ids: Ids) -> np.ndarray:
    return np.zeros(len(ids), np.int64)
