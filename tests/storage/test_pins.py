"""Pins: what a reader may still touch is released after it has left, and not before."""

from __future__ import annotations

from functools import partial
from threading import Event, Thread

from hypothesis import given
from hypothesis import strategies as st

from storage.row_log.lock import StoreLock
from storage.row_log.pins import Pins


def test_nothing_waits_where_nobody_reads() -> None:
    pins, gone = Pins(), []
    pins.retire(partial(gone.append, 1))
    assert gone == [1]
    assert not pins.held and not pins.waiting


def test_what_is_retired_waits_for_those_who_came_before_and_for_nobody_else() -> None:
    pins, gone = Pins(), []
    early = pins.enter()
    pins.retire(partial(gone.append, "a"))
    late = pins.enter()
    pins.retire(partial(gone.append, "b"))
    assert pins.waiting == 2
    pins.leave(early)
    assert gone == ["a"], "b waits for the late reader"
    pins.leave(late)
    assert gone == ["a", "b"]
    assert not pins.held


@given(st.lists(st.integers(-1, 5), max_size=60))
def test_any_order_of_coming_and_going(steps: list[int]) -> None:
    """-1 retires something, another number ends that reader if there is one, or begins one."""
    pins, gone, retired = Pins(), [], 0
    readers: dict[int, int] = {}
    before: dict[int, set[int]] = {}  # readers that were there when a thing was retired
    count = 0
    names: dict[int, int] = {}
    for step in steps:
        if step == -1:
            before[retired] = {names[at] for at in readers}
            pins.retire(partial(gone.append, retired))
            retired += 1
        elif step in readers:
            pins.leave(readers.pop(step))
            name = names.pop(step)
            for waiting in before.values():
                waiting.discard(name)
        else:
            readers[step], names[step] = pins.enter(), count
            count += 1
        assert gone == sorted(gone)
        assert all(not before[at] for at in gone), "released while a reader of before was there"
    for generation in readers.values():
        pins.leave(generation)
    assert gone == list(range(retired))


def test_who_wants_quiet_is_not_kept_waiting_by_those_who_come_later() -> None:
    """A thread that is inside may enter again, or it would wait for itself."""
    lock, pins, seen = StoreLock(), Pins(), []
    inside = Event()

    def change() -> None:
        with lock, pins.quiet(lock):
            seen.append((pins.held, pins.may_enter))

    with lock:
        pin = pins.enter()
        thread = Thread(target=change)
        thread.start()
        while not pins._quieted:
            lock.wait(0.001)
        assert pins.may_enter, "this thread is inside"
        other = Thread(target=lambda: (seen.append(pins.may_enter), inside.set()))
        other.start()
        other.join()
        assert inside.is_set() and seen == [False]
        again = pins.enter()
        pins.leave(pin)
        assert pins.may_enter
        pins.leave(again)
        assert not pins.may_enter
        lock.notify_all()
    thread.join()
    assert seen == [False, (False, False)]
    assert pins.may_enter
