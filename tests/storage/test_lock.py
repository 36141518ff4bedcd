"""StoreLock: who holds it block after block gives way to those who wait, and only to them."""

from __future__ import annotations

from threading import Event, Thread

import pytest

from storage.row_log import lock as module
from storage.row_log.lock import StoreLock


def test_its_owner_may_take_it_again_and_waiting_lets_go_of_it_all() -> None:
    lock, inside = StoreLock(), Event()

    def enter() -> None:
        with lock:
            inside.set()
            lock.notify_all()

    with lock, lock:
        other = Thread(target=enter)
        other.start()
        assert lock.wait_for(inside.is_set, 30)
    other.join()


def test_giving_way_pauses_if_somebody_wants_to_come_in_and_not_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, pauses, inside, leave = StoreLock(), list[float](), Event(), Event()
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    lock.give_way()
    assert not pauses

    def hold() -> None:
        with lock:
            inside.set()
            leave.wait(30)

    holder, waiting = Thread(target=hold), Thread(target=lambda: lock.__enter__())
    holder.start()
    assert inside.wait(30)
    waiting.start()
    for _ in range(10_000):
        if lock._entering:
            break
        Event().wait(0.001)
    assert lock._entering
    lock.give_way()
    assert len(pauses) == 1
    leave.set()
    holder.join()
    waiting.join()
    lock.give_way()
    assert len(pauses) == 1
