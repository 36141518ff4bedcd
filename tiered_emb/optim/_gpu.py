"""Row rules on a GPU in Triton: the twin of each rule's `reference`, the same float32 operations in the same order.

`LAUNCHES` has a function for each rule by its name, called as `RowRule.apply` with the rule in front. A rule that is
not among them runs by its reference. Slots that are negative are no rows: nothing is done for them.

Rules that change each number of a row by itself are cut into tiles of rows and columns; those that look at whole rows
first go over a row's columns twice. Shapes: n rows, D columns of a weight row, K of state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tiered_emb.kernels._tiles import folded, lane_dot, launch, launch_rows, tile
from tiered_emb.optim._moments import shares

Launch = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None]


def _launched(
    kernel: Any, numbers: Callable[[Any, int], tuple[float, ...]], *, whole_rows: bool = False, **options: str
) -> Launch:
    """A rule's function: `kernel` takes the tensors, the shape, the rule's `numbers` of a step, and as constants
    whether its `options`, attributes by the constants' names, are anything but 0."""

    def apply(
        rule: Any, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        n, dim = grads.shape
        constants = {name: bool(getattr(rule, attribute)) for name, attribute in options.items()}
        run = launch_rows if whole_rows else launch
        run(kernel, n, dim, weight, state, slots, grads, n, dim, *numbers(rule, step), **constants)

    return apply


def _of_moments(rule: Any, step: int) -> tuple[float, ...]:
    return (*shares(rule.betas), *rule._numbers(step))


@triton.jit
def _rows_at(slots, n, dim, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Of this program's tile: rows of the gradients, slots, both (ROWS, 1) int64, columns (1, COLS), and what is
    there."""
    row, column, is_row, is_column = tile(n, dim, ROWS, COLS)
    slot = tl.load(slots + row, mask=is_row, other=-1).to(tl.int64)
    return row, slot, column, (slot >= 0) & is_column


@triton.jit
def _averaged(average, new, share):
    return average + (new - average) * share


@triton.jit
def _sgd(
    weight,
    state,
    slots,
    grads,
    n,
    dim,
    lr,
    momentum,
    decay,
    MOMENTUM: tl.constexpr,
    DECAY: tl.constexpr,
    NESTEROV: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row, slot, column, there = _rows_at(slots, n, dim, ROWS, COLS)
    at = slot * dim + column
    grad = tl.load(grads + row * dim + column, mask=there)
    old = tl.load(weight + at, mask=there)
    if DECAY:
        grad = grad + old * decay
    change = grad
    if MOMENTUM:
        change = tl.load(state + at, mask=there) * momentum + grad
        tl.store(state + at, change, mask=there)
        if NESTEROV:
            change = change * momentum + grad
    tl.store(weight + at, old - change * lr, mask=there)


@triton.jit
def _adagrad(weight, state, slots, grads, n, dim, lr, eps, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, slot, column, there = _rows_at(slots, n, dim, ROWS, COLS)
    at = slot * dim + column
    grad = tl.load(grads + row * dim + column, mask=there, other=0.0)
    sums = tl.load(state + at, mask=there, other=1.0) + grad * grad
    tl.store(state + at, sums, mask=there)
    change = tl.div_rn(grad, tl.sqrt_rn(sums) + eps) * lr
    tl.store(weight + at, tl.load(weight + at, mask=there) - change, mask=there)


@triton.jit
def _adam(
    weight, state, slots, grads, n, dim, share_1, share_2, eps, size, keep, ROWS: tl.constexpr, COLS: tl.constexpr
):
    row, slot, column, there = _rows_at(slots, n, dim, ROWS, COLS)
    at, average = slot * dim + column, state + slot * (2 * dim) + column
    grad = tl.load(grads + row * dim + column, mask=there, other=0.0)
    mean = _averaged(tl.load(average, mask=there, other=0.0), grad, share_1)
    square = _averaged(tl.load(average + dim, mask=there, other=1.0), grad * grad, share_2)
    tl.store(average, mean, mask=there)
    tl.store(average + dim, square, mask=there)
    change = tl.div_rn(mean, tl.sqrt_rn(square) + eps) * size
    tl.store(weight + at, tl.load(weight + at, mask=there) * keep - change, mask=there)


@triton.jit
def _ftrl(weight, state, slots, grads, n, dim, lr, l1, l2, beta, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, slot, column, there = _rows_at(slots, n, dim, ROWS, COLS)
    at, kept = slot * dim + column, state + slot * (2 * dim) + column
    grad = tl.load(grads + row * dim + column, mask=there, other=0.0)
    old = tl.load(kept + dim, mask=there, other=0.0)
    new = old + grad * grad
    root = tl.sqrt_rn(new)
    pull = tl.load(weight + at, mask=there, other=0.0) * tl.div_rn(root - tl.sqrt_rn(old), lr)
    linear = tl.load(kept, mask=there, other=0.0) + (grad - pull)
    tl.store(kept, linear, mask=there)
    tl.store(kept + dim, new, mask=there)
    pulled = tl.where(linear > 0, linear - l1, linear + l1)
    made = tl.div_rn(pulled * -1.0, tl.div_rn(root + beta, lr) + l2)
    tl.store(weight + at, tl.where(tl.abs(linear) <= l1, 0.0, made), mask=there)


@triton.jit
def _mean_squares(grads, row, is_row, dim, ROWS: tl.constexpr):
    """Means (ROWS, 1) of the squares of rows (ROWS, 1) of grads, added in lane order."""
    squares = lane_dot(grads + row * dim, grads + row * dim, is_row, dim, ROWS)
    return tl.div_rn(squares, tl.full((ROWS, 1), 1.0, tl.float32) * dim)


@triton.jit
def _rowwise_adagrad(weight, state, slots, grads, n, dim, lr, eps, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, slot, columns, _ = _rows_at(slots, n, dim, ROWS, COLS)
    is_row = slot >= 0
    sums = tl.load(state + slot, mask=is_row, other=1.0) + _mean_squares(grads, row, is_row, dim, ROWS)
    tl.debug_barrier()  # all threads have read it
    tl.store(state + slot, sums, mask=is_row)
    scale = tl.div_rn(lr, tl.sqrt_rn(sums) + eps)
    for block in range(0, dim, COLS):
        column = block + columns
        there = is_row & (column < dim)
        at = weight + slot * dim + column
        grad = tl.load(grads + row * dim + column, mask=there)
        tl.store(at, tl.load(at, mask=there) - grad * scale, mask=there)


@triton.jit
def _rowwise_adam(
    weight, state, slots, grads, n, dim, share_1, share_2, eps, size, keep, ROWS: tl.constexpr, COLS: tl.constexpr
):
    row, slot, columns, _ = _rows_at(slots, n, dim, ROWS, COLS)
    is_row, average = slot >= 0, state + slot * (dim + 1)
    mean_square = tl.load(average + dim, mask=is_row, other=1.0)
    mean_square = _averaged(mean_square, _mean_squares(grads, row, is_row, dim, ROWS), share_2)
    tl.debug_barrier()  # all threads have read it
    tl.store(average + dim, mean_square, mask=is_row)
    scale = tl.div_rn(size, tl.sqrt_rn(mean_square) + eps)
    for block in range(0, dim, COLS):
        column = block + columns
        there = is_row & (column < dim)
        at = weight + slot * dim + column
        grad = tl.load(grads + row * dim + column, mask=there)
        mean = _averaged(tl.load(average + column, mask=there), grad, share_1)
        tl.store(average + column, mean, mask=there)
        tl.store(at, tl.load(at, mask=there) * keep - mean * scale, mask=there)


@triton.jit
def _lamb_change(weight, state, grads, row, slot, column, there, dim, share_1, share_2, eps, size, decay):
    """Of these columns: the weights, both averages as they are to be, and the change before it is scaled."""
    average = state + slot * (2 * dim) + column
    grad = tl.load(grads + row * dim + column, mask=there, other=0.0)
    mean = _averaged(tl.load(average, mask=there, other=0.0), grad, share_1)
    square = _averaged(tl.load(average + dim, mask=there, other=1.0), grad * grad, share_2)
    old = tl.load(weight + slot * dim + column, mask=there, other=0.0)
    change = tl.div_rn(mean, tl.sqrt_rn(square) + eps) * size + old * decay
    return old, mean, square, tl.where(there, change, 0.0)


@triton.jit
def _lamb(
    weight,
    state,
    slots,
    grads,
    n,
    dim,
    share_1,
    share_2,
    eps,
    size,
    decay,
    lr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row, slot, columns, _there = _rows_at(slots, n, dim, ROWS, COLS)
    is_row = slot >= 0
    of_weight, of_change = tl.zeros((ROWS, 8), tl.float32), tl.zeros((ROWS, 8), tl.float32)
    for block in range(0, dim, 8):
        eight = block + tl.arange(0, 8)[None, :]
        at_lanes = is_row & (eight < dim)
        before, _mean_8, _square_8, change_8 = _lamb_change(
            weight, state, grads, row, slot, eight, at_lanes, dim, share_1, share_2, eps, size, decay
        )
        of_weight += before * before
        of_change += change_8 * change_8
    length, moved = tl.sqrt_rn(folded(of_weight, ROWS)), tl.sqrt_rn(folded(of_change, ROWS))
    scale = tl.where((length > 0) & (moved > 0), tl.div_rn(length, moved), 1.0) * lr
    tl.debug_barrier()  # all threads have read the row
    for block in range(0, dim, COLS):
        column = block + columns
        there = is_row & (column < dim)
        old, mean, square, change = _lamb_change(
            weight, state, grads, row, slot, column, there, dim, share_1, share_2, eps, size, decay
        )
        average = state + slot * (2 * dim) + column
        tl.store(average, mean, mask=there)
        tl.store(average + dim, square, mask=there)
        tl.store(weight + slot * dim + column, old - change * scale, mask=there)


LAUNCHES: dict[str, Launch] = {
    "sgd": _launched(
        _sgd,
        lambda rule, step: (rule.lr, rule.momentum, rule.weight_decay),
        MOMENTUM="momentum",
        DECAY="weight_decay",
        NESTEROV="nesterov",
    ),
    "adagrad": _launched(_adagrad, lambda rule, step: (rule.lr, rule.eps)),
    "rowwise_adagrad": _launched(_rowwise_adagrad, lambda rule, step: (rule.lr, rule.eps), whole_rows=True),
    "adam": _launched(_adam, _of_moments),
    "adamw": _launched(_adam, _of_moments),
    "rowwise_adam": _launched(_rowwise_adam, _of_moments, whole_rows=True),
    "lamb": _launched(_lamb, _of_moments, whole_rows=True),
    "ftrl": _launched(_ftrl, lambda rule, step: (rule.lr, rule.l1, rule.l2, rule.beta)),
}
"""What runs a rule on a GPU, by the rule's name; every rule of ours is among them."""
