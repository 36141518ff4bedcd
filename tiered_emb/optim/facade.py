"""RowOptimizer: a row rule as people hold optimizers in PyTorch, with ``param_groups`` for schedulers.

The parameters live in the tiers, not in tensors; the one parameter group carries the rule's learning rate. With
``update="backward"`` the rule has run by the time ``step`` is called, and ``step`` does nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tiered_emb.optim._rule import RowRule


class RowOptimizer(torch.optim.Optimizer):
    """The optimizer of a tiered module.

    Args:
        rule: the row rule; ``param_groups[0]["lr"]`` replaces its learning rate from then on.
        apply: applies what backward passes recorded; called by :meth:`step`, does nothing when nothing is recorded.
        discard: forgets what backward passes recorded; called by :meth:`zero_grad`.
    """

    def __init__(self, rule: RowRule, apply: Callable[[], None], discard: Callable[[], None]) -> None:
        self._row_rule = rule
        self._apply = apply
        self._discard = discard
        super().__init__([torch.zeros(0, dtype=torch.float32, device="cpu", requires_grad=True)], {"lr": rule.lr})

    @property
    def rule(self) -> RowRule:
        """The row rule at the present learning rate."""
        lr = float(self.param_groups[0]["lr"])
        if lr != self._row_rule.lr:
            self._row_rule = replace(self._row_rule, lr=lr)  # type: ignore[type-var]
        return self._row_rule

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the rule once to the rows of all backward passes since the last step; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._apply()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of backward passes since the last step."""
        self._discard()
        super().zero_grad(set_to_none)
