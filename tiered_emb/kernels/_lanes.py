"""Sums over the columns of a row in a fixed order that vector units can follow: eight lanes.

A plain left-to-right float32 sum is one long chain of dependent additions. Here lane l adds columns l, l + 8, l + 16,
... from zero, and the lanes are folded in halves: l + (l + 4), then l + (l + 2), then l + (l + 1). The order is part
of the definition of whatever uses it (row-wise Adagrad's mean square, the gradients of per-sample weights), so the
torch and the Numba form below agree to the bit on every device. Columns past the last multiple of eight count as
zeros.

Numba's cache does not see edits of this file: after one, delete the `__pycache__` folders of its users.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

LANES = 8


def lane_sum(terms: torch.Tensor) -> torch.Tensor:
    """Sum of each row of terms float32 (n, D) in lane order; float32 (n,), on the device of `terms`."""
    n, dim = terms.shape
    blocks = -(-dim // LANES)
    padded = torch.nn.functional.pad(terms, (0, blocks * LANES - dim)).view(n, blocks, LANES)
    lanes = terms.new_zeros((n, LANES))
    for block in range(blocks):
        lanes = lanes + padded[:, block]
    lanes = lanes[:, :4] + lanes[:, 4:]
    lanes = lanes[:, :2] + lanes[:, 2:]
    return lanes[:, 0] + lanes[:, 1]


@njit(inline="always")
def lane_dot(a: Any, i: Any, b: Any, j: Any) -> Any:
    """Sum over d of a[i, d] * b[j, d] in lane order; a and b two-dimensional float32 of the same width."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
    dim = a.shape[1]
    whole = dim - dim % 8
    for d in range(0, whole, 8):
        s0 += a[i, d] * b[j, d]
        s1 += a[i, d + 1] * b[j, d + 1]
        s2 += a[i, d + 2] * b[j, d + 2]
        s3 += a[i, d + 3] * b[j, d + 3]
        s4 += a[i, d + 4] * b[j, d + 4]
        s5 += a[i, d + 5] * b[j, d + 5]
        s6 += a[i, d + 6] * b[j, d + 6]
        s7 += a[i, d + 7] * b[j, d + 7]
    rest = dim - whole
    if rest > 0:
        s0 += a[i, whole] * b[j, whole]
    if rest > 1:
        s1 += a[i, whole + 1] * b[j, whole + 1]
    if rest > 2:
        s2 += a[i, whole + 2] * b[j, whole + 2]
    if rest > 3:
        s3 += a[i, whole + 3] * b[j, whole + 3]
    if rest > 4:
        s4 += a[i, whole + 4] * b[j, whole + 4]
    if rest > 5:
        s5 += a[i, whole + 5] * b[j, whole + 5]
    if rest > 6:
        s6 += a[i, whole + 6] * b[j, whole + 6]
    return ((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7))
