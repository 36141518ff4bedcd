"""FTRL-Proximal (McMahan et al.: "Ad click prediction: a view from the trenches", KDD 2013): sparse weights by l1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numba import njit

from storage.schema import Column
from tiered_emb.intrinsics import prefetch_row
from tiered_emb.optim._rule import apply_on_device, check_numbers, rounded_sqrt

_AHEAD = 4  # rows between asking for a row and using it
_LEAST_LR = 1e-30  # the rule divides by it


@dataclass(frozen=True)
class FTRL:
    """s = sqrt(n + g**2); z += g - w * (s - sqrt(n)) / lr; n += g**2; w = (sign(z) * l1 - z) / ((beta + s) / lr + l2).

    w is 0 where |z| <= l1. A weight is made anew from z in each step that touches its row, so a row's random beginning
    is mostly gone after the first one. l1 and l2 are exact, not lazy: they count once, whatever the steps between.
    """

    lr: float
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0
    name: ClassVar[str] = "ftrl"

    def __post_init__(self) -> None:
        zero = (0.0, math.inf)
        check_numbers(self, lr=(_LEAST_LR, math.inf), l1=zero, l2=zero, beta=zero)

    def state_columns(self, dim: int) -> tuple[Column, ...]:
        """`linear`: z of each weight; `sum`: n, of its squared gradients."""
        return Column("linear", "float32", dim), Column("sum", "float32", dim)

    def state_width(self, dim: int) -> int:
        """2 D."""
        return 2 * dim

    def apply(
        self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """As `RowRule.apply`."""
        if weight.device.type == "cpu":
            numbers = (np.float32(number) for number in (self.lr, self.l1, self.l2, self.beta))
            _apply(weight.numpy(), state.numpy(), slots.numpy(), grads.numpy(), *numbers)
        else:
            apply_on_device(self, weight, state, slots, grads, step)

    def reference(
        self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, grads: torch.Tensor, step: int
    ) -> None:
        """`apply` in torch ops, on any device."""
        rows, dim = slots.long(), weight.shape[1]
        linear, sums, old = state[rows, :dim], state[rows, dim:], weight[rows]
        lr = torch.full_like(old, self.lr)  # a scalar divisor is made a factor on some devices
        new = sums + grads * grads
        root = rounded_sqrt(new)
        linear = linear + (grads - old * ((root - rounded_sqrt(sums)) / lr))
        state[rows] = torch.cat([linear, new], 1)
        pulled = torch.where(linear > 0, linear - self.l1, linear + self.l1)
        weights = -pulled / ((root + self.beta) / lr + self.l2)
        weight[rows] = torch.where(linear.abs() <= self.l1, torch.zeros_like(weights), weights)


@njit(nogil=True, cache=True, error_model="numpy")
def _apply(weight: Any, state: Any, slots: Any, grads: Any, lr: Any, l1: Any, l2: Any, beta: Any) -> None:
    dim = weight.shape[1]
    for n in range(len(slots)):
        if n + _AHEAD < len(slots):
            prefetch_row(weight, slots[n + _AHEAD])
            prefetch_row(state, slots[n + _AHEAD])
        row = slots[n]
        for d in range(dim):
            grad, old = grads[n, d], state[row, dim + d]
            state[row, dim + d] = old + grad * grad
            root = np.sqrt(state[row, dim + d])
            linear = state[row, d] + (grad - weight[row, d] * ((root - np.sqrt(old)) / lr))
            state[row, d] = linear
            pulled = linear - l1 if linear > 0 else linear + l1
            weight[row, d] = 0 if abs(linear) <= l1 else -pulled / ((root + beta) / lr + l2)
