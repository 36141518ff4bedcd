"""What rules of the Adam family share: running averages of gradients and of their squares, and the correction of both.

Both averages start from zero and are divided by what they would be too small by after so many steps. The step is the
module's, not the row's, as in `torch.optim.SparseAdam`. They are lazy: they move in the steps that touch the row.

Numba's cache does not see edits of this file: after one, delete the `__pycache__` folders of its users.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import njit

from storage.schema import Column
from tiered_emb.errors import ConfigError
from tiered_emb.intrinsics import prefetch_row
from tiered_emb.optim._rule import apply_on_device, rounded_sqrt

_AHEAD = 4  # rows between asking for a row and using it


def check_betas(rule: object, betas: tuple[float, float]) -> None:
    """Raise ConfigError unless `betas` are two numbers that averages can decay by."""
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(
            f"{type(rule).__name__}: betas are {betas}, but must be two numbers of at least 0 and less than 1"
        )


def shares(betas: tuple[float, float]) -> tuple[float, float]:
    """What a new gradient counts for in the two averages."""
    return 1 - betas[0], 1 - betas[1]


def corrections(betas: tuple[float, float], step: int) -> tuple[float, float]:
    """What the first average, and the root of the second, are of what they should be after so many steps, from 1."""
    assert step >= 1, step
    return 1 - betas[0] ** step, math.sqrt(1 - betas[1] ** step)


def decoupled_numbers(rule: Any, step: int) -> tuple[float, float, float]:
    """(eps, size, keep) of a step by the rule's numbers: w = w * keep - m / (sqrt(v) + eps) * size.

    Corrections are drawn together in float64; decay does not pass through the averages.
    """
    mean, root = corrections(rule.betas, step)
    return rule.eps * root, rule.lr * root / mean, 1 - rule.lr * rule.weight_decay


def averaged(average: torch.Tensor, new: torch.Tensor, share: float) -> torch.Tensor:
    """A running average after one more number."""
    return average + (new - average) * share


class AdamRows:
    """What Adam and AdamW share: averages for every weight. A rule has betas, and `_numbers` of a step."""

    betas: tuple[float, float]

    def state_columns(self, dim: int) -> tuple[Column, ...]:
        """`exp_avg` and `exp_avg_sq`: running averages of each weight's gradient and of its square."""
        return Column("exp_avg", "float32", dim), Column("exp_avg_sq", "float32", dim)

    def state_width(self, dim: int) -> int:
        """2 D."""
        return 2 * dim

    def apply(
        self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """As `RowRule.apply`."""
        if weight.device.type == "cpu":
            arrays = weight.numpy(), state.numpy(), slots.numpy(), grads.numpy()
            _adam(*arrays, *(np.float32(number) for number in (*shares(self.betas), *self._numbers(step))))
        else:
            apply_on_device(self, weight, state, slots, grads, step)

    def reference(
        self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """`apply` in torch ops, on any device."""
        rows, dim = slots.long(), weight.shape[1]
        (share_1, share_2), (eps, size, keep) = shares(self.betas), self._numbers(step)
        mean, square = state[rows, :dim], state[rows, dim:]
        mean, square = averaged(mean, grads, share_1), averaged(square, grads * grads, share_2)
        state[rows] = torch.cat([mean, square], 1)
        weight[rows] = weight[rows] * keep - mean / (rounded_sqrt(square) + eps) * size

    def _numbers(self, step: int) -> tuple[float, float, float]:
        """(eps, size, keep): w = w * keep - m / (sqrt(v) + eps) * size."""
        raise NotImplementedError("of the rule")


@njit(nogil=True, cache=True, error_model="numpy")
def _adam(
    weight: Any, state: Any, slots: Any, grads: Any, share_1: Any, share_2: Any, eps: Any, size: Any, keep: Any
) -> None:
    dim = weight.shape[1]
    for n in range(len(slots)):
        if n + _AHEAD < len(slots):
            prefetch_row(weight, slots[n + _AHEAD])
            prefetch_row(state, slots[n + _AHEAD])
        row = slots[n]
        for d in range(dim):
            state[row, d] += (grads[n, d] - state[row, d]) * share_1
        for d in range(dim):
            state[row, dim + d] += (grads[n, d] * grads[n, d] - state[row, dim + d]) * share_2
        for d in range(dim):
            change = state[row, d] / (np.sqrt(state[row, dim + d]) + eps) * size
            weight[row, d] = weight[row, d] * keep - change
