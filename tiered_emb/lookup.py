"""TableLookup: one differentiable look-up of features whose tables share a group and a pooling mode.

The forward takes a batch down its road and returns pooled rows; the backward records the gradient of that use with the
module's :class:`Updates`, which applies the row rule once to every table: at the end of the backward pass
(``update="backward"``), or in ``optimizer.step()`` (``update="step"``). Rows change only then, so that a table used
twice in one forward is updated once, by the sum of both uses, and gradients of per-sample weights see the rows of the
forward.

Pins end with the update; those of a forward whose graph is dropped end with the graph. A backward over an updated
forward is an error, and so is one over a forward of a module that was closed since. A backward pass that fails half-way
leaves no trace: its uses are dropped by the next forward. Passes may be nested (a checkpointed part of a model runs its
own); each applies what it recorded. A pass that asks for other gradients only (``torch.autograd.grad`` of the
per-sample weights) records nothing.

Shapes: N ids, B bags a feature, F features, D dimension.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable

from storage.interrupts import Uninterrupted
from tiered_emb.config import Mode
from tiered_emb.errors import InvalidBatchError, ModuleClosedError, PlanReleasedError
from tiered_emb.gradients import Use
from tiered_emb.group import TableGroup
from tiered_emb.inputs import Ends, check_ends, check_range, listed
from tiered_emb.limits import certainly_finite
from tiered_emb.optim import RowRule
from tiered_emb.plan import Bags, IdBatch, Ids, Plan

UpdateTime = Literal["backward", "step"]


@dataclass(frozen=True, slots=True)
class Feature:
    """A column of ids and the table it looks up: numbered ``number``, bounded by ``num_embeddings`` or not (None)."""

    name: str
    table: str
    number: int
    num_embeddings: int | None


class Updates:
    """Gradients recorded by backward passes of one module, until the rule is applied.

    Attributes:
        steps: rule applications so far; the next one is number ``steps + 1``.
        finite: whether all gradients that wait for ``optimizer.step()`` are.
        recorded: called whenever one begins to.
        after: called with the new ``steps`` after each application.
    """

    def __init__(self, time: UpdateTime, rule: Callable[[], RowRule], steps: int, after: Callable[[int], None]) -> None:
        self.time = time
        self.steps = steps
        self.finite = True
        self.recorded: Callable[[], None] = lambda: None
        self._rule = rule
        self._after = after
        self._closed = False
        self._uses: dict[
            int, list[tuple[TableLookup, Use]]
        ] = {}  # by autograd's number of the backward pass; -1 = "step"

    def record(self, lookup: TableLookup, use: Use) -> None:
        """Called by a backward node: the pooled rows of this forward have this gradient."""
        if self.time == "step":  # until which the caller may do with the gradients' memory what it likes
            use = replace(use, grads=[grad.clone() for grad in use.grads])
            self.finite &= certainly_finite(use.grads, None, 1)
            self.recorded()
        current = torch._C._current_graph_task_id() if self.time == "backward" else -1
        if current not in self._uses and self.time == "backward":
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.apply(current))
        self._uses.setdefault(current, []).append((lookup, use))

    def drop_failed(self) -> None:
        """Forget the uses of a backward pass that failed half-way; called between passes."""
        if self._uses and self.time == "backward" and torch._C._current_graph_task_id() == -1:
            self.discard()

    def apply(self, backward_pass: int = -1, factor: float = 1.0) -> None:
        """Apply the rule once to the uses that a backward pass recorded (-1: that all did), times a factor, and unpin
        their rows."""
        with Uninterrupted():
            self.finite = True
            if uses := self._uses.pop(backward_pass, []):
                if factor != 1:
                    uses = [(one, replace(use, grads=[grad * factor for grad in use.grads])) for one, use in uses]
                self._apply(uses)

    def _apply(self, uses: Sequence[tuple[TableLookup, Use]]) -> None:
        if over := [lookup for lookup, use in uses if use.plan.released]:  # by a pass within this one
            for lookup, use in uses:
                _release(lookup, [use])
            raise _is_over(over[0])
        found = {
            lookup: sorted((use for one, use in uses if one is lookup), key=lambda use: use.plan.number)
            for lookup in dict.fromkeys(lookup for lookup, _ in uses)
        }
        try:
            rule = self._rule()
            finite = [lookup.group.check_gradients(mine, rule) for lookup, mine in found.items()]
        except BaseException:  # no row has changed, and these gradients will not do
            for lookup, use in uses:
                _release(lookup, [use])
            raise
        self.steps += 1
        for (lookup, mine), are_finite in zip(found.items(), finite, strict=True):
            lookup.group.update(mine, rule, self.steps, finite=are_finite)
            for use in mine:
                lookup.group.finish(use.plan)
        self._after(self.steps)

    def discard(self) -> None:
        """Forget recorded uses, as ``zero_grad`` does."""
        with Uninterrupted():
            for uses in self._uses.values():
                for lookup, use in uses:
                    _release(lookup, [use])
            self._uses = {}
            self.finite = True

    @property
    def pending(self) -> bool:
        """Whether gradients wait for the rule."""
        return bool(self._uses)

    def close(self) -> None:
        """Forget recorded uses and refuse further ones."""
        self.discard()
        self._closed = True

    def check_open(self, tables: Sequence[str]) -> None:
        """Raise ModuleClosedError after :meth:`close`: rows changed now would reach no Store."""
        if self._closed:
            raise ModuleClosedError(
                f"tables {listed(tables)}: a backward pass reached a forward of a module that was closed since; "
                f"close it after the last backward pass"
            )


def forget_failed_passes() -> None:
    """Have autograd and the garbage collector drop graphs that nobody can use any more.

    Nodes that a failed backward pass did not get to wait in autograd's queue, with the plans that they hold, until the
    next pass comes by; so one is run that does nothing.
    """
    if torch._C._current_graph_task_id() == -1:
        nothing = torch.zeros(0, dtype=torch.float32, device="cpu", requires_grad=True).clone()
        torch.autograd.backward([nothing], [torch.zeros_like(nothing)])
    gc.collect()


def passing() -> bool:
    """Whether this thread is in the middle of a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def _is_over(lookup: TableLookup) -> PlanReleasedError:
    tables = sorted({feature.table for feature in lookup.features.values()})
    return PlanReleasedError(
        f"tables {listed(tables)}: a backward pass has already updated and released the rows of this forward, or a "
        f"rollback has let them go; run the forward again, or add the losses and go backward once"
    )


