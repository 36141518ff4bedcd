"""Checkpoints: cases 7, 23, 25, 26, 30 and 31."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cases import another_run
from tests.cases.another_machine import environment
from tiered_emb import (
    Adam,
    JaggedIds,
    RowwiseAdagrad,
    TableConfig,
    TierConfig,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
    load_checkpoint,
    save_checkpoint,
)
from tiered_emb.testing import DenseOracle

ROOT = Path(__file__).resolve().parents[2]


def every_row(bag: TieredEmbeddingBag) -> dict[int, bytes]:
    """Rows with their optimizer state."""
    return {int(id): row.tobytes() for _, ids, rows in bag.scan() for id, row in zip(ids, rows, strict=True)}


@pytest.mark.parametrize("stored", [False, True])
def test_case_07_assigned_rows_are_exact_after_a_load_and_start_anew(tmp_path: Path, stored: bool) -> None:
    tiers = TierConfig(0, "128KiB", tmp_path / "rows" if stored else None)
    values, ids = torch.randn(2000, 4), torch.arange(2000)
    with TieredEmbeddingBag(2000, 4, mode="sum", tiers=tiers, optimizer=RowwiseAdagrad(0.5), seed=1) as bag:
        bag(torch.arange(30).unsqueeze(1)).sum().backward()  # gives rows a state, which assigning takes
        bag.set_rows(ids, values)
        save_checkpoint(tmp_path / "saves", bag)
        for _ in range(3):
            bag(torch.arange(30).unsqueeze(1)).sum().backward()
        load_checkpoint(tmp_path / "saves", bag)
        assert torch.equal(bag.rows(ids), values)
        bag(torch.tensor([[7]])).backward(torch.full((1, 4), 2.0))
        expected = values[7] - 0.5 * 2 / (torch.tensor(4.0).sqrt() + 1e-8)
        torch.testing.assert_close(bag.rows(torch.tensor([7]))[0], expected)


@pytest.mark.parametrize("hbm_bytes", [0, 20_000])
@pytest.mark.parametrize("policy", ["lru", "lfu", "s3fifo"])
def test_case_23_the_same_victims_on_a_machine_whose_clock_is_a_day_off(
    tmp_path: Path, policy: str, hbm_bytes: int
) -> None:
    bag = another_run.make(tmp_path, policy, hbm_bytes)
    another_run.steps(bag, 1)
    save_checkpoint(tmp_path / "saves", bag)
    expected = another_run.steps(bag, 2)
    stats = bag.stats().tiers
    assert all(tier.evictions > 50 for tier in stats)
    load_checkpoint(tmp_path / "saves", bag)
    assert another_run.steps(bag, 2) == expected  # in the process that has gone on
    bag._abandon()
    program = [sys.executable, another_run.__file__, str(tmp_path), policy, str(hbm_bytes)]
    result = subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == expected


@pytest.mark.parametrize("stored", [False, True])
def test_case_25_a_checkpoint_holds_its_step_and_an_older_one_the_older(tmp_path: Path, stored: bool) -> None:
    tiers = TierConfig(0, "100KiB", tmp_path / "rows" if stored else None)
    batches = [torch.from_numpy(np.random.default_rng(at).integers(0, 1500, (100, 2))) for at in range(6)]
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=tiers, optimizer=Adam(0.1), seed=1) as bag:
        states = []
        for at, batch in enumerate(batches):
            bag(batch).sin().sum().backward()
            saved = save_checkpoint(tmp_path / "saves", bag)
            assert saved.step == at + 1
            states.append(every_row(bag))
        load_checkpoint(tmp_path / "saves", bag)
        assert every_row(bag) == states[5]
        for tag in (3, 1):
            bag(batches[0]).sum().backward()  # the tiers hold rows of another time
            load_checkpoint(tmp_path / "saves", bag, tag=f"step-{tag}")
            assert every_row(bag) == states[tag - 1]
            assert bag.steps == tag
            bag(batches[tag]).sin().sum().backward()  # as it did then, from what a look-up sees now
            assert every_row(bag) == states[tag]


def test_case_26_a_second_save_writes_no_row(tmp_path: Path) -> None:
    tiers = TierConfig(10_000, "100KiB", tmp_path / "rows")
    with TieredEmbeddingBag(None, 4, mode="sum", tiers=tiers, optimizer=Adam(0.1), seed=1) as bag:
        bag(torch.arange(200).unsqueeze(1)).sum().backward()
        save_checkpoint(tmp_path / "saves", bag)
        before = bag.stats().store
        save_checkpoint(tmp_path / "saves", bag)
        after = bag.stats().store
        assert before.rows_written == 200
        assert (after.rows_written, after.bytes_written) == (before.rows_written, before.bytes_written)


@pytest.mark.parametrize("hbm_bytes", [0, 30_000])
def test_case_30_rows_with_adam_state_go_to_disk_and_back_over_checkpoints(tmp_path: Path, hbm_bytes: int) -> None:
    """The trajectory is the reference's, with a load every few steps: by a new module, and by the one that goes on."""
    tables = [TableConfig("t", None, 4)]
    oracle = DenseOracle(tables, optimizer=Adam(0.05), seed=3)
    tiers, rng = TierConfig(hbm_bytes, "100KiB", tmp_path / "rows"), np.random.default_rng(0)

    def make() -> TieredEmbeddingBagCollection:
        return TieredEmbeddingBagCollection(tables, tiers=tiers, optimizer=Adam(0.05), seed=3)

    bags = make()
    evictions = 0
    for step in range(24):
        ids = torch.from_numpy(rng.zipf(1.1, 200) % 4000)
        batch = JaggedIds.from_dict({"t": (ids, torch.full((100,), 2))})
        out, expected = bags(batch)["t"], oracle(batch)["t"]
        assert torch.equal(out, expected), step
        out.sin().sum().backward()
        expected.sin().sum().backward()
        if step % 6 == 5:
            evictions += bags.stats().tiers[-1].evictions
            save_checkpoint(tmp_path / "saves", bags, keep_last=1)
            bags(batch)["t"].sum().backward()  # which is not to be
            if step % 12 == 5:
                bags._abandon()
                bags = make()
            load_checkpoint(tmp_path / "saves", bags)
    assert evictions > 500
    stored = {int(id): row.tobytes() for _, ids, rows in bags.scan() for id, row in zip(ids, rows, strict=True)}
    ids, rows = oracle.touched()["t"]
    assert stored == {int(id): row.tobytes() for id, row in zip(ids, rows, strict=True)}
    bags.close()


