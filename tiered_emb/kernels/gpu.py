"""Row work on a GPU in Triton: pool, gather, gradient sums, copies in and out of a slab.

The twin of `reference`, where each function's contract stands: same arguments, same bits. Shapes: S slots, D columns
of a weight row, K columns of optimizer state, U unique ids, N positions of a batch, B bags, M rows copied.

Bits. As in `cpu`, a bag is summed from zero in the order of its positions and a row's gradient in the order of
`position`, each number by one thread; `_tiles` says how the arithmetic is kept to the host's. No atomic sums.

Speed. Positions of a sum are taken some at a time (`_AHEAD`), so that their rows are on the way together, though they
are added one by one. A row that a batch asks for very often is one long sum, and the others of its tile wait for it.

Everything is enqueued on the caller's stream and nothing is waited for. `workers` is taken for the sake of the common
signature and not used. Tensors of the host will do in Triton's interpreter (TRITON_INTERPRET=1), for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from tiered_emb.kernels import reference
from tiered_emb.kernels._tiles import lane_dot, launch, run, tile
from tiered_emb.scratch import Scratch
from tiered_emb.workers import WorkerPool

_AHEAD = 4  # positions whose rows are asked for together
_DOT_ROWS = 16  # positions of a program of `per_sample_gradients`: 8 lanes each make one number a thread


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
    bags, dim = out.shape
    tensors = weight, slots, inverse, offsets, per_sample, out
    weighted = per_sample is not None
    launch(_pool, bags, dim, *tensors, bags, dim, MEAN=mode == "mean", WEIGHTED=weighted, AHEAD=_AHEAD, sums=True)


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
    bags, dim = out.shape
    launch(_pool_max, bags, dim, weight, slots, inverse, offsets, out, arg, bags, dim, AHEAD=_AHEAD, sums=True)


def gather(
    weight: torch.Tensor, slots: torch.Tensor, inverse: torch.Tensor, out: torch.Tensor, workers: WorkerPool
) -> None:
    """The row of each position; see `reference.gather`."""
    positions, dim = out.shape
    launch(_gather, positions, dim, weight, slots, inverse, out, positions, dim)


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
    n, dim = len(out), weight.shape[1]
    if n:
        grid = (triton.cdiv(n, _DOT_ROWS),)
        run(_dots, grid, weight, slots, inverse, bags, grad.contiguous(), out, n, dim, ROWS=_DOT_ROWS)


def locate_gradients(grads: Sequence[torch.Tensor], bags: torch.Tensor, scratch: Scratch) -> Any:
    """Where `sum_gradients` finds the gradient of each position; see `reference.locate_gradients`.

    Gradients of one feature are read where they are, by any strides; those of several are copied under each other.
    """
    return reference.locate_gradients(grads, bags, scratch)


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
    grad, bags = located
    rows, dim = out.shape
    tensors, weighted = (bags, per_sample, start, position), per_sample is not None
    launch(
        _sum_gradients,
        *(rows, dim, grad, *grad.stride(), *tensors, first, out, rows, dim),
        WEIGHTED=weighted,
        AHEAD=_AHEAD,
        sums=True,
    )


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
    grad, _ = located
    rows, dim = out.shape
    tensors = arg, bags, start, position
    launch(
        _sum_gradients_max,
        *(rows, dim, grad, *grad.stride(), *tensors, first, out, rows, dim),
        AHEAD=_AHEAD,
        sums=True,
    )


def read_rows(weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Copy rows out of a slab; see `reference.read_rows`."""
    _move(weight, state, slots, out, reads=True)


