"""WorkerPool: our own few threads, over which a batch's row work is partitioned.

Numba kernels here are serial and release the GIL; parallel work is a kernel called on several contiguous parts of a
batch at once. Numba's own `parallel=True` is not used: one of its layers kills a forked child that enters a kernel,
the other aborts when two threads do.

Invariants
- The parts of one `run` are disjoint and cover range(n); which thread takes which part is left to chance, so a function
  given to `run` must not let its result depend on the partition. (Parts are handed out one by one, because the ids that
  appear first in a skewed batch have most of the positions: an even split by rows is not an even split of the work.)
- The caller works too and never waits for a part that nobody has begun. Hence several threads may call `run` at once,
  and a function that is being run may call `run` itself, without deadlock.
- When `run` returns or raises, no part is running.

Threads: a pool of `threads` owns `threads - 1` daemon threads, started by the first `run` that can use them. A forked
child inherits no thread; it finds that out by its process id and starts its own. The pool keeps no other state.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType

Part = Callable[[int, int], None]
_PARTS_PER_THREAD = 4  # enough to even out skew, few enough that handing them out (about 2 us each) costs nothing


class _Job:
    """One call of `run`: hands out parts, counts those that ended, keeps the first error."""

    def __init__(self, fn: Part, n: int, size: int) -> None:
        self._fn, self._n, self._size = fn, n, size
        self._parts = itertools.count()  # next() is one step under the GIL: no two threads get the same part
        self._total = -(-n // size)
        self._ended = 0
        self._lock = threading.Lock()
        self._all_ended = threading.Event()
        self.error: BaseException | None = None

    def work(self) -> None:
        """Take parts until none is left. After an error the remaining parts are taken and skipped."""
        while (part := next(self._parts)) < self._total:
            try:
                if self.error is None:
                    self._fn(part * self._size, min((part + 1) * self._size, self._n))
            except BaseException as error:  # raised again in the thread that called run
                with self._lock:
                    self.error = self.error or error
            finally:
                self._end_part()

    def _end_part(self) -> None:
        with self._lock:
            self._ended += 1
            if self._ended == self._total:
                self._all_ended.set()

    def wait(self) -> None:
        """Until every part has ended; an interrupt is kept until then, since parts write into the caller's arrays."""
        while not self._all_ended.is_set():
            try:
                self._all_ended.wait()
            except BaseException as error:  # Ctrl-C: raised again once no part is running
                self.error = self.error or error


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    """Body of a worker thread; holds the queue only, so that a pool nobody refers to can be collected."""
    while (job := jobs.get()) is not None:
        job.work()
        del job


def _stop(jobs: SimpleQueue[_Job | None], threads: int) -> None:
    for _ in range(threads):
        jobs.put(None)


class WorkerPool:
    """Runs a function over the parts of a range on `threads` threads, the caller's included.

    Requires: threads >= 1. Threads are started at the first use; `close` (or `with`) ends them, and so does dropping
    the pool. May be used by several threads at once and, after a fork, in the child.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a WorkerPool needs at least 1 thread, not {threads}; 1 runs everything in the caller")
        self.threads = threads
        self._start_lock = threading.Lock()
        self._closed = False
        self._pid = 0  # process whose threads serve self._jobs; 0 = none started
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._helpers: list[threading.Thread] = []
        self._finalizer: weakref.finalize[[SimpleQueue[_Job | None], int], WorkerPool] | None = None

    def run(self, fn: Part, n: int, grain: int = 1) -> None:
        """Call fn(first, last) on disjoint parts that cover range(n); return when all have returned.

        No part is smaller than `grain`, but the last. The first error that a part raises is raised here, after every
        part that was running has ended; parts not begun by then are skipped. n = 0 calls nothing.
        """
        if self._closed:
            raise RuntimeError("this WorkerPool is closed; make a new one")
        if n <= 0:
            return
        if self.threads == 1 or n <= grain:
            fn(0, n)
            return
        job = _Job(fn, n, max(grain, 1, -(-n // (self.threads * _PARTS_PER_THREAD))))
        self._start()
        for _ in range(self.threads - 1):
            self._jobs.put(job)
        job.work()
        job.wait()
        if job.error is not None:
            raise job.error

    def _start(self) -> None:
        if self._pid == os.getpid():
            return
        with self._start_lock:
            if self._pid == os.getpid():
                return
            if self._finalizer is not None:
                self._finalizer.detach()  # the parent's threads: not ours to stop
            self._jobs = SimpleQueue()
            self._helpers = [
                threading.Thread(target=_serve, args=(self._jobs,), name=f"tiered-emb-worker-{i}", daemon=True)
                for i in range(1, self.threads)
            ]
            for helper in self._helpers:
                helper.start()
            self._finalizer = weakref.finalize(self, _stop, self._jobs, self.threads - 1)
            self._pid = os.getpid()

    def close(self) -> None:
        """End the threads and wait for them; a second close does nothing. Requires: no `run` in progress."""
        self._closed = True
        if self._finalizer is not None and self._pid == os.getpid():
            self._finalizer()
            for helper in self._helpers:
                helper.join()
        self._helpers, self._finalizer = [], None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
