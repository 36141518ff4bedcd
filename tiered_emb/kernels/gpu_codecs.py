"""Rows packed and unpacked on a GPU, in Triton: the twins of `storage.codecs`, the same bytes for the same draws.

The codecs' files say what a packed row is, and why; here stands only how a GPU does it. Numbers are rounded in integer
arithmetic, for Triton's own conversions differ between devices, and where they saturate. Draws come from Triton's
Philox, which is `storage.philox`, eight columns from four words.

Shapes: N rows, W >= D floats of a row, B bytes of a packed row, all on one device. Rows and packed rows are
C-contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from storage.codecs import Draws
from tiered_emb.kernels._tiles import launch, launch_rows, tile

_PURPOSE = tl.constexpr(0x9E3779B97F4A7C15)  # as in `storage.codecs._codec`
_MAGNITUDE, _INFINITE = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)
_FRACTION, _LEADING = tl.constexpr(0x7FFFFF), tl.constexpr(0x800000)
_NORMAL = tl.constexpr(113)  # biased exponent of the least normal half, 2^-14
_REBIAS = tl.constexpr(112 << 23)  # between the exponents' biases
_NO_COLUMN = tl.constexpr(0x7FFFFFFF)
_TO_WHOLE = tl.constexpr(1.5 * 2.0**52)  # added and taken away, it rounds a float64 to the nearest whole number
_SNAP = tl.constexpr(2.0**-12)
_UNIT = tl.constexpr(2.0**-16)
_SUBNORMAL_UNIT = tl.constexpr(2.0**-24)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceDraws:
    """`storage.codecs.Draws` on a device.

    Attributes:
        seeds, tables, ids, steps: (N,) uint64, uint32, int64, uint32.
    """

    seeds: torch.Tensor
    tables: torch.Tensor
    ids: torch.Tensor
    steps: torch.Tensor

    @classmethod
    def of(cls, draws: Draws, device: torch.device) -> DeviceDraws:
        """Copied to a device."""
        arrays = draws.seeds, draws.tables, draws.ids, draws.steps
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))


def pack(codec: str, rows: torch.Tensor, dim: int, out: torch.Tensor, draws: DeviceDraws) -> None:
    """Pack the first D = `dim` numbers of rows (N, W) float32 into the first bytes of out (N, B) uint8.

    As `Codec.pack` of the codec of that name, one of `NAMES`: to nearest where a row's step is 0, else by its draws.
    """
    told = draws.seeds, draws.tables, draws.ids, draws.steps
    n, width = rows.shape
    if codec == "int8":
        launch_rows(_pack_int8, n, dim, rows, out, *told, n, dim, width, out.shape[1])
    else:
        halves = out.view(torch.int16)
        launch(_pack_halves, n, dim, _bits(rows), halves, *told, n, dim, width, halves.shape[1], BF16=_is_bf16(codec))


def unpack(codec: str, packed: torch.Tensor, dim: int, out: torch.Tensor) -> None:
    """Read the first bytes of packed (N, B) uint8 into the first D = `dim` numbers of out (N, W) float32; as
    `Codec.unpack` of the codec of that name, one of `NAMES`."""
    n, width = out.shape
    if codec == "int8":
        launch(_unpack_int8, n, dim, packed, out, n, dim, packed.shape[1], width)
    else:
        halves = packed.view(torch.int16)
        launch(_unpack_halves, n, dim, halves, _bits(out), n, dim, halves.shape[1], width, BF16=_is_bf16(codec))


NAMES = ("bf16", "fp16", "int8")
"""The codecs that have a twin here; fp32 is a copy."""


def _is_bf16(codec: str) -> bool:
    assert codec in NAMES, codec
    return codec == "bf16"


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.int32)


@triton.jit
def _noise(seeds, tables, ids, step, row, is_row, block, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """16 random bits for each column of blocks (1, BLOCKS) of eight: (ROWS, 8 * BLOCKS) uint32."""
    seed = tl.load(seeds + row, mask=is_row, other=0).to(tl.uint64)
    number = tl.load(ids + row, mask=is_row, other=0).to(tl.uint64)
    table = tl.load(tables + row, mask=is_row, other=0).to(tl.uint32)
    key = seed ^ ((step.to(tl.uint64) * 2 + 1) * _PURPOSE)
    zero = tl.zeros((ROWS, BLOCKS), tl.uint32)
    low, high = (number & 0xFFFFFFFF).to(tl.uint32), (number >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(key, low + zero, high + zero, table + zero, block.to(tl.uint32) + zero)
    words = tl.join(tl.join(a, c), tl.join(b, d))  # [..., i, j] is word 2 * i + j
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (ROWS, 8 * BLOCKS))


@triton.jit
def _half(bits, fill, nearest, BF16: tl.constexpr):
    """The number `bits` (uint32) as 16 bits: to nearest, ties to even, or lifted by the upper 16 bits of `fill`."""
    LARGEST: tl.constexpr = 0x7F7F if BF16 else 0x7BFF
    INFINITE: tl.constexpr = 0x7F80 if BF16 else 0x7C00
    magnitude = bits & _MAGNITUDE
    if BF16:
        dropped, base = magnitude * 0 + 16, magnitude
        quiet = (magnitude >> 16) | 0x40
    else:
        exponent = magnitude >> 23
        normal = exponent >= _NORMAL
        below = tl.minimum(126 - tl.minimum(exponent, _NORMAL - 1), 31)  # bits that a subnormal half has no room for
        dropped = tl.where(normal, 13, below)
        base = tl.where(normal, magnitude, _REBIAS) - _REBIAS
        base = tl.where(normal, base, (magnitude & _FRACTION) | _LEADING)
        quiet = magnitude * 0 + 0x7E00
    even = tl.where(nearest, (base >> dropped) & 1, 0)
    half = tl.minimum((base + (fill >> (32 - dropped)) + even) >> dropped, LARGEST)
    if not BF16:
        half = tl.where(exponent == 0, 0, half)  # zero, or a float32 far below the least half
    half = tl.where(magnitude == _INFINITE, INFINITE, tl.where(magnitude > _INFINITE, quiet, half))
    return half | ((bits >> 16) & 0x8000)


@triton.jit
def _pack_halves(
    bits,
    out,
    seeds,
    tables,
    ids,
    steps,
    n,
    dim,
    width,
    out_width,
    BF16: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    BLOCKS: tl.constexpr = (COLS + 7) // 8
    row, _, is_row, _ = tile(n, dim, ROWS, COLS)
    first = tl.program_id(1) * COLS
    column = first + tl.arange(0, 8 * BLOCKS)[None, :]  # more than COLS where that is less than a block
    step = tl.load(steps + row, mask=is_row, other=0)
    block = first // 8 + tl.arange(0, BLOCKS)[None, :]
    noise = _noise(seeds, tables, ids, step, row, is_row, block, ROWS, BLOCKS)
    nearest, there = step == 0, is_row & (column < dim)
    number = tl.load(bits + row * width + column, mask=there, other=0).to(tl.uint32, bitcast=True)
    half = _half(number, tl.where(nearest, _MAGNITUDE, noise << 16), nearest, BF16)
    tl.store(out + row * out_width + column, half.to(tl.uint16).to(tl.int16, bitcast=True), mask=there)


@triton.jit
def _unpack_halves(
    packed, bits, n, dim, packed_width, width, BF16: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    row, column, is_row, is_column = tile(n, dim, ROWS, COLS)
    there = is_row & is_column
    half = tl.load(packed + row * packed_width + column, mask=there, other=0).to(tl.uint16, bitcast=True).to(tl.uint32)
    if BF16:
        number = half << 16
    else:
        magnitude = half & 0x7FFF
        number = (magnitude << 13) + _REBIAS + tl.where(magnitude >= 0x7C00, _REBIAS, 0)
        small = (magnitude.to(tl.float32) * _SUBNORMAL_UNIT).to(tl.uint32, bitcast=True)
        number = tl.where(magnitude < 0x400, small, number) | ((half & 0x8000) << 16)
    tl.store(bits + row * width + column, number.to(tl.int32, bitcast=True), mask=there)


@triton.jit
def _extremes(rows, row, is_row, dim, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Least and greatest number of each row, (ROWS, 1) each, and whether all are finite; of several that are least the
    first, since 0.0 and -0.0 are equal and pack to other bytes."""
    low, high = tl.full((ROWS, 1), float("inf"), tl.float32), tl.full((ROWS, 1), float("-inf"), tl.float32)
    first = tl.zeros((ROWS, 1), tl.int32)
    infinite = tl.zeros((ROWS, 1), tl.int32)
    for block in range(0, dim, COLS):
        column = block + tl.arange(0, COLS)[None, :]
        there = is_row & (column < dim)
        number = tl.load(rows + row * width + column, mask=there, other=0.0)
        magnitude = number.to(tl.int32, bitcast=True) & _MAGNITUDE
        infinite = tl.maximum(infinite, tl.max((magnitude >= _INFINITE).to(tl.int32), axis=1)[:, None])
        least = tl.min(tl.where(there, number, float("inf")), axis=1)[:, None]
        at = tl.min(tl.where(there & (number == least), column, _NO_COLUMN), axis=1)[:, None]
        first = tl.where(least < low, at, first)
        low = tl.where(least < low, least, low)
        greatest = tl.max(tl.where(there, number, float("-inf")), axis=1)[:, None]
        high = tl.where(greatest > high, greatest, high)
    finite = is_row & (infinite == 0)
    low = tl.load(rows + row * width + first, mask=finite, other=0.0)
    return low, tl.where(finite & (high != low), high, low), finite