def _release(lookup: TableLookup, uses: Sequence[Use]) -> None:
    for use in uses:
        lookup.group.release(use.plan)


@dataclass(slots=True, eq=False)
class Question:
    """What one look-up is asked in one forward.

    Attributes:
        lookup: to be asked.
        batch: the ids.
        weights: (N,) float32 per-sample weights as autograd knows them, or None.
        num_features: F.
        plan: the batch's, where it is to be trained on.
    """

    lookup: TableLookup
    batch: IdBatch
    weights: torch.Tensor | None
    num_features: int
    plan: Plan | None = None

    def withdraw(self) -> None:
        """Unpin what an answer that nobody will get has pinned; a traceback may keep its tensors for long."""
        if self.plan is not None:
            self.lookup.group.release(self.plan)
            self.plan = None


@dataclass(frozen=True, slots=True, eq=False)
class LookupInput:
    """What one look-up is given in one forward, not looked at yet.

    Attributes:
        lookup: that is asked.
        names: F features.
        ids: (N,) int64; features, then bags, one after the other.
        ends: (F * B + 1,) int64 as JaggedIds' offsets.
        weights: (N,) float32 per-sample weights as autograd knows them, or None.
    """

    lookup: TableLookup
    names: Sequence[str]
    ids: Ids
    ends: Ends
    weights: torch.Tensor | None

    def ask(self) -> Question:
        """As ``TableLookup.ask``."""
        return self.lookup.ask(self.names, self.ids, self.ends, self.weights)

    def kept(self) -> LookupInput:
        """The same with arrays of its own, whatever becomes of the caller's."""
        weights = None if self.weights is None else self.weights.detach().clone()
        return replace(self, ids=self.ids.copy(), ends=self.ends.copy(), weights=weights)

    def equals(self, other: LookupInput) -> bool:
        """Whether both ask for the same, by value."""
        return (
            self.lookup is other.lookup
            and list(self.names) == list(other.names)
            and np.array_equal(self.ids, other.ids)
            and np.array_equal(self.ends, other.ends)
            and _equal_weights(self.weights, other.weights)
        )


def _equal_weights(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one.detach(), other)


