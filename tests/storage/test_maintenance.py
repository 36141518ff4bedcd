"""Maintenance: one thread, a round for whoever asks, an end."""

from __future__ import annotations

from threading import Condition, Event, RLock, Thread, active_count

import pytest

from storage.row_log.maintenance import Maintenance


class Work:
    """A round that waits until it is let through."""

    def __init__(self) -> None:
        self.rounds = 0
        self.begun, self.go_on = Event(), Event()
        self.pause: float | None = None

    def __call__(self) -> float | None:
        self.begun.set()
        assert self.go_on.wait(30)
        self.rounds += 1
        return self.pause


@pytest.fixture
def lock() -> Condition:
    return Condition(RLock())


def test_no_thread_before_somebody_asks(lock: Condition) -> None:
    threads = active_count()
    Maintenance(lock, lambda: None, "idle").stop()
    assert active_count() == threads


def test_who_asks_during_a_round_gets_another(lock: Condition) -> None:
    work, second = Work(), Event()
    maintenance = Maintenance(lock, work, "rounds")
    with lock:
        maintenance.ask()
    assert work.begun.wait(30)
    with lock:
        maintenance.ask()
    real = work.go_on.set

    def count() -> float | None:
        second.set()
        return None

    maintenance._work = count
    real()
    assert second.wait(30)
    maintenance.stop()
    assert work.rounds == 1


def test_a_round_comes_again_by_itself_if_it_says_so(lock: Condition) -> None:
    work, third = Work(), Event()
    work.go_on.set()
    work.pause = 0.001

    def round() -> float | None:
        work()
        if work.rounds == 3:
            third.set()
            return None
        return work.pause

    maintenance = Maintenance(lock, round, "again")
    with lock:
        maintenance.ask()
    assert third.wait(30)
    maintenance.stop()
    assert work.rounds == 3


def test_stopping_waits_for_the_round_and_lets_waiters_go(lock: Condition) -> None:
    work = Work()
    maintenance = Maintenance(lock, work, "stop")
    with lock:
        maintenance.ask()
    assert work.begun.wait(30)
    stopping = Thread(target=maintenance.stop)
    stopping.start()
    work.go_on.set()
    stopping.join(30)
    assert not stopping.is_alive() and work.rounds == 1
