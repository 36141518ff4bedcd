"""Staging: rows on their way between host memory and the slab of another device, beside what the trainer's stream does.

A copy between ordinary host memory and a GPU waits for everything that the GPU was given before it, and has the host
wait too. So rows go through blocks of page-locked memory, used in turn, on a stream of copies. That stream and the
trainer's know nothing of each other; the order between them is kept here:

- Work inside :meth:`Staging.working` comes after all rows that moved before it, so a look-up finds its rows in place.
- Rows that move later come after that work, so no slot gets a new row while an update of its last one is still to be
  done. (A slot that is pinned never moves; this is about those that, by the host's clock, were pinned until just now.)
- A block is filled again when its last copy is over, and rows that were read are handed out once they have arrived.

The host waits in the last of these only, and only the thread that moves rows does.

Threads: rows are moved by whoever holds the road, and read by whoever trains too, before it changes rows of a state
that is being written (:mod:`tiered_emb.saving`). The blocks are one thread's at a time. `working` is for any thread, on
its current stream.

Shapes: N rows, W floats of a row, S slots.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import torch

from tiered_emb.plan import Rows, Slots

Enqueue: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]

_BLOCKS = 2  # one is filled or emptied by the host while the other is on its way
_BLOCK_BYTES = 1 << 18


class Copies(Protocol):
    """A device's way to copy beside other work, in the order in which it is asked."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device reads and writes by itself."""

    def run(self, work: Callable[[], None]) -> None:
        """Have `work`, which enqueues copies and kernels, done after all work that was `used` so far."""

    def mark(self) -> Callable[[], None]:
        """A wait until all that was run so far is done."""

    def lead(self) -> None:
        """What the caller's stream is given from now on comes after all that was run so far."""

    def used(self) -> None:
        """What is run from now on comes after all that the caller's stream was given so far."""

    def share(self, tensor: torch.Tensor) -> None:
        """Work that is run uses this memory: once freed, it is nobody else's until that is done."""


class PlainCopies:
    """For devices without streams that are known here: everything is done in the order it is asked for."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As `Copies.pinned`."""
        return torch.empty(shape, dtype=dtype, device="cpu")

    def run(self, work: Callable[[], None]) -> None:
        """As `Copies.run`."""
        work()

    def mark(self) -> Callable[[], None]:
        """As `Copies.mark`."""
        return _done

    def lead(self) -> None:
        """As `Copies.lead`."""

    def used(self) -> None:
        """As `Copies.used`."""

    def share(self, tensor: torch.Tensor) -> None:
        """As `Copies.share`."""


def _done() -> None:
    """Nothing to wait for."""


class CudaCopies:
    """A CUDA stream of copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._moved: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._used: dict[int, Any] = {}  # by stream

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As `Copies.pinned`."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def run(self, work: Callable[[], None]) -> None:
        """As `Copies.run`."""
        for event in list(self._used.values()):  # a copy made at once: another thread may add its stream
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            try:
                work()
            finally:
                self._moved.record(self._stream)

    def mark(self) -> Callable[[], None]:
        """As `Copies.mark`."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        wait: Callable[[], None] = event.synchronize
        return wait

    def lead(self) -> None:
        """As `Copies.lead`."""
        torch.cuda.current_stream(self._device).wait_event(self._moved)

    def used(self) -> None:
        """As `Copies.used`."""
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream not in self._used:
            self._used[stream.cuda_stream] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._used[stream.cuda_stream].record(stream)

    def share(self, tensor: torch.Tensor) -> None:
        """As `Copies.share`."""
        tensor.record_stream(self._stream)


class _Block:
    """Page-locked memory for some rows and their slots, and what is still to be done about it."""

    def __init__(self, copies: Copies, rows: int, width: int) -> None:
        self.slots = copies.pinned((rows,), torch.int32)
        self.rows = copies.pinned((rows, width), torch.float32)
        self._wait: Callable[[], None] | None = None
        self._out: torch.Tensor | None = None

    def begun(self, wait: Callable[[], None], out: torch.Tensor | None = None) -> None:
        """It is on its way until `wait` returns; then its rows are for `out`."""
        self._wait, self._out = wait, out

    def finish(self) -> None:
        """Wait until it may be filled again; rows that were read are where they were wanted then."""
        wait, out = self._wait, self._out
        self._wait = self._out = None
        if wait is not None:
            wait()
        if out is not None:
            out.copy_(self.rows[: len(out)])


