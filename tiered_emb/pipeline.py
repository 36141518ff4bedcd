"""Prefetch: batches of a loader are planned, fetched and committed while the model still works on earlier ones.

::

    for batch in prefetch(loader, model, ids=lambda batch: batch.ids, lookahead=2):
        loss = model(batch) ...                      the loop body stays the user's

The loader is read `lookahead` batches ahead, in the thread of the loop, so that what it draws at random does not depend
on timing. One thread takes each batch down the first part of its road (`TieredTables.prepare`), in order: its rows are
brought into the top tier and pinned there, what leaves for them is handed to the Store. A forward finds what was
prepared for it **by value** - the same ids, bags and weights - and goes on with the look-up; it takes no lock then. A
forward that finds nothing, because the body renamed its ids, skipped a batch, or made one up, prepares its own. So what
is prepared may hasten a forward and never changes what it gives: everything here may fail, be late or be missing.

Invariants:

- The thread prepares in batch order; it waits for the disk and the road, never for a release. What has no room beside
  the pins of batches that were not used yet is refused and tried again at the next `next()`; a forward that finds no
  room has everything prepared and not taken let go, then prepares its own batch.
- Pins of a batch end with its backward pass (or whatever ends those of a forward). Of a batch that no forward took they
  end at the `next()` after the one that gave it, and all of them when the loop ends: at the last batch, by `break`, by
  an exception, by `close()`, by closing the module, or when the iterator is dropped.
- Where rows rest in fewer bits the order of plans bears on numbers, so it does not depend on threads: a batch is
  prepared as if nothing had been released since it was handed over, and a forward that prepares its own waits until all
  that was handed over is prepared.
- An error met while preparing is not raised there: the forward prepares the batch itself, and raises what it meets.

Threads: `Prefetch` belongs to the thread of the loop; an `Entry` (`tiered_emb.prepared`) is handed to the preparing
thread by a queue, and back by an event.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Protocol, Self, runtime_checkable

import torch
from torch import nn

from tiered_emb.errors import ConfigError, IdRangeError, InvalidBatchError
from tiered_emb.inputs import kind_of
from tiered_emb.lookup import LookupInput, Question
from tiered_emb.plan import JaggedIds
from tiered_emb.prepared import Batch, Entry, Part, PrefetchStats
from tiered_emb.tables import TieredTables

MOST_AHEAD = 64


def _serve(queue: SimpleQueue[Entry[Any] | None]) -> None:
    """Body of the preparing thread; holds the queue only, so that a dropped iterator goes away.

    While a batch is prepared the disk may begin to read for the next one.
    """
    here = deque([queue.get()])  # the one that is due, and the one after it
    while (entry := here.popleft()) is not None:
        if not queue.empty():
            here.append(queue.get())
            if here[0] is not None:
                here[0].announce()
        entry.prepare()
        del entry
        if not here:
            here.append(queue.get())


def _end(queue: SimpleQueue[Entry[Any] | None], entries: deque[Entry[Any]]) -> None:
    """Have the thread end, which may be in the middle of a batch; what is prepared goes with the entries.

    As a finalizer this may run in any thread, one that the road's holder waits for among them: it takes no lock.
    """
    for entry in entries:
        for part in entry.parts:
            part.cancelled = True
    queue.put(None)


@runtime_checkable
class Positioned(Protocol):
    """A loader that knows where it is, as torchdata's do."""

    def state_dict(self) -> Any:
        """Its position, of tensors, numbers, strings, lists and dicts, not changed by what the loader does later."""


