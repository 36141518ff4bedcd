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

import numpy as np
import torch
from numpy.typing import NDArray

from tiered_emb.kernels import batch as batch_kernels
from tiered_emb.optim import RowRule
from tiered_emb.plan import Bags, Plan, Slots
from tiered_emb.scratch import Scratch
from tiered_emb.tier import Tier
from tiered_emb.workers import WorkerPool

CHUNK_ROWS = 2048  # summed gradients of so many rows stay in a core's cache until the rule has used them


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """One forward of a plan and the gradient (B, D) of its output."""

    plan: Plan
    grad: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowGradients:
    """Which output gradients add up to the gradient of which row.

    Attributes:
        slots: (U,) int32, distinct.
        grad: (B, D) gradient of the pooled outputs.
        bags: (N,) int32 bag of each position.
        weights: (N,) float32 factor of each position, or None.
        arg: (B, D) int32 position that won a max bag, or None.
        start, position: row u's positions are ``position[start[u]:start[u + 1]]``.
    """

    slots: Slots
    grad: torch.Tensor
    bags: torch.Tensor
    weights: torch.Tensor | None
    arg: torch.Tensor | None
    start: torch.Tensor
    position: torch.Tensor


def row_gradients(uses: Sequence[Use], deduper: batch_kernels.Deduper, scratch: Scratch) -> RowGradients:
    """Line up the gradients of all ``uses`` of one set of tables; the arrays are ``scratch``'s until the next call."""
    if len(uses) == 1:
        batch, slots, inverse = uses[0].plan.batch, uses[0].plan.slots, uses[0].plan.batch.inverse.numpy()
        bags, arg = batch.bags, uses[0].plan.arg
        grad, in_bag, weights = _of_sums(uses[0].grad, bags), bag_numbers(bags, scratch), bags.weights
    else:
        slots, inverse = _shared_slots(uses, deduper)
        grad, in_bag = _joined_bags(uses, scratch)
        weights, arg = _joined_weights(uses), _joined_winners(uses)
    start = scratch.take("start", len(slots) + 1, np.int64)
    position = scratch.take("position", len(inverse), np.int32)
    batch_kernels.group_positions(inverse, len(slots), start, position)
    return RowGradients(slots, grad, in_bag, weights, arg, torch.from_numpy(start), torch.from_numpy(position))


def apply_gradients(tier: Tier, work: RowGradients, rule: RowRule, step: int, workers: WorkerPool) -> None:
    """Sum each row's gradients and change the row; rows are partitioned over ``workers``, each row whole."""
    slab, slots = tier.slab, torch.from_numpy(work.slots)

    def part(first: int, last: int) -> None:
        sums = torch.empty((min(CHUNK_ROWS, last - first), slab.weight.shape[1]), device=slab.device)
        for begin in range(first, last, CHUNK_ROWS):
            end = min(begin + CHUNK_ROWS, last)
            chunk = sums[: end - begin]
            _sum(tier, work, begin, end, chunk)
            rule.apply(slab.weight, slab.state, slots[begin:end], chunk, step)

    workers.run(part, len(work.slots), CHUNK_ROWS)
    tier.dirty[work.slots] = True


def _sum(tier: Tier, work: RowGradients, first: int, last: int, out: torch.Tensor) -> None:
    if work.arg is not None:
        tier.kernels.sum_gradients_max(work.grad, work.arg, work.bags, work.start, work.position, first, last, out)
    else:
        tier.kernels.sum_gradients(work.grad, work.bags, work.weights, work.start, work.position, first, last, out)


def bag_numbers(bags: Bags, scratch: Scratch) -> torch.Tensor:
    """(N,) int32: the bag each position is in."""
    out = scratch.take("bags", int(bags.offsets[-1]), np.int32)
    batch_kernels.bags_of(bags.offsets.numpy(), out)
    return torch.from_numpy(out)


def _of_sums(grad: torch.Tensor, bags: Bags) -> torch.Tensor:
    """Gradient of the bags' sums: a mean's is divided by the bag's length."""
    grad = grad.contiguous()
    if bags.mode != "mean" or bags.plain:
        return grad
    return grad / bags.offsets.diff().clamp(min=1).unsqueeze(1).to(grad)


def _shared_slots(uses: Sequence[Use], deduper: batch_kernels.Deduper) -> tuple[Slots, NDArray[np.int32]]:
    """Distinct slots over all uses and, for each position of all uses in call order, which of them it asked for."""
    asked = np.concatenate([use.plan.slots[use.plan.batch.inverse.numpy()] for use in uses]).astype(np.int64)
    unique = batch_kernels.UniqueIds.empty(len(asked))
    count = deduper.dedupe(asked, np.array([0, len(asked)]), np.zeros(1, np.uint32), unique)
    return unique.ids[:count].astype(np.int32), unique.inverse


def _joined_bags(uses: Sequence[Use], scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of all uses under each other, and the bag of each position in that list."""
    grads, bags, seen = [], [], 0
    for use in uses:
        grads.append(_of_sums(use.grad, use.plan.batch.bags))
        bags.append(bag_numbers(use.plan.batch.bags, scratch) + seen)
        seen += use.plan.batch.bags.num_bags
    return torch.cat(grads), torch.cat(bags)


def _joined_weights(uses: Sequence[Use]) -> torch.Tensor | None:
    weights = [use.plan.batch.bags.weights for use in uses]
    if all(one is None for one in weights):
        return None
    return torch.cat(
        [
            torch.ones(len(use.plan.batch.inverse)) if one is None else one
            for use, one in zip(uses, weights, strict=True)
        ]
    )


def _joined_winners(uses: Sequence[Use]) -> torch.Tensor | None:
    winners, seen = [], 0
    for use in uses:
        if use.plan.arg is None:
            return None
        winners.append(torch.where(use.plan.arg >= 0, use.plan.arg + seen, use.plan.arg))
        seen += len(use.plan.batch.inverse)
    return torch.cat(winners)
