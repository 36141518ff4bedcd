"""Compiles every Triton kernel for a GPU that is not there, and looks at what came out; run by `test_compiled.py`.

No kernel runs: the public functions are called with tensors of the host, and launches are made compilations. Prints one
line a kernel: its name and, of the instructions whose bits would not be the host's, those that it holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from storage.codecs import Draws
from tiered_emb import optim
from tiered_emb.kernels import gpu, gpu_codecs
from tiered_emb.optim._gpu import LAUNCHES
from tiered_emb.scratch import Scratch
from tiered_emb.workers import WorkerPool

OTHER_BITS = re.compile(r"\b(?:fma\.|mad\.\w+\.f|\w+\.approx\.|div\.full\.|\w+\.(?:\w+\.)*ftz\.)[\w.]*")


class AbsentGpu:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiling(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """In place of `kernel[grid]`."""

    def compile_only(*arguments: Any, **options: Any) -> None:
        made = kernel.warmup(*arguments, grid=grid, **options)
        print(kernel.fn.__name__, *sorted(set(OTHER_BITS.findall(made.asm["ptx"]))))

    return compile_only


def row_kernels(dim: int) -> None:
    """Every function of `kernels.gpu`."""
    weight, state, grad, arg = torch.empty(9, dim), torch.empty(9, 3), torch.empty(5, dim), torch.empty(5, dim).int()
    ints, longs, per_sample = torch.zeros(8, dtype=torch.int32), torch.zeros(6, dtype=torch.int64), torch.empty(8)
    rows, one = torch.empty(8, dim + 3), WorkerPool(1)
    gpu.pool(weight, ints, ints, longs, None, "sum", grad, one)
    gpu.pool(weight, ints, ints, longs, per_sample, "mean", grad, one)
    gpu.pool_max(weight, ints, ints, longs, grad, arg, one)
    gpu.gather(weight, ints, ints, torch.empty(8, dim), one)
    gpu.per_sample_gradients(weight, ints, ints, ints, grad, per_sample, one)
    located = gpu.locate_gradients([grad], ints, Scratch())
    gpu.sum_gradients(located, None, longs, ints, 0, 5, grad)
    gpu.sum_gradients(located, per_sample, longs, ints, 1, 5, grad[:4])
    gpu.sum_gradients_max(located, arg, ints, longs, ints, 0, 5, grad)
    gpu.read_rows(weight, state, ints, rows)
    gpu.write_rows(weight, state, ints, rows)


def rules(dim: int) -> None:
    """Every row rule, with options that use all of its kernel."""
    options: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}}
    for name, launch in LAUNCHES.items():
        rule = optim.RULES[name](lr=0.1, **options.get(name, {}))
        slots = torch.zeros(8, dtype=torch.int32)
        launch(rule, torch.empty(9, dim), torch.empty(9, rule.state_width(dim)), slots, torch.empty(8, dim), 3)


def codecs(dim: int) -> None:
    """Every codec, both ways."""
    rows, packed = torch.empty(8, dim), torch.empty(8, 2 * dim + 8, dtype=torch.uint8)
    for name in gpu_codecs.NAMES:
        gpu_codecs.pack(name, rows, dim, packed, gpu_codecs.DeviceDraws.of(Draws.none(8), torch.device("cpu")))
        gpu_codecs.unpack(name, packed, dim, rows)


if __name__ == "__main__":
    triton.runtime.driver.set_active(AbsentGpu())
    triton.runtime.jit.JITFunction.__getitem__ = compiling
    row_kernels(1)  # Triton makes a constant of an argument that is 1
    for work in (row_kernels, rules, codecs):
        work(64)
