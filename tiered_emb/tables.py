"""TieredTables: what the modules share - tables in an engine, their optimizer, their life from opening to close.

Shapes: N ids, D dimension, K state width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import nn

from storage.store import TableRef
from tiered_emb.config import TableConfig, TierConfig
from tiered_emb.engine import Engine
from tiered_emb.errors import ConfigError, InvalidBatchError, ModuleClosedError
from tiered_emb.group import TableGroup
from tiered_emb.inputs import checked_ids, listed
from tiered_emb.lookup import Question, Updates, UpdateTime
from tiered_emb.metrics import EngineStats
from tiered_emb.optim import RowRule, RowwiseAdagrad
from tiered_emb.optim.facade import RowOptimizer
from tiered_emb.plan import Bags, IdBatch, Ids, Rows

_CHUNK_IDS = 1 << 14  # rows read or written at once by rows() and set_rows()


@dataclass(frozen=True)
class ModuleOptions:
    """What every module takes beside its tables.

    Attributes:
        tiers: budgets and store; ``TierConfig()`` if None.
        optimizer: the row rule of all tables; ``RowwiseAdagrad(lr=0.01)`` if None.
        seed: of rows never stored; drawn from torch's generator if None.
        update: "backward" applies the rule at the end of the backward pass, "step" in ``optimizer.step()``.
        device: of the HBM tier and the outputs; "cpu" may stand in for a GPU.
    """

    tiers: TierConfig | None = None
    optimizer: RowRule | None = None
    seed: int | None = None
    update: UpdateTime = "backward"
    device: torch.device | str | None = None


class TieredTables(nn.Module):
    """What the modules share: tables in an engine, their optimizer, their life. Not used by itself.

    Attributes:
        tables: the tables, in order.
    """

    def __init__(self, tables: Sequence[TableConfig], options: ModuleOptions) -> None:
        super().__init__()
        if options.update not in ("backward", "step"):
            raise ConfigError(f"update is {options.update!r}; expected 'backward' or 'step'")
        self.tables = tuple(tables)
        self.device = None if options.device is None else torch.device(options.device)
        self._rule = RowwiseAdagrad(lr=0.01) if options.optimizer is None else options.optimizer
        self._optimizer: RowOptimizer | None = None
        self._closed = False
        self._engine = Engine.open(TierConfig() if options.tiers is None else options.tiers, self.device)
        try:
            opened = self._engine.add_tables(self.tables, self._rule, _seed(options.seed))
        except BaseException:
            self._engine.leave([])
            raise
        self._opened = dict(zip((table.name for table in self.tables), opened, strict=True))
        steps = max(self._engine.steps.get(table.name, 0) for table in self.tables)
        self._updates = Updates(options.update, self._current_rule, steps, self._count_steps)

    @property
    def optimizer(self) -> RowOptimizer:
        """The rule as a ``torch.optim.Optimizer``; ``param_groups[0]["lr"]`` is the learning rate.

        Made when first asked for: a torch optimizer imports half of torch, which a table should not cost.
        """
        if self._optimizer is None:
            apply = self._updates.apply if self._updates.time == "step" else _nothing
            self._optimizer = RowOptimizer(self._rule, apply, self._updates.discard)
        return self._optimizer

    def flush(self) -> None:
        """Make every changed row, optimizer state included, durable in the store as one state."""
        self._check_open()
        self._engine.flush()

    def close(self) -> None:
        """Flush and let go of the tiers and the store; a second close does nothing.

        If the store cannot take the rows its error is raised and the module is still open, so that it can be tried
        again.
        """
        if not self._closed:
            self._updates.discard()
            self._engine.leave([table.name for table in self.tables])
            self._closed = True

    def stats(self) -> EngineStats:
        """Capacity, rows, bytes, hits, misses, evictions and write-backs of each tier, and the store's counts."""
        self._check_open()
        return self._engine.stats()

    def scan(self) -> Iterator[tuple[str, Ids, Rows]]:
        """Table name, ids (N,) and rows (N, D + K) with optimizer state, block by block, of all rows ever updated.

        Flushes first.
        """
        self.flush()
        return self._engine.scan([table.name for table in self.tables])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answers(self, questions: Sequence[Question]) -> list[tuple[torch.Tensor, ...]]:
        """The outputs of one forward's look-ups; room is made for all of them before the first one pins its rows."""
        if len(questions) > 1 and self.training and torch.is_grad_enabled():
            self._engine.expect([(question.lookup.group, question.batch) for question in questions])
        return [question.lookup.answer(question, self.training) for question in questions]

    def _rows(self, table: TableConfig, ids: torch.Tensor) -> torch.Tensor:
        self._check_open()
        group, ref = self._opened[table.name]
        wanted = checked_ids(table, ids)
        numbers = np.full(len(wanted), ref.number, np.uint32)
        out = torch.empty((len(wanted), table.embedding_dim))
        for first in range(0, len(wanted), _CHUNK_IDS):
            part = slice(first, first + _CHUNK_IDS)
            out[part] = torch.from_numpy(group.read_rows(numbers[part], wanted[part])[:, : table.embedding_dim])
        return out

    def _set_rows(self, table: TableConfig, ids: torch.Tensor, values: torch.Tensor) -> None:
        self._check_open()
        group, ref = self._opened[table.name]
        wanted = checked_ids(table, ids)
        if values.shape != (len(wanted), table.embedding_dim):
            raise InvalidBatchError(
                f"table {table.name!r}: values have shape {tuple(values.shape)}; expected "
                f"({len(wanted)}, {table.embedding_dim}), a row for each id"
            )
        weights = values.detach().to("cpu", torch.float32).numpy()
        chunk = max(1, min(_CHUNK_IDS, group.top.capacity_rows // 4))
        for first in range(0, len(wanted), chunk):
            _overwrite(group, ref, wanted[first : first + chunk], weights[first : first + chunk])

    def _current_rule(self) -> RowRule:
        return self._rule if self._optimizer is None else self._optimizer.rule

    def _count_steps(self, steps: int) -> None:
        for table in self.tables:
            self._engine.steps[table.name] = steps

    def _to_device(self, out: torch.Tensor) -> torch.Tensor:
        return out if self.device is None else out.to(self.device)

    def _check_open(self) -> None:
        if self._closed:
            raise ModuleClosedError(
                f"the module of {listed([table.name for table in self.tables])} is closed; make a new one"
            )


def _nothing() -> None:
    """``step`` of an optimizer whose rule ran in the backward pass."""


def _seed(seed: int | None) -> int:
    """A seed of 64 bits; None draws one from torch's generator, as torch's own initialisation does."""
    if seed is None:
        return int(torch.randint(1 << 62, ()))
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise ConfigError(f"seed is {seed!r}; expected an integer from 0 to 2^64 - 1")
    return seed


def _overwrite(group: TableGroup, ref: TableRef, ids: Ids, weights: Rows) -> None:
    """Give rows new weights and zero optimizer state; the last of equal ids wins."""
    ends = np.arange(len(ids) + 1, dtype=np.int64)
    bags = Bags(torch.from_numpy(ends), None, "sum")
    batch: IdBatch = group.dedupe(ids, ends[[0, -1]], np.array([ref.number], np.uint32), bags)
    rows = np.zeros((len(batch.ids), group.row_width), np.float32)
    rows[batch.inverse.numpy(), : group.dim] = weights
    plan = group.prepare(batch)
    try:
        group.overwrite(plan, rows)
    finally:
        group.release(plan)
