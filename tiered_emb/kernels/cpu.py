"""Row work on the CPU in Numba: pool, gather, gradient sums, copies in and out of a slab.

The twin of `reference`, where each function's contract stands: same arguments, same bits. Shapes: S slots, D columns
of a weight row, K columns of optimizer state, U unique ids, N positions of a batch, B bags, M rows copied.

Bits. A bag is summed from zero in the order of its positions, a row's gradient from zero in the order of `position`,
each in float32 without fused multiply-add or reassociation; a mean divides the sum. Workers are given whole bags,
rows or positions, so their number changes nothing.

Speed. Rows far apart in memory are asked for some positions ahead (`_AHEAD`); inner loops index arrays and take no
slices (a slice in an inner loop made the backward three times slower). Tensors are C-contiguous: one specialisation a
kernel; gradients may lie anyhow and are found by address. The functions above the kernels only turn tensors into
arrays, about 1 us each.

Threads: any; nothing is kept. The caller sees to it that nobody writes the slots that are read, or reads those written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from tiered_emb.intrinsics import floats_at, prefetch_bytes, prefetch_row
from tiered_emb.kernels._lanes import lane_dot
from tiered_emb.scratch import Scratch
from tiered_emb.workers import WorkerPool

_AHEAD = 8  # positions between asking for a row and using it
_GRAIN = 4096  # positions of the smallest part worth giving to another thread
_ONE = np.float32(1)  # a factor that changes no bit
_ZERO = np.float32(0)  # what a sum starts from: turns a lone -0.0 into +0.0, as a longer sum would
_NO_WEIGHTS = np.empty(0, np.float32)  # stands for per_sample=None: one specialisation instead of two


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
    """Sum or mean of each bag's rows; see `reference.pool`."""
    w, s, i, o, result = weight.numpy(), slots.numpy(), inverse.numpy(), offsets.numpy(), out.numpy()
    samples, mean = _or_empty(per_sample), mode == "mean"

    def part(first: int, last: int) -> None:
        _pool(w, s, i, o, samples, mean, result, first, last)

    workers.run(part, len(result), _grain(len(result), len(i)))


def pool_max(
    weight: torch.Tensor,
    slots: torch.Tensor,
    inverse: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
    arg: torch.Tensor,
    workers: WorkerPool,
) -> None:
    """Maximum of each bag's rows and where it comes from; see `reference.pool_max`."""
    w, s, i, o, result, a = (t.numpy() for t in (weight, slots, inverse, offsets, out, arg))

    def part(first: int, last: int) -> None:
        _pool_max(w, s, i, o, result, a, first, last)

    workers.run(part, len(result), _grain(len(result), len(i)))


def gather(
    weight: torch.Tensor, slots: torch.Tensor, inverse: torch.Tensor, out: torch.Tensor, workers: WorkerPool
) -> None:
    """The row of each position; see `reference.gather`."""
    w, s, i, result = weight.numpy(), slots.numpy(), inverse.numpy(), out.numpy()

    def part(first: int, last: int) -> None:
        _gather(w, s, i, result, first, last)

    workers.run(part, len(i), _GRAIN)


def per_sample_gradients(
    weight: torch.Tensor,
    slots: torch.Tensor,
    inverse: torch.Tensor,
    bags: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor,
    workers: WorkerPool,
) -> None:
    """Gradient of each position's weight; see `reference.per_sample_gradients`."""
    w, s, i, b, g, result = (t.numpy() for t in (weight, slots, inverse, bags, grad, out))

    def part(first: int, last: int) -> None:
        _per_sample_gradients(w, s, i, b, g, result, first, last)

    workers.run(part, len(i), _GRAIN)


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """Gradients where they are: no copy brings those of several features together, which would take longer than a step.

    Attributes:
        grads: keeps what the addresses lead to.
        at: int64 (N,) address of each position's gradient.
    """

    grads: Sequence[torch.Tensor]
    at: npt.NDArray[np.int64]


