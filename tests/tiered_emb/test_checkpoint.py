"""Checkpoints: what a load brings back, over which stores; what is refused; what crashes leave; going back."""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from storage import HeapStore, LmdbStore, MemoryStore, RowIds, StoreConfigError
from storage.errors import StoreFullError
from tiered_emb import (
    SGD,
    Adagrad,
    Adam,
    CheckpointError,
    ConfigError,
    ModuleClosedError,
    PlanReleasedError,
    TierConfig,
    TieredEmbeddingBag,
    list_checkpoints,
    load_checkpoint,
    prefetch,
    save_checkpoint,
)
from tiered_emb.budget import HostBudget
from tiered_emb.checkpoint_files import Folder
from tiered_emb.optim import RowRule

IDS = torch.arange(3000)
BUDGET = "512KiB"


class Model(nn.Module):
    """Two tiered modules of different row rules over one store, and a dense part with a dropout."""

    def __init__(self, tiers: TierConfig, rule: RowRule | None = None, seed: int = 1, dim: int = 4) -> None:
        super().__init__()
        rule = Adam(0.05) if rule is None else rule
        self.users = TieredEmbeddingBag(None, dim, mode="sum", tiers=tiers, optimizer=rule, seed=seed, name="users")
        self.items = TieredEmbeddingBag(None, 3, mode="sum", tiers=tiers, optimizer=SGD(0.1), seed=2, name="items")
        self.dropout = nn.Dropout(0.2)
        self.top = nn.Linear(dim + 3, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.dropout(torch.cat([self.users(ids), self.items(ids // 3)], 1)))
        return out

    def close(self) -> None:
        self.users.close()
        self.items.close()

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.users.rows(IDS), self.items.rows(IDS)

    def all_rows(self) -> list[tuple[str, int, bytes]]:
        """Every stored row with its optimizer state."""
        found = []
        for module in (self.users, self.items):
            for name, ids, rows in module.scan():
                found += [(name, int(id), row.tobytes()) for id, row in zip(ids, rows, strict=True)]
        return sorted(found)


def holder(**modules: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


class Loader:
    """Batches drawn at random beforehand; knows where it is."""

    def __init__(self, count: int = 40) -> None:
        rng = np.random.default_rng(0)
        self.batches = [torch.from_numpy(rng.zipf(1.2, (60, 2)) % 3000) for _ in range(count)]
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Run:
    """A model, its optimizer and its loader."""

    def __init__(self, tiers: TierConfig, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Model(tiers, **options)
        self.optimizer = torch.optim.Adam(self.model.top.parameters(), 0.01)
        self.loader = Loader()

    def step(self, ids: torch.Tensor) -> float:
        loss = self.model(ids).sigmoid().square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def steps(self, count: int) -> list[float]:
        return [self.step(batch) for _, batch in zip(range(count), self.loader, strict=False)]

    def save(self, path: Path, tag: str | None = None, **more: Any) -> Any:
        return save_checkpoint(path, self.model, self.optimizer, self.loader, tag, **more)

    def load(self, path: Path, tag: str | None = None) -> Any:
        return load_checkpoint(path, self.model, self.optimizer, self.loader, tag)

    def state(self) -> Any:
        weights = {name: value.tolist() for name, value in self.model.top.state_dict().items()}
        return self.model.all_rows(), weights, self.loader.at, self.model.users.steps, self.model.items.steps

    def abandon(self) -> None:
        """As if the process had died."""
        for module in (self.model.users, self.model.items):
            module._abandon()


def on_disk(tmp_path: Path, budget: str = BUDGET, **more: Any) -> TierConfig:
    return TierConfig(0, budget, tmp_path / "rows", **more)


# ---- what a load brings back


@pytest.mark.parametrize("hbm", [0, 40_000])
@pytest.mark.parametrize("again", ["the same process", "another process", "a larger budget", "in memory", "elsewhere"])
def test_training_goes_on_to_the_same_bits(tmp_path: Path, again: str, hbm: int) -> None:
    """Losses, rows with their state, dense part, generators and loader of a run that was interrupted, and one that was
    not; whatever the store that it goes on over."""
    saves, tiers = tmp_path / "saves", TierConfig(hbm, BUDGET, tmp_path / "rows")
    run = Run(tiers)
    run.steps(12)
    saved = run.save(saves, extra={"losses": torch.tensor([1.5])})
    assert (saved.tag, saved.step, saved.number) == ("step-12", 12, 1)
    draws = torch.rand(1).item(), np.random.rand(), random.random()
    expected = run.steps(15), run.state()
    if again != "the same process":
        run.abandon()
        over = {
            "another process": tiers,
            "a larger budget": TierConfig(hbm, "4MiB", tmp_path / "rows", policy="lfu"),
            "in memory": TierConfig(hbm, "1MiB"),
            "elsewhere": TierConfig(hbm, BUDGET, tmp_path / "others"),
        }
        run = Run(over[again])
        run.step(torch.tensor([[7, 8], [9, 2900]]))  # something else, which must leave no trace
    found = run.load(saves)
    assert torch.equal(found.extra["losses"], torch.tensor([1.5]))
    assert (found.tag, found.reset, found.dropped) == ("step-12", (), ())
    assert bool(found.cold) == (again in ("a larger budget", "in memory")), found.cold
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == draws
    assert (run.steps(15), run.state()) == expected
    run.model.close()


def test_an_older_checkpoint_is_gone_back_to_and_newer_ones_go(tmp_path: Path) -> None:
    run = Run(on_disk(tmp_path))
    states = []
    for _ in range(3):
        run.steps(4)
        run.save(tmp_path / "saves")
        states.append(run.state())
    run.steps(3)
    found = run.load(tmp_path / "saves", "step-4")
    assert run.state() == states[0]
    assert found.dropped == ("step-8", "step-12")
    assert [one.tag for one in list_checkpoints(tmp_path / "saves")] == ["step-4"]
    with pytest.raises(CheckpointError, match=r"no checkpoint 'step-8'; the newest there are: step-4"):
        run.load(tmp_path / "saves", "step-8")
    with pytest.raises(CheckpointError, match=r"no checkpoint '../saves/step-4'; the newest there are: step-4"):
        run.load(tmp_path / "saves", "../saves/step-4")
    run.model.close()


def test_rows_that_the_store_refused_are_forgotten_too(tmp_path: Path) -> None:
    run = Run(on_disk(tmp_path, "256KiB"))
    run.steps(5)
    run.save(tmp_path / "saves")
    state = run.state()
    group, refused = run.model.users._lookup.group, []
    put = group.cold._store.put

    def refuse(*arguments: Any) -> None:
        refused.append(1)
        raise StoreFullError("no room")

    group.cold._store.put = refuse
    table = run.model.users.engine.tables["users"].number
    with pytest.raises(StoreFullError):
        group.put_cold(np.full(2, table, np.uint32), np.array([1, 2]), np.ones((2, group.row_width), np.float32))
    group.cold._store.put = put
    assert refused and group.cold.unwritten == 2
    run.load(tmp_path / "saves")
    assert group.cold.unwritten == 0
    assert run.state() == state
    run.model.close()


def test_modules_in_memory_and_on_disk_go_into_one_checkpoint(tmp_path: Path) -> None:
    def make() -> nn.ModuleList:
        stores = (tmp_path / "rows", None, MemoryStore(), HeapStore())
        return nn.ModuleList(
            TieredEmbeddingBag(None, 4, mode="sum", tiers=TierConfig(0, "256KiB", store), seed=1, name="same")
            for store in stores
        )

    def train(model: nn.ModuleList, times: int) -> None:
        for at, one in enumerate(model):
            one(torch.arange(50).unsqueeze(1) + at).square().sum().mul(times).backward()

    def rows(model: nn.ModuleList) -> list[bytes]:
        return [one.rows(torch.arange(100)).numpy().tobytes() for one in model]

    model = make()
    train(model, 1)
    save_checkpoint(tmp_path / "saves", model, tag="one")
    first = rows(model)
    train(model, 2)
    save_checkpoint(tmp_path / "saves", model, tag="two")
    second = rows(model)
    assert len(set(first)) == 4 and first != second
    assert {path.name for path in (tmp_path / "saves").iterdir()} >= {"rows", "rows-2", "rows-3"}
    train(model, 3)
    load_checkpoint(tmp_path / "saves", model, tag="two")
    assert rows(model) == second
    load_checkpoint(tmp_path / "saves", model, tag="one")
    assert rows(model) == first
    model[0]._abandon()
    again = make()
    found = load_checkpoint(tmp_path / "saves", again)
    assert (found.tag, rows(again), found.cold) == ("one", first, ())
    save_checkpoint(tmp_path / "saves", again)  # of rows that are fewer than those of "two"
    with LmdbStore(tmp_path / "saves" / "rows", read_only=True) as store:
        assert store.stats().rows == 50
    again[0].close()


def test_rows_deleted_since_are_there_again_and_rows_made_since_are_not(tmp_path: Path) -> None:
    run = Run(on_disk(tmp_path))
    run.steps(6)
    run.save(tmp_path / "saves")
    state = run.state()
    ref = run.model.users.engine.tables["users"]
    some = next(iter(run.model.users.engine.store.scan(ref.group)))[0]
    run.model.users.engine.store.delete(some)
    run.step(torch.full((2, 2), 2_999_999_999))
    run.load(tmp_path / "saves")
    assert run.state() == state
    run.model.close()


def test_another_row_rule_starts_from_zero_state_with_a_warning(tmp_path: Path) -> None:
    run = Run(on_disk(tmp_path))
    run.steps(6)
    run.save(tmp_path / "saves")
    weights = run.model.rows()
    run.model.close()
    again = Run(TierConfig(0, BUDGET, tmp_path / "other"), rule=Adagrad(0.1))
    with pytest.warns(UserWarning, match=r"tables users have another row rule than in checkpoint 'step-6'"):
        found = again.load(tmp_path / "saves")
    assert found.reset == ("users",)
    assert all(map(torch.equal, again.model.rows(), weights))
    assert (again.model.users.steps, again.model.items.steps) == (0, 6)
    assert all(not rows[:, 4:].any() for _, _, rows in again.model.users.scan())
    again.model.close()
    with TieredEmbeddingBag(None, 3, optimizer=SGD(0.1), tiers=TierConfig(0, BUDGET, tmp_path / "other"), name="items"
                            ) as items:  # fmt: skip
        assert items.steps == 6  # what was copied is durable with its progress


def test_the_learning_rate_of_the_rule_comes_back(tmp_path: Path) -> None:
    run = Run(on_disk(tmp_path))
    run.model.users.optimizer.param_groups[0]["lr"] = 0.003
    run.steps(2)
    run.save(tmp_path / "saves")
    run.model.close()
    again = Run(on_disk(tmp_path))
    again.load(tmp_path / "saves")
    assert (again.model.users.rule.lr, again.model.items.rule.lr) == (0.003, 0.1)
    again.model.close()


def test_a_prefetched_loop_saves_the_position_of_its_batch(tmp_path: Path) -> None:
    def ids(batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"users": batch, "items": batch // 3}

    run, losses = Run(on_disk(tmp_path, "2MiB")), []
    with prefetch(run.loader, run.model, ids, lookahead=3) as batches:
        for batch in batches:
            losses.append(run.step(batch))
            if len(losses) == 9:
                save_checkpoint(tmp_path / "saves", run.model, run.optimizer, batches)
                assert run.loader.at > 9
        assert batches.state_dict() == {"at": 40}
    expected = run.state()
    run.model.close()
    again = Run(on_disk(tmp_path, "2MiB"))
    again.load(tmp_path / "saves")
    assert again.loader.at == 9
    with prefetch(again.loader, again.model, ids, lookahead=1) as batches:
        assert [again.step(batch) for batch in batches] == losses[9:]
    assert again.state() == expected
    again.model.close()


def test_a_load_in_mid_loop_lets_go_of_what_is_prepared(tmp_path: Path) -> None:
    run = Run(on_disk(tmp_path, "2MiB"))
    run.steps(3)
    run.save(tmp_path / "saves")
    expected = run.steps(5)
    run.load(tmp_path / "saves")
    losses = []
    with prefetch(run.loader, run.model, lambda batch: {"users": batch, "items": batch // 3}) as batches:
        for batch in batches:
            if len(losses) == 2:  # later batches are prepared with rows of a step that will not have been
                losses.append(run.step(batch))
                load_checkpoint(tmp_path / "saves", run.model, run.optimizer)
                break
            losses.append(run.step(batch))
    run.loader.at = 3
    torch.set_rng_state(torch.load(tmp_path / "saves/step-3/dense.pt", weights_only=True)["random"]["torch"])
    assert run.steps(5) == expected
    run.model.close()


def test_tiers_without_room_for_their_former_size_start_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(on_disk(tmp_path))
    run.steps(5)
    run.save(tmp_path / "saves")
    expected = run.steps(5)
    for group in run.model.users.engine.groups.values():
        group.shrink(group.top, group.top.capacity_rows // 2)
    before = [group.top.capacity_rows for group in run.model.users.engine.groups.values()]
    with monkeypatch.context() as patch:
        patch.setattr(HostBudget, "charged_bytes", lambda self: self.limit_bytes + 1)
        found = run.load(tmp_path / "saves")
    assert [group.top.capacity_rows for group in run.model.users.engine.groups.values()] == before
    assert [reason.split(",")[0] for reason in found.cold] == [f"ddr tier: rows of capacity {rows}" for rows in before]
    assert run.steps(5) == expected
    found = run.load(tmp_path / "saves")
    assert found.cold == ()
    (tier,) = run.model.users.stats().tiers
    assert tier.bytes <= tier.capacity_bytes
    assert [group.top.capacity_rows for group in run.model.users.engine.groups.values()] > before
    assert run.steps(5) == expected
    run.model.close()


def test_after_a_rollback_the_index_is_expected_to_grow_by_new_rows_again(tmp_path: Path) -> None:
    """Rows that only initialisers have made count against the budget, whatever the store had taken before."""
    tiers = TierConfig(0, "1MiB", tmp_path / "rows")
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=tiers, optimizer=SGD(1.0), seed=1) as bag:
        bag(torch.arange(500).unsqueeze(1)).sum().backward()
        bag.snapshot("then")
        bag(torch.arange(1000).unsqueeze(1)).sum().backward()
        bag.rollback("then")
        bag(torch.arange(900).unsqueeze(1)).sum().backward()
        assert bag.engine._budget._unstored_rows() == 400


# ---- as little as possible


def test_a_second_save_without_a_step_writes_no_row(tmp_path: Path) -> None:
    run = Run(on_disk(tmp_path))
    run.steps(6)
    run.save(tmp_path / "saves")
    written = run.model.users.stats().store.rows_written
    assert run.save(tmp_path / "saves").tag == "step-6-2"
    assert run.model.users.stats().store.rows_written == written
    run.step(torch.tensor([[1, 2]]))
    run.save(tmp_path / "saves")
    assert run.model.users.stats().store.rows_written == written + 3  # users 1 and 2, item 0
    run.load(tmp_path / "saves", "step-6")
    assert run.model.users.stats().store.rows_written == written + 3
    run.model.close()


def test_keep_last_drops_older_ones_with_their_snapshots(tmp_path: Path) -> None:
    run = Run(on_disk(tmp_path))
    for _ in range(4):
        run.steps(2)
        saved = run.save(tmp_path / "saves", keep_last=2)
    assert saved.dropped == ("step-4",)
    assert [one.tag for one in list_checkpoints(tmp_path / "saves")] == ["step-6", "step-8"]
    assert [one.name.rpartition(":")[2] for one in run.model.users.engine.store.snapshots()] == ["step-6", "step-8"]
    assert sorted(path.name for path in (tmp_path / "saves").iterdir()) == ["checkpoints.json", "step-6", "step-8"]
    run.model.close()


@pytest.mark.parametrize("failing", ["drop_snapshot", "rename"])
@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_is_whole_where_older_ones_cannot_be_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool, failing: str
) -> None:
    run, saves = Run(on_disk(tmp_path)), tmp_path / "saves"
    run.save(saves)
    run.steps(2)

    def full(*_: object) -> None:
        raise StoreFullError("no room")

    def save() -> Any:
        saved: Any = run.save(saves, keep_last=1, background=background)
        return saved.wait() if background else saved

    with monkeypatch.context() as patch:
        if failing == "rename":
            patch.setattr(Folder, "withdraw", full)
        else:
            patch.setattr(LmdbStore, "drop_snapshot", full)
        with pytest.warns(UserWarning, match="the checkpoint is whole, but .* no room"):
            saved = save()
        assert saved.tag == "step-2"
        assert saved.dropped == (() if failing == "rename" else ("step-0",))
    run.steps(2)
    run.save(saves, keep_last=1)
    assert [one.name.rpartition(":")[2] for one in run.model.users.engine.store.snapshots()] == ["step-4"]
    run.model.close()


def test_two_directories_and_snapshots_of_others_do_not_meet(tmp_path: Path) -> None:
    run = Run(on_disk(tmp_path))
    run.steps(2)
    run.save(tmp_path / "a", "best")
    run.model.users.snapshot("mine")
    run.steps(2)
    run.save(tmp_path / "b", "best", keep_last=1)
    state = run.state()
    with pytest.raises(CheckpointError, match=r"newer snapshots than the checkpoint \('mine', .*: drop them first"):
        run.load(tmp_path / "a")
    assert run.state() == state
    run.load(tmp_path / "b")
    assert run.state() == state
    run.model.close()


# ---- crashes


class Crash(BaseException):
    pass


@pytest.mark.parametrize("keep_last", [None, 1])
@pytest.mark.parametrize("memory", [False, True])
def test_a_crash_anywhere_leaves_a_checkpoint_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_last: int | None, memory: bool
) -> None:
    """Before every fsync, rename, removal and snapshot of a save, in turn."""
    for at in range(100):
        place = tmp_path / str(at)
        tiers = TierConfig(0, BUDGET, None if memory else place / "rows")
        run, saves = Run(tiers), place / "saves"
        run.steps(2)
        run.save(saves)
        first = run.state()
        run.steps(2)
        calls = [at]

        def dies(call: Callable[..., Any], calls: list[int] = calls) -> Callable[..., Any]:
            def counted(*arguments: Any, **more: Any) -> Any:
                calls[0] -= 1
                if calls[0] == -1:
                    raise Crash
                return call(*arguments, **more)

            return counted

        with monkeypatch.context() as patch:
            for where, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (shutil, "rmtree")):
                patch.setattr(where, name, dies(getattr(where, name)))
            for name in ("snapshot", "drop_snapshot"):
                patch.setattr(LmdbStore, name, dies(getattr(LmdbStore, name)))
            with suppress(Crash):
                run.save(saves, keep_last=keep_last)
        second = run.state()
        run.abandon()
        there = [one.tag for one in list_checkpoints(saves)]
        again = Run(tiers)
        found = again.load(saves)
        assert found.tag == there[-1]
        assert again.state() == {"step-2": first, "step-4": second}[found.tag]
        again.steps(1)
        again.save(saves, "after")
        tags = {one.tag for one in list_checkpoints(saves)}
        names = {path.name for path in saves.iterdir()} - {"checkpoints.json", "rows", "rows-2"}
        assert names == tags
        if not memory:
            kept = {one.name.rpartition(":")[2] for one in again.model.users.engine.store.snapshots()}
            assert kept == tags
        again.model.close()
        if calls[0] >= 0:
            assert at >= 8
            return
    raise AssertionError("a save makes fewer calls than that")


def test_a_copy_takes_no_checkpoint_along_whatever_its_tag(tmp_path: Path) -> None:
    then = Run(TierConfig(0, BUDGET, tmp_path / "then"))
    then.steps(4)
    then.save(tmp_path / "saves", "then")
    then.model.close()
    run = Run(on_disk(tmp_path))
    run.steps(7)
    run.save(tmp_path / "saves", "loading")
    state = run.state()
    run.load(tmp_path / "saves", "then")
    assert run.load(tmp_path / "saves", "loading").tag == "loading"
    assert run.state() == state
    run.model.close()


def test_a_copy_that_fails_leaves_the_module_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(on_disk(tmp_path))
    run.steps(6)
    run.save(tmp_path / "saves")
    run.model.close()
    again = Run(TierConfig(0, BUDGET, tmp_path / "other"))
    again.steps(3)
    state, put = again.state(), LmdbStore.put
    calls = [0]

    def fail(self: LmdbStore, *arguments: Any) -> None:
        calls[0] += 1
        if calls[0] > 1:
            raise StoreFullError("no room")
        put(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LmdbStore, "put", fail)
        with pytest.raises(StoreFullError):
            again.load(tmp_path / "saves")
    assert calls[0] == 2
    assert again.state() == state
    again.model.close()


def test_a_rollback_that_fails_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(on_disk(tmp_path))
    run.steps(2)
    run.save(tmp_path / "saves")
    run.steps(2)
    run.save(tmp_path / "saves")
    state = run.state()

    def fail(self: LmdbStore, *arguments: Any, **more: Any) -> None:
        raise StoreFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(LmdbStore, "rollback", fail)
        with pytest.raises(StoreFullError):
            run.load(tmp_path / "saves", "step-2")
    assert run.state() == state
    assert [one.tag for one in list_checkpoints(tmp_path / "saves")] == ["step-2", "step-4"]
    run.model.close()


# ---- refusals


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    run = Run(on_disk(tmp_path))
    run.steps(4)
    run.save(tmp_path / "saves")
    run.model.close()
    return tmp_path / "saves" / "step-4"


def refused(tmp_path: Path, message: str, run: Run | None = None, **what: Any) -> None:
    """The load is, and has changed nothing."""
    run = Run(on_disk(tmp_path)) if run is None else run
    run.step(torch.tensor([[1, 2]]))
    state, draws = run.state(), torch.get_rng_state()
    arguments = {"model": run.model, "optimizer": run.optimizer, "loader": run.loader} | what
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load_checkpoint(tmp_path / "saves", **arguments)
    assert run.state() == state
    assert torch.equal(torch.get_rng_state(), draws)
    run.model.close()


@pytest.mark.parametrize("name", ["dense.pt", "tiers.npz"])
def test_a_file_with_one_bit_changed_or_missing_is_refused(tmp_path: Path, saved: Path, name: str) -> None:
    data = bytearray((saved / name).read_bytes())
    data[len(data) // 2] ^= 1
    (saved / name).write_bytes(data)
    refused(tmp_path, rf"{name} is damaged: it has {len(data)} bytes with SHA-256 .* put it back from a copy")
    (saved / name).unlink()
    refused(tmp_path, rf"{name} is missing")


def test_a_damaged_or_newer_manifest_is_refused(tmp_path: Path, saved: Path) -> None:
    file = saved / "manifest.json"
    text = file.read_text()
    file.write_text(text.replace('"steps": 4', '"steps": 5', 1))
    refused(tmp_path, r"manifest.json is damaged: its checksum is")
    file.write_text(json.dumps(json.loads(text) | {"version": 2}))
    refused(tmp_path, r"has version 2: this program reads version 1")
    file.write_text("{")
    refused(tmp_path, r"is damaged: it is not JSON")
    file.write_text("{}")
    refused(tmp_path, r"is not the manifest of a checkpoint")


def test_a_snapshot_that_was_dropped_is_said_and_passed_over(tmp_path: Path, saved: Path) -> None:
    run = Run(on_disk(tmp_path))
    run.load(tmp_path / "saves")
    run.steps(2)
    run.save(tmp_path / "saves")
    store = run.model.users.engine.store
    assert isinstance(store, LmdbStore)
    store.drop_snapshot(store.snapshots()[-1].name)
    assert [one.tag for one in list_checkpoints(tmp_path / "saves")] == ["step-4"]
    with pytest.raises(
        CheckpointError, match=r"no snapshot 'checkpoint:\w+:step-6' any more .*'checkpoint:\w+:step-4'"
    ):
        run.load(tmp_path / "saves", "step-6")
    with pytest.warns(UserWarning, match="passed over, because their snapshots were dropped: step-6"):
        assert run.load(tmp_path / "saves").tag == "step-4"
    store.drop_snapshot(store.snapshots()[-1].name)
    with pytest.raises(CheckpointError, match=r"has no checkpoint to load; snapshots of step-4.* were dropped"):
        run.load(tmp_path / "saves")
    run.model.close()


def test_rows_that_are_nowhere_and_another_store_in_their_place(tmp_path: Path, saved: Path) -> None:
    def elsewhere() -> Run:
        return Run(TierConfig(0, BUDGET))

    (tmp_path / "rows").rename(tmp_path / "moved")
    refused(tmp_path, r"were in the store .*rows, which is neither there nor at .*: bring it back", elsewhere())
    LmdbStore(tmp_path / "rows").close()
    refused(tmp_path, r"rows is store .*, but the rows of the checkpoint are in .*: put that store back", elsewhere())
    refused(tmp_path, r"rows is store .*, but the rows of the checkpoint are in .*: put that store back")


def test_another_model_is_refused(tmp_path: Path, saved: Path) -> None:
    elsewhere = TierConfig(0, BUDGET, tmp_path / "other")
    refused(
        tmp_path, r"table 'users' has seed 3, in the checkpoint 1: make its module with seed 1", Run(elsewhere, seed=3)
    )
    shutil.rmtree(tmp_path / "other")
    refused(tmp_path, r"table 'users' has dimension 5, in the checkpoint 4", Run(elsewhere, dim=5))
    shutil.rmtree(tmp_path / "other")
    run = Run(elsewhere)
    run.model.other = nn.Linear(1, 1)
    refused(tmp_path, r"only the model has 'other.bias' beside the rows", run)
    run = Run(elsewhere)
    run.model.top = nn.Linear(7, 2)
    refused(tmp_path, r"'top.weight' has shape \(2, 7\), in checkpoint 'step-4' \(1, 7\)", run)
    run = Run(elsewhere)
    refused(
        tmp_path,
        r"only the checkpoint has a tiered module 'items'",
        run,
        model=nn.ModuleDict({"users": run.model.users}),
    )
    with TieredEmbeddingBag(None, 4, seed=1, name="others") as others:
        model = holder(users=others, items=others)
        with pytest.raises(CheckpointError, match=r"only the checkpoint has a tiered module 'items'"):
            load_checkpoint(tmp_path / "saves", model)  # which has it once
    run = Run(elsewhere)
    with TieredEmbeddingBag(None, 4, seed=1, name="others", optimizer=Adam(0.05)) as others:
        model = holder(users=others, items=run.model.items, top=run.model.top)
        refused(
            tmp_path, r"module 'users': table 'others': the module has it, the checkpoint has not", run, model=model
        )


def test_another_optimizer_or_loader_is_refused(tmp_path: Path, saved: Path) -> None:
    run = Run(on_disk(tmp_path))
    two = torch.optim.Adam([run.model.top.weight])
    refused(tmp_path, r"groups of \[1\] parameters, in checkpoint 'step-4' of \[2\]", run, optimizer=two)
    refused(tmp_path, r"the loader is a list, which has no load_state_dict", loader=[1])
    run = Run(on_disk(tmp_path))
    save_checkpoint(tmp_path / "saves", run.model)
    refused(tmp_path, r"'step-\d' was saved without the optimizer", run)
    refused(tmp_path, r"'step-\d' was saved without the loader", optimizer=None)


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    run, saves = Run(on_disk(tmp_path)), tmp_path / "saves"
    run.steps(1)
    with pytest.raises(ConfigError, match=r"the loader is a list, which has no state_dict\(\)"):
        save_checkpoint(saves, run.model, loader=[1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"something in it that no checkpoint takes: .*numpy"):
        run.save(saves, extra=np.float64(1.5))
    with pytest.raises(ConfigError, match=r"something in it that no checkpoint takes: .*pickle"):
        run.save(saves, extra={"clean": lambda: None})
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ConfigError, match=r"something in it that no checkpoint takes: .*recursion"):
        run.save(saves, extra=deep)
    for tag in ("", "a/b", "..", ".hidden", "x.tmp", "rows", "rows-2", "x" * 129):
        with pytest.raises(ConfigError, match="tag is"):
            run.save(saves, tag)
    run.save(saves, "best")
    with pytest.raises(ConfigError, match=r"has 'best' already: give another tag, or remove that directory"):
        run.save(saves, "best")
    with pytest.raises(ConfigError, match="keep_last is 0"):
        run.save(saves, keep_last=0)
    with pytest.raises(ConfigError, match="has no tiered module"):
        save_checkpoint(saves, nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="is a file"):
        run.save(saves / "best" / "dense.pt")
    assert [one.tag for one in list_checkpoints(saves)] == ["best"]
    run.model.close()
    with pytest.raises(ModuleClosedError):
        run.save(saves)


def test_a_removed_checkpoint_may_be_made_again(tmp_path: Path) -> None:
    run = Run(on_disk(tmp_path))
    run.steps(1)
    run.save(tmp_path / "saves", "best")
    shutil.rmtree(tmp_path / "saves" / "best")
    run.steps(1)
    run.save(tmp_path / "saves", "best")
    state = run.state()
    run.steps(1)
    run.load(tmp_path / "saves", "best")
    assert run.state() == state
    run.model.close()


def test_no_checkpoints_there(tmp_path: Path) -> None:
    run = Run(on_disk(tmp_path))
    assert list_checkpoints(tmp_path / "saves") == []
    with pytest.raises(CheckpointError, match=r"has no checkpoints.json: there are no checkpoints here"):
        run.load(tmp_path / "saves")
    run.model.close()


def test_in_the_middle_of_a_step_nothing_is_saved_or_loaded(tmp_path: Path) -> None:
    run, saves = Run(on_disk(tmp_path)), tmp_path / "saves"
    run.steps(1)
    run.save(saves)
    for verb in (run.save, run.load, lambda path: run.model.users.rollback("x")):
        out = run.model(torch.tensor([[1, 2]]))
        out.register_hook(lambda grad, verb=verb: verb(saves))
        with pytest.raises(CheckpointError, match=r"a backward pass is under way: .* between two steps"):
            out.sum().backward()
    with TieredEmbeddingBag(None, 2, mode="sum", update="step", seed=1) as bag:
        bag(torch.tensor([[1, 2]])).sum().backward()
        with pytest.raises(CheckpointError, match=r"gradients .* wait for its optimizer.step\(\)"):
            save_checkpoint(saves, bag)
        bag.optimizer.step()
        save_checkpoint(saves, bag)
    run.model.close()


# ---- snapshots of modules, by themselves


def test_modules_over_one_store_go_back_together(tmp_path: Path) -> None:
    run = Run(on_disk(tmp_path))
    run.steps(5)
    run.model.users.snapshot("then")
    state = run.state()[0]
    run.steps(3)
    run.model.items.snapshot("later")
    run.steps(3)
    run.model.users.rollback("then")
    assert (run.state()[0], run.model.users.steps, run.model.items.steps) == (state, 5, 5)
    assert [one.name for one in run.model.users.engine.store.snapshots()] == ["then"]
    (tier,) = run.model.users.stats().tiers
    assert tier.rows == sum(table["rows"] for table in tier.by_table.values()) == 0
    with pytest.raises(StoreConfigError, match="no snapshot 'later'"):
        run.model.users.rollback("later")
    run.model.close()


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_forward_of_before_updates_nothing_afterwards(tmp_path: Path, update: str) -> None:
    tiers = TierConfig(0, "256KiB", tmp_path / "rows")
    ids = torch.arange(40).unsqueeze(1)
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=tiers, optimizer=SGD(1.0), seed=1, update=update) as bag:  # type: ignore[arg-type]
        bag.snapshot("empty")
        before, gone_back = bag(ids), bag(ids)
        if update == "step":
            gone_back.sum().backward()
        bag.rollback("empty")
        expected = bag.rows(ids.squeeze(1))
        with pytest.raises(PlanReleasedError, match="a rollback has let them go"):
            before.sum().backward()
        bag.optimizer.step()  # nothing waits
        assert (bag.steps, torch.equal(bag.rows(ids.squeeze(1)), expected)) == (0, True)
        bag(ids).sum().backward()
        bag.optimizer.step()
        assert torch.equal(bag.rows(ids.squeeze(1)), expected - 1)
        del before, gone_back  # their pins are nobody's any more
        group = bag._lookup.group
        group.release_dropped()
        assert group.top.directory.pinned_rows == 0


def test_a_store_that_keeps_no_states_says_so() -> None:
    with TieredEmbeddingBag(None, 4, seed=1) as bag:
        for verb in (bag.snapshot, bag.rollback):
            with pytest.raises(ConfigError, match=r"the rows are in a HeapStore, which keeps no states by name"):
                verb("x")


def test_state_dict_is_a_reference_that_is_checked(tmp_path: Path) -> None:
    run = Run(on_disk(tmp_path))
    run.steps(2)
    state = run.model.state_dict()
    assert state["users._extra_state"] == {
        "store": str(tmp_path / "rows"),
        "uuid": run.model.users.engine.identity,
        "steps": 2,
        "rule": "adam",
        "tables": {"users": [4, 1]},
    }
    torch.save(state, tmp_path / "state.pt")
    run.model.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    run.steps(1)
    with pytest.raises(CheckpointError, match=r"rows with steps 2, but here they have 3: .*load_checkpoint\(\)"):
        run.model.load_state_dict(state)
    run.model.close()
    other = Run(TierConfig(0, BUDGET, tmp_path / "other"))
    with pytest.raises(
        CheckpointError, match=r"rows with uuid .*: .*open the module over the store of then \(.*rows\)"
    ):
        other.model.load_state_dict(state)
    other.model.close()
    third = Run(TierConfig(0, BUDGET, tmp_path / "third"), seed=5)
    with pytest.raises(CheckpointError, match=r"rows with tables \{'users': \[4, 1\]\}"):
        third.model.load_state_dict(state)
    third.model.close()


def test_no_warning_without_a_reason(tmp_path: Path) -> None:
    run = Run(on_disk(tmp_path))
    run.steps(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.save(tmp_path / "saves")
        assert run.load(tmp_path / "saves").cold == ()
    assert run.model.users.stats().tiers[0].rows > 0
    ref = run.model.users.engine.tables["users"]
    out, found = np.empty((1, ref.schema.row_bytes), np.uint8), np.zeros(1, np.bool_)
    run.model.users.engine.store.get(RowIds.of(ref, np.array([1])), out, found)
    assert found[0]
    run.model.close()
