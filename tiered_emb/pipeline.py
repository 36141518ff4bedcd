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

- The thread prepares in batch order and waits for nobody but the disk. What has no room beside the pins of batches that
  were not used yet is refused and tried again at the next `next()`; a forward that finds no room has everything
  prepared and not taken let go, then prepares its own batch.
- Pins of a batch end with its backward pass (or whatever ends those of a forward). Of a batch that no forward took they
  end at the `next()` after the one that gave it, and all of them when the loop ends: at the last batch, by `break`, by
  an exception, by `close()`, by closing the module, or when the iterator is dropped.
- An error met while preparing is not raised there: the forward prepares the batch itself, and raises what it meets.

Threads: `Prefetch` belongs to the thread of the loop; `_Entry` is handed to the preparing thread by a queue, and back
by an event. What both touch between the two is guarded by the engine's road.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch
from torch import nn

from tiered_emb.errors import ConfigError, IdRangeError, InvalidBatchError, TierCapacityError
from tiered_emb.inputs import kind_of
from tiered_emb.lookup import LookupInput, Question
from tiered_emb.plan import JaggedIds
from tiered_emb.tables import TieredTables

Batch = TypeVar("Batch")
MOST_AHEAD = 64


@dataclass(slots=True)
class PrefetchStats:
    """What prefetching did so far.

    Attributes:
        batches: given to the loop.
        prepared: forwards that found their batch prepared, however late.
        unprepared: forwards that found nothing, and prepared their batch themselves.
        refused: batches that had no room beside others, and were tried again or prepared by their forward.
        failed: batches whose preparation met an error, which their forward may have met again.
        stalls: forwards that had to wait for what was prepared for them.
        stall_seconds: how long they waited, by what was at work meanwhile: "hbm", "ddr", "store", or "queue" for
            earlier batches.
    """

    batches: int = 0
    prepared: int = 0
    unprepared: int = 0
    refused: int = 0
    failed: int = 0
    stalls: int = 0
    stall_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def stalled_seconds(self) -> float:
        """How long forwards waited in all."""
        return sum(self.stall_seconds.values())


class _Clock:
    """Where the time of one preparation goes; `at` is called by who prepares, `within` by who waited."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, str]] = []

    def at(self, place: str) -> None:
        """The time from now on goes to `place`."""
        self._marks.append((time.perf_counter(), place))

    def within(self, begin: float, end: float) -> dict[str, float]:
        """How much of the time from `begin` to `end` went where."""
        seconds: dict[str, float] = {}
        marks = [(begin, "queue"), *self._marks, (end, "")]
        for (since, place), (until, _) in pairwise(marks):
            spent = min(until, end) - max(since, begin)
            if spent > 0:
                seconds[place] = seconds.get(place, 0.0) + spent
        return seconds


class _Part:
    """What one module will be asked in the forward of one batch.

    Attributes:
        questions: once prepared; taken by the forward.
        error: what preparing met.
        taken, cancelled: a forward has it; nobody wants it any more.
        refused: it had no room, or had to make some for another batch.
    """

    def __init__(self, module: TieredTables, inputs: Sequence[LookupInput]) -> None:
        self.module = module
        self.inputs = [one.kept() for one in inputs]
        self.questions: list[Question] | None = None
        self.error: BaseException | None = None
        self.taken = self.cancelled = self.refused = False

    def prepare(self, at: Callable[[str], None]) -> None:
        """In the preparing thread: bring the rows in, unless that was done or is not wanted any more."""
        with self.module.road:
            if not self._is_wanted() or self.questions is not None:
                return
            self.error, self.refused = None, False
            try:
                self.questions = self.module.prepare(self.inputs, at)
            except BaseException as error:  # the forward that comes meets it again, or does not
                self.error = error.with_traceback(None)  # whose frames would hold plans
                self.refused = isinstance(error, TierCapacityError)
            if not self._is_wanted():  # since meanwhile: a finalizer takes no lock
                self._withdraw()

    def _is_wanted(self) -> bool:
        return not self.taken and not self.cancelled

    def matches(self, module: TieredTables, inputs: Sequence[LookupInput]) -> bool:
        """Whether this is for a forward of `module` with these inputs, and still to be had."""
        return (
            self.module is module
            and not self.taken
            and not self.cancelled
            and len(self.inputs) == len(inputs)
            and all(mine.equals(other) for mine, other in zip(self.inputs, inputs, strict=True))
        )

    def take(self, inputs: Sequence[LookupInput]) -> list[Question] | None:
        """In the thread of the loop, once prepared: the questions, with the forward's own weights; None = none."""
        self.taken = True
        questions, self.questions = self.questions, None
        for question, one in zip(questions or (), inputs, strict=False):
            question.weights = one.weights
        return questions

    def let_go(self, *, for_good: bool) -> None:
        """Unpin what is prepared, unless a forward has it; `for_good` = it will not be prepared again."""
        if self.taken:  # without the road, which may be long
            return
        with self.module.road:
            self.cancelled |= for_good
            self.refused |= self.questions is not None
            self._withdraw()

    def _withdraw(self) -> None:
        questions, self.questions = self.questions, None
        for question in questions or ():
            question.withdraw()


class _Entry(Generic[Batch]):
    """One batch on its way through the queue."""

    def __init__(self, batch: Batch, parts: Sequence[_Part]) -> None:
        self.batch = batch
        self.parts = parts
        self.clock = _Clock()
        self.done = threading.Event()

    def prepare(self) -> None:
        """In the preparing thread."""
        try:
            for part in self.parts:
                part.prepare(self.clock.at)
        finally:
            self.done.set()

    @property
    def was_refused(self) -> bool:
        """Whether a part that is still wanted had no room."""
        return self.done.is_set() and any(part.refused and not part.taken and not part.cancelled for part in self.parts)

    def let_go(self, *, for_good: bool) -> None:
        """Unpin what is prepared and no forward has taken."""
        for part in self.parts:
            part.let_go(for_good=for_good)