def locate_gradients(grads: Sequence[torch.Tensor], bags: torch.Tensor, scratch: Scratch) -> Any:
    """Where `sum_gradients` finds the gradient of each position; see `reference.locate_gradients`.

    Rows may be apart by any stride; their columns are made to lie side by side.
    """
    grads = [grad if grad.shape[1] == 1 or grad.stride(1) == 1 else grad.contiguous() for grad in grads]
    bases = np.array([grad.data_ptr() for grad in grads], np.int64)
    steps = np.array([grad.stride(0) * grad.element_size() for grad in grads], np.int64)
    at = scratch.take("gradients at", len(bags), np.int64)
    _locate(bags.numpy(), bases, steps, max(1, grads[0].shape[0]), at)
    return Located(grads, at)


def sum_gradients(
    located: Any,
    per_sample: torch.Tensor | None,
    start: torch.Tensor,
    position: torch.Tensor,
    first: int,
    last: int,
    out: torch.Tensor,
) -> None:
    """Gradients of unique rows first .. last - 1; see `reference.sum_gradients`."""
    samples = _or_empty(per_sample)
    _sum_gradients(located.at, samples, start.numpy(), position.numpy(), first, last, out.numpy())


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
    """The same for bags pooled by maximum; see `reference.sum_gradients_max`."""
    arrays = arg.numpy(), bags.numpy(), start.numpy(), position.numpy()
    _sum_gradients_max(located.at, *arrays, first, last, out.numpy())


