"""From the gradient of pooled outputs to changed rows.

The gradients of one row are summed in forward order - features, bags, ids as the batch lists them, several forwards in
the order they were made - in float32 from zero, and the row rule is applied once to the sum. That order is part of the
result: workers, tiers and lookahead do not change it, because a row's sum is made by one worker from one list of
positions.

Shapes: N ids, U unique ids, B bags, D dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tiered_emb.kernels import batch as batch_kernels
from tiered_emb.limits import Limits, certainly_finite, finite_rows
from tiered_emb.optim import RowRule, runs_in_triton
from tiered_emb.plan import Bags, Plan, Slots
from tiered_emb.scratch import Scratch
from tiered_emb.staging import sent
from tiered_emb.tier import Tier
from tiered_emb.workers import WorkerPool

CHUNK_ROWS = 2048  # summed gradients of so many rows stay in a core's cache until the rule has used them


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """One forward of a plan and the gradient of its output.

    Attributes:
        plan: the forward's.
        grads: of F features (B, D) each; what they hold for bags that played no part in the loss means nothing.
        taking_part: (N,) positions whose bags did, ascending; None = all. Rows of other positions only are not updated.
    """

    plan: Plan
    grads: Sequence[torch.Tensor]
    taking_part: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowGradients:
    """Which output gradients add up to the gradient of which row.

    Attributes:
        slots: (U,) int32, distinct.
        located: where the gradient of each position is, for the device's kernels.
        bags: (N,) int32 bag of each position.
        weights: (N,) float32 factor of each position, or None.
        arg: (B, D) int32 position that won a max bag, or None.
        start, position: row u's positions are ``position[start[u]:start[u + 1]]``.
    """

    slots: Slots
    located: Any
    bags: torch.Tensor
    weights: torch.Tensor | None
    arg: torch.Tensor | None
    start: torch.Tensor
    position: torch.Tensor


def row_gradients(tier: Tier, uses: Sequence[Use], deduper: batch_kernels.Deduper, scratch: Scratch) -> RowGradients:
    """Line up the gradients of all ``uses`` of one set of tables; the arrays are ``scratch``'s until the next call."""
    if len(uses) == 1 and uses[0].taking_part is None:
        batch, slots, inverse = uses[0].plan.batch, uses[0].plan.slots, uses[0].plan.batch.inverse.numpy()
        bags, arg = batch.bags, uses[0].plan.arg
        grads, in_bag, weights = _of_sums(uses[0].grads, bags), bag_numbers(bags, scratch), bags.weights
    else:
        slots, inverse = _shared_slots(uses, deduper)
        joined, in_bag = _joined_bags(uses, scratch)
        grads = [joined]
        weights, arg = _joined_weights(uses), _joined_winners(uses)
    start = scratch.take("start", len(slots) + 1, np.int64)
    position = scratch.take("position", len(inverse), np.int32)
    batch_kernels.group_positions(inverse, len(slots), start, position)
    in_bag = tier.on_device(in_bag)
    return RowGradients(
        slots,
        tier.kernels.locate_gradients(grads, in_bag, scratch),
        in_bag,
        None if weights is None else tier.on_device(weights),
        arg,
        tier.on_device(start),
        tier.on_device(position),
    )


def are_finite(uses: Sequence[Use]) -> bool:
    """Whether the summed gradients of all rows are certainly finite."""
    weights = [use.plan.batch.bags.weights for use in uses]
    most = sum(int(use.plan.batch.counts.max(initial=0)) for use in uses)
    return all(certainly_finite(use.grads, factors, most) for use, factors in zip(uses, weights, strict=True))


def infinite_rows(tier: Tier, work: RowGradients) -> Slots:
    """Slots of the rows whose summed gradients are not finite, by a look at all of them."""
    found = [work.slots[:0]]
    sums = torch.empty((CHUNK_ROWS, tier.worked_on.weight.shape[1]), dtype=torch.float32, device=tier.slab.device)
    for begin in range(0, len(work.slots), CHUNK_ROWS):
        end = min(begin + CHUNK_ROWS, len(work.slots))
        _sum(tier, work, begin, end, sums[: end - begin])
        found.append(work.slots[begin:end][~finite_rows(sums[: end - begin])])
    return np.concatenate(found)