class TableLookup:
    """Looks features up; see the module's essay.

    Attributes:
        group: holds the tables.
        features: by name.
        mode: how bags are pooled.

    With ``copies`` a batch of one id a bag is copied, not pooled.
    """

    def __init__(
        self, group: TableGroup, features: Sequence[Feature], mode: Mode, updates: Updates, *, copies: bool = False
    ) -> None:
        self.group = group
        self.features = {feature.name: feature for feature in features}
        self.mode: Mode = mode
        self._updates = updates
        self._copies = copies
        # Makes autograd call the backward. Not a leaf: of a leaf autograd does not say whether a pass will reach it.
        self._anchor = torch.zeros(0, dtype=torch.float32, device="cpu", requires_grad=True).clone()

    def ask(self, names: Sequence[str], ids: Ids, ends: Ends, weights: torch.Tensor | None) -> Question:
        """The checked, deduplicated ids of F features, in the order of ``names``.

        ``ids`` (N,) int64 and ``ends`` (F * B + 1,) int64 as JaggedIds' offsets; ``weights`` (N,) float32 or None.
        Raises InvalidBatchError and IdRangeError; nothing is changed by it.
        """
        features = [self.features[name] for name in names]
        return Question(self, self._batch(features, ids, ends, weights), weights, len(names))

    def answer(self, question: Question, training: bool) -> tuple[torch.Tensor, ...]:
        """Pooled rows (B, D) of each of the F features.

        With ``training`` and gradients enabled, of the question's plan, and to be trained; otherwise nothing is left
        behind, and what the Store raises is raised. Requires: the engine's road then.
        """
        batch, weights, features = question.batch, question.weights, question.num_features
        if training and torch.is_grad_enabled():
            plan = question.plan
            assert plan is not None, "a look-up that trains is planned first"
            self.group.number_forward(plan)
            outs: tuple[torch.Tensor, ...] = _Pooled.apply(self._anchor, weights, self, plan, features)  # type: ignore[no-untyped-call]
            return outs
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            return self._weighted_only(batch, weights).tensor_split(features)
        return _by_feature(self.group.peek(batch), features)

    def _batch(self, features: Sequence[Feature], ids: Ids, ends: Ends, weights: torch.Tensor | None) -> IdBatch:
        self._check(features, ids, ends, weights)
        num_bags, num_features = len(ends) - 1, len(features)
        factors = None if weights is None else weights.detach().to("cpu").contiguous()
        bags = Bags(torch.from_numpy(ends), factors, self.mode, self._copies and num_bags == len(ids))
        segments = ends[np.arange(num_features + 1) * (num_bags // num_features)]
        numbers = np.array([feature.number for feature in features], np.uint32)
        return self.group.dedupe(ids, segments, numbers, bags)

    def _check(self, features: Sequence[Feature], ids: Ids, ends: Ends, weights: torch.Tensor | None) -> None:
        names = listed([feature.name for feature in features])
        check_ends(ends, len(ids), names)
        if weights is not None and (weights.dtype != torch.float32 or weights.shape != (len(ids),)):
            raise InvalidBatchError(
                f"{names}: weights are {weights.dtype} {tuple(weights.shape)}; expected float32 ({len(ids)},)"
            )
        if weights is not None and self.mode != "sum":
            raise InvalidBatchError(f"{names}: weights go with mode 'sum', not {self.mode!r}")
        size = (len(ends) - 1) // len(features)
        for at, feature in enumerate(features):
            mine = ids[ends[at * size] : ends[(at + 1) * size]]
            check_range(feature.table, feature.name, feature.num_embeddings, mine)

    def _weighted_only(self, batch: IdBatch, weights: torch.Tensor) -> torch.Tensor:
        """Outside training only the per-sample weights get a gradient."""
        rows = self.group.read_rows(batch.tables, batch.ids)[:, : self.group.dim]
        return torch.nn.functional.embedding_bag(
            batch.inverse.long().to(weights.device),
            torch.from_numpy(np.ascontiguousarray(rows)).to(weights.device),
            batch.bags.offsets.to(weights.device),
            mode="sum",
            per_sample_weights=weights,
            include_last_offset=True,
        )


class _Pooled(torch.autograd.Function):
    """Pooled rows of a committed plan, one output a feature; its backward gives their gradients to the Updates."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, weights: torch.Tensor | None, lookup: TableLookup, plan: Plan, features: int
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.lookup, ctx.plan = lookup, plan
        ctx.weights_device = None if weights is None else weights.device
        return _by_feature(lookup.group.lookup(plan), features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        lookup, plan = ctx.lookup, ctx.plan
        tables = sorted({feature.table for feature in lookup.features.values()})
        lookup._updates.check_open(tables)
        if plan.released:
            raise _is_over(lookup)
        used = [grad is not None for grad in grads]
        if not any(used):
            return None, None, None, None, None
        given = _given(grads)
        weight_grad = None
        if ctx.needs_input_grad[1]:
            joined = given[0] if len(given) == 1 else torch.cat(given)
            weight_grad = lookup.group.weight_gradients(plan, joined).to(ctx.weights_device)
        if torch._C._will_engine_execute_node(ctx.next_functions[0][0]):  # the anchor's: rows are to be trained
            lookup._updates.record(lookup, Use(plan, given, None if all(used) else _positions(plan, used)))
        return None, weight_grad, None, None, None


def _by_feature(out: torch.Tensor, features: int) -> tuple[torch.Tensor, ...]:
    """``out`` (F * B, D) as F tensors (B, D) of the same memory, which autograd does not take for views: each may be
    changed in place."""
    if features == 1:
        return (out,)
    size, dim = out.shape[0] // features, out.shape[1]
    storage = out.untyped_storage()
    return tuple(
        torch.empty(0, dtype=out.dtype, device=out.device).set_(storage, feature * size * dim, (size, dim), (dim, 1))
        for feature in range(features)
    )


def _given(grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Gradients of all features; zeros where a feature played no part."""
    shape = next(grad for grad in grads if grad is not None)
    return [torch.zeros_like(shape) if grad is None else grad.detach().resolve_neg() for grad in grads]


def _positions(plan: Plan, used: Sequence[bool]) -> NDArray[np.int64]:
    """Positions in bags of the features that are used."""
    ends = plan.batch.bags.offsets.numpy()
    size = (len(ends) - 1) // len(used)
    spans = [np.arange(ends[at * size], ends[(at + 1) * size]) for at, part in enumerate(used) if part]
    return np.concatenate(spans)
