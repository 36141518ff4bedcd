"""Ctrl-C at any moment: every row is the old or the new one, no pin stays, and what is stored is what was seen."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from storage.interrupts import Uninterrupted
from tiered_emb import (
    JaggedIds,
    ModuleClosedError,
    RowwiseAdagrad,
    TableConfig,
    TierConfig,
    TieredEmbeddingBagCollection,
)
from tiered_emb.group import TableGroup
from tiered_emb.lookup import forget_failed_passes

TABLES = [TableConfig("a", None, 4), TableConfig("b", None, 6, mode="mean")]


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = []

    def work() -> None:
        with Uninterrupted():
            with Uninterrupted():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_wait() -> None:
    done = []

    def work() -> None:
        with Uninterrupted(), Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("first")
            signal.raise_signal(signal.SIGINT)
            done.append("second")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_are_left_alone() -> None:
    done = []

    def work() -> None:
        with Uninterrupted():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]


@pytest.fixture
def alarm() -> Iterator[None]:
    """A timer that presses Ctrl-C."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def rows_of(bags: TieredEmbeddingBagCollection, ids: dict[str, torch.Tensor]) -> dict[tuple[str, int], bytes]:
    return {
        (name, row_id): row.numpy().tobytes()
        for name in ids
        for row_id, row in zip(ids[name].tolist(), bags.rows(name, ids[name]), strict=True)
    }


def step(bags: TieredEmbeddingBagCollection, batch: JaggedIds, delay: float, flush: bool) -> str:
    """A training step with Ctrl-C after so many seconds; what it was doing then."""
    doing = "forward"
    try:
        try:
            if delay:
                signal.setitimer(signal.ITIMER_REAL, delay)
            outs = bags(batch)
            doing = "backward"
            (outs["a"].square().sum() + outs["b"].square().sum()).backward()
            if flush:
                doing = "flush"
                bags.flush()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return doing
    return ""


@pytest.mark.parametrize("hbm", [0, 250 * 4 * 12])
@pytest.mark.usefixtures("alarm")
def test_interrupted_steps(tmp_path: Path, hbm: int) -> None:
    def opened() -> Any:
        tiers = TierConfig(hbm, 400_000, tmp_path / "rows")
        return TieredEmbeddingBagCollection(TABLES, tiers=tiers, optimizer=RowwiseAdagrad(0.1), seed=3)

    rng, bags, known, caught, took = np.random.default_rng(1), opened(), {}, set(), 1.0
    every = {name: torch.arange(3000) for name in "ab"}
    for at in range(160):
        ids = {name: torch.from_numpy(rng.choice(3000, 150, replace=False)) for name in "ab"}
        batch = JaggedIds.from_dict({name: (ids[name], torch.full((150,), 1)) for name in "ab"})
        before = rows_of(bags, ids)
        assert before == {row: known.get(row, before[row]) for row in before}
        delay = 0 if at < 10 else float(rng.uniform(1e-4, max(4e-3, took)))  # the first steps load kernels
        begun = time.perf_counter()
        doing = step(bags, batch, delay, at % 9 == 0)
        if delay == 0:  # interrupts come at all moments of a step, however slow the machine is
            took = min(took, time.perf_counter() - begun)
        caught.add(doing)
        after = rows_of(bags, ids)
        assert doing != "forward" or after == before
        known |= after
        if doing == "backward":
            bags._updates.drop_failed()
            forget_failed_passes()
        for group in bags._engine.groups.values():
            group.release_dropped()
            assert group.top.directory.pinned_rows == 0, doing
    assert caught >= {"forward", "backward"}
    expected = rows_of(bags, every)
    assert expected == expected | known
    bags.close()
    with opened() as bags:
        assert rows_of(bags, every) == expected


def test_a_second_interrupt_in_mid_step_ends_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that it cut short is looked up or stored; the store opens at the last flush."""
    tiers, ids = TierConfig(0, 400_000, tmp_path / "rows"), {name: torch.arange(20) for name in "ab"}
    batch = JaggedIds.from_dict({name: (ids[name], torch.ones(20, dtype=torch.int64)) for name in "ab"})
    bags = TieredEmbeddingBagCollection(TABLES, tiers=tiers, optimizer=RowwiseAdagrad(0.1), seed=3)
    assert step(bags, batch, 0, flush=True) == ""
    expected = rows_of(bags, ids)

    def cut_short(*args: Any, **more: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(TableGroup, "update", cut_short)
        with pytest.raises(KeyboardInterrupt):
            sum(out.sum() for out in bags(batch).values()).backward()  # type: ignore[union-attr]
    with pytest.raises(ModuleClosedError, match="second Ctrl-C"):
        bags(batch)
    with pytest.raises(ModuleClosedError, match="second Ctrl-C"):
        bags.flush()
    bags.close()
    with TieredEmbeddingBagCollection(TABLES, tiers=tiers, optimizer=RowwiseAdagrad(0.1), seed=3) as again:
        assert rows_of(again, ids) == expected
