"""torch.distributed.checkpoint of models with tiered modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from storage import LmdbStore
from storage.errors import StoreFullError
from tests.tiered_emb.test_checkpoint import Run, on_disk
from tiered_emb import CheckpointError, ConfigError
from tiered_emb.checkpoint_dcp import TieredReader, TieredWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*single process")


def state_of(run: Run) -> dict[str, Any]:
    return {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "at": run.loader.at}


def load(run: Run, path: Path) -> None:
    state = state_of(run)
    dcp.load(state, storage_reader=TieredReader(path, run.model))
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.loader.at = state["at"]


def test_a_model_is_saved_and_loaded(tmp_path: Path) -> None:
    one = Run(on_disk(tmp_path))
    one.steps(8)
    one.step(one.loader.batches[0])
    torch.manual_seed(5)
    dcp.save(state_of(one), storage_writer=TieredWriter(tmp_path / "ck", one.model))
    state, losses = one.state(), one.steps(6)
    load(one, tmp_path / "ck")
    assert one.state() == state
    torch.manual_seed(5)
    assert one.steps(6) == losses
    one.model.close()
    other = Run(on_disk(tmp_path))
    other.steps(1)  # dcp loads what a state dict has, and that of an optimizer without a step has nothing
    load(other, tmp_path / "ck")
    torch.manual_seed(5)
    assert other.steps(6) == losses
    other.model.close()


def test_random_generators_are_left_alone(tmp_path: Path) -> None:
    one = Run(on_disk(tmp_path))
    one.steps(3)
    dcp.save(state_of(one), storage_writer=TieredWriter(tmp_path / "ck", one.model))
    torch.manual_seed(9)
    before = torch.get_rng_state()
    load(one, tmp_path / "ck")
    assert torch.equal(torch.get_rng_state(), before)
    one.model.close()


def test_rows_are_those_of_when_the_writer_was_made(tmp_path: Path) -> None:
    one = Run(on_disk(tmp_path))
    one.steps(8)
    rows, state = one.model.rows(), state_of(one)
    writer = TieredWriter(tmp_path / "ck", one.model)
    one.steps(5)
    dcp.save(state, storage_writer=writer)
    one.steps(2)
    dcp.load(state, storage_reader=TieredReader(tmp_path / "ck", one.model))
    assert all(torch.equal(mine, then) for mine, then in zip(one.model.rows(), rows, strict=True))
    one.model.close()


def test_without_its_rows_there_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Run(on_disk(tmp_path))
    one.steps(3)

    def refuse(*_: Any, **__: Any) -> None:
        raise StoreFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(LmdbStore, "complete_state", refuse)
        with pytest.raises(CheckpointException, match="no room"):
            dcp.save(state_of(one), storage_writer=TieredWriter(tmp_path / "ck", one.model))
    assert not (tmp_path / "ck" / ".metadata").exists()
    one.model.close()


def test_what_is_refused(tmp_path: Path) -> None:
    one = Run(on_disk(tmp_path))
    one.steps(3)
    dcp.save(state_of(one), storage_writer=TieredWriter(tmp_path / "ck", one.model))
    with pytest.raises(ConfigError, match="a directory of its own"):
        TieredWriter(tmp_path / "ck", one.model)
    with pytest.raises(ConfigError, match="no tiered module"):
        TieredWriter(tmp_path / "other", one.model.top)
    with pytest.raises(CheckpointError, match="TieredWriter"):
        TieredReader(tmp_path, one.model)
    writer = TieredWriter(tmp_path / "more", one.model)
    with pytest.raises(ConfigError, match="checkpoint_id"):
        writer.reset(tmp_path / "elsewhere")
    one.model.close()
