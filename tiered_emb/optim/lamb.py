"""LAMB for rows (You et al.: "Large batch optimization for deep learning", ICLR 2020), a trust ratio for every row.

As FBGEMM's LAMB: where the paper has a layer, a table has a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numba import njit

from storage.schema import Column
from tiered_emb.intrinsics import prefetch_row
from tiered_emb.kernels._lanes import lane_dot, lane_sum
from tiered_emb.optim._moments import averaged, check_betas, corrections, shares
from tiered_emb.optim._rule import apply_on_device, check_numbers, rounded_sqrt

_AHEAD = 4  # rows between asking for a row and using it


@dataclass(frozen=True)
class LAMB:
    """m, v as Adam's; u = m * c / (sqrt(v) + e) + w * decay; w -= u * (lr * |w| / |u|).

    c and e carry the corrections of both averages, in float64, rounded once. Where |w| or |u| is 0, their ratio counts
    as 1. Decay and averages are lazy: they move in the steps that touch the row. Squares are added in lane order
    (`kernels._lanes`).
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0
    name: ClassVar[str] = "lamb"

    def __post_init__(self) -> None:
        check_numbers(self, lr=(0.0, math.inf), eps=(0.0, math.inf), weight_decay=(0.0, math.inf))
        check_betas(self, self.betas)

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
            numbers = (np.float32(number) for number in (*shares(self.betas), *self._numbers(step)))
            _apply(weight.numpy(), state.numpy(), slots.numpy(), grads.numpy(), *numbers)
        else:
            apply_on_device(self, weight, state, slots, grads, step)

    def reference(
        self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """`apply` in torch ops, on any device."""
        rows, dim = slots.long(), weight.shape[1]
        (share_1, share_2), (eps, size, decay, lr) = shares(self.betas), self._numbers(step)
        mean = averaged(state[rows, :dim], grads, share_1)
        square = averaged(state[rows, dim:], grads * grads, share_2)
        state[rows] = torch.cat([mean, square], 1)
        old = weight[rows]
        change = mean / (rounded_sqrt(square) + eps) * size + old * decay
        length, of_change = rounded_sqrt(lane_sum(old * old)), rounded_sqrt(lane_sum(change * change))
        ratio = torch.where((length > 0) & (of_change > 0), length / of_change, torch.ones_like(length))
        weight[rows] = old - change * (ratio * lr)[:, None]

    def _numbers(self, step: int) -> tuple[float, float, float, float]:
        mean, root = corrections(self.betas, step)
        return self.eps * root, root / mean, self.weight_decay, self.lr


@njit(nogil=True, cache=True, error_model="numpy")
def _apply(
    weight: Any,
    state: Any,
    slots: Any,
    grads: Any,
    share_1: Any,
    share_2: Any,
    eps: Any,
    size: Any,
    decay: Any,
    lr: Any,
) -> None:
    dim = weight.shape[1]
    change = np.empty((1, dim), np.float32)
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
            change[0, d] = state[row, d] / (np.sqrt(state[row, dim + d]) + eps) * size + weight[row, d] * decay
        length, of_change = np.sqrt(lane_dot(weight, row, weight, row)), np.sqrt(lane_dot(change, 0, change, 0))
        ratio = length / of_change if length > 0 and of_change > 0 else np.float32(1)
        scale = ratio * lr
        for d in range(dim):
            weight[row, d] -= change[0, d] * scale
