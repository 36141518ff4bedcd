"""bf16: the upper half of a float32, which keeps its range and 8 of its 24 bits of precision.

NaN stays NaN and infinity infinity. A finite number never becomes infinite: beyond the largest, 3.39e38, it is that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from storage.codecs._bytes import load16, store16
from storage.codecs._codec import Draws, Packed, Rows, draw_buffer, draw_row
from storage.schema import Column

_MAGNITUDE, _INFINITE, _LARGEST = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x7F7F)
_SIGN, _QUIET, _HALF = np.uint32(0x8000), np.uint32(0x40), np.uint32(0x7FFF)
_ONE, _SIXTEEN = np.uint32(1), np.uint32(16)


class Bf16:
    """Two bytes a weight; see the module's docstring."""

    name = "bf16"
    lossy = True

    def columns(self, dim: int) -> tuple[Column, ...]:
        """`weight`, D numbers of two bytes."""
        return (Column("weight", "bfloat16", dim),)

    def pack(self, rows: Rows, dim: int, out: Packed, draws: Draws) -> None:
        """As `Codec.pack`."""
        _pack(rows.view(np.uint32), dim, out, draws.seeds, draws.tables, draws.ids, draws.steps, *draw_buffer(dim))

    def unpack(self, packed: Packed, dim: int, out: Rows) -> None:
        """As `Codec.unpack`."""
        _unpack(packed, dim, out.view(np.uint32))


@njit(nogil=True, cache=True, forceinline=True)
def _rounded(bits: Any, added: Any) -> Any:
    """The number `bits` with `added` below its last place."""
    magnitude = bits & _MAGNITUDE
    upper = min((magnitude + added) >> _SIXTEEN, _LARGEST)
    if magnitude >= _INFINITE:
        upper = (magnitude >> _SIXTEEN) | (_QUIET if magnitude > _INFINITE else np.uint32(0))
    return np.uint16(upper | ((bits >> _SIXTEEN) & _SIGN))


@njit(nogil=True, cache=True)
def _pack(bits: Any, dim: Any, out: Any, seeds: Any, tables: Any, ids: Any, steps: Any, words: Any, drawn: Any) -> None:
    for n in range(len(bits)):
        if steps[n] == 0:
            for d in range(dim):
                added = _HALF + ((bits[n, d] >> _SIXTEEN) & _ONE)  # ties to even
                store16(out, n, 2 * d, _rounded(bits[n, d], added))
            continue
        draw_row(seeds[n], tables[n], ids[n], steps[n], words)
        for d in range(dim):
            store16(out, n, 2 * d, _rounded(bits[n, d], np.uint32(drawn[d])))


@njit(nogil=True, cache=True)
def _unpack(packed: Any, dim: Any, bits: Any) -> None:
    for n in range(len(packed)):
        for d in range(dim):
            bits[n, d] = np.uint32(load16(packed, n, 2 * d)) << _SIXTEEN