class Staging:
    """See the module's essay.

    Args:
        copies: the device's.
        weight, state: (S, D) and (S, W - D), the slab.
    """

    def __init__(self, copies: Copies, weight: torch.Tensor, state: torch.Tensor) -> None:
        self._device = weight.device
        self._copies = copies
        row_floats = weight.shape[1] + state.shape[1]
        self._block_rows = block_rows(len(weight), row_floats)
        copies.share(weight)
        copies.share(state)
        self._blocks = deque(_Block(copies, self._block_rows, row_floats) for _ in range(_BLOCKS))
        self._moving = threading.Lock()  # held by whose rows are in the blocks

    def write(self, slots: Slots, rows: Rows, put: Enqueue) -> None:
        """Send rows (N, W) for slots (N,); `put` takes slots and rows, both on the device, and enqueues the rest."""
        with self._moving:
            for part in self._parts(len(slots)):
                self._send(torch.from_numpy(slots[part]), torch.from_numpy(rows[part]), put)

    def _send(self, slots: torch.Tensor, rows: torch.Tensor, put: Enqueue) -> None:
        block, n = self._next_block(), len(slots)
        block.slots[:n].copy_(slots)
        block.rows[:n].copy_(rows)
        try:
            self._copies.run(lambda: put(self._sent(block.slots[:n]), self._sent(block.rows[:n])))
        finally:
            block.begun(self._copies.mark())

    def read(self, slots: Slots, out: Rows, take: Enqueue) -> None:
        """Fetch the rows of slots (N,) into `out` (N, W); `take` is given slots and the place for their rows, both on
        the device, and enqueues the rest."""
        with self._moving:
            try:
                for part in self._parts(len(slots)):
                    self._fetch(torch.from_numpy(slots[part]), torch.from_numpy(out[part]), take)
            finally:
                for block in self._blocks:
                    block.finish()

    def _fetch(self, slots: torch.Tensor, out: torch.Tensor, take: Enqueue) -> None:
        block, n = self._next_block(), len(slots)
        block.slots[:n].copy_(slots)

        def fetch() -> None:
            rows = torch.empty_like(out, device=self._device)
            take(self._sent(block.slots[:n]), rows)
            block.rows[:n].copy_(rows, non_blocking=True)

        self._copies.run(fetch)
        block.begun(self._copies.mark(), out)

    def _sent(self, pinned: torch.Tensor) -> torch.Tensor:
        return pinned.to(self._device, non_blocking=True)

    def _next_block(self) -> _Block:
        self._blocks.rotate()
        self._blocks[0].finish()
        return self._blocks[0]

    def _parts(self, rows: int) -> Iterator[slice]:
        return (slice(first, first + self._block_rows) for first in range(0, rows, self._block_rows))

    @contextmanager
    def working(self) -> Iterator[None]:
        """For work on the slab in the caller's stream."""
        self._copies.lead()
        try:
            yield
        finally:
            self._copies.used()


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on a device, itself if it is there; a GPU gets it on the current stream, and the host does not wait.

    What it held when this was called is what arrives, whatever is written to it after.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)  # torch keeps the page-locked copy until it has gone
    return tensor.to(device)


def block_rows(slab_rows: int, row_floats: int) -> int:
    """Rows of a block: 256 KiB of them, and no more than a sixteenth of the slab."""
    return max(1, min(_BLOCK_BYTES // (4 * row_floats), slab_rows // 16))


def staging_bytes(device: torch.device, slab_rows: int, row_floats: int) -> int:
    """Host memory that the staging of such a slab takes; none where rows are copied straight."""
    return 0 if device.type == "cpu" else _BLOCKS * block_rows(slab_rows, row_floats) * 4 * (row_floats + 1)


def staging_for(weight: torch.Tensor, state: torch.Tensor) -> Staging | None:
    """How rows get to a slab (S, D) and (S, W - D); None = it is host memory."""
    device = weight.device
    if device.type == "cpu":
        return None
    return Staging(CudaCopies(device) if device.type == "cuda" else PlainCopies(), weight, state)
