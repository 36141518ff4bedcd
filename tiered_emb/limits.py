"""Limits: what the summed gradients of rows may be, by table - clipped by value, clipped by norm, finite.

A gradient that is not finite would stay in a row and in its optimizer state for good. So it never gets there: with
``on_nan="error"`` the update is refused before any row of the step has changed, with "skip" the row is left as it is,
and counted.

Looking at every sum would cost a pass over all rows. Instead `certainly_finite` bounds them: no sum can overflow, or be
no number, where the greatest output gradient times the most that are added is a float32. Only where that does not hold
are sums looked at.

A GPU would have the host wait for both. There the sums are looked at on the device, which leaves out the rows of the
step by itself, all of them where one is to be refused, and what it found is told once it has arrived (`Limits.later`):
rows are counted, or the error is raised, in a later forward or backward pass, or in a flush.

Shapes: N rows, D dimension.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from tiered_emb.errors import GradientError
from tiered_emb.kernels._lanes import lane_dot, lane_sum
from tiered_emb.optim import rounded_sqrt
from tiered_emb.plan import Ids, TableNumbers
from tiered_emb.staging import sent

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_FINITE_BELOW = float(np.finfo(np.float32).max) / 2  # what rounding adds on the way is far less than half


@dataclass(frozen=True, slots=True)
class TableLimits:
    """Of one table: its name, the greatest value and norm of a row's gradient, whether a row whose gradient is not
    finite is left out."""

    name: str
    value: float = math.inf
    norm: float = math.inf
    skips: bool = False


@dataclass(frozen=True, slots=True)
class _Later:
    """What a device will tell of the rows (N,) of a step: `finite` holds it when `arrived` is so."""

    tables: TableNumbers
    ids: Ids
    finite: torch.Tensor
    event: Any

    def arrived(self, wait: bool) -> bool:
        if self.event is None:
            return True
        if wait:
            self.event.synchronize()
        return bool(self.event.query())


class Limits:
    """Of the tables of one group; see the module's essay.

    Attributes:
        clip: whether any table has its gradients clipped.
        skipped: rows that were not updated for a gradient that is not finite, by table number.
    """

    def __init__(self) -> None:
        self.clip = False
        self.skipped: Counter[int] = Counter()
        self._tables: dict[int, TableLimits] = {}
        self._counting = threading.Lock()
        self._hearing = threading.Lock()
        self._later: deque[_Later] = deque()
        self._refused: GradientError | None = None

    def set(self, table: int, limits: TableLimits) -> None:
        """Have these for a table from now on."""
        self._tables[table] = limits
        self.clip = any(one.value < math.inf or one.norm < math.inf for one in self._tables.values())

    def clipped(self, tables: TableNumbers, sums: torch.Tensor) -> None:
        """Clip sums (N, D) in place, first by value and then by norm; rows are of ``tables`` (N,)."""
        values, norms = np.full(len(tables), np.inf, np.float32), np.full(len(tables), np.inf, np.float32)
        for number in np.unique(tables):
            mine, one = tables == number, self._tables[int(number)]
            values[mine], norms[mine] = one.value, one.norm
        if sums.device.type == "cpu":
            _clip(sums.numpy(), values, norms)
        else:
            clip_reference(sums, *(sent(torch.from_numpy(limit), sums.device) for limit in (values, norms)))

    def strict(self, tables: TableNumbers) -> NDArray[np.bool_]:
        """(N,): which rows are of tables that refuse a step with a gradient that is not finite."""
        return np.isin(tables, np.array([number for number, one in self._tables.items() if not one.skips], np.uint32))

    def later(self, tables: TableNumbers, ids: Ids, finite: torch.Tensor) -> None:
        """Rows (N,) to which `finite` (N,) bool, on a device, says no were left out of a step; nobody waits for it."""
        event, there = None, finite
        if finite.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            there = torch.empty(finite.shape, dtype=torch.bool, device="cpu", pin_memory=True)
            there.copy_(finite, non_blocking=True)
            event.record(torch.cuda.current_stream(finite.device))
        self._later.append(_Later(tables, ids, there, event))

    def hear(self, *, wait: bool = False) -> None:
        """Count the rows that devices have told of by now; with `wait`, all that they were asked about."""
        with self._hearing:
            while self._later and self._later[0].arrived(wait):
                self._take(self._later.popleft())

    def _take(self, one: _Later) -> None:
        wrong = np.flatnonzero(~one.finite.numpy())
        self.count_skipped(one.tables[wrong[~self.strict(one.tables[wrong])]])
        try:
            self.refuse(one.tables[wrong], one.ids[wrong])
        except GradientError as error:
            self._refused = self._refused or error

    def raise_heard(self, *, wait: bool = False) -> None:
        """As `hear`; then raise GradientError, once, if a step was refused."""
        if not self._later and self._refused is None:  # as on the host always: without the lock
            return
        self.hear(wait=wait)
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    def refuse(self, tables: TableNumbers, ids: Ids) -> None:
        """Raise GradientError if one of these rows (N,), whose gradients are not finite, is of a table that wants to
        know."""
        wrong = np.flatnonzero(self.strict(tables))
        if len(wrong):
            first, more = wrong[0], f", nor are those of {len(wrong) - 1} others" if len(wrong) > 1 else ""
            raise GradientError(
                f"table {self._tables[int(tables[first])].name!r}: the gradient of the row of id {ids[first]} is not "
                f"finite{more}; no row was changed. Look for where it comes from (torch.autograd.set_detect_anomaly), "
                f"lower the learning rate, or have such rows left out with TableConfig(on_nan='skip')"
            )

    def count_skipped(self, tables: TableNumbers) -> None:
        """Rows (N,) were not updated. Any thread may tell."""
        with self._counting:
            self.skipped.update(tables.tolist())


def certainly_finite(grads: Sequence[torch.Tensor], weights: torch.Tensor | None, most: int) -> bool:
    """Whether every sum of up to ``most`` rows of grads (B, D), each times one of weights (N,), is finite."""
    peak = max((_peak(grad) for grad in grads), default=0.0)
    factor = 1.0 if weights is None else max(1.0, _peak(weights))
    return peak * factor * max(1, most) < _FINITE_BELOW


def _peak(tensor: torch.Tensor) -> float:
    """The greatest magnitude; infinity also for what is no number."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension]:  # of an expanded tensor, as the gradient of a sum
            tensor = tensor.narrow(dimension, 0, 1)
    if not tensor.numel():
        return 0.0
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        peak = float(tensor.abs().amax())
    else:
        bits = np.array([_greatest(tensor.numpy().reshape(-1).view(np.uint32))], np.uint32)
        peak = float(bits.view(np.float32)[0])
    return math.inf if math.isnan(peak) else peak