def read_rows(weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Copy rows out of a slab; see `reference.read_rows`."""
    _read_rows(weight.numpy(), state.numpy(), slots.numpy(), out.numpy())


def write_rows(weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy rows into a slab; see `reference.write_rows`."""
    _write_rows(weight.numpy(), state.numpy(), slots.numpy(), rows.numpy())


def _or_empty(per_sample: torch.Tensor | None) -> npt.NDArray[Any]:
    return _NO_WEIGHTS if per_sample is None else per_sample.detach().numpy()


def _grain(bags: int, positions: int) -> int:
    """Bags that hold about `_GRAIN` positions together."""
    return max(1, _GRAIN * bags // max(positions, bags, 1))


@njit(nogil=True, cache=True, error_model="numpy")
def _pool(
    weight: Any,
    slots: Any,
    inverse: Any,
    offsets: Any,
    per_sample: Any,
    mean: Any,
    out: Any,
    first: Any,
    last: Any,
) -> None:
    dim, end, weighted = weight.shape[1], offsets[last], len(per_sample) > 0
    for b in range(first, last):
        if offsets[b] == offsets[b + 1]:
            for d in range(dim):
                out[b, d] = 0
        for p in range(offsets[b], offsets[b + 1]):
            if p + _AHEAD < end:
                prefetch_row(weight, slots[inverse[p + _AHEAD]])
            row = slots[inverse[p]]
            factor = per_sample[p] if weighted else _ONE
            if p == offsets[b]:
                for d in range(dim):
                    out[b, d] = weight[row, d] * factor + _ZERO
            else:
                for d in range(dim):
                    out[b, d] += weight[row, d] * factor
        if mean and offsets[b + 1] > offsets[b] + 1:
            length = np.float32(offsets[b + 1] - offsets[b])
            for d in range(dim):
                out[b, d] /= length


@njit(nogil=True, cache=True)
def _pool_max(weight: Any, slots: Any, inverse: Any, offsets: Any, out: Any, arg: Any, first: Any, last: Any) -> None:
    dim, end = weight.shape[1], offsets[last]
    for b in range(first, last):
        for d in range(dim):
            out[b, d] = 0
            arg[b, d] = -1
        for p in range(offsets[b], offsets[b + 1]):
            if p + _AHEAD < end:
                prefetch_row(weight, slots[inverse[p + _AHEAD]])
            row = slots[inverse[p]]
            for d in range(dim):
                if arg[b, d] < 0 or weight[row, d] > out[b, d]:
                    out[b, d] = weight[row, d]
                    arg[b, d] = p


@njit(nogil=True, cache=True)
def _gather(weight: Any, slots: Any, inverse: Any, out: Any, first: Any, last: Any) -> None:
    for p in range(first, last):
        if p + _AHEAD < last:
            prefetch_row(weight, slots[inverse[p + _AHEAD]])
        row = slots[inverse[p]]
        for d in range(weight.shape[1]):
            out[p, d] = weight[row, d]


@njit(nogil=True, cache=True)
def _per_sample_gradients(
    weight: Any, slots: Any, inverse: Any, bags: Any, grad: Any, out: Any, first: Any, last: Any
) -> None:
    for p in range(first, last):
        if p + _AHEAD < last:
            prefetch_row(weight, slots[inverse[p + _AHEAD]])
        out[p] = lane_dot(weight, slots[inverse[p]], grad, bags[p])


@njit(nogil=True, cache=True)
def _locate(bags: Any, bases: Any, steps: Any, size: Any, at: Any) -> None:
    feature = 0
    for p in range(len(bags)):
        if not feature * size <= bags[p] < (feature + 1) * size:  # bags ascend: seldom
            feature = bags[p] // size
        at[p] = bases[feature] + (bags[p] - feature * size) * steps[feature]


@njit(nogil=True, cache=True)
def _sum_gradients(at: Any, per_sample: Any, start: Any, position: Any, first: Any, last: Any, out: Any) -> None:
    dim, end, weighted = out.shape[1], start[last], len(per_sample) > 0
    for u in range(first, last):
        row = u - first
        if start[u] == start[u + 1]:
            for d in range(dim):
                out[row, d] = 0
        for place in range(start[u], start[u + 1]):
            if place + _AHEAD < end:
                prefetch_bytes(at[position[place + _AHEAD]], 4 * dim)
            p = position[place]
            grad = floats_at(at[p], dim)
            factor = per_sample[p] if weighted else _ONE
            if place == start[u]:
                for d in range(dim):
                    out[row, d] = grad[d] * factor + _ZERO
            else:
                for d in range(dim):
                    out[row, d] += grad[d] * factor


@njit(nogil=True, cache=True)
def _sum_gradients_max(
    at: Any, arg: Any, bags: Any, start: Any, position: Any, first: Any, last: Any, out: Any
) -> None:
    dim = out.shape[1]
    for u in range(first, last):
        row = u - first
        for d in range(dim):
            out[row, d] = 0
        for place in range(start[u], start[u + 1]):
            p = position[place]
            b = bags[p]
            grad = floats_at(at[p], dim)
            for d in range(dim):
                if arg[b, d] == p:
                    out[row, d] += grad[d]


@njit(nogil=True, cache=True)
def _read_rows(weight: Any, state: Any, slots: Any, out: Any) -> None:
    dim = weight.shape[1]
    for m in range(len(slots)):
        if m + _AHEAD < len(slots):
            prefetch_row(weight, slots[m + _AHEAD])
            prefetch_row(state, slots[m + _AHEAD])
        for d in range(dim):
            out[m, d] = weight[slots[m], d]
        for k in range(state.shape[1]):
            out[m, dim + k] = state[slots[m], k]


@njit(nogil=True, cache=True)
def _write_rows(weight: Any, state: Any, slots: Any, rows: Any) -> None:
    dim = weight.shape[1]
    for m in range(len(slots)):
        if m + _AHEAD < len(slots):
            prefetch_row(weight, slots[m + _AHEAD])
            prefetch_row(state, slots[m + _AHEAD])
        for d in range(dim):
            weight[slots[m], d] = rows[m, d]
        for k in range(state.shape[1]):
            state[slots[m], k] = rows[m, dim + k]