def apply_gradients(
    tier: Tier, work: RowGradients, rule: RowRule, step: int, workers: WorkerPool, limits: Limits, *, finite: bool
) -> None:
    """Sum each row's gradients and change the row; rows are partitioned over ``workers``, each row whole.

    Args:
        limits: of the tables.
        finite: all sums are; else rows with others are left as they are, and counted.
    """
    slab, slots = tier.worked_on, tier.on_device(work.slots)

    batch_kernels.mark(tier.dirty, work.slots)  # first: also rows of an update that fails half-way
    tier.count_step(work.slots, step)

    def part(first: int, last: int) -> None:
        shape = min(CHUNK_ROWS, last - first), slab.weight.shape[1]
        sums = torch.empty(shape, dtype=torch.float32, device=slab.device)
        for begin in range(first, last, CHUNK_ROWS):
            end = min(begin + CHUNK_ROWS, last)
            chunk = sums[: end - begin]
            _sum(tier, work, begin, end, chunk)
            rows = slots[begin:end]
            if limits.clip:
                limits.clipped(tier.directory.slot_tables[work.slots[begin:end]], chunk)
            if not finite:
                kept = finite_rows(chunk)
                limits.count_skipped(tier.directory.slot_tables[work.slots[begin:end][~kept]])
                which = tier.on_device(kept)
                rows, chunk = rows[which], chunk[which]
            rule.apply(slab.weight, slab.state, rows, chunk, step)

    if slab.device.type == "cpu":
        workers.run(part, len(work.slots), CHUNK_ROWS)
    elif len(work.slots):
        part(0, len(work.slots))  # on the caller's stream


def tells_later(tier: Tier, rule: RowRule) -> bool:
    """Whether rows whose gradients are not finite are left out on the device, by `apply_and_tell_later`."""
    return runs_in_triton(rule, tier.slab.device)


def apply_and_tell_later(tier: Tier, work: RowGradients, rule: RowRule, step: int, limits: Limits) -> None:
    """As `apply_gradients`, all rows at once and without waiting for the device: it leaves out rows whose sums are not
    finite, and all rows where one of them is of a table that refuses such a step; ``limits`` hears of it later.

    Requires: `tells_later`. The sums of all rows, (U, D), take device memory while the step is done.
    """
    slab, tables = tier.worked_on, tier.directory.slot_tables[work.slots]
    batch_kernels.mark(tier.dirty, work.slots)
    tier.count_step(work.slots, step)
    sums = torch.empty((len(work.slots), slab.weight.shape[1]), dtype=torch.float32, device=slab.device)
    _sum(tier, work, 0, len(work.slots), sums)
    finite, strict = sums.isfinite().all(1), tier.on_device(limits.strict(tables))
    refused = (strict & ~finite).any()
    if limits.clip:
        limits.clipped(tables, sums)
        finite = torch.where(strict, finite, sums.isfinite().all(1))  # what was clipped may be finite now
    slots = torch.where(finite & ~refused, tier.on_device(work.slots), -1)
    rule.apply(slab.weight, slab.state, slots, sums, step)
    limits.later(tables, tier.directory.slot_ids[work.slots], finite)


def weight_gradients(tier: Tier, plan: Plan, grad: torch.Tensor, scratch: Scratch, workers: WorkerPool) -> torch.Tensor:
    """Gradient (N,) of per-sample weights: the rows of ``plan``, unchanged since the forward, times ``grad`` (B, D)."""
    batch, out = plan.batch, torch.empty(len(plan.batch.inverse), dtype=torch.float32, device=grad.device)
    slots, inverse = tier.on_device(plan.slots), tier.on_device(batch.inverse)
    bags = tier.on_device(bag_numbers(batch.bags, scratch))
    tier.kernels.per_sample_gradients(tier.worked_on.weight, slots, inverse, bags, grad.contiguous(), out, workers)
    return out


