"""Initial rows: a pure function of (seed, table, id), so that a row costs nothing until it is touched.

A row is never stored before its first change; whoever needs it computes it, in any order, in any process, on any
shard, and gets the same bits. Every number comes from a counter-based generator (`storage.philox`):
    key     = the seed (64 bits)
    counter = (low word of id, high word of id, table number, number of the block of 4 columns)
Nothing here holds state; every function may be called from any thread and releases the GIL.

A new distribution is one frozen dataclass with `fill` and one kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import njit

from storage.philox import LOW_WORD, WORD, philox, seed_bits

Ids: TypeAlias = npt.NDArray[np.int64]
Tables: TypeAlias = npt.NDArray[np.uint32]
Rows: TypeAlias = npt.NDArray[np.float32]

_TOP_24_BITS = np.uint64(8)


class Initializer(Protocol):
    """What the weights of a row are before its first change."""

    def fill(self, seed: int, tables: Tables, ids: Ids, out: Rows) -> None:
        """Write the initial weights of row (tables[n], ids[n]) into out[n], for tables, ids (N,) and out (N, D).

        The same (seed, table, id, D) gives the same bits in every call, and a smaller D gives a prefix of a larger one.
        """


@njit(nogil=True, cache=True)
def _words(seed: Any, table: Any, row_id: Any, block: Any) -> Any:
    number = np.uint64(row_id)
    return philox(number & LOW_WORD, number >> WORD, np.uint64(table), np.uint64(block), seed & LOW_WORD, seed >> WORD)


@njit(nogil=True, cache=True)
def _fill_uniform(seed: Any, tables: Any, ids: Any, low: Any, width: Any, out: Any) -> None:
    dim = out.shape[1]
    for n in range(len(ids)):
        for block in range((dim + 3) // 4):
            words = _words(seed, tables[n], ids[n], block)
            for w in range(min(4, dim - 4 * block)):
                unit = np.float64(words[w] >> _TOP_24_BITS) * 2.0**-24
                out[n, 4 * block + w] = np.float32(low + unit * width)


@njit(nogil=True, cache=True)
def _fill_normal(seed: Any, tables: Any, ids: Any, mean: Any, std: Any, out: Any) -> None:
    dim = out.shape[1]
    for n in range(len(ids)):
        for block in range((dim + 3) // 4):
            words = _words(seed, tables[n], ids[n], block)
            for pair in range(2):  # words 0 and 1 give columns 0 and 1, words 2 and 3 give columns 2 and 3
                column = 4 * block + 2 * pair
                if column < dim:
                    radius = std * math.sqrt(-2.0 * math.log((np.float64(words[2 * pair]) + 1.0) * 2.0**-32))
                    angle = np.float64(words[2 * pair + 1]) * (2.0**-32 * 2.0 * math.pi)
                    out[n, column] = np.float32(mean + radius * math.cos(angle))
                    if column + 1 < dim:
                        out[n, column + 1] = np.float32(mean + radius * math.sin(angle))


@dataclass(frozen=True)
class Uniform:
    """Evenly spread over [low, high]: low + u * (high - low) in float64, u a multiple of 2^-24 below 1, then
    rounded."""

    low: float = -0.01
    high: float = 0.01

    def __post_init__(self) -> None:
        _check_finite(self)
        if self.low > self.high:
            raise ValueError(f"Uniform(low={self.low}, high={self.high}): low must not be above high")

    def fill(self, seed: int, tables: Tables, ids: Ids, out: Rows) -> None:
        """As `Initializer.fill`."""
        _check_shapes(tables, ids, out)
        _fill_uniform(seed_bits(seed), tables, ids, float(self.low), float(self.high) - float(self.low), out)


@dataclass(frozen=True)
class Normal:
    """Gaussian, by the method of Box and Muller (1958) in float64 on pairs of words, then rounded to float32."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        _check_finite(self)
        if self.std < 0:
            raise ValueError(f"Normal(mean={self.mean}, std={self.std}): std must not be negative")

    def fill(self, seed: int, tables: Tables, ids: Ids, out: Rows) -> None:
        """As `Initializer.fill`."""
        _check_shapes(tables, ids, out)
        _fill_normal(seed_bits(seed), tables, ids, float(self.mean), float(self.std), out)


@dataclass(frozen=True)
class Constant:
    """The same number in every column of every row."""

    value: float = 0.0

    def __post_init__(self) -> None:
        _check_finite(self)

    def fill(self, seed: int, tables: Tables, ids: Ids, out: Rows) -> None:
        """As `Initializer.fill`; seed, tables and ids play no part."""
        _check_shapes(tables, ids, out)
        out[...] = self.value


def _check_finite(initializer: Uniform | Normal | Constant) -> None:
    for name, number in vars(initializer).items():
        if not math.isfinite(number):
            raise ValueError(f"{type(initializer).__name__}: {name} is {number}, but must be a finite number")


def _check_shapes(tables: Tables, ids: Ids, out: Rows) -> None:
    assert tables.dtype == np.uint32 and ids.dtype == np.int64 and out.dtype == np.float32
    assert out.ndim == 2 and len(tables) == len(ids) == len(out), (tables.shape, ids.shape, out.shape)
