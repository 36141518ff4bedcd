"""Training with and without checkpoints beside it, for `benchmarks.checkpoint`: two models of one kind over stores of
their own, in turns.

A step is a forward and a backward pass of a small click model over pooled rows, and Adam for its dense part. Every
step is timed by itself; a turn with checkpoints has them in the middle of each so many steps, and ends when the last
of them is complete.

Both stores make complete states by themselves, so that both have the space of superseded rows back by compaction: a
store of training without any state keeps everything.

Shapes: B samples, F features, D dimension.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.pipeline_internals import store_sizes
from benchmarks.workloads import Zipf
from storage import LmdbStore
from tiered_emb import RowwiseAdagrad, TierConfig, TieredEmbeddingBag
from tiered_emb.checkpoint import save_checkpoint
from tiered_emb.pipeline import prefetch

_HIDDEN = 128
_LOOKAHEAD = 2


@dataclass(frozen=True)
class Size:
    """What is trained.

    Attributes:
        rows, dim: of the table.
        share: of the rows' bytes that the engine may hold in host memory.
        samples, features: of a batch.
        every: steps from one checkpoint to the next.
    """

    rows: int
    dim: int
    share: float
    samples: int
    features: int
    every: int

    @property
    def budget_bytes(self) -> int:
        """Of the engine."""
        return int(self.rows * 4 * (self.dim + 1) * self.share)


class ClickModel(nn.Module):
    """One id a feature, its row; a layer over all rows of a sample."""

    def __init__(self, bag: TieredEmbeddingBag, size: Size) -> None:
        super().__init__()
        self.bag = bag
        self._width = size.features * size.dim
        self._offsets = torch.arange(size.samples * size.features + 1)
        self.dense = nn.Sequential(nn.Linear(self._width, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(B,) log odds of ids (B * F,)."""
        logits: torch.Tensor = self.dense(self.bag(ids, self._offsets).view(-1, self._width)).squeeze(1)
        return logits


class Trainer:
    """A model over a store of its own, trained turn by turn.

    Attributes:
        path: of its checkpoints.
        step_s: seconds of each step so far.
        checkpoints: made so far.
    """

    def __init__(self, directory: Path, size: Size, law: Zipf, *, saves: bool) -> None:
        self._size, self._law, self._saves = size, law, saves
        self.path = directory / "checkpoints"
        self._store = LmdbStore(directory / "store", config=store_sizes(directory / "store", size.budget_bytes))
        torch.manual_seed(0)
        self.model = ClickModel(
            TieredEmbeddingBag(
                size.rows,
                size.dim,
                mode="sum",
                include_last_offset=True,
                tiers=TierConfig(0, size.budget_bytes, self._store),
                optimizer=RowwiseAdagrad(lr=0.05),
                seed=0,
                name="clicks",
            ),
            size,
        )
        self.optimizer = torch.optim.Adam(self.model.dense.parameters(), 1e-3)
        self.step_s: list[float] = []
        self.checkpoints = 0
        self._random = np.random.default_rng(1)

    def run(self, steps: int) -> float:
        """Seconds a step of so many steps."""
        size, begin, saving = self._size, time.perf_counter(), None
        offsets = torch.arange(size.samples * size.features + 1)
        with prefetch(self._batches(steps), self.model, lambda ids: (ids, offsets), _LOOKAHEAD) as batches:
            since = time.perf_counter()
            for number, ids in enumerate(batches, 1):
                loss = self.model(ids).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                if self._saves and number % size.every == size.every // 2:
                    saving = save_checkpoint(
                        self.path,
                        self.model,
                        self.optimizer,
                        tag=f"{self.checkpoints:06}",
                        keep_last=2,
                        background=True,
                    )
                    self.checkpoints += 1
                now = time.perf_counter()
                self.step_s.append(now - since)
                since = now
        if saving is not None:
            saving.wait()
        return (time.perf_counter() - begin) / steps

    def _batches(self, steps: int) -> Iterator[torch.Tensor]:
        for _ in range(steps):
            yield torch.from_numpy(self._law.draw(self._random, self._size.samples * self._size.features))

    @property
    def peak_bytes(self) -> int:
        """The most that was charged to the engine's host budget."""
        return self.model.bag.stats().tiers[-1].peak_bytes

    @property
    def rows_written(self) -> int:
        """Rows that the store has taken."""
        return self.model.bag.stats().store.rows_written

    def close(self) -> None:
        """Let go of model and store."""
        self.model.bag.close()
        self._store.close()


def second_save(trainer: Trainer) -> int:
    """Rows that a save writes right after another one."""
    for tag in ("first", "second"):
        written = trainer.rows_written
        save_checkpoint(trainer.path, trainer.model, trainer.optimizer, tag=tag)
    return trainer.rows_written - written