def _sum(tier: Tier, work: RowGradients, first: int, last: int, out: torch.Tensor) -> None:
    if work.arg is not None:
        tier.kernels.sum_gradients_max(work.located, work.arg, work.bags, work.start, work.position, first, last, out)
    else:
        tier.kernels.sum_gradients(work.located, work.weights, work.start, work.position, first, last, out)


def bag_numbers(bags: Bags, scratch: Scratch) -> torch.Tensor:
    """(N,) int32: the bag each position is in."""
    out = scratch.take("bags", int(bags.offsets[-1]), np.int32)
    batch_kernels.bags_of(bags.offsets.numpy(), out)
    return torch.from_numpy(out)


def _of_sums(grads: Sequence[torch.Tensor], bags: Bags) -> Sequence[torch.Tensor]:
    """Gradients of the bags' sums: a mean's are divided by the bag's length."""
    if bags.mode != "mean" or _longest(bags) <= 1:
        return grads
    lengths = sent(bags.offsets.diff().clamp(min=1).unsqueeze(1).to(grads[0].dtype), grads[0].device)
    return [grad / part for grad, part in zip(grads, lengths.tensor_split(len(grads)), strict=True)]


def _longest(bags: Bags) -> int:
    return int(bags.offsets.diff().max()) if bags.num_bags else 0


def _shared_slots(uses: Sequence[Use], deduper: batch_kernels.Deduper) -> tuple[Slots, NDArray[np.int32]]:
    """Distinct slots over all uses and, for each position of all uses in call order, which of them it asked for."""
    asked = np.concatenate([use.plan.slots[_taking_part(use, use.plan.batch.inverse.numpy())] for use in uses])
    unique = batch_kernels.UniqueIds.empty(len(asked))
    count = deduper.dedupe(asked.astype(np.int64), np.array([0, len(asked)]), np.zeros(1, np.uint32), unique)
    return unique.ids[:count].astype(np.int32), unique.inverse


def _joined_bags(uses: Sequence[Use], scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of all uses under each other, and the bag of each position in that list."""
    grads: list[torch.Tensor] = []
    bags: list[torch.Tensor] = []
    seen = 0
    for use in uses:
        grads += _of_sums(use.grads, use.plan.batch.bags)
        numbers = bag_numbers(use.plan.batch.bags, scratch).numpy()
        bags.append(torch.from_numpy(_taking_part(use, numbers) + np.int32(seen)))
        seen += use.plan.batch.bags.num_bags
    return torch.cat(grads), torch.cat(bags)


def _taking_part(use: Use, positions: NDArray[Any]) -> NDArray[Any]:
    return positions if use.taking_part is None else positions[use.taking_part]


def _joined_weights(uses: Sequence[Use]) -> torch.Tensor | None:
    if all(use.plan.batch.bags.weights is None for use in uses):
        return None
    parts = []
    for use in uses:
        weights = use.plan.batch.bags.weights
        whole = np.ones(len(use.plan.batch.inverse), np.float32) if weights is None else weights.numpy()
        parts.append(torch.from_numpy(_taking_part(use, whole)))
    return torch.cat(parts)


def _joined_winners(uses: Sequence[Use]) -> torch.Tensor | None:
    """Winners of max bags as positions in the joined list; one that takes no part wins nothing."""
    winners, seen = [], 0
    for use in uses:
        if use.plan.arg is None:
            return None
        size = len(use.plan.batch.inverse)
        taking = np.arange(size) if use.taking_part is None else use.taking_part
        place = np.full(size + 1, -1, np.int32)  # the last one is for winner -1, an empty bag
        place[taking] = np.arange(seen, seen + len(taking), dtype=np.int32)
        winners.append(sent(torch.from_numpy(place), use.plan.arg.device)[use.plan.arg.long()])
        seen += len(taking)
    return torch.cat(winners)
