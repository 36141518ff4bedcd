"""Row work by device: one set of functions, several implementations with the same bits.

`reference` is the specification in torch ops and runs on any device; `cpu` is Numba, `gpu` is Triton, which is imported
when a GPU asks for it. `batch` is work on ids, on the host. `gpu_codecs` packs and unpacks rows on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, Protocol

import torch

from tiered_emb.kernels import cpu, reference
from tiered_emb.scratch import Scratch
from tiered_emb.workers import WorkerPool

PoolMode = Literal["sum", "mean"]


class Kernels(Protocol):
    """The functions a device needs; a module is one. Contracts stand in `tiered_emb.kernels.reference`."""

    def pool(
        self,
        weight: torch.Tensor,
        slots: torch.Tensor,
        inverse: torch.Tensor,
        offsets: torch.Tensor,
        per_sample: torch.Tensor | None,
        mode: PoolMode,
        out: torch.Tensor,
        workers: WorkerPool,
    ) -> None:
        """Sum or mean of each bag's rows."""

    def pool_max(
        self,
        weight: torch.Tensor,
        slots: torch.Tensor,
        inverse: torch.Tensor,
        offsets: torch.Tensor,
        out: torch.Tensor,
        arg: torch.Tensor,
        workers: WorkerPool,
    ) -> None:
        """Maximum of each bag's rows by column, and the position it comes from."""

    def gather(
        self,
        weight: torch.Tensor,
        slots: torch.Tensor,
        inverse: torch.Tensor,
        out: torch.Tensor,
        workers: WorkerPool,
    ) -> None:
        """The row of each position."""

    def per_sample_gradients(
        self,
        weight: torch.Tensor,
        slots: torch.Tensor,
        inverse: torch.Tensor,
        bags: torch.Tensor,
        grad: torch.Tensor,
        out: torch.Tensor,
        workers: WorkerPool,
    ) -> None:
        """Gradient of each position's per-sample weight."""

    def locate_gradients(self, grads: Sequence[torch.Tensor], bags: torch.Tensor, scratch: Scratch) -> Any:
        """Where `sum_gradients` finds the gradient of each position."""

    def sum_gradients(
        self,
        located: Any,
        per_sample: torch.Tensor | None,
        start: torch.Tensor,
        position: torch.Tensor,
        first: int,
        last: int,
        out: torch.Tensor,
    ) -> None:
        """Gradients of unique rows first .. last - 1."""

    def sum_gradients_max(
        self,
        located: Any,
        arg: torch.Tensor,
        bags: torch.Tensor,
        start: torch.Tensor,
        position: torch.Tensor,
        first: int,
        last: int,
        out: torch.Tensor,
    ) -> None:
        """The same for bags pooled by maximum."""

    def read_rows(self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
        """Copy rows out of a slab."""

    def write_rows(self, weight: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy rows into a slab."""


@cache
def has_triton() -> bool:
    """Whether Triton is there to be imported; the first question imports it."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def for_device(device: torch.device) -> Kernels:
    """The kernels that work on tensors of `device`: Numba's on the host, Triton's on a GPU where there is Triton, the
    reference elsewhere."""
    if device.type == "cuda" and has_triton():
        from tiered_emb.kernels import gpu

        return gpu
    return cpu if device.type == "cpu" else reference
