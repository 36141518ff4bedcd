"""fp16: IEEE 754's half precision, 11 bits of precision from 6.1e-5 up to 65504.

Below that it has steps of 6.0e-8. NaN stays NaN and infinity infinity. A finite number never becomes infinite: beyond
65504 it is that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from storage.codecs._bytes import load16, store16
from storage.codecs._codec import Draws, Packed, Rows, draw_buffer, draw_row
from storage.schema import Column

_MAGNITUDE, _INFINITE, _LARGEST = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x7BFF)
_SIGN, _HALF_INFINITE, _HALF_NAN = np.uint32(0x8000), np.uint32(0x7C00), np.uint32(0x7E00)
_ONE, _SIXTEEN = np.uint32(1), np.uint32(16)
_FRACTION, _LEADING, _23 = np.uint32(0x7FFFFF), np.uint32(0x800000), np.uint32(23)
_NORMAL = np.uint32(113)  # biased exponent of the least normal half, 2^-14
_REBIAS = np.uint32(112 << 23)  # between the exponents' biases
_DROPPED = np.uint32(13)  # bits of a float32's fraction that a normal half has no room for
_MOST_DROPPED, _ZERO_EXPONENT = np.uint32(31), np.uint32(126)  # exponent 126 - b: b bits below the least half
_THIRTY_TWO = np.uint32(32)
_SUBNORMAL_UNIT = np.float32(2.0**-24)


class Fp16:
    """Two bytes a weight; see the module's docstring."""

    name = "fp16"
    lossy = True

    def columns(self, dim: int) -> tuple[Column, ...]:
        """`weight`, D numbers of two bytes."""
        return (Column("weight", "float16", dim),)

    def pack(self, rows: Rows, dim: int, out: Packed, draws: Draws) -> None:
        """As `Codec.pack`."""
        _pack(rows.view(np.uint32), dim, out, draws.seeds, draws.tables, draws.ids, draws.steps, *draw_buffer(dim))

    def unpack(self, packed: Packed, dim: int, out: Rows) -> None:
        """As `Codec.unpack`."""
        _unpack(packed, dim, out.view(np.uint32), out)


@njit(nogil=True, cache=True, forceinline=True)
def _rounded(bits: Any, noise: Any, nearest: Any) -> Any:
    """The number `bits` rounded to nearest, or up as 16 bits of `noise` have it."""
    magnitude = bits & _MAGNITUDE
    exponent = magnitude >> _23
    normal = exponent >= _NORMAL
    dropped = _DROPPED if normal else min(_ZERO_EXPONENT - exponent, _MOST_DROPPED)
    base = magnitude - _REBIAS if normal else (magnitude & _FRACTION) | _LEADING
    if nearest:
        added = (_ONE << (dropped - _ONE)) - _ONE + ((base >> dropped) & _ONE)  # ties to even
    else:
        added = (noise << _SIXTEEN) >> (_THIRTY_TWO - dropped)
    half = min((base + added) >> dropped, _LARGEST)
    if magnitude >= _INFINITE:
        half = _HALF_NAN if magnitude > _INFINITE else _HALF_INFINITE
    elif exponent == 0:  # zero, or a float32 far below the least half
        half = np.uint32(0)
    return np.uint16(half | ((bits >> _SIXTEEN) & _SIGN))


@njit(nogil=True, cache=True)
def _pack(bits: Any, dim: Any, out: Any, seeds: Any, tables: Any, ids: Any, steps: Any, words: Any, drawn: Any) -> None:
    none = np.uint32(0)
    for n in range(len(bits)):
        if steps[n] == 0:
            for d in range(dim):
                store16(out, n, 2 * d, _rounded(bits[n, d], none, True))
            continue
        draw_row(seeds[n], tables[n], ids[n], steps[n], words)
        for d in range(dim):
            store16(out, n, 2 * d, _rounded(bits[n, d], np.uint32(drawn[d]), False))


@njit(nogil=True, cache=True)
def _unpack(packed: Any, dim: Any, bits: Any, out: Any) -> None:
    for n in range(len(packed)):
        for d in range(dim):
            half = np.uint32(load16(packed, n, 2 * d))
            sign, magnitude = (half & _SIGN) << _SIXTEEN, half & np.uint32(0x7FFF)
            whole = (magnitude << _DROPPED) + _REBIAS
            if magnitude >= _HALF_INFINITE:
                whole += _REBIAS
            if magnitude < np.uint32(0x400):
                out[n, d] = np.float32(np.int32(magnitude)) * _SUBNORMAL_UNIT
                bits[n, d] |= sign
            else:
                bits[n, d] = whole | sign
