"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011) for Numba kernels.

A counter-based generator: four 32-bit words of output are a keyed bijection of four words of counter, so that a number
is a pure function of what it is for. Whoever uses it says what counter and key are; two uses have different keys.

Words are held in uint64, so that a product keeps its high word. Numba's cache does not see edits of this file: after
one, delete the `__pycache__` folders of its users.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

LOW_WORD = np.uint64(0xFFFFFFFF)
WORD = np.uint64(32)

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)


@njit(nogil=True, cache=True, forceinline=True)
def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Four words for a counter of four and a key of two, all uint64 below 2^32."""
    for _ in range(10):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0 = (product_1 >> WORD) ^ c1 ^ k0
        c1 = product_1 & LOW_WORD
        c2 = (product_0 >> WORD) ^ c3 ^ k1
        c3 = product_0 & LOW_WORD
        k0 = (k0 + _WEYL_0) & LOW_WORD
        k1 = (k1 + _WEYL_1) & LOW_WORD
    return c0, c1, c2, c3


def seed_bits(seed: int) -> np.uint64:
    """A seed as 64 bits; negative seeds are their two's complement."""
    return np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
