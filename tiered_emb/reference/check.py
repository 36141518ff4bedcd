"""The same run on whole tables in memory: do the tiers change anything?

Two references are trained, from the same seeds and batches and with the same number of torch threads:

- `DenseOracle` keeps whole tables and shares row kernels, initial rows and row rules with the tiers, nothing else.
Every
  pooled row, every loss and, at the end, every row with its optimizer state must equal the tiered run's **to the bit**.
- `TorchOracle` is plain torch operations. Its sums are rounded in another order, and a network that is trained on
amplifies
  rounding without bound; so it is not trained by itself, but is given the upstream gradients of the first reference,
  as the definition of "identical" has it. Its losses, through the same MLPs, and its rows at the end must agree
  within `LOSS_TOLERANCE` and `ROW_TOLERANCE`.

The tiered run leaves 32 bits of every pooled row behind, so that a difference is reported with the first step, table
and id that shows it. Memory: the tables, twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tiered_emb.config import TableConfig
from tiered_emb.engine import row_schema
from tiered_emb.optim import RowRule
from tiered_emb.plan import JaggedIds
from tiered_emb.reference.at_rest import RowsAtRest
from tiered_emb.reference.dlrm import Pooled
from tiered_emb.reference.stream import ClickBatch
from tiered_emb.reference.training import Learner, fingerprints
from tiered_emb.testing import DenseOracle, TorchOracle

IDENTICAL = "identical"
LOSS_TOLERANCE = 1e-5  # absolute; 1.2e-7 was seen
ROW_TOLERANCE = 1e-4  # of the largest number in the same column of the row; 5e-6 was seen after 704 steps of Adam

Touched = dict[str, tuple[NDArray[np.int64], NDArray[np.float32]]]


@dataclass(frozen=True)
class Trail:
    """What a tiered run leaves behind for the check: one loss, and (C, B) fingerprints of pooled rows, a step."""

    losses: Sequence[float]
    fingerprints: Sequence[NDArray[np.uint32]]


@dataclass(frozen=True)
class Model:
    """What both runs start from."""

    tables: Sequence[TableConfig]
    rule: RowRule
    seed: int
    learner: Callable[[], Learner]


def check_dense(model: Model, batches: Iterable[ClickBatch], trail: Trail, rows: RowsAtRest) -> str:
    """`IDENTICAL`, or where the first difference is: step, table and id."""
    dense = DenseOracle(model.tables, optimizer=model.rule, seed=model.seed)
    plain = TorchOracle(model.tables, optimizer=model.rule, seed=model.seed)
    learner = model.learner()
    device = learner.device
    for step, batch in enumerate(batches):
        pooled, shadow = _on(device, dense(batch.sparse)), _on(device, plain(batch.sparse))
        found = _pooled_difference(
            fingerprints(pooled, learner.model.features), trail.fingerprints[step], batch, learner
        )
        loss = learner.loss(batch, {name: _twin(pooled[name], shadow[name]) for name in pooled})
        with torch.no_grad():
            plain_loss = learner.loss(batch, shadow)
        found = found or _loss_difference(loss.item(), trail.losses[step], plain_loss.item())
        if found:
            return f"step {step + 1}: {found}"
        learner.learn(loss)
    widths = [column.width for column in row_schema(model.tables[0].embedding_dim, model.rule).columns]
    return _row_differences(dense.touched(), plain.touched(), rows, widths) or IDENTICAL


def _on(device: torch.device, pooled: Pooled) -> Pooled:
    return {name: rows.to(device) for name, rows in pooled.items()}


def _twin(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The first tensor; in the backward pass both receive its gradient."""
    both: torch.Tensor = _Twin.apply(first, second)  # type: ignore[no-untyped-call]
    return both


class _Twin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], grads[0]


def _pooled_difference(
    expected: NDArray[np.uint32], got: NDArray[np.uint32], batch: ClickBatch, learner: Learner
) -> str:
    """Which feature's pooled row differs first, by sample; empty if none does."""
    differs = np.argwhere((expected != got).T)
    if not len(differs):
        return ""
    sample, feature = (int(number) for number in differs[0])
    name = learner.model.features[feature]
    ids = _ids_of(batch.sparse, name, sample)
    what = f"id {ids[0]}" if len(ids) == 1 else f"one of the ids {', '.join(map(str, ids))}"
    return f"table {name!r}, {what} (sample {sample}): the pooled row is not the dense table's"


def _ids_of(sparse: JaggedIds, feature: str, sample: int) -> NDArray[np.int64]:
    """The ids in one sample's bag of a feature."""
    bag = sparse.features.index(feature) * sparse.batch_size + sample
    first, stop = int(sparse.offsets[bag]), int(sparse.offsets[bag + 1])
    ids: NDArray[np.int64] = sparse.ids[first:stop].numpy()
    return ids


def _loss_difference(dense: float, tiered: float, plain: float) -> str:
    if dense != tiered:
        return f"the loss is {tiered!r}, with dense tables {dense!r}, from equal pooled rows: the MLPs differ"
    if not abs(plain - dense) <= LOSS_TOLERANCE:
        return f"the loss is {dense!r}, in plain torch {plain!r}: more than {LOSS_TOLERANCE} apart"
    return ""


def _row_differences(dense: Touched, plain: Touched, rows: RowsAtRest, widths: Sequence[int]) -> str:
    """The first row at rest, by table and id, that is not the dense table's, or not near plain torch's."""
    for table in sorted(set(rows.tables()) | set(dense) | set(plain)):
        found = _ids_differ(table, dense, plain, rows)
        if found:
            return found
        done = 0
        for ids, block in rows.blocks(table):
            part = slice(done, done + len(ids))
            done += len(ids)
            equal = (block.view(np.uint32) == dense[table][1][part].view(np.uint32)).all(axis=1)
            near = _near(plain[table][1][part], block, widths)
            for right, what in (
                (equal, "is not the dense table's"),
                (near, f"is over {ROW_TOLERANCE} from plain torch's"),
            ):
                if not right.all():
                    return f"after the last step: table {table!r}, id {ids[int(right.argmin())]}: the row {what}"
    return ""


def _near(expected: NDArray[np.float32], got: NDArray[np.float32], widths: Sequence[int]) -> NDArray[np.bool_]:
    """(N,) which rows agree: in each column, no number is further off than the tolerance of the column's largest."""
    borders = np.cumsum(widths)[:-1]
    near = np.ones(len(expected), np.bool_)
    for one, other in zip(np.split(expected, borders, axis=1), np.split(got, borders, axis=1), strict=True):
        near &= np.abs(one - other).max(axis=1) <= ROW_TOLERANCE * np.abs(one).max(axis=1)
    return near


def _ids_differ(table: str, dense: Touched, plain: Touched, rows: RowsAtRest) -> str:
    none = np.empty(0, np.int64)
    stored = np.concatenate([none, *(ids for ids, _ in rows.blocks(table))])
    for other, what in ((dense, "the dense table"), (plain, "plain torch")):
        ids = other[table][0] if table in other else none
        odd = np.setxor1d(ids, stored)
        if len(odd):
            where = f"only {what} has" if odd[0] in ids else f"the store, but not {what}, has"
            return f"after the last step: table {table!r}, id {odd[0]}: {where} such a row"
    return ""
