"""What is prepared for one batch of a loop before its forward comes, and what became of it: see `tiered_emb.pipeline`.

A `Part` is what one module will be asked; an `Entry` is all of them for one batch, on its way through the queue.
Between being handed to the preparing thread and being `done` an entry is that thread's; what both touch then is guarded
by the road of the part's engine, but for `cancelled`, which is set without a lock and looked at once more afterwards.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, TypeVar

from tiered_emb.errors import TierCapacityError
from tiered_emb.lookup import LookupInput, Question
from tiered_emb.plan import Mark
from tiered_emb.tables import TieredTables

Batch = TypeVar("Batch")


@dataclass(slots=True)
class PrefetchStats:
    """What prefetching did so far.

    Attributes:
        batches: given to the loop.
        prepared: forwards that found their batch prepared, however late.
        unprepared: forwards that found nothing, and prepared their batch themselves.
        refused: times that a batch had no room beside others, and was tried again or prepared by its forward.
        failed: batches whose preparation met an error, which their forward may have met again.
        last_failure: the last of those errors.
        stalls: forwards that had to wait for what was prepared for them.
        stall_seconds: how long they waited, by what was at work meanwhile: "hbm", "ddr", "store", or "queue" for
            earlier batches.
    """

    batches: int = 0
    prepared: int = 0
    unprepared: int = 0
    refused: int = 0
    failed: int = 0
    last_failure: str = ""
    stalls: int = 0
    stall_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def stalled_seconds(self) -> float:
        """How long forwards waited in all."""
        return sum(self.stall_seconds.values())


class Clock:
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


class Part:
    """What one module will be asked in the forward of one batch.

    Its ids are deduplicated in the thread of the loop, which has less to do than the preparing one.

    Attributes:
        error: what preparing met.
        taken, cancelled: a forward has it; nobody wants it any more.
        refused: it had no room, or had to make some for another batch.
    """

    def __init__(self, module: TieredTables, inputs: Sequence[LookupInput]) -> None:
        self.module = module
        self.inputs = [one.kept() for one in inputs]
        self.error: BaseException | None = None
        self.taken = self.cancelled = self.refused = False
        self._prepared: deque[Sequence[Question]] = deque()  # one or none; whoever pops it has it
        self._asked: Sequence[Question] | None = None
        groups = {id(one.lookup.group): one.lookup.group for one in inputs}.values()
        self._ordered = [group for group in groups if group.form.lossy]  # elsewhere rows are the same wherever they are
        self._marks: Sequence[Mark] = []
        try:
            self._asked = [one.ask() for one in self.inputs]
        except Exception as error:
            self.error = error.with_traceback(None)

    @property
    def is_prepared(self) -> bool:
        """Whether there is something that a forward may take, or that may be let go."""
        return bool(self._prepared)

    def announce(self) -> None:
        """In the preparing thread, while an earlier batch is due: have the store begin to read."""
        if self._asked is not None and not self.is_prepared and self.is_wanted:
            with suppress(Exception):  # which preparing meets too, or does not
                self.module.announce(self._asked)

    def mark(self) -> None:
        """In the thread of the loop, before it is handed over: it is prepared as if nothing were released later."""
        self._marks = [group.mark() for group in self._ordered]

    def prepare(self, at: Callable[[str], None]) -> None:
        """In the preparing thread: bring the rows in, unless that was done or is not wanted any more."""
        with self.module.road:
            if self._asked is not None and not self.is_prepared and self.is_wanted:
                self._prepare(self._asked, at)

    def _prepare(self, asked: Sequence[Question], at: Callable[[str], None]) -> None:
        self.error, self.refused = None, False
        try:
            with ExitStack() as planning:
                for group, mark in zip(self._ordered, self._marks, strict=True):
                    planning.enter_context(group.planning_as_of(mark))
                self.module.prepare(asked, at)
            self._prepared.append(asked)
        except BaseException as error:  # the forward that comes meets it again, or does not
            self.error = error.with_traceback(None)  # whose frames would hold plans
            self.refused = isinstance(error, TierCapacityError)
        if not self.is_wanted:  # since meanwhile: a finalizer takes no lock
            self._withdraw()

    @property
    def is_wanted(self) -> bool:
        """Whether a forward may still come for it."""
        return not self.taken and not self.cancelled

    def matches(self, module: TieredTables, inputs: Sequence[LookupInput]) -> bool:
        """Whether this is for a forward of `module` with these inputs, and still to be had."""
        return (
            self.module is module
            and self.is_wanted
            and len(self.inputs) == len(inputs)
            and all(mine.equals(other) for mine, other in zip(self.inputs, inputs, strict=True))
        )

    def take(self, inputs: Sequence[LookupInput]) -> Sequence[Question] | None:
        """In the thread of the loop, once prepared: the questions, with the forward's own weights; None = none."""
        self.taken, self._asked = True, None
        questions = self._pop()
        for question, one in zip(questions or (), inputs, strict=False):
            question.weights = one.weights
        return questions

    def let_go(self, *, for_good: bool) -> None:
        """Unpin what is prepared, unless a forward has it; `for_good` = it will not be prepared again."""
        if self.taken:  # without the road, which may be long
            return
        with self.module.road:
            self.cancelled |= for_good
            self.refused |= self.is_prepared
            self._withdraw()

    def _withdraw(self) -> None:
        for question in self._pop() or ():
            question.withdraw()

    def _pop(self) -> Sequence[Question] | None:
        """What is prepared, for one of those who ask."""
        try:
            return self._prepared.pop()
        except IndexError:
            return None


class Entry(Generic[Batch]):
    """One batch on its way through the queue; `position` is the loader's behind it."""

    def __init__(self, batch: Batch, parts: Sequence[Part], position: Any = None) -> None:
        self.batch = batch
        self.position = position
        self.parts = parts
        self.clock = Clock()
        self.done = threading.Event()

    def mark(self) -> None:
        """In the thread of the loop, before it is handed over."""
        for part in self.parts:
            part.mark()

    def announce(self) -> None:
        """In the preparing thread: that it comes after the one that is prepared now."""
        for part in self.parts:
            part.announce()

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
        return self.done.is_set() and any(part.refused and part.is_wanted for part in self.parts)

    def let_go(self, *, for_good: bool) -> None:
        """Unpin what is prepared and no forward has taken."""
        for part in self.parts:
            part.let_go(for_good=for_good)
