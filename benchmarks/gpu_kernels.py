"""Every Triton kernel as a case of `benchmarks.gpu`: run by Triton and by what defines it, and the bytes it must move.

A batch asks for ``ids`` rows of a table on the device, so many that what it moves is far larger than the device's
caches. Bytes are those of rows, gradients and packed rows, each time they are used, and of the arrays that say which;
a kernel that moves them once and at the rate of a plain copy has a share of 1.

Shapes: N ids, U unique ids, B bags, D dimension.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from storage.codecs import CODECS, Draws
from storage.schema import RowSchema
from tiered_emb.kernels import reference
from tiered_emb.kernels.batch import Deduper, UniqueIds, bags_of, group_positions
from tiered_emb.optim import RULES
from tiered_emb.scratch import Scratch
from tiered_emb.workers import WorkerPool

_STEP = 10  # of the rules: past the first ones, in which averages are corrected most
_ONE = WorkerPool(1)
_CHECKED_ROWS = 1 << 16  # rows that a codec packs; its twin on the host is not what is measured

Outputs = list[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A kernel on a batch.

    Attributes:
        name: of the kernel.
        ids: of the batch, or rows that are worked on.
        bytes: that have to be moved.
        ours: runs it once by Triton, and gives what it wrote.
        theirs: the same by what it is defined by.
    """

    name: str
    ids: int
    bytes: int
    ours: Callable[[], Outputs]
    theirs: Callable[[], Outputs]


@dataclass(frozen=True)
class Batch:
    """What the kernels are given, on the device: see `tiered_emb.kernels.reference`."""

    weight: torch.Tensor
    slots: torch.Tensor
    inverse: torch.Tensor
    offsets: torch.Tensor
    bags: torch.Tensor
    start: torch.Tensor
    position: torch.Tensor
    per_sample: torch.Tensor
    grad: torch.Tensor

    @property
    def dim(self) -> int:
        """D."""
        return self.weight.shape[1]