def write_rows(weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy rows into a slab; see `reference.write_rows`."""
    _move(weight, state, slots, rows, reads=False)


def _move(weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, *, reads: bool) -> None:
    n, dim, width = len(slots), weight.shape[1], state.shape[1]
    launch(_copy_rows, n, dim + width, weight, state, slots, rows, n, dim, width, READS=reads)


@triton.jit
def _pool(
    weight,
    slots,
    inverse,
    offsets,
    per_sample,
    out,
    bags,
    dim,
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    bag, column, is_bag, is_column = tile(bags, dim, ROWS, COLS)
    begin = tl.load(offsets + bag, mask=is_bag, other=0)
    length = tl.load(offsets + bag + 1, mask=is_bag, other=0) - begin
    total = tl.zeros((ROWS, COLS), tl.float32)
    for k in range(0, tl.max(length), AHEAD):
        for ahead in tl.static_range(AHEAD):
            position, is_one = begin + k + ahead, k + ahead < length
            row = tl.load(slots + tl.load(inverse + position, mask=is_one, other=0), mask=is_one, other=0)
            term = tl.load(weight + row.to(tl.int64) * dim + column, mask=is_one & is_column, other=0.0)
            if WEIGHTED:
                term *= tl.load(per_sample + position, mask=is_one, other=0.0)
            total = tl.where(is_one, total + term, total)
    if MEAN:
        total = tl.div_rn(total, tl.broadcast_to(tl.maximum(length, 1).to(tl.float32), (ROWS, COLS)))
    tl.store(out + bag * dim + column, total, mask=is_bag & is_column)


@triton.jit
def _pool_max(
    weight,
    slots,
    inverse,
    offsets,
    out,
    arg,
    bags,
    dim,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    bag, column, is_bag, is_column = tile(bags, dim, ROWS, COLS)
    begin = tl.load(offsets + bag, mask=is_bag, other=0)
    length = tl.load(offsets + bag + 1, mask=is_bag, other=0) - begin
    greatest = tl.zeros((ROWS, COLS), tl.float32)
    winner = tl.full((ROWS, COLS), -1, tl.int32)
    for k in range(0, tl.max(length), AHEAD):
        for ahead in tl.static_range(AHEAD):
            position, is_one = begin + k + ahead, k + ahead < length
            row = tl.load(slots + tl.load(inverse + position, mask=is_one, other=0), mask=is_one, other=0)
            term = tl.load(weight + row.to(tl.int64) * dim + column, mask=is_one & is_column, other=0.0)
            wins = is_one & ((winner < 0) | (term > greatest))
            greatest = tl.where(wins, term, greatest)
            winner = tl.where(wins, position.to(tl.int32), winner)
    tl.store(out + bag * dim + column, greatest, mask=is_bag & is_column)
    tl.store(arg + bag * dim + column, winner, mask=is_bag & is_column)


@triton.jit
def _gather(weight, slots, inverse, out, positions, dim, ROWS: tl.constexpr, COLS: tl.constexpr):
    position, column, is_one, is_column = tile(positions, dim, ROWS, COLS)
    row = tl.load(slots + tl.load(inverse + position, mask=is_one, other=0), mask=is_one, other=0)
    found = tl.load(weight + row.to(tl.int64) * dim + column, mask=is_one & is_column)
    tl.store(out + position * dim + column, found, mask=is_one & is_column)


@triton.jit
def _dots(weight, slots, inverse, bags, grad, out, n, dim, ROWS: tl.constexpr):
    position, _, is_one, _ = tile(n, dim, ROWS, 1)
    row = tl.load(slots + tl.load(inverse + position, mask=is_one, other=0), mask=is_one, other=0)
    bag = tl.load(bags + position, mask=is_one, other=0)
    found = lane_dot(weight + row.to(tl.int64) * dim, grad + bag.to(tl.int64) * dim, is_one, dim, ROWS)
    tl.store(out + position, found, mask=is_one)


@triton.jit
def _sum_gradients(
    grad,
    row_stride,
    column_stride,
    bags,
    per_sample,
    start,
    position,
    first,
    out,
    rows,
    dim,
    WEIGHTED: tl.constexpr,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row, column, is_row, is_column = tile(rows, dim, ROWS, COLS)
    begin = tl.load(start + first + row, mask=is_row, other=0)
    length = tl.load(start + first + row + 1, mask=is_row, other=0) - begin
    total = tl.zeros((ROWS, COLS), tl.float32)
    for k in range(0, tl.max(length), AHEAD):
        for ahead in tl.static_range(AHEAD):
            is_one = k + ahead < length
            p = tl.load(position + begin + k + ahead, mask=is_one, other=0)
            bag = tl.load(bags + p, mask=is_one, other=0).to(tl.int64)
            term = tl.load(grad + bag * row_stride + column * column_stride, mask=is_one & is_column, other=0.0)
            if WEIGHTED:
                term *= tl.load(per_sample + p, mask=is_one, other=0.0)
            total = tl.where(is_one, total + term, total)
    tl.store(out + row * dim + column, total, mask=is_row & is_column)


@triton.jit
def _sum_gradients_max(
    grad,
    row_stride,
    column_stride,
    arg,
    bags,
    start,
    position,
    first,
    out,
    rows,
    dim,
    AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row, column, is_row, is_column = tile(rows, dim, ROWS, COLS)
    begin = tl.load(start + first + row, mask=is_row, other=0)
    length = tl.load(start + first + row + 1, mask=is_row, other=0) - begin
    total = tl.zeros((ROWS, COLS), tl.float32)
    for k in range(0, tl.max(length), AHEAD):
        for ahead in tl.static_range(AHEAD):
            is_one = k + ahead < length
            p = tl.load(position + begin + k + ahead, mask=is_one, other=0)
            bag = tl.load(bags + p, mask=is_one, other=0).to(tl.int64)
            won = is_one & (tl.load(arg + bag * dim + column, mask=is_one & is_column, other=-1) == p)
            term = tl.load(grad + bag * row_stride + column * column_stride, mask=won, other=0.0)
            total = tl.where(won, total + term, total)
    tl.store(out + row * dim + column, total, mask=is_row & is_column)


@triton.jit
def _copy_rows(weight, state, slots, rows, n, dim, width, READS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, column, is_row, is_column = tile(n, dim + width, ROWS, COLS)
    slot = tl.load(slots + row, mask=is_row, other=0).to(tl.int64)
    of_weight, of_state = is_row & (column < dim), is_row & is_column & (column >= dim)
    in_weight, in_state = weight + slot * dim + column, state + slot * width + (column - dim)
    moved = rows + row * (dim + width) + column
    if READS:
        tl.store(moved, tl.load(in_weight, mask=of_weight), mask=of_weight)
        tl.store(moved, tl.load(in_state, mask=of_state), mask=of_state)
    else:
        tl.store(in_weight, tl.load(moved, mask=of_weight), mask=of_weight)
        tl.store(in_state, tl.load(moved, mask=of_state), mask=of_state)