def _serve(entries: SimpleQueue[_Entry[Any] | None]) -> None:
    """Body of the preparing thread; holds the queue only, so that a dropped iterator goes away."""
    while (entry := entries.get()) is not None:
        entry.prepare()
        del entry


def _end(entries: SimpleQueue[_Entry[Any] | None], outstanding: deque[_Entry[Any]]) -> None:
    """Have the thread end, which may be in the middle of a batch; what is prepared goes with the entries.

    As a finalizer this may run in any thread, one that the road's holder waits for among them: it takes no lock.
    """
    for entry in outstanding:
        for part in entry.parts:
            part.cancelled = True
    outstanding.clear()
    entries.put(None)


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
        self._batches: Iterator[Batch] | None = iter(loader)
        self._modules = modules
        self._ids = ids
        self._lookahead = lookahead
        self._coming: deque[_Entry[Batch]] = deque()  # read from the loader, not given yet
        self._given: _Entry[Batch] | None = None
        self._failure: Exception | None = None  # of the loader, raised once the batches before it were given
        self._outstanding: deque[_Entry[Any]] = deque()  # all of these
        self._entries: SimpleQueue[_Entry[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, _end, self._entries, self._outstanding)
        self._finalizer.atexit = False
        for module in modules.values():
            module.prepare_ahead(_Weak(self))

    # ---- the loop

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._given is not None:
            self._given.let_go(for_good=True)
            if self._given in self._outstanding:
                self._outstanding.remove(self._given)
            self._given = None
        self._read_ahead()
        if not self._coming:
            self.close()
            raise StopIteration if self._failure is None else self._failure
        self._given = self._coming.popleft()
        self.stats.batches += 1
        return self._given.batch

    def _read_ahead(self) -> None:
        """Read from the loader until the batch that is given next has `lookahead` behind it."""
        for entry in self._coming:
            if entry.was_refused:
                self.stats.refused += 1
                self._hand_over(entry)
        while self._batches is not None and len(self._coming) <= self._lookahead:
            try:
                batch = next(self._batches)
                entry = _Entry(batch, self._parts(batch))
            except Exception as error:
                self._batches = None
                self._failure = None if isinstance(error, StopIteration) else error
                return
            self._coming.append(entry)
            self._outstanding.append(entry)
            self._hand_over(entry)

    def _hand_over(self, entry: _Entry[Batch]) -> None:
        if self._lookahead == 0 or not entry.parts:  # the forward prepares its own
            entry.done.set()
            return
        entry.done.clear()
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._entries,), name="tiered-emb-prefetch", daemon=True
            )
            self._thread.start()
        self._entries.put(entry)

    def _parts(self, batch: Batch) -> list[_Part]:
        if self._lookahead == 0:
            return []
        parts = []
        for module, arguments in _arguments(batch if self._ids is None else self._ids(batch), self._modules):
            with suppress(InvalidBatchError, IdRangeError):  # which the forward will say, in its turn
                if module.training:
                    parts.append(_Part(module, module.lookup_inputs(*arguments)))
        return parts

    # ---- the forward, by `Ahead`

    def take(self, module: TieredTables, inputs: Sequence[LookupInput]) -> list[Question] | None:
        """As `tiered_emb.tables.Ahead.take`."""
        for entry in self._outstanding:
            for part in entry.parts:
                if part.matches(module, inputs):
                    self._await(entry)
                    questions = part.take(inputs)
                    self._count(part, questions is not None)
                    return questions
        self.stats.unprepared += 1
        return None

    def _await(self, entry: _Entry[Any]) -> None:
        if entry.done.is_set():
            return
        begin = time.perf_counter()
        entry.done.wait()
        self.stats.stalls += 1
        for place, seconds in entry.clock.within(begin, time.perf_counter()).items():
            self.stats.stall_seconds[place] = self.stats.stall_seconds.get(place, 0.0) + seconds

    def _count(self, part: _Part, prepared: bool) -> None:
        self.stats.prepared += prepared
        self.stats.unprepared += not prepared
        self.stats.refused += part.refused
        self.stats.failed += part.error is not None and not part.refused

    def cancel(self) -> None:
        """As `tiered_emb.tables.Ahead.cancel`."""
        for entry in self._outstanding:
            entry.let_go(for_good=False)

    def stop(self) -> None:
        """As `tiered_emb.tables.Ahead.stop`: batches go on to come, unprepared."""
        if not self._finalizer.alive:
            return
        self._lookahead = 0
        entries = list(self._outstanding)
        self._finalizer()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None
        for entry in entries:
            entry.let_go(for_good=True)
        for module in self._modules.values():
            module.prepare_ahead(None)

    # ---- the end

    def close(self) -> None:
        """Prepare nothing more, and let go of what is prepared; the loop gets no further batch."""
        self.stop()
        self._batches = self._given = None
        self._coming.clear()
        self._outstanding.clear()

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

    def take(self, module: TieredTables, inputs: Sequence[LookupInput]) -> list[Question] | None:
        prefetch = self._prefetch()
        return None if prefetch is None else prefetch.take(module, inputs)

    def cancel(self) -> None:
        if (prefetch := self._prefetch()) is not None:
            prefetch.cancel()

    def stop(self) -> None:
        if (prefetch := self._prefetch()) is not None:
            prefetch.stop()

    @property
    def is_there(self) -> bool:
        return self._prefetch() is not None


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
