from __future__ import annotations

import gc
import os
import threading

import pytest

from tiered_emb.workers import WorkerPool


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("n", "grain"), [(0, 1), (1, 1), (7, 3), (1000, 1), (1000, 300), (64, 64)])
def test_parts_cover_the_range_once(threads: int, n: int, grain: int) -> None:
    parts: list[tuple[int, int]] = []
    with WorkerPool(threads) as pool:
        pool.run(lambda first, last: parts.append((first, last)), n, grain)
    parts.sort()
    assert [i for first, last in parts for i in range(first, last)] == list(range(n))
    assert all(last - first >= min(grain, n) for first, last in parts[:-1])


def test_two_threads_work_at_once() -> None:
    both = threading.Barrier(2, timeout=60)  # passes only if two parts are running at the same time
    with WorkerPool(2) as pool:
        pool.run(lambda first, last: both.wait() and None, 2)


def test_one_thread_runs_in_the_caller_and_starts_nothing() -> None:
    before, names = threading.active_count(), []
    pool = WorkerPool(1)
    pool.run(lambda first, last: names.append(threading.current_thread().name), 100)
    assert names == [threading.current_thread().name]
    assert threading.active_count() == before


def test_no_thread_before_the_first_use_and_none_after_close() -> None:
    before = threading.active_count()
    pool = WorkerPool(3)
    assert threading.active_count() == before
    pool.run(lambda first, last: None, 100)
    assert threading.active_count() == before + 2
    pool.close()
    pool.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(lambda first, last: None, 1)


def test_a_dropped_pool_ends_its_threads() -> None:
    pool = WorkerPool(3)
    pool.run(lambda first, last: None, 100)
    helpers = pool._helpers
    del pool
    gc.collect()
    for helper in helpers:
        helper.join(timeout=60)
        assert not helper.is_alive()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_an_error_is_raised_in_the_caller_and_the_pool_goes_on(threads: int) -> None:
    def fail(first: int, last: int) -> None:
        if first <= 13 < last:
            raise KeyError(13)

    with WorkerPool(threads) as pool:
        with pytest.raises(KeyError, match="13"):
            pool.run(fail, 100)
        seen: list[int] = []
        pool.run(lambda first, last: seen.extend(range(first, last)), 100)
        assert sorted(seen) == list(range(100))


def test_when_an_error_is_raised_no_part_is_running() -> None:
    other_started, may_end, ended = threading.Event(), threading.Event(), []
    caller = threading.current_thread()

    def part(first: int, last: int) -> None:
        if threading.current_thread() is caller:
            other_started.wait(60)
            threading.Timer(0.05, may_end.set).start()
            raise ValueError("ours")
        other_started.set()
        may_end.wait(60)
        ended.append(first)

    with WorkerPool(2) as pool:
        with pytest.raises(ValueError, match="ours"):
            pool.run(part, 2)
        assert len(ended) == 1  # before close(), which waits too


def test_run_inside_run() -> None:
    seen: list[int] = []
    with WorkerPool(2) as pool:
        pool.run(lambda a, b: pool.run(lambda c, d: seen.extend(range(c, d)), 50), 4)
    assert len(seen) % 50 == 0
    assert set(seen) == set(range(50))


def test_many_callers_at_once() -> None:
    sums = [0] * 8
    with WorkerPool(3) as pool:

        def count() -> int:
            parts: list[int] = []
            pool.run(lambda first, last: parts.append(last - first), 1000, 10)
            return sum(parts)

        def caller(i: int) -> None:
            sums[i] = sum(count() for _ in range(50))

        threads = [threading.Thread(target=caller, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sums == [50_000] * 8


def test_a_forked_child_starts_its_own_threads() -> None:
    with WorkerPool(2) as pool:
        pool.run(lambda first, last: None, 100)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                both = threading.Barrier(2, timeout=60)
                pool.run(lambda first, last: both.wait() and None, 2)
                pool.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        both = threading.Barrier(2, timeout=60)
        pool.run(lambda first, last: both.wait() and None, 2)  # the parent's threads are unharmed


def test_a_pool_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="at least 1 thread, not 0"):
        WorkerPool(0)