@triton.jit
def _store_word(out, word, there):
    """The four bytes of a float32 (ROWS, 1), at any address."""
    byte = tl.arange(0, 4)[None, :]
    bits = word.to(tl.uint32, bitcast=True) >> (8 * byte).to(tl.uint32)
    tl.store(out + byte, (bits & 0xFF).to(tl.uint8), mask=there)


@triton.jit
def _whole(number):
    """The nearest whole number of a float64, ties to even."""
    return (number + _TO_WHOLE) - _TO_WHOLE


@triton.jit
def _pack_int8(
    rows,
    out,
    seeds,
    tables,
    ids,
    steps,
    n,
    dim,
    width,
    out_width,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row, _, is_row, _ = tile(n, dim, ROWS, COLS)
    low, high, finite = _extremes(rows, row, is_row, dim, width, ROWS, COLS)
    scale = ((high.to(tl.float64) - low.to(tl.float64)) / 255.0).to(tl.float32)
    not_a_number = (finite.to(tl.int32) * 0 + 0x7FC00000).to(tl.float32, bitcast=True)
    packed = out + row * out_width
    _store_word(packed + dim, tl.where(finite, scale, not_a_number), is_row)
    _store_word(packed + dim + 4, tl.where(finite, low, not_a_number), is_row)
    spread = finite & (scale > 0)
    factor = 1.0 / tl.where(spread, scale, 1.0).to(tl.float64)
    step = tl.load(steps + row, mask=is_row, other=0)
    for block in range(0, dim, COLS):
        column = block + tl.arange(0, COLS)[None, :]
        there = is_row & (column < dim)
        eighth = block // 8 + tl.arange(0, COLS // 8)[None, :]
        noise = _noise(seeds, tables, ids, step, row, is_row, eighth, ROWS, COLS // 8).to(tl.float64) * _UNIT
        number = tl.load(rows + row * width + column, mask=there & spread, other=0.0).to(tl.float64)
        at = (number - tl.where(spread, low, 0.0).to(tl.float64)) * factor
        nearest = _whole(at)
        lifted = tl.where(tl.abs(at - nearest) < _SNAP, nearest, tl.floor(at + noise))
        place = tl.where(spread, tl.where(step == 0, nearest, lifted), 0.0)
        place = tl.minimum(tl.maximum(place, 0.0), 255.0)
        tl.store(packed + column, place.to(tl.int32).to(tl.uint8), mask=there)


@triton.jit
def _load_word(packed, is_row, ROWS: tl.constexpr):
    """The float32 (ROWS, 1) of four bytes, at any address."""
    byte = tl.arange(0, 4)[None, :]
    bits = tl.load(packed + byte, mask=is_row, other=0).to(tl.int32) << (8 * byte)
    return tl.sum(bits, axis=1)[:, None].to(tl.float32, bitcast=True)


@triton.jit
def _unpack_int8(packed, out, n, dim, packed_width, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, column, is_row, is_column = tile(n, dim, ROWS, COLS)
    mine, there = packed + row * packed_width, is_row & is_column
    scale = _load_word(mine + dim, is_row, ROWS).to(tl.float64)
    bias = _load_word(mine + dim + 4, is_row, ROWS).to(tl.float64)
    place = tl.load(mine + column, mask=there, other=0).to(tl.float64)
    tl.store(out + row * width + column, (bias + place * scale).to(tl.float32), mask=there)
