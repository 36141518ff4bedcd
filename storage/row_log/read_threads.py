"""Threads that help with a get of many rows.

The blocks of a get depend on nothing of each other, and reading one spends its time in kernels that hold no GIL. So
whoever asks works through them together with helpers, each taking the next block that is left. Helpers are started for
one get and gone after it: that costs a hundredth of what a get of some blocks takes, and leaves no pool that a forked
child, an interpreter that shuts down or a close would have to think of. It knows nothing of rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from threading import Thread

MOST_THREADS = 4  # by default: reading one batch is soon bound by memory


@cache
def usable_threads() -> int:
    """Threads that read one batch unless the configuration says otherwise: one a processor, `MOST_THREADS` at most."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def for_each_block(work: Callable[[int], None], starts: Sequence[int], threads: int) -> None:
    """Call `work` for every start, in `threads` threads at most, this one among them.

    Raises:
        What `work` raised first, once no other thread works any more.
    """
    left, errors = iter(starts), list[BaseException]()
    helpers = [
        Thread(target=_work_through, args=(work, left, errors), name="tiered-emb-read", daemon=True)
        for _ in range(min(threads, len(starts)) - 1)
    ]
    with suppress(RuntimeError):  # no thread to be had, at the end of the interpreter for one: this one does it all
        for helper in helpers:
            helper.start()
    _work_through(work, left, errors)
    for helper in helpers:
        _wait_for(helper)
    if errors:
        raise errors[0]


def _work_through(work: Callable[[int], None], left: Iterator[int], errors: list[BaseException]) -> None:
    try:
        for start in left:
            if errors:
                return
            work(start)
    except BaseException as error:
        errors.append(error)


def _wait_for(helper: Thread) -> None:
    """Not to be interrupted: the thread reads pages that its caller keeps in place."""
    while helper.ident is not None and helper.is_alive():
        with suppress(KeyboardInterrupt):
            helper.join()
