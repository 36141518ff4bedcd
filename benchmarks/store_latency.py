"""How long single gets and puts take beside growth and compaction, at a fixed rate of both.

Two threads, one that gets and one that puts batches of 4,096 rows, each at fixed moments. A call's latency counts from
the moment at which it was due, so that one slow call also charges those that had to wait behind it.

The sides are two copies of a store in its steady state, which take turns. One is opened with compaction, which keeps
working while garbage comes, and an eighth of the rows put are new, so that the index grows. The other is opened
without; all rows put exist, and its garbage stays. The first second of a turn does not count: it maps the file's
pages again.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from benchmarks.store_internals import store_config
from benchmarks.store_sides import open_rows
from storage import LmdbStore, RowIds

ROWS = 4096
_NEW_SHARE = 8
_WARM_UP_S = 1.0


@dataclass(slots=True)
class Turns:
    """Latencies in seconds, one list a turn, of one side; what compaction moved meanwhile."""

    gets: list[list[float]] = field(default_factory=list)
    puts: list[list[float]] = field(default_factory=list)
    moved_bytes: int = 0


@dataclass(slots=True)
class PacedLoad:
    """One side: a store under the same load, turn after turn.

    Attributes:
        path, row_bytes: of the store, whose ids are those below `rows`.
        compacting: whether compaction works, and rows are new; then `rows` grows.
        a_second: gets, and puts, a second.
        seconds: a turn takes, after its warm-up.
    """

    path: Path
    row_bytes: int
    rows: int
    compacting: bool
    a_second: float
    seconds: float

    def turn(self, into: Turns) -> None:
        """Open the store, run the load, close the store."""
        random = np.random.default_rng(self.rows)
        data = random.integers(0, 256, (ROWS, self.row_bytes), dtype=np.uint8)
        out, found = np.empty_like(data), np.empty(ROWS, np.bool_)
        calls = int((_WARM_UP_S + self.seconds) * self.a_second)
        reads = random.integers(0, self.rows, (calls, ROWS))
        writes = random.integers(0, self.rows, (calls, ROWS))
        if self.compacting:
            new = ROWS // _NEW_SHARE * calls
            writes[:, ::_NEW_SHARE] = np.arange(self.rows, self.rows + new).reshape(calls, -1)
            self.rows += new
        with LmdbStore(self.path, config=store_config(compacting=self.compacting)) as store:
            table = open_rows(store, self.row_bytes)
            gets, puts = _together(
                lambda call: store.get(RowIds.of(table, reads[call]), out, found),
                lambda call: store.put(RowIds.of(table, writes[call]), data),
                calls,
                1 / self.a_second,
            )
            into.moved_bytes += store.stats().bytes_moved
        counted = int(_WARM_UP_S * self.a_second)
        into.gets.append(gets[counted:])
        into.puts.append(puts[counted:])


def _together(
    get: Callable[[int], None], put: Callable[[int], None], calls: int, interval: float
) -> tuple[list[float], list[float]]:
    """Latencies of both verbs, each called so many times in a thread of its own; puts are due between gets."""
    gets: list[float] = []
    puts: list[float] = []
    failures: list[BaseException] = []
    start = time.perf_counter() + 0.05

    def run(verb: Callable[[int], None], first: float, latencies: list[float]) -> None:
        try:
            for call in range(calls):
                due = first + call * interval
                time.sleep(max(0.0, due - time.perf_counter()))
                verb(call)
                latencies.append(time.perf_counter() - due)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(get, start, gets)),
        threading.Thread(target=run, args=(put, start + interval / 2, puts)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return gets, puts


def p999(latencies: list[float]) -> float:
    """The latency that one call in a thousand exceeds."""
    return float(np.quantile(latencies, 0.999, method="higher"))


def beside_compaction(load: PacedLoad, rounds: int) -> dict[str, float]:
    """Figures of `load` and of a copy of its store without compaction, and the worse ratio of the two verbs.

    A verb's ratio is the median of the turns' ratios. The copy is left beside the store.
    """
    copy = load.path.with_name(f"{load.path.name}-alone")
    shutil.copytree(load.path, copy)
    beside, alone = Turns(), Turns()
    sides = [(load, beside), (replace(load, path=copy, compacting=False), alone)]
    for number in range(rounds):
        for side, turns in sides if number % 2 == 0 else reversed(sides):
            side.turn(turns)
    figures: dict[str, float] = {}
    ratios = []
    for verb in ("gets", "puts"):
        with_it, without = getattr(beside, verb), getattr(alone, verb)
        ratios.append(statistics.median(p999(a) / p999(b) for a, b in zip(with_it, without, strict=True)))
        figures[f"p999_{verb}_beside_ms"] = round(p999([*chain(*with_it)]) * 1e3, 2)
        figures[f"p999_{verb}_alone_ms"] = round(p999([*chain(*without)]) * 1e3, 2)
        figures[f"p999_{verb}_beside_compaction"] = round(ratios[-1], 2)
    figures["moved_bytes_beside"] = beside.moved_bytes
    return {"p999_beside_compaction": round(max(ratios), 2), **figures}