MANY = """
import sys, torch
from pathlib import Path
from storage import LmdbStore
from tiered_emb import RowwiseAdagrad, TierConfig, TieredEmbeddingBag, load_checkpoint, save_checkpoint

ROWS = 500_000

def make(place, budget):
    tiers = TierConfig(0, budget, place / "rows")
    return TieredEmbeddingBag(None, 64, mode="sum", tiers=tiers, optimizer=RowwiseAdagrad(0.1), seed=1)

def save(place):
    with make(place, "128MiB") as bag:
        for first in range(0, ROWS, 25_000):
            bag(torch.arange(first, first + 25_000).unsqueeze(1)).sum().backward()
        save_checkpoint(place / "saves", bag)

def anonymous():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watched(verb):
    def call(*arguments, **more):
        global peak
        found = verb(*arguments, **more)
        peak = max(peak, anonymous())
        return found
    return call

def load(place, over):
    with make(over, "16MiB") as bag:
        load_checkpoint(place / "saves", bag)
        assert bag.stats().store.rows == ROWS

place, over = Path(sys.argv[1]), Path(sys.argv[2])
if sys.argv[3] == "save":
    save(place)
else:
    before = peak = anonymous()
    LmdbStore.put, LmdbStore.get = watched(LmdbStore.put), watched(LmdbStore.get)
    load(place, over)
    print(max(peak, anonymous()) - before)
"""


def many(place: Path, over: Path, what: str) -> str:
    command = [sys.executable, "-c", MANY, str(place), str(over), what]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def many_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 130 MB of rows."""
    place = tmp_path_factory.mktemp("many")
    many(place, place, "save")
    return place


@pytest.mark.parametrize("over", ["its own store", "another store"])
def test_case_31_a_load_takes_the_budget_and_64_mb(tmp_path: Path, many_rows: Path, over: str) -> None:
    """Anonymous memory above that of the imported interpreter, seen from the system after every get and put."""
    taken = int(many(many_rows, many_rows if over == "its own store" else tmp_path, "load"))
    assert (1 << 20) < taken < (16 << 20) + (64 << 20)
