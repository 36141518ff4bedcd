"""Row work in plain torch ops, on any device: the specification that the fast kernels are compared with, to the bit.

Shapes: S slots, D columns of a weight row, K columns of optimizer state, U unique ids, N positions of a batch, B bags,
M rows copied. float32 rows, int32 slots, bags and positions, int64 offsets and starts; `out` is written whole.

Sums run position by position through all bags (or rows) at once, so each is a left-to-right float32 sum, whatever the
device. That takes as many steps as the longest bag (or the hottest row) has positions: this is for truth, not for
speed. `workers` is taken for the sake of the common signature and not used.

A sum starts from +0.0. Hence a bag of one row of -0.0 pools to +0.0 (as in torch), while `gather` copies the sign.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from tiered_emb.kernels._lanes import lane_sum
from tiered_emb.scratch import Scratch
from tiered_emb.workers import WorkerPool


def pool(
    weight: torch.Tensor,
    slots: torch.Tensor,
    inverse: torch.Tensor,
    offsets: torch.Tensor,
    per_sample: torch.Tensor | None,
    mode: Literal["sum", "mean"],
    out: torch.Tensor,
    workers: WorkerPool,
) -> None:
    """out[b] = sum, in order, of weight[slots[inverse[p]]] over the positions p of bag b; empty bags give 0.

    weight (S, D), slots (U,), inverse (N,), offsets (B + 1,), per_sample (N,) or None, out (B, D). With per_sample a
    row is multiplied (rounded) before it is added. "mean" divides the sum by the bag's number of positions.
    """
    rows = slots[inverse]
    out.zero_()
    for bags, positions in _steps(offsets[:-1], offsets[1:]):
        terms = weight[rows[positions]]
        if per_sample is not None:
            terms = terms * per_sample[positions, None]
        out[bags] = out[bags] + terms
    if mode == "mean":
        out.div_((offsets[1:] - offsets[:-1]).clamp(min=1).to(torch.float32)[:, None])


def pool_max(
    weight: torch.Tensor,
    slots: torch.Tensor,
    inverse: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
    arg: torch.Tensor,
    workers: WorkerPool,
) -> None:
    """out[b, d] = largest weight[slots[inverse[p]], d] over the positions p of bag b, arg[b, d] = the first such p.

    out float32 (B, D), arg int32 (B, D). An empty bag gives 0 and -1. A NaN wins unless it is the bag's first row's
    column's successor: as in torch, a later row replaces the maximum only where it compares greater.
    """
    rows = slots[inverse]
    out.zero_()
    arg.fill_(-1)
    for bags, positions in _steps(offsets[:-1], offsets[1:]):
        terms = weight[rows[positions]]
        wins = (arg[bags] < 0) | (terms > out[bags])
        out[bags] = torch.where(wins, terms, out[bags])
        arg[bags] = torch.where(wins, positions[:, None].to(torch.int32), arg[bags])


def gather(
    weight: torch.Tensor, slots: torch.Tensor, inverse: torch.Tensor, out: torch.Tensor, workers: WorkerPool
) -> None:
    """out[p] = weight[slots[inverse[p]]], bit by bit. weight (S, D), slots (U,), inverse (N,), out (N, D)."""
    out.copy_(weight[slots[inverse]])


def per_sample_gradients(
    weight: torch.Tensor,
    slots: torch.Tensor,
    inverse: torch.Tensor,
    bags: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor,
    workers: WorkerPool,
) -> None:
    """out[p] = sum over d of weight[slots[inverse[p]], d] * grad[bags[p], d], in lane order (`kernels._lanes`).

    weight (S, D), slots (U,), inverse (N,), bags (N,), grad (B, D), out (N,).
    """
    out.copy_(lane_sum(weight[slots[inverse]] * grad[bags]))


def locate_gradients(grads: Sequence[torch.Tensor], bags: torch.Tensor, scratch: Scratch) -> Any:
    """Where `sum_gradients` finds the gradient of each position: row bags[p] of all grads under each other.

    grads (B, D) each, of one shape, bags (N,). What is returned means something to these kernels alone, until
    `scratch`, which may hold it, is used for other gradients.
    """
    return (grads[0] if len(grads) == 1 else torch.cat(list(grads))), bags


def sum_gradients(
    located: Any,
    per_sample: torch.Tensor | None,
    start: torch.Tensor,
    position: torch.Tensor,
    first: int,
    last: int,
    out: torch.Tensor,
) -> None:
    """out[u - first] = sum, in order, of p's gradient over p in position[start[u]:start[u + 1]], first <= u < last.

    located as `locate_gradients` gives it, per_sample (N,) or None, start (>= last + 1,), position (N,), out
    (last - first, D). With per_sample a gradient is multiplied (rounded) before it is added.
    """
    grad, bags = located
    out.zero_()
    for rows, places in _steps(start[first:last], start[first + 1 : last + 1]):
        p = position[places]
        terms = grad[bags[p]]
        if per_sample is not None:
            terms = terms * per_sample[p, None]
        out[rows] = out[rows] + terms


def sum_gradients_max(
    located: Any,
    arg: torch.Tensor,
    bags: torch.Tensor,
    start: torch.Tensor,
    position: torch.Tensor,
    first: int,
    last: int,
    out: torch.Tensor,
) -> None:
    """As `sum_gradients`, but of p's gradient in column d only where arg[bags[p], d] == p: column d came from there.

    arg int32 (B, D) as written by `pool_max`, bags (N,).
    """
    grad, _ = located
    out.zero_()
    for rows, places in _steps(start[first:last], start[first + 1 : last + 1]):
        p = position[places]
        b = bags[p]
        out[rows] = torch.where(arg[b] == p[:, None], out[rows] + grad[b], out[rows])


def read_rows(weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """out[m] = weight[slots[m]] and state[slots[m]], one after the other.

    weight (S, D), state (S, K), slots (M,), out (M, D + K).
    """
    dim = weight.shape[1]
    out[:, :dim] = weight[slots]
    out[:, dim:] = state[slots]


def write_rows(weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """The reverse of `read_rows`: rows (M, D + K) go to the slots, which are distinct."""
    dim = weight.shape[1]
    weight[slots.long()] = rows[:, :dim]
    state[slots.long()] = rows[:, dim:]


def _steps(begin: torch.Tensor, end: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For k = 0, 1, ...: the ranges begin[i] .. end[i] - 1 that have a k-th item, and those items."""
    members = torch.nonzero(end > begin).squeeze(1)
    k = 0
    while members.numel():
        yield members, begin[members] + k
        k += 1
        members = members[end[members] > begin[members] + k]