class Prefetch(Generic[Batch]):
    """Iterator over the batches of a loader, each prepared before its turn; made by :func:`prefetch`.

    Attributes:
        stats: what it did so far.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        modules: Mapping[str, TieredTables],
        ids: Callable[[Batch], Any] | None,
        lookahead: int,
    ) -> None:
        self.stats = PrefetchStats()
        self._loader = loader if isinstance(loader, Positioned) else None
        self._batches: Iterator[Batch] | None = iter(loader)
        self._position = self._read_to = self._loader_position()
        self._modules = modules
        self._ids = ids
        self._lookahead = lookahead
        self._entries: deque[Entry[Any]] = deque()  # of batches that were read; the first may have been given
        self._given = False  # whether it was
        self._failure: Exception | None = None  # of the loader, raised once the batches before it were given
        self._queue: SimpleQueue[Entry[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._queue, self._entries)
        self._finalizer.atexit = False
        for module in modules.values():
            module.prepare_ahead(_Weak(self))

    # ---- the loop

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._given:
            self._entries[0].let_go(for_good=True)
            self._entries.popleft()
            self._given = False
        self._read_ahead()
        if not self._entries:
            self._position = self._read_to
            self.close()
            raise StopIteration if self._failure is None else self._failure
        self._given = True
        self._position = self._entries[0].position
        self.stats.batches += 1
        given: Batch = self._entries[0].batch
        return given

    def _read_ahead(self) -> None:
        """Read from the loader until the batch that is given next has `lookahead` behind it."""
        for entry in self._entries:
            if entry.was_refused:
                self.stats.refused += 1
                self._hand_over(entry)
        while self._batches is not None and len(self._entries) <= self._lookahead:
            try:
                batch = next(self._batches)
                self._read_to = self._loader_position()
                entry = Entry(batch, self._parts(batch), self._read_to)
            except Exception as error:
                self._batches = None
                self._read_to = self._loader_position()
                self._failure = None if isinstance(error, StopIteration) else error
                return
            self._entries.append(entry)
            self._hand_over(entry)

    def _loader_position(self) -> Any:
        return None if self._loader is None else self._loader.state_dict()

    def state_dict(self) -> Any:
        """The loader's position behind the batch that was given last, however far it was read: for a checkpoint.

        It is the loader that goes on from it (``load_state_dict``), before a new loop begins.
        Raises ConfigError if the loader has no ``state_dict``.
        """
        if self._loader is None:
            raise ConfigError("the loader has no state_dict() that says where it is: give one that has")
        return self._position

    def _hand_over(self, entry: Entry[Batch]) -> None:
        if self._lookahead == 0 or not entry.parts:  # the forward prepares its own
            entry.done.set()
            return
        entry.mark()
        entry.done.clear()
        if self._thread is None:
            thread = threading.Thread(target=_serve, args=(self._queue,), name="tiered-emb-prefetch", daemon=True)
            thread.start()
            self._thread = thread  # once there is something to wait for, should this be interrupted
        self._queue.put(entry)

    def _parts(self, batch: Batch) -> list[Part]:
        if self._lookahead == 0:
            return []
        parts = []
        for module, arguments in _arguments(batch if self._ids is None else self._ids(batch), self._modules):
            try:
                if module.training:
                    parts.append(Part(module, module.lookup_inputs(*arguments)))
            except (InvalidBatchError, IdRangeError) as error:  # the forward says it in its turn, if it gets the same
                self.stats.failed += 1
                self.stats.last_failure = str(error)
        return parts

    # ---- the forward, by `Ahead`

    def take(self, module: TieredTables, inputs: Sequence[LookupInput]) -> Sequence[Question] | None:
        """As `tiered_emb.tables.Ahead.take`; nothing in a forked child, in which nobody prepares."""
        if os.getpid() != self._pid:
            return None
        for entry in self._entries:
            for part in entry.parts:
                if part.matches(module, inputs):
                    self._await(entry)
                    questions = part.take(inputs)
                    self._count(part, questions is not None)
                    if questions is None:
                        self._settle(module)
                    return questions
        self.stats.unprepared += 1
        self._settle(module)
        return None

    def _settle(self, module: TieredTables) -> None:
        """Where the order of plans bears on numbers, have those made that were handed over before the forward's own."""
        if module.order_matters:
            for entry in self._entries:
                entry.done.wait()

    def _await(self, entry: Entry[Any]) -> None:
        if entry.done.is_set():
            return
        begin = time.perf_counter()
        entry.done.wait()
        self.stats.stalls += 1
        for place, seconds in entry.clock.within(begin, time.perf_counter()).items():
            self.stats.stall_seconds[place] = self.stats.stall_seconds.get(place, 0.0) + seconds

    def _count(self, part: Part, prepared: bool) -> None:
        self.stats.prepared += prepared
        self.stats.unprepared += not prepared
        self.stats.refused += part.refused
        if part.error is not None and not part.refused:
            self.stats.failed += 1
            self.stats.last_failure = f"{type(part.error).__name__}: {part.error}"

    def cancel(self, module: int) -> None:
        """As `tiered_emb.tables.Ahead.cancel`."""
        for entry in list(self._entries):  # a copy made at once: the loop may go on
            for part in entry.parts:
                if id(part.module) == module:  # others may be on another road, whose holder may want this one
                    part.let_go(for_good=False)

    def stop(self) -> None:
        """As `tiered_emb.tables.Ahead.stop`: batches go on to come, unprepared."""
        if not self._finalizer.alive:
            return
        self._lookahead = 0
        self._finalizer()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None
        for entry in self._entries:
            entry.let_go(for_good=True)
        for module in self._modules.values():
            module.prepare_ahead(None)

    # ---- the end

    def close(self) -> None:
        """Prepare nothing more, and let go of what is prepared; the loop gets no further batch."""
        self.stop()
        self._batches, self._given = None, False
        self._entries.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Weak:
    """A module's way to the iterator that prepares for it, which goes away when the loop drops it."""

    def __init__(self, prefetch: Prefetch[Any]) -> None:
        self._prefetch = weakref.ref(prefetch)

    def take(self, module: TieredTables, inputs: Sequence[LookupInput]) -> Sequence[Question] | None:
        prefetch = self._prefetch()
        return None if prefetch is None else prefetch.take(module, inputs)

    def cancel(self, module: int) -> None:
        if (prefetch := self._prefetch()) is not None:
            prefetch.cancel(module)

    def stop(self) -> None:
        if (prefetch := self._prefetch()) is not None:
            prefetch.stop()


