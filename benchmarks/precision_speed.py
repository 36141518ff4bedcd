"""How fast codecs pack and unpack, for `benchmarks.precision`: GB of float32 rows a second, in one thread.

Rows go through a codec in blocks of about 1 MiB, as they do on their way to a store, out of and into arrays that no
cache holds. Time is the thread's own. The figure is the median of the rounds, in which codecs take turns.

Shapes: N rows, D dimension.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.timing import take_turns
from storage.codecs import CODECS, Codec, Draws
from storage.schema import RowSchema

_BLOCK_BYTES = 1 << 20
UNPACK = "unpack"
DIRECTIONS = ("nearest", "stochastic", UNPACK)


def speeds(rows: int, dim: int, rounds: int) -> dict[str, dict[str, float]]:
    """Codec -> direction (`DIRECTIONS`) -> GB/s, of every codec that packs."""
    numbers = np.random.default_rng(0).standard_normal((rows, dim), np.float32)
    turns: dict[str, Callable[[], float]] = {}
    for codec in CODECS.values():
        if codec.lossy:
            turns |= {f"{codec.name} {direction}": _turn(codec, direction, numbers) for direction in DIRECTIONS}
    found: dict[str, dict[str, float]] = {}
    for name, seconds in take_turns(turns, rounds).items():
        codec_name, direction = name.split()
        found.setdefault(codec_name, {})[direction] = round(numbers.nbytes / statistics.median(seconds) / 1e9, 2)
    return found


def _turn(codec: Codec, direction: str, numbers: NDArray[np.float32]) -> Callable[[], float]:
    """A turn over all rows (N, D), which returns its seconds."""
    n, dim = numbers.shape
    size = max(1, _BLOCK_BYTES // (4 * dim))
    blocks = [slice(first, min(n, first + size)) for first in range(0, n, size)]
    packed = np.zeros((n, RowSchema(codec.columns(dim)).row_bytes), np.uint8)
    back = np.zeros_like(numbers)
    draws = [_draws(block, stochastic=direction != "nearest") for block in blocks]
    for block, drawn in zip(blocks, draws, strict=True):
        codec.pack(numbers[block], dim, packed[block], drawn)

    def turn() -> float:
        start = time.thread_time()
        for block, drawn in zip(blocks, draws, strict=True):
            if direction == UNPACK:
                codec.unpack(packed[block], dim, back[block])
            else:
                codec.pack(numbers[block], dim, packed[block], drawn)
        return time.thread_time() - start

    return turn


def _draws(block: slice, *, stochastic: bool) -> Draws:
    n = block.stop - block.start
    if not stochastic:
        return Draws.none(n)
    ones = np.ones(n, np.uint32)
    return Draws(np.zeros(n, np.uint64), ones, np.arange(block.start, block.stop), ones)
