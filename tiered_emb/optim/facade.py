"""RowOptimizer: a row rule as people hold optimizers in PyTorch, with ``param_groups`` for schedulers.

The parameters live in the tiers, not in tensors; the one parameter group carries the rule's learning rate. With
``update="backward"`` the rule has run by the time ``step`` is called, and ``step`` does nothing more.

A ``torch.amp.GradScaler`` divides the gradients of an optimizer's parameters by its scale, and leaves out the step if
one is not finite. So there is one parameter, of one number, whose gradient is what the gradients of rows are to be
multiplied by: 1, or infinity where one of them is not finite. What the scaler does to it is done to the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tiered_emb.errors import ConfigError
from tiered_emb.optim._rule import RowRule


class RowOptimizer(torch.optim.Optimizer):
    """The optimizer of a tiered module.

    Args:
        rule: the row rule; ``param_groups[0]["lr"]`` replaces its learning rate from then on.
        apply: applies what backward passes recorded, times a factor; called by :meth:`step`, does nothing when nothing
            is recorded. None = the rule has run by then.
        discard: forgets what backward passes recorded; called by :meth:`zero_grad`.
    """

    def __init__(self, rule: RowRule, apply: Callable[[float], None] | None, discard: Callable[[], None]) -> None:
        self._row_rule = rule
        self._apply = apply
        self._discard = discard
        self._factor = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)  # by its gradient
        super().__init__([self._factor], {"lr": rule.lr})

    def note(self, finite: bool) -> None:
        """Gradients wait for :meth:`step`; whether all are finite."""
        self._factor.grad = torch.full_like(self._factor, 1.0 if finite else math.inf)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by ``GradScaler.step``. Raises ConfigError where its scale is in the rows by then."""
        if self._apply is None:
            raise ConfigError(
                "with update='backward' rows change in the backward pass, by gradients that a GradScaler has scaled "
                "and not unscaled yet: make the module with update='step'"
            )
        return False

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
        factor = 1.0 if self._factor.grad is None else self._factor.grad.item()
        self._factor.grad = None
        if self._apply is not None:
            self._apply(factor if math.isfinite(factor) else 1.0)  # what is not finite is told by the rows it is of
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of backward passes since the last step."""
        self._discard()
        super().zero_grad(set_to_none)