def prefetch(
    loader: Iterable[Batch],
    model: nn.Module,
    ids: Callable[[Batch], Any] | None = None,
    lookahead: int = 2,
) -> Prefetch[Batch]:
    """The batches of `loader`, in order, whose rows are brought in while earlier batches are trained on.

    Args:
        loader: anything that can be iterated over; read `lookahead` batches ahead, in the caller's thread.
        model: a tiered module, or a model that has some.
        ids: what a batch will have the tiered module look up: the arguments of its forward, as `JaggedIds`, a tensor,
            or a tuple such as (ids, offsets). Where the model has several tiered modules, a dict from their names in
            `model.named_modules()` to that; a module that is left out prepares its own batches. None = the batch is it.
        lookahead: batches that are prepared beyond the one being trained on; 0 = none, each forward prepares its own.

    Returns:
        An iterator, which is a context manager too, with `stats` (:class:`PrefetchStats`). An older one over the same
        modules, left behind by an interrupt perhaps, prepares nothing from now on.

    Raises:
        ConfigError: the model has no tiered module, or `lookahead` is not from 0 to 64. While iterating, in its turn:
            `ids` does not fit the model, and what loader and `ids` raise.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, TieredTables)}
    if not modules:
        raise ConfigError(f"{type(model).__name__} has no tiered module to prefetch for")
    if not isinstance(lookahead, int) or isinstance(lookahead, bool) or not 0 <= lookahead <= MOST_AHEAD:
        raise ConfigError(f"lookahead is {lookahead!r}; expected a number of batches from 0 to {MOST_AHEAD}")
    for module in modules.values():
        module.stop_ahead()
    return Prefetch(loader, modules, ids, lookahead)


def _arguments(given: Any, modules: Mapping[str, TieredTables]) -> list[tuple[TieredTables, tuple[Any, ...]]]:
    """Each module that something is given for, and the arguments of its forward."""
    if not isinstance(given, dict):
        if len(modules) > 1:
            raise ConfigError(
                f"the model has {len(modules)} tiered modules ({', '.join(list(modules)[:5])}), but ids gave a "
                f"{kind_of(given)}: give a dict from their names to what each looks up"
            )
        return [(next(iter(modules.values())), _as_arguments(given))]
    if odd := sorted(map(str, given.keys() - modules.keys())):
        raise ConfigError(f"ids gave something for {odd[0]!r}; the tiered modules are {', '.join(list(modules)[:5])}")
    return [(modules[name], _as_arguments(one)) for name, one in given.items()]


def _as_arguments(given: Any) -> tuple[Any, ...]:
    if isinstance(given, tuple):
        return given
    if isinstance(given, JaggedIds | torch.Tensor):
        return (given,)
    raise ConfigError(
        f"ids gave a {kind_of(given)}; expected JaggedIds, a tensor, or a tuple of what the module's forward takes"
    )
