"""Forks: a child finds no road held by a thread that is not there, and nothing half moved.

A fork waits for whoever is on a road, a batch at most, and holds all roads until it is done.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from storage.interrupts import Uninterrupted


class Forkable(Protocol):
    """What has a road.

    Attributes:
        road: held by whoever plans or moves rows.
    """

    road: threading.RLock

    def forget_threads(self) -> None:
        """In a child: what other threads held is free."""


_alive: weakref.WeakSet[Forkable] = weakref.WeakSet()
_forking = threading.RLock()
_held: list[Forkable] = []  # whose roads are held while the process forks


def remember(one: Forkable) -> None:
    """Hold its road while the process forks, from now on; once it is complete."""
    _alive.add(one)


def _before() -> None:
    with Uninterrupted():  # what is raised here is not heard of, and the fork goes on
        _forking.acquire()
        for one in sorted(_alive, key=id):
            one.road.acquire()
            _held.append(one)


def _after() -> None:
    while _held:
        _held.pop().road.release()
    _forking.release()


def _after_in_child() -> None:
    try:
        for one in _held:
            one.forget_threads()
    finally:
        _after()


# After the stores' own, so that it runs before them: a thread on the road may want a store's lock, never the reverse.
os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)
