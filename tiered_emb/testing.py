"""Oracles: embedding bags in whole in-memory tables, to compare the tiered modules with.

`DenseOracle` is the definition of what a collection computes, to the bit. It shares the row kernels, `init` and the
row rules with the product, and nothing that moves rows: no Directory, tier, plan or store. `TorchOracle` shares only
`init`: it pools and differentiates with torch's own ops, so it agrees within a tolerance and catches what the shared
kernels have in common.

Both are used like a TieredEmbeddingBagCollection with update="backward". What they define:
- A row that was never updated is init(seed, table number, id) with zero optimizer state.
- An update happens once, at the end of a backward pass: every table that got a gradient has each of its rows changed
  once, by the sum of all its gradients. The module's step count grows by one a backward pass.
- The order of that sum: forwards in the order they were called, in each the features in the batch's order, then bags,
  then ids.
- A bag's mean divides its sum by its length, and its gradient likewise.
- A feature whose output played no part in the loss is not updated; in eval mode nothing is.

For tests and checks: rows are found through Python dicts and kept for ever. One thread at a time.
Shapes: N ids, B bags, D dimension, K state width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable

from storage.schema import table_number
from tiered_emb.config import TableConfig
from tiered_emb.errors import ConfigError, IdRangeError, InvalidBatchError, PlanReleasedError
from tiered_emb.kernels import batch as batch_kernels
from tiered_emb.kernels import cpu
from tiered_emb.optim import RowRule
from tiered_emb.plan import JaggedIds
from tiered_emb.scratch import Scratch
from tiered_emb.workers import WorkerPool

_INLINE = WorkerPool(1)


class _Table:
    """Every row of one table that was ever asked for; a row's `ordinal` is its place in order of first appearance."""

    def __init__(self, config: TableConfig, rule: RowRule, seed: int) -> None:
        self.config = config
        self._seed = seed
        self._number = table_number(config.name)
        self._ordinals: dict[int, int] = {}
        self.weight = torch.empty((0, config.embedding_dim))
        self.state = torch.empty((0, rule.state_width(config.embedding_dim)))
        self.changed = torch.zeros(0, dtype=torch.bool)

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """Ordinal of each id; new rows are made."""
        before = len(self._ordinals)
        found = [self._ordinals.setdefault(row_id, len(self._ordinals)) for row_id in ids.tolist()]
        self._make(len(self._ordinals) - before)
        return np.array(found, np.int32)

    def _make(self, count: int) -> None:
        """Weights and state of the newest rows."""
        total = len(self._ordinals)
        if total > len(self.weight):
            self.weight, self.state, self.changed = (
                torch.cat([old, old.new_zeros((2 * total - len(old), *old.shape[1:]))])
                for old in (self.weight, self.state, self.changed)
            )
        new = np.array(list(itertools.islice(reversed(self._ordinals), count))[::-1], np.int64)
        rows = self.weight[total - count : total].numpy()
        self.config.init.fill(self._seed, np.full(count, self._number, np.uint32), new, rows)

    def changed_rows(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids (n,), ascending, and rows (n, D + K) that were ever changed."""
        ordinals = self.changed.nonzero().squeeze(1).numpy()
        ids = np.array(list(self._ordinals), np.int64)[ordinals]
        ascending = np.argsort(ids)
        rows = torch.cat([self.weight[ordinals[ascending]], self.state[ordinals[ascending]]], 1)
        return ids[ascending], rows.numpy()


@dataclass(eq=False)
class _Use:
    """One feature of one forward: what its backward needs.

    `order` places it among all uses of the module; `arg` is where a max came from; `grad` (B, D) arrives in the
    backward pass.
    """

    table: _Table
    order: tuple[int, int]
    ordinals: NDArray[np.int32]
    offsets: torch.Tensor
    weights: torch.Tensor | None
    arg: torch.Tensor | None = None
    grad: torch.Tensor | None = None
    updated: bool = False

    def bags(self) -> torch.Tensor:
        """Bag of each id, int32 (N,)."""
        out = np.empty(len(self.ordinals), np.int32)
        batch_kernels.bags_of(self.offsets.numpy(), out)
        return torch.from_numpy(out)


class _Oracle(torch.nn.Module):
    """What the two oracles have in common: tables, the batch's parts, the update at the end of a backward pass."""

    def __init__(self, tables: Sequence[TableConfig], *, optimizer: RowRule, seed: int) -> None:
        super().__init__()
        self.rule = optimizer
        self.steps = 0
        self._tables = {config.name: _Table(config, optimizer, seed) for config in tables}
        self._features = {name: self._tables[config.name] for config in tables for name in config.feature_names}
        names = [name for config in tables for name in config.feature_names]
        if len(self._tables) != len(tables) or len(self._features) != len(names):
            raise ConfigError("names of tables and of features must be unique over the collection")
        self._forwards = 0
        self._pass = -1  # autograd's number of the backward pass that `_uses` are of
        self._uses: list[_Use] = []

    def forward(self, batch: JaggedIds) -> dict[str, torch.Tensor]:
        """Pooled rows (B, D) of each feature of the batch."""
        self._forwards += 1
        return self._pool(self._split(batch), batch)

    def rows(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Weights (N, D) of a table's rows."""
        ordinals = self._tables[table].find(ids.numpy())
        return self._tables[table].weight[ordinals]

    def set_rows(self, table: str, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Replace a table's rows (N, D) by id and reset their optimizer state; the last of equal ids wins."""
        ordinals = self._tables[table].find(ids.numpy())
        for ordinal, row in zip(ordinals.tolist(), values, strict=True):
            self._tables[table].weight[ordinal] = row
        self._tables[table].state[ordinals] = 0
        self._tables[table].changed[ordinals] = True

    def touched(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Of each table, by name: ids (n,), ascending, and rows (n, D + K) = weight and state, of rows ever changed."""
        return {name: table.changed_rows() for name, table in self._tables.items()}

    def _pool(self, uses: list[_Use], batch: JaggedIds) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def _update(self, table: _Table, uses: list[_Use]) -> None:
        raise NotImplementedError

    def _split(self, batch: JaggedIds) -> list[_Use]:
        """The features of a batch, checked."""
        if set(batch.features) - set(self._features):
            raise InvalidBatchError(f"the batch has features {batch.features}; expected some of {list(self._features)}")
        ids, offsets, size = (
            batch.ids.to(torch.int64).contiguous().numpy(),
            batch.offsets.to(torch.int64),
            batch.batch_size,
        )
        wrong = batch_kernels.check_offsets(offsets.numpy(), len(ids))
        if wrong >= 0:
            seen = int(offsets[wrong])
            raise InvalidBatchError(f"offsets[{wrong}] is {seen}, which is no bag boundary of {len(ids)} ids")
        uses = []
        for f, feature in enumerate(batch.features):
            first, last = int(offsets[f * size]), int(offsets[(f + 1) * size])
            table = self._features[feature]
            _check_range(table.config, feature, ids[first:last])
            weights = None if batch.weights is None else batch.weights[first:last]
            if weights is not None and table.config.mode != "sum":
                raise InvalidBatchError(f"feature {feature!r}: weights go with mode 'sum', not {table.config.mode!r}")
            ends = offsets[f * size : (f + 1) * size + 1] - first
            uses.append(_Use(table, (self._forwards, f), table.find(ids[first:last]), ends, weights))
        return uses

    def _record(self, use: _Use, grad: torch.Tensor) -> None:
        """Called in a backward pass: the output of this use has this gradient."""
        if use.updated:
            raise PlanReleasedError(f"table {use.table.config.name}: a backward pass has already updated this forward")
        current = torch._C._current_graph_task_id()
        if current != self._pass:  # the first of a pass; uses of one that failed are dropped
            self._uses, self._pass = [], current
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        use.grad = grad
        self._uses.append(use)

    def _finish(self) -> None:
        """The end of a backward pass: one update of every table that got a gradient."""
        uses, self._uses, self._pass = sorted(self._uses, key=lambda use: use.order), [], -1
        self.steps += 1
        with torch.no_grad():
            for table in self._tables.values():
                mine = [use for use in uses if use.table is table]
                if mine:
                    self._update(table, mine)
                for use in mine:
                    use.updated, use.grad = True, None
                    table.changed[use.ordinals] = True


def _check_range(config: TableConfig, feature: str, ids: NDArray[np.int64]) -> None:
    if config.num_embeddings is not None:
        wrong = batch_kernels.first_out_of_range(ids, 0, config.num_embeddings)
        if wrong >= 0:
            raise IdRangeError(
                f"table {config.name!r}, feature {feature!r}, position {wrong}: id {ids[wrong]} is not in 0 .. "
                f"{config.num_embeddings - 1}"
            )


class DenseOracle(_Oracle):
    """Embedding bags in memory, to the bit what the tiered modules must compute; see the module's essay.

    Args:
        tables: names unique; features unique over all tables.
        optimizer: the row rule of all tables.
        seed: of rows never changed.
    """

    def __init__(self, tables: Sequence[TableConfig], *, optimizer: RowRule, seed: int) -> None:
        super().__init__(tables, optimizer=optimizer, seed=seed)
        self._anchor = torch.zeros(0, requires_grad=True)  # makes autograd call the backward

    def _pool(self, uses: list[_Use], batch: JaggedIds) -> dict[str, torch.Tensor]:
        anchor = self._anchor if self.training else None
        outs = _DenseBags.apply(anchor, batch.weights, self, uses)  # type: ignore[no-untyped-call]
        return dict(zip(batch.features, outs, strict=True))

    def _update(self, table: _Table, uses: list[_Use]) -> None:
        slots, inverse = np.unique(np.concatenate([use.ordinals for use in uses]), return_inverse=True)
        position = np.argsort(inverse, kind="stable").astype(np.int32)
        start = np.concatenate([[0], np.cumsum(np.bincount(inverse, minlength=len(slots)))]).astype(np.int64)
        groups = torch.from_numpy(start), torch.from_numpy(position), 0, len(slots)
        grad, bags = _joined_gradients(uses)
        located = cpu.locate_gradients([grad], bags, Scratch())
        sums = torch.empty((len(slots), grad.shape[1]))
        if table.config.mode == "max":
            cpu.sum_gradients_max(located, _joined_args(uses), bags, *groups, sums)
        else:
            cpu.sum_gradients(located, _joined_weights(uses), *groups, sums)
        self.rule.apply(table.weight, table.state, torch.from_numpy(slots), sums, self.steps)


class _DenseBags(torch.autograd.Function):
    """All features of one forward; its backward hands their gradients to the oracle."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor | None, weights: torch.Tensor | None, oracle: DenseOracle, uses: list[_Use]
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.oracle, ctx.uses, ctx.trains = oracle, uses, anchor is not None
        return tuple(_pool(use) for use in uses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        parts = [_weight_gradient(use, grad) for use, grad in zip(ctx.uses, grads, strict=True)]
        if ctx.trains:
            for use, grad in zip(ctx.uses, grads, strict=True):
                if grad is not None:
                    ctx.oracle._record(use, grad.contiguous())
        return None, torch.cat(parts) if ctx.needs_input_grad[1] else None, None, None


def _pool(use: _Use) -> torch.Tensor:
    """Pooled rows (B, D) of one feature."""
    table, bags = use.table, len(use.offsets) - 1
    out = torch.empty((bags, table.config.embedding_dim))
    slots, inverse = torch.from_numpy(use.ordinals), torch.arange(len(use.ordinals), dtype=torch.int32)
    if table.config.mode == "max":
        use.arg = torch.empty(out.shape, dtype=torch.int32)
        cpu.pool_max(table.weight, slots, inverse, use.offsets, out, use.arg, _INLINE)
    else:
        weights = None if use.weights is None else use.weights.detach().contiguous()
        cpu.pool(table.weight, slots, inverse, use.offsets, weights, table.config.mode, out, _INLINE)
    return out


def _weight_gradient(use: _Use, grad: torch.Tensor | None) -> torch.Tensor:
    """Gradient (N,) of one feature's per-sample weights, from the rows as they were in the forward."""
    out = torch.zeros(len(use.ordinals))
    if grad is not None and use.weights is not None:
        slots, inverse = torch.from_numpy(use.ordinals), torch.arange(len(use.ordinals), dtype=torch.int32)
        cpu.per_sample_gradients(use.table.weight, slots, inverse, use.bags(), grad.contiguous(), out, _INLINE)
    return out


def _joined_gradients(uses: list[_Use]) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the bags' sums under each other (B, D), and the bag of each id in that list (N,)."""
    grads, bags, seen = [], [], 0
    for use in uses:
        assert use.grad is not None
        lengths = use.offsets.diff().clamp(min=1).to(torch.float32)[:, None]
        grads.append(use.grad / lengths if use.table.config.mode == "mean" else use.grad)
        bags.append(use.bags() + seen)
        seen += len(use.offsets) - 1
    return torch.cat(grads), torch.cat(bags)


def _joined_weights(uses: list[_Use]) -> torch.Tensor | None:
    if all(use.weights is None for use in uses):
        return None
    ones = (torch.ones(len(use.ordinals)) for use in uses)
    return torch.cat(
        [one if use.weights is None else use.weights.detach() for use, one in zip(uses, ones, strict=True)]
    )


def _joined_args(uses: list[_Use]) -> torch.Tensor:
    """Positions that won a max, counted over all uses."""
    args, seen = [], 0
    for use in uses:
        assert use.arg is not None
        args.append(torch.where(use.arg >= 0, use.arg + seen, use.arg))
        seen += len(use.ordinals)
    return torch.cat(args)


class TorchOracle(_Oracle):
    """The same in torch's own ops: `embedding_bag` and its autograd, and the rules' formulas written once more.

    Agrees with DenseOracle within a tolerance: torch sums gradients in another order and fuses some operations. A
    rule that has no formula here is applied as it is.
    """

    def _pool(self, uses: list[_Use], batch: JaggedIds) -> dict[str, torch.Tensor]:
        return {name: self._bag(use) for name, use in zip(batch.features, uses, strict=True)}

    def _bag(self, use: _Use) -> torch.Tensor:
        trains = self.training and torch.is_grad_enabled()
        rows = use.table.weight[use.ordinals].requires_grad_(trains)
        if trains:
            rows.register_hook(lambda grad: self._record(use, grad))  # type: ignore[no-untyped-call]
        return torch.nn.functional.embedding_bag(
            torch.arange(len(rows)),
            rows,
            use.offsets,
            mode=use.table.config.mode,
            per_sample_weights=use.weights,
            include_last_offset=True,
        )

    def _update(self, table: _Table, uses: list[_Use]) -> None:
        slots, inverse = np.unique(np.concatenate([use.ordinals for use in uses]), return_inverse=True)
        sums = torch.zeros((len(slots), table.weight.shape[1]))
        sums.index_add_(0, torch.from_numpy(inverse), torch.cat([use.grad for use in uses if use.grad is not None]))
        formula = _FORMULAS.get(self.rule.name)
        if formula is None:
            self.rule.apply(table.weight, table.state, torch.from_numpy(slots), sums, self.steps)
            return
        weight, state = table.weight[slots], table.state[slots]
        formula(self.rule, weight, state, sums, self.steps)
        table.weight[slots], table.state[slots] = weight, state


def _sgd(rule: Any, weight: torch.Tensor, state: torch.Tensor, grad: torch.Tensor, step: int) -> None:
    weight.sub_(grad, alpha=rule.lr)


def _adagrad(rule: Any, weight: torch.Tensor, state: torch.Tensor, grad: torch.Tensor, step: int) -> None:
    state.addcmul_(grad, grad)
    weight.addcdiv_(grad, state.sqrt().add_(rule.eps), value=-rule.lr)


def _rowwise_adagrad(rule: Any, weight: torch.Tensor, state: torch.Tensor, grad: torch.Tensor, step: int) -> None:
    state.add_(grad.square().mean(1, keepdim=True))
    weight.addcdiv_(grad, state.sqrt().add_(rule.eps), value=-rule.lr)


def _adam(rule: Any, weight: torch.Tensor, state: torch.Tensor, grad: torch.Tensor, step: int) -> None:
    (beta_1, beta_2), (mean, square) = rule.betas, state.chunk(2, 1)
    mean.lerp_(grad, 1 - beta_1)
    square.mul_(beta_2).addcmul_(grad, grad, value=1 - beta_2)
    correction_1, correction_2 = 1 - beta_1**step, 1 - beta_2**step
    weight.addcdiv_(mean, square.sqrt().add_(rule.eps), value=-rule.lr * correction_2**0.5 / correction_1)


_Formula = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, int], None]
_FORMULAS: dict[str, _Formula] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
}
