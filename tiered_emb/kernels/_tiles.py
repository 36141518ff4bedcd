"""What Triton kernels share: how work is cut into programs, how they are launched, sums in lane order.

A program works on a tile of ROWS rows and COLS columns, both powers of two; what lies outside is masked. Rows are the
first dimension of the grid and blocks of columns the second, so that any width will do.

Bits. Every launch forbids fused multiply-add and the flushing of numbers below 2^-126 to zero, both of which Triton has
by default; division and square root are asked for as IEEE 754 rounds them.

Where a program changes numbers that it has read, no number may belong to two of its threads, or one would read what the
other wrote. So such tiles are no smaller than the number of their threads, and numbers of which there is one a row have
a barrier between the load and the store.

Triton is imported here, so only what runs on a GPU, and its tests, may import this module.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_MOST_COLUMNS = 128
_COPIED = 1024  # numbers of a tile that is copied or changed: 4 warps, 8 numbers a thread
_SUMMED = 128  # numbers of a tile whose rows are sums: 1 warp, since rows of one program wait for the longest of them
_LANES = tl.constexpr(8)  # of `kernels._lanes`


def launch(kernel: Any, rows: int, columns: int, *arguments: Any, sums: bool = False, **constants: Any) -> None:
    """Run a kernel over (rows, columns); nothing is run where either is 0.

    Args:
        kernel: takes the arguments, the constants, and ROWS and COLS, the tile of a program.
        sums: a row is the sum of as many rows as it likes; rows of one tile should be few then.
    """
    if rows == 0 or columns == 0:
        return
    cols = min(triton.next_power_of_2(columns), _MOST_COLUMNS)
    tile = max(1, (_SUMMED if sums else _COPIED) // cols)
    grid = (triton.cdiv(rows, tile), triton.cdiv(columns, cols))
    run(kernel, grid, *arguments, **constants, ROWS=tile, COLS=cols, num_warps=1 if sums else 4)


def launch_rows(kernel: Any, rows: int, columns: int, *arguments: Any, **constants: Any) -> None:
    """As `launch`, for kernels that need a row whole: a program goes over all of its columns, COLS at a time."""
    if rows == 0 or columns == 0:
        return
    cols = min(max(8, triton.next_power_of_2(columns)), _MOST_COLUMNS)
    run(kernel, (triton.cdiv(rows, _COPIED // cols),), *arguments, **constants, ROWS=_COPIED // cols, COLS=cols)


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch on the device of the arguments, with arithmetic that gives the bits of the host's."""
    first = next(one for one in arguments if isinstance(one, torch.Tensor))
    with torch.cuda.device_of(first):  # Triton launches on the current device; does nothing for tensors of the host
        kernel[grid](*arguments, **constants, enable_fp_fusion=False, enable_reflect_ftz=False)


@triton.jit
def tile(n, dim, ROWS: tl.constexpr, COLS: tl.constexpr):
    """This program's rows (ROWS, 1) int64 of n, columns (1, COLS) of dim, and which of both are there."""
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    return rows, columns, rows < n, columns < dim


@triton.jit
def folded(lanes, ROWS: tl.constexpr):
    """Sums (ROWS, 1) of lanes (ROWS, 8), folded in halves as `kernels._lanes` has it."""
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 4)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 2)), axis=1)
    return tl.sum(lanes, axis=1)[:, None]


@triton.jit
def lane_dot(a, b, live, dim, ROWS: tl.constexpr):
    """Sums (ROWS, 1) over the columns of the rows at a times the rows at b, pointers (ROWS, 1), in lane order."""
    lanes = tl.zeros((ROWS, _LANES), tl.float32)
    for block in range(0, dim, _LANES):
        columns = (block + tl.arange(0, _LANES))[None, :]
        there = live & (columns < dim)
        lanes += tl.load(a + columns, mask=there, other=0.0) * tl.load(b + columns, mask=there, other=0.0)
    return folded(lanes, ROWS)
