"""`torch.distributed.checkpoint` with tiered modules: a writer and a reader that see to the rows.

::

    dcp.save(state, storage_writer=TieredWriter("epoch-3", model))
    dcp.load(state, storage_reader=TieredReader("epoch-3", model))     then model.load_state_dict(state["model"])

dcp writes what a `state_dict()` has, and that of a tiered module is a reference. The rows that it refers to are kept as
`save_checkpoint(..., rows_only=True)` keeps them: by a snapshot of their store, named by a directory ``tiered`` in that
of the checkpoint. A checkpoint without dcp's ``.metadata`` is none; that is written once the rows are durable.

The writer begins when it is made: rows are kept as they are then, and written while dcp does its part, or, with
`dcp.async_save`, while training goes on. So make it between two steps, where the state is taken.

One process: rows that several share are for sharded modules. A directory takes one checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tiered_emb.checkpoint import load_checkpoint, save_checkpoint
from tiered_emb.errors import CheckpointError, ConfigError

_ROWS, _TAG, _METADATA = "tiered", "all", ".metadata"


class TieredWriter(FileSystemWriter):
    """See the module's docstring.

    Args:
        path: a directory without a checkpoint; made if need be.
        model: a tiered module, or a model that has some.
        options: as of `FileSystemWriter`.

    Raises:
        ConfigError: there is a checkpoint, there are several processes, or the model has no tiered module.
        CheckpointError, StoreFullError, StoreIOError, OSError: as `save_checkpoint`.
    """

    def __init__(self, path: str | os.PathLike[str], model: nn.Module, **options: Any) -> None:
        _check_alone()
        place = Path(path)
        if (place / _METADATA).exists() or (place / _ROWS).exists():
            raise ConfigError(f"{path} has a checkpoint, or part of one: give each checkpoint a directory of its own")
        super().__init__(path, **options)
        place.mkdir(parents=True, exist_ok=True)
        self._place = place
        self._pending = save_checkpoint(place / _ROWS, model, tag=_TAG, rows_only=True, background=True)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """As dcp asks. Raises ConfigError for another directory than that of the rows."""
        if checkpoint_id is not None and Path(checkpoint_id) != self._place:
            raise ConfigError(f"checkpoint_id is {checkpoint_id}, but rows go to {self._place}: give one of them")
        super().reset(checkpoint_id)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Have the rows durable, then the checkpoint. Raises what went wrong with the rows: there is none then."""
        self._pending.wait()
        super().finish(metadata, results)


class TieredReader(FileSystemReader):
    """See the module's docstring.

    Args:
        path: of the checkpoint.
        model: as the one that was saved; its rows change in `dcp.load`.

    Raises:
        CheckpointError: there are no rows at the path. `dcp.load` raises it too, as `load_checkpoint`.
        ConfigError: there are several processes.
    """

    def __init__(self, path: str | os.PathLike[str], model: nn.Module) -> None:
        _check_alone()
        if not (Path(path) / _ROWS).is_dir():
            raise CheckpointError(f"{path} has no directory {_ROWS!r}: what is there no TieredWriter has written")
        super().__init__(path)
        self._place = Path(path)
        self._model = model

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Bring the rows back, then what dcp has."""
        load_checkpoint(self._place / _ROWS, self._model)
        return super().read_data(plan, planner)


def _check_alone() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        processes = torch.distributed.get_world_size()
        if processes > 1:
            raise ConfigError(f"{processes} processes: rows of a tiered module are one process's; save it from there")