@njit(nogil=True, cache=True)
def _greatest(bits: Any) -> Any:
    """Of numbers without their signs: as unsigned integers they are in the same order, infinity and NaN last."""
    greatest = np.uint32(0)
    for i in range(len(bits)):
        greatest = max(greatest, bits[i] & _MAGNITUDE)
    return greatest


def finite_rows(sums: torch.Tensor) -> NDArray[np.bool_]:
    """(N,): which rows of sums (N, D) have finite numbers only."""
    found: NDArray[np.bool_] = sums.isfinite().all(1).cpu().numpy()
    return found


def clip_reference(sums: torch.Tensor, values: torch.Tensor, norms: torch.Tensor) -> None:
    """Clip sums (N, D) in place to values (N,) and then to norms (N,), in torch ops on any device.

    A norm is the root of the squares added in lane order (`kernels._lanes`).
    """
    clamped = torch.minimum(torch.maximum(sums, -values[:, None]), values[:, None])
    found = rounded_sqrt(lane_sum(clamped * clamped))
    shorter = clamped * (norms / found)[:, None]
    sums.copy_(torch.where((found > norms)[:, None], shorter, clamped))


@njit(nogil=True, cache=True, error_model="numpy")
def _clip(sums: Any, values: Any, norms: Any) -> None:
    for n in range(len(sums)):
        if values[n] < np.inf:
            for d in range(sums.shape[1]):
                sums[n, d] = min(max(sums[n, d], -values[n]), values[n])
        if norms[n] < np.inf:
            found = np.sqrt(lane_dot(sums, n, sums, n))
            if found > norms[n]:
                scale = norms[n] / found
                for d in range(sums.shape[1]):
                    sums[n, d] *= scale
