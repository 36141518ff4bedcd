"""Codec: how the weights of a row are packed into fewer bytes, in a lower tier and at rest.

The other columns of a row, optimizer state, keep their own precision: they follow the packed weights byte by byte.

Rounding is to nearest, or stochastic: up with the probability that is the distance from below, in units of the last
place, so that small updates are not lost but on average (Gupta et al.: "Deep learning with limited numerical
precision", ICML 2015). A draw is a pure function of (seed, table, id, column, step), where the step is that of the
row's last update: a row is rounded to the same bits whenever, wherever and however often it is packed after it.

A new codec is one file with one class, one line in `CODECS` (`storage.codecs`) and one in
`tests/storage/test_codecs.py`.

Shapes: N rows, D dimension, K state width, B bytes of a packed row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.philox import LOW_WORD, WORD, philox
from storage.schema import Column

Rows: TypeAlias = NDArray[np.float32]
Packed: TypeAlias = NDArray[np.uint8]

_BLOCK_COLUMNS = 8  # that one call of Philox draws for
_PURPOSE = np.uint64(0x9E3779B97F4A7C15)  # into the key, so that no draw is one of an initializer of the same seed


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """What stochastic rounding of N rows draws from.

    Attributes:
        seeds: (N,) uint64, of the rows' tables.
        tables: (N,) uint32.
        ids: (N,) int64.
        steps: (N,) uint32, of the last update; 0 = round this row to nearest.
    """

    seeds: NDArray[np.uint64]
    tables: NDArray[np.uint32]
    ids: NDArray[np.int64]
    steps: NDArray[np.uint32]

    @classmethod
    def none(cls, rows: int) -> Draws:
        """For so many rows that are all rounded to nearest."""
        zeros = np.zeros(rows, np.uint32)
        return cls(np.zeros(rows, np.uint64), zeros, np.zeros(rows, np.int64), zeros)


class Codec(Protocol):
    """What packing needs of a precision. Codecs hold no state, and any thread may use them."""

    @property
    def name(self) -> str:
        """The precision's name in `CODECS`, in configurations and in messages."""

    @property
    def lossy(self) -> bool:
        """Whether what comes back may differ from what was packed."""

    def columns(self, dim: int) -> tuple[Column, ...]:
        """Columns of a packed row of `dim` weights, the first of which is named `weight`."""

    def pack(self, rows: Rows, dim: int, out: Packed, draws: Draws) -> None:
        """Pack the first `dim` numbers of rows (N, >= D) into the first bytes of out (N, B); both C-contiguous."""

    def unpack(self, packed: Packed, dim: int, out: Rows) -> None:
        """Read the first bytes of packed (N, B) into the first `dim` numbers of out (N, >= D); both C-contiguous."""


def draw_buffer(dim: int) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """Room for the draws of one row of `dim` weights: as `draw_row` writes it, and as 16 bits a column."""
    words = np.empty(4 * -(-dim // _BLOCK_COLUMNS), np.uint32)
    return words, words.view(np.uint16)


@njit(nogil=True, cache=True, forceinline=True)
def draw_row(seed: Any, table: Any, row_id: Any, step: Any, words: Any) -> None:
    """Fill `words`, uint32: four for each block of 8 columns, which are 16 bits a column in the columns' order.

    A loop of its own, which LLVM makes vector instructions of, several blocks at a time: five times as fast as a call
    between the columns that use it.
    """
    number = np.uint64(row_id)
    key = seed ^ (_PURPOSE * (np.uint64(2) * np.uint64(step) + np.uint64(1)))
    low, high, table_word = number & LOW_WORD, number >> WORD, np.uint64(table)
    key_low, key_high = key & LOW_WORD, key >> WORD
    for block in range(len(words) // 4):
        w0, w1, w2, w3 = philox(low, high, table_word, np.uint64(block), key_low, key_high)
        words[4 * block], words[4 * block + 1] = np.uint32(w0), np.uint32(w1)
        words[4 * block + 2], words[4 * block + 3] = np.uint32(w2), np.uint32(w3)
