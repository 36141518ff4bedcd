"""int8: a row's weights as 256 steps between its least and its greatest, which stand beside them as scale and bias.

weight = bias + scale * q with q from 0 to 255, as FBGEMM's rows of 8 bits. A weight that is a step to within 2^-12 of
one is that step, so that a row which was packed before and did not change is packed to the same steps, draws or none.
A row that holds NaN or infinity comes back as NaN in all places: one number of a row cannot be told apart.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from storage.codecs._bytes import load32, store32
from storage.codecs._codec import Draws, Packed, Rows, draw_buffer, draw_row
from storage.schema import Column

_SNAP = 2.0**-12


class Int8:
    """A byte a weight, and 8 bytes a row; see the module's docstring."""

    name = "int8"
    lossy = True

    def columns(self, dim: int) -> tuple[Column, ...]:
        """`weight`, D bytes; `weight_scale` and `weight_bias`."""
        scale = Column("weight_scale", "float32", 1), Column("weight_bias", "float32", 1)
        return (Column("weight", "uint8", dim), *scale)

    def pack(self, rows: Rows, dim: int, out: Packed, draws: Draws) -> None:
        """As `Codec.pack`."""
        scales = np.empty((1, 2), np.float32)
        numbers = scales, scales.view(np.uint32)
        _pack(rows, dim, out, draws.seeds, draws.tables, draws.ids, draws.steps, *numbers, *draw_buffer(dim))

    def unpack(self, packed: Packed, dim: int, out: Rows) -> None:
        """As `Codec.unpack`."""
        scales = np.empty((1, 2), np.float32)
        _unpack(packed, dim, out, scales, scales.view(np.uint32))


@njit(nogil=True, cache=True, forceinline=True)
def _step(at: Any, noise: Any) -> Any:
    """The step for a place between steps; `noise` from 0 up to 1 is what is to lift it to the next one."""
    nearest = np.rint(at)
    step = nearest if abs(at - nearest) < _SNAP else math.floor(at + noise)
    return np.uint8(min(max(step, 0.0), 255.0))


@njit(nogil=True, cache=True)
def _pack(
    rows: Any,
    dim: Any,
    out: Any,
    seeds: Any,
    tables: Any,
    ids: Any,
    steps: Any,
    scales: Any,
    scale_bits: Any,
    words: Any,
    drawn: Any,
) -> None:
    for n in range(len(rows)):
        low = high = rows[n, 0]
        finite = True
        for d in range(dim):
            low, high = min(low, rows[n, d]), max(high, rows[n, d])
            finite &= np.isfinite(rows[n, d])
        bias, scale = np.float64(low), np.float64(np.float32((np.float64(high) - np.float64(low)) / 255.0))
        scales[0, 0], scales[0, 1] = (scale, low) if finite else (np.nan, np.nan)
        store32(out, n, dim, scale_bits[0, 0])
        store32(out, n, dim + 4, scale_bits[0, 1])
        factor = 1.0 / scale if finite and scale > 0 else 0.0
        if factor == 0:
            for d in range(dim):
                out[n, d] = 0
        elif steps[n] == 0:
            for d in range(dim):
                out[n, d] = np.uint8(min(max(np.rint((rows[n, d] - bias) * factor), 0.0), 255.0))
        else:
            draw_row(seeds[n], tables[n], ids[n], steps[n], words)
            for d in range(dim):
                out[n, d] = _step((rows[n, d] - bias) * factor, np.float64(drawn[d]) * 2.0**-16)


@njit(nogil=True, cache=True)
def _unpack(packed: Any, dim: Any, out: Any, scales: Any, scale_bits: Any) -> None:
    for n in range(len(packed)):
        scale_bits[0, 0], scale_bits[0, 1] = load32(packed, n, dim), load32(packed, n, dim + 4)
        scale, bias = np.float64(scales[0, 0]), np.float64(scales[0, 1])
        for d in range(dim):
            out[n, d] = np.float32(bias + packed[n, d] * scale)
