"""Stochastic gradient descent, without momentum: no state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numba import njit

from storage.schema import Column
from tiered_emb.intrinsics import prefetch_row
from tiered_emb.optim._rule import check_numbers

_AHEAD = 4  # rows between asking for a row and using it


@dataclass(frozen=True)
class SGD:
    """w -= g * lr, as torch.optim.SGD without momentum or decay (which rounds once less)."""

    lr: float
    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        check_numbers(self, lr=(0.0, math.inf))

    def state_columns(self, dim: int) -> tuple[Column, ...]:
        """None."""
        return ()

    def state_width(self, dim: int) -> int:
        """0."""
        return 0

    def apply(
        self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """As `RowRule.apply`."""
        if weight.device.type == "cpu":
            _apply(weight.numpy(), slots.numpy(), grads.numpy(), np.float32(self.lr))
        else:
            self.reference(weight, state, slots, grads, step)

    def reference(
        self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """`apply` in torch ops, on any device."""
        rows = slots.long()
        weight[rows] = weight[rows] - grads * self.lr


@njit(nogil=True, cache=True)
def _apply(weight: Any, slots: Any, grads: Any, lr: Any) -> None:
    dim = weight.shape[1]
    for n in range(len(slots)):
        if n + _AHEAD < len(slots):
            prefetch_row(weight, slots[n + _AHEAD])
        row = slots[n]
        for d in range(dim):
            weight[row, d] -= grads[n, d] * lr
