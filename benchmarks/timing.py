"""Timing sides against each other on a machine that is not ours alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Step = Callable[[int], None]


def interleave(sides: dict[str, Step], rounds: int, warm_up: int = 3, turn: int = 2) -> dict[str, list[float]]:
    """Seconds a step of each side, one figure a round.

    Every round gives each side one turn of ``turn`` steps, in one order in even rounds and in the reverse order in odd
    ones. A step is called with its running number, the same for all sides, so that all of them see the same batches.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-warm_up, rounds):
        names = list(sides) if number % 2 == 0 else list(reversed(sides))
        for name in names:
            start = time.perf_counter()
            for step in range(turn):
                sides[name]((number + warm_up) * turn + step)
            if number >= 0:
                seconds[name].append((time.perf_counter() - start) / turn)
    return seconds


def take_turns(sides: dict[str, Callable[[], float]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """As `interleave`, for sides that take the time themselves: each call is a turn and returns its seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-warm_up, rounds):
        for name in list(sides) if number % 2 == 0 else list(reversed(sides)):
            took = sides[name]()
            if number >= 0:
                seconds[name].append(took)
    return seconds


def ratio(seconds: Mapping[str, list[float]], ours: str, theirs: str) -> float:
    """Median over the rounds of our time divided by theirs in the same round."""
    return statistics.median(a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True))


def spread(numbers: list[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile."""
    first, middle, third = statistics.quantiles(numbers, n=4)
    return first, middle, third