def batch_of(ids: NDArray[np.int64], rows: int, dim: int, bag: int, device: torch.device) -> Batch:
    """The batch of ids (N,) below ``rows``, ``bag`` of them a bag; a row's slot is its id."""
    n, found = len(ids), UniqueIds.empty(len(ids))
    unique = Deduper().dedupe(ids, np.array([0, n]), np.zeros(1, np.uint32), found)
    offsets = np.minimum(np.arange(-(-n // bag) + 1) * bag, n)
    bags, start, position = np.empty(n, np.int32), np.empty(unique + 1, np.int64), np.empty(n, np.int32)
    bags_of(offsets, bags)
    group_positions(found.inverse, unique, start, position)
    arrays = (found.ids[:unique].astype(np.int32), found.inverse, offsets, bags, start, position)
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=device)

    told = [torch.from_numpy(array).to(device) for array in arrays]
    return Batch(*(normal(rows, dim), *told, normal(n), normal(len(offsets) - 1, dim)))


def row_cases(ours: ModuleType, b: Batch) -> Iterator[Case]:
    """Every function of the kernels ``ours``, beside `reference`'s."""
    n, unique, bags, dim = len(b.inverse), len(b.slots), len(b.grad), b.dim
    row, index = 4 * dim, 8 * n  # of a position: which unique id it has, and a slot or a bag
    state = torch.zeros(len(b.weight), 1, device=b.weight.device)
    by_bag, by_row = torch.empty_like(b.grad), torch.empty(unique, dim, device=b.weight.device)
    by_position, winners = torch.empty(n, dim, device=b.weight.device), torch.empty_like(b.grad, dtype=torch.int32)
    dots, moved = torch.empty_like(b.per_sample), torch.empty(unique, dim + 1, device=b.weight.device)
    asked = b.weight, b.slots, b.inverse

    def pool(k: Any, per_sample: torch.Tensor | None, mode: Literal["sum", "mean"]) -> Outputs:
        k.pool(*asked, b.offsets, per_sample, mode, by_bag, _ONE)
        return [by_bag]

    def pool_max(k: Any) -> Outputs:
        k.pool_max(*asked, b.offsets, by_bag, winners, _ONE)
        return [by_bag, winners]

    def gather(k: Any) -> Outputs:
        k.gather(*asked, by_position, _ONE)
        return [by_position]

    def per_sample_gradients(k: Any) -> Outputs:
        k.per_sample_gradients(*asked, b.bags, b.grad, dots, _ONE)
        return [dots]

    def sum_gradients(k: Any) -> Outputs:
        located = k.locate_gradients([b.grad], b.bags, Scratch())
        k.sum_gradients(located, None, b.start, b.position, 0, unique, by_row)
        return [by_row]

    def sum_gradients_max(k: Any) -> Outputs:
        located = k.locate_gradients([b.grad], b.bags, Scratch())
        k.sum_gradients_max(located, winners, b.bags, b.start, b.position, 0, unique, by_row)
        return [by_row]

    def read_rows(k: Any) -> Outputs:
        k.read_rows(b.weight, state, b.slots, moved)
        return [moved]

    sent = torch.randn_like(moved)

    def write_rows(k: Any) -> Outputs:
        k.write_rows(b.weight, state, b.slots, sent)
        return [b.weight, state]

    pooled, summed = n * row + index + bags * row, n * row + index + unique * row
    for name, size, work in (
        ("pool sum", pooled, lambda k: pool(k, None, "sum")),
        ("pool mean, weighted", pooled + 4 * n, lambda k: pool(k, b.per_sample, "mean")),
        ("pool max", pooled + bags * row, pool_max),
        ("gather", 2 * n * row + index, gather),
        ("per-sample gradients", 2 * n * row + index + 8 * n, per_sample_gradients),
        ("sum gradients", summed, sum_gradients),
        ("sum gradients max", summed + n * row, sum_gradients_max),  # after "pool max", whose winners it asks for
    ):
        yield _twins(name, n, size, work, ours)
    for name, work in (("read rows", read_rows), ("write rows", write_rows)):
        yield _twins(name, unique, 2 * unique * (row + 4) + 4 * unique, work, ours)


def _twins(name: str, ids: int, size: int, work: Callable[[Any], Outputs], ours: ModuleType) -> Case:
    return Case(name, ids, size, lambda: work(ours), lambda: work(reference))


def rule_cases(launches: dict[str, Any], b: Batch) -> Iterator[Case]:
    """Every row rule with a function among ``launches``, on the unique rows of a batch."""
    unique, dim = len(b.slots), b.dim
    grads = torch.randn(unique, dim, device=b.weight.device) * 0.01
    for name, launch in launches.items():
        rule = RULES[name](lr=0.01)
        width = rule.state_width(dim)
        # what a rule is checked and timed on is its own; both begin as the batch's rows
        mine, other = ((b.weight.clone(), _state(b, width)) for _ in range(2))

        def ours(launch: Any = launch, rule: Any = rule, slab: Any = mine) -> Outputs:
            launch(rule, *slab, b.slots, grads, _STEP)
            return list(slab)

        def theirs(rule: Any = rule, slab: Any = other) -> Outputs:
            rule.reference(*slab, b.slots, grads, _STEP)
            return list(slab)

        yield Case(name, unique, unique * 4 * (3 * dim + 2 * width + 1), ours, theirs)


def _state(b: Batch, width: int) -> torch.Tensor:
    return torch.full((len(b.weight), width), 0.01, device=b.weight.device)


def codec_cases(ours: Any, b: Batch) -> Iterator[Case]:
    """Every codec of the module ``ours``, both ways, on rows of a batch; drawn for, beside the host's."""
    rows, device = b.weight[:_CHECKED_ROWS].contiguous(), b.weight.device
    n, dim, ids = len(rows), b.dim, np.arange(len(rows))
    steps = np.where(ids % 2 == 0, _STEP, 0).astype(np.uint32)
    draws = Draws(ids.astype(np.uint64), ids.astype(np.uint32), ids, steps)
    on_device = ours.DeviceDraws.of(draws, device)
    for name in ours.NAMES:
        codec, width = CODECS[name], RowSchema(CODECS[name].columns(dim)).row_bytes
        packed, unpacked = torch.zeros(n, width, dtype=torch.uint8, device=device), torch.empty_like(rows)

        def pack(name: str = name, packed: torch.Tensor = packed) -> Outputs:
            ours.pack(name, rows, dim, packed, on_device)
            return [packed]

        def pack_on_host(codec: Any = codec, width: int = width) -> Outputs:
            out = np.zeros((n, width), np.uint8)
            codec.pack(rows.cpu().numpy(), dim, out, draws)
            return [torch.from_numpy(out).to(device)]

        def unpack(name: str = name, packed: torch.Tensor = packed, out: torch.Tensor = unpacked) -> Outputs:
            ours.unpack(name, packed, dim, out)
            return [out]

        def unpack_on_host(codec: Any = codec, packed: torch.Tensor = packed) -> Outputs:
            out = np.empty((n, dim), np.float32)
            codec.unpack(packed.cpu().numpy(), dim, out)
            return [torch.from_numpy(out).to(device)]

        size = n * (4 * dim + width)
        yield Case(f"pack {name}", n, size + 24 * n, pack, pack_on_host)
        yield Case(f"unpack {name}", n, size, unpack, unpack_on_host)  # after "pack": what it wrote


def same_bits(case: Case) -> bool:
    """Whether Triton writes what defines the kernel does. Run once a case, before it is timed: rules change rows."""
    ours = [one.clone() for one in case.ours()]
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(ours, case.theirs(), strict=True))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


def seconds_of(run: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Median over the rounds of a run's time on the device, by its own clock; on the host's, without a GPU."""
    run()
    return statistics.median(_timed(run, device) for _ in range(rounds))


def _timed(run: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(repeats):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000 / repeats


def copied_bytes_a_second(weight: torch.Tensor, rounds: int) -> float:
    """What a copy on the device reads and writes in a second."""
    other = torch.empty_like(weight)
    return 2 * 4 * weight.numel() / seconds_of(lambda: other.copy_(weight), weight.device, rounds)
