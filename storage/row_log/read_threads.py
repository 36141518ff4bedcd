"""Threads that help with reading: a get of a large batch, the segments of a log that is opened, an export's files.

The blocks of such work depend on nothing of each other and spend their time in kernels that hold no GIL. So whoever
asks works through them together with helpers, each taking the next block that is left. Helpers are started for one
piece of work and gone after it: that costs a hundredth of what a get of some blocks takes, and leaves no pool that a
forked child, an interpreter that shuts down or a close would have to think of. It knows nothing of rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from threading import Event, Thread
from typing import TypeAlias

MOST_THREADS = 4  # by default: reading one batch is soon bound by memory

Errors: TypeAlias = list[BaseException]
Work: TypeAlias = Callable[[int, Sequence[BaseException]], None]


@cache
def usable_threads() -> int:
    """Threads that read one batch unless the configuration says otherwise: one a processor, `MOST_THREADS` at most."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def for_each_block(work: Work, starts: Sequence[int], threads: int) -> None:
    """Call `work` for every start, in `threads` threads at most, this one among them.

    Args:
        work: is given a start, and what went wrong elsewhere so far: long work stops when there is something.

    Raises:
        What `work` raised first, or an interrupt of this thread, once no other thread works any more.
    """
    left, errors = iter(starts), Errors()
    helpers = [_Helper(work, left, errors) for _ in range(min(threads, len(starts)) - 1)]
    try:
        with suppress(RuntimeError):  # no thread to be had, at the end of the interpreter for one: this one does it all
            for helper in helpers:
                helper.start()
        _work_through(work, left, errors)
    except BaseException as error:
        errors.append(error)  # before anything else: a helper that is only starting looks here first
    _wait_for(helpers, errors)
    if errors:
        first = errors[0]
        errors.clear()
        try:
            raise first
        finally:
            del first  # which has this frame: nothing of it is to wait for the garbage collector


def _work_through(work: Work, left: Iterator[int], errors: Errors) -> None:
    try:
        for start in left:
            if errors:
                return
            work(start, errors)
    except BaseException as error:
        errors.append(error)


def _wait_for(helpers: Sequence[_Helper], errors: Errors) -> None:
    """Return when none of them reads anything any more; interrupts, wherever they come, are kept for later."""
    while True:
        try:
            for helper in helpers:
                helper.wait()
            return
        except KeyboardInterrupt as interrupt:
            errors.append(interrupt)


class _Helper(Thread):
    """A thread that works through what is left, and can be waited for whatever happens."""

    def __init__(self, work: Work, left: Iterator[int], errors: Errors) -> None:
        super().__init__(name="tiered-emb-read", daemon=True)
        self._arguments = work, left, errors
        self._ended = Event()

    def run(self) -> None:
        """Work, and let go of what it was given."""
        try:
            _work_through(*self._arguments)
        finally:
            del self._arguments
            self._ended.set()

    def wait(self) -> None:
        """Return when it reads nothing any more.

        Not by `join`, which takes a thread for ended when it is interrupted (CPython 3.11). One that never got as far
        as to have an `ident` was not started, or finds what happened before it looks at anything.
        """
        if self.ident is not None:
            self._ended.wait()
