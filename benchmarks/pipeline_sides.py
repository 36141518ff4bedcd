"""The stores and the sides of `benchmarks.pipeline`: each side runs steps of a stream and says how long one took.

Shapes: N ids a step, D dimension.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from benchmarks.disk import written_bytes
from benchmarks.pipeline_internals import RequestCounts, cold_pages, store_sizes, wait_for_prepared
from benchmarks.report import Figure
from benchmarks.sides import LEARNING_RATE
from benchmarks.workloads import ClickStream, Zipf
from storage import LmdbStore, RowIds
from tiered_emb import RowwiseAdagrad, TierConfig, TieredEmbeddingBag
from tiered_emb.engine import row_schema
from tiered_emb.pipeline import prefetch

TABLE = "clicks"
POLICY = "lfu"  # which of the rows are popular does not change here
_BLOCK_ROWS = 1 << 16
_COUNTED_STEPS = 4
_PACED_ROWS, _PACE_S = 1 << 14, 0.02  # about what a step brings, and how soon the next one comes


@dataclass(frozen=True)
class Setting:
    """What every side of one run has in common, as the command line gives it.

    Attributes:
        rows, dim: of the table.
        share: of the rows' bytes that the engine may hold in host memory.
        samples, features: N = samples * features.
        lookahead: batches that are prepared ahead.
        warm_up: batches before the first clock.
        steps, rounds: length of a turn, and turns of each side.
        puts: rows put into the store after it was loaded, as a share of its rows; superseded rows fill it until
            compaction has to keep up.
    """

    rows: int
    dim: int
    share: float
    samples: int
    features: int
    lookahead: int
    warm_up: int
    steps: int
    rounds: int
    puts: float

    @property
    def row_bytes(self) -> int:
        """A row with its optimizer state, one float."""
        return 4 * self.dim + 4

    @property
    def budget_bytes(self) -> int:
        """Of the engine: `TierConfig.ddr_bytes`."""
        return int(self.rows * self.row_bytes * self.share)

    @property
    def told(self) -> dict[str, Figure]:
        """For another process, and for the report."""
        return asdict(self)

    def stream(self, law: Zipf) -> ClickStream:
        """Batches of a law; the same ones whoever asks."""
        return ClickStream(law, self.dim, self.samples, self.features)


@contextmanager
def phase(name: str, seconds: dict[str, Figure] | None = None) -> Iterator[None]:
    """Say on stderr what has begun, and note how long it took."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    start = time.perf_counter()
    yield
    if seconds is not None:
        seconds[name] = round(time.perf_counter() - start, 1)


def open_store(path: Path, setting: Setting) -> LmdbStore:
    """The store with the sizes that an engine of this budget would give it.

    It makes complete states by itself (an engine leaves that to `flush`), so that dead segments go while it is used.
    """
    return LmdbStore(path, config=store_sizes(path, setting.budget_bytes))


def fill(store: LmdbStore, setting: Setting, law: Zipf) -> None:
    """Put every row into a new store, then rows of the law until superseded ones have compaction at work.

    Popular rows are left out of the latter: they rest in the tier above, and never leave it.
    """
    table = store.open_table(TABLE, row_schema(setting.dim, RowwiseAdagrad(lr=LEARNING_RATE)))
    random = np.random.default_rng(0)
    rows = random.normal(0, 0.01, (_BLOCK_ROWS, setting.dim + 1)).astype(np.float32)
    rows[:, -1] = 0
    for first in range(0, setting.rows, _BLOCK_ROWS):
        ids = np.arange(first, min(setting.rows, first + _BLOCK_ROWS))
        store.put(RowIds.of(table, ids), np.roll(rows, first // _BLOCK_ROWS, axis=0)[: len(ids)].view(np.uint8))
    store.flush()  # compaction moves only what a complete state covers
    left = int(setting.rows * setting.puts)
    while left > 0:
        ids = np.unique(law.draw(random, min(left, _BLOCK_ROWS), from_rank=setting.rows // 25))
        store.put(RowIds.of(table, random.permutation(ids)), rows[: len(ids)].view(np.uint8))
        left -= len(ids)
    store.flush()


def begin_compaction(store: LmdbStore, setting: Setting, law: Zipf) -> None:
    """Put rows until compaction is at work: how much superseded space it leaves alone depends on what a commit brings,
    so a store that was filled faster than it is trained on would not be compacted for many steps."""
    table = store.open_table(TABLE, row_schema(setting.dim, RowwiseAdagrad(lr=LEARNING_RATE)))
    random, begun = np.random.default_rng(2), store.stats().rows_moved
    rows = np.zeros((_PACED_ROWS, table.schema.row_bytes), np.uint8)
    for _ in range(0, int(setting.rows * setting.puts), _PACED_ROWS):
        if store.stats().rows_moved - begun > setting.rows // 20:
            return
        ids = np.unique(law.draw(random, _PACED_ROWS, from_rank=setting.rows // 25))
        store.put(RowIds.of(table, random.permutation(ids)), rows[: len(ids)])
        time.sleep(_PACE_S)


def tiered_bag(store: LmdbStore, setting: Setting, cache_rows: int | None) -> TieredEmbeddingBag:
    """Ours over a store; `cache_rows` is the most rows it may keep in memory, None = what the budget holds."""
    quota = {} if cache_rows is None else {TABLE: cache_rows}
    return TieredEmbeddingBag(
        setting.rows,
        setting.dim,
        mode="sum",
        include_last_offset=True,
        tiers=TierConfig(0, setting.budget_bytes, store, POLICY, max_rows=quota),
        optimizer=RowwiseAdagrad(lr=LEARNING_RATE),
        seed=0,
        name=TABLE,
    )


class Side(Protocol):
    """An engine that trains on the batches of a stream."""

    def run(self, first: int, steps: int) -> float:
        """Seconds a step of so many steps, the first of which is number `first`."""


class InMemory:
    """A module without anything below it, of ours or of FBGEMM."""

    def __init__(self, module: torch.nn.Module, stream: ClickStream) -> None:
        self._module, self._stream = module, stream

    def run(self, first: int, steps: int) -> float:
        stream, start = self._stream, time.perf_counter()
        for step in range(first, first + steps):
            self._module(stream.batch(step), stream.offsets).backward(stream.grad)
        return (time.perf_counter() - start) / steps


class Tiered:
    """Ours over a store, in a prefetch loop that takes the batches one after the other.

    A turn ends when what was prepared ahead is done: it begins with `lookahead` batches prepared, so that each turn
    pays for as many preparations as it has steps, although the last of them find nothing to hide behind.

    Attributes:
        stalled_s: how long forwards waited in the last turn, a step.
        written_bytes: what the process had written in the last turn, a step.
        next: number of the step that comes next.
    """

    def __init__(
        self,
        store: LmdbStore,
        setting: Setting,
        stream: ClickStream,
        *,
        first: int = 0,
        lookahead: int | None = None,
        cache_rows: int | None = None,
    ) -> None:
        self.store = store
        self.bag = tiered_bag(store, setting, cache_rows)
        self.stalled_s = self.written_bytes = 0.0
        self._stream, self.next = stream, first
        self._lookahead = setting.lookahead if lookahead is None else lookahead
        self._steps = prefetch(
            stream.batches_from(first), self.bag, ids=lambda ids: (ids, stream.offsets), lookahead=self._lookahead
        )

    def warm_up(self, setting: Setting) -> None:
        """The batches before the first clock; then compaction is at work."""
        self.run(self.next, setting.warm_up)
        begin_compaction(self.store, setting, self._stream.law)

    def run(self, first: int, steps: int) -> float:
        if first != self.next:
            raise RuntimeError(f"step {self.next} comes next, not {first}")
        self._stream.make(first + steps + self._lookahead + 1)
        stalled, written, start = self.stalled, written_bytes(), time.perf_counter()
        for _ in range(steps):
            ids = next(self._steps)
            self.bag(ids, self._stream.offsets).backward(self._stream.grad)
        wait_for_prepared(self._steps)
        seconds = (time.perf_counter() - start) / steps
        self.stalled_s = (self.stalled - stalled) / steps
        self.written_bytes = (written_bytes() - written) / steps
        self.next += steps
        return seconds

    @property
    def stalled(self) -> float:
        """Seconds that forwards have waited since the side was made."""
        return self._steps.stats.stalled_seconds

    def counted(self, steps: int = _COUNTED_STEPS) -> dict[str, float]:
        """Runs some steps without a clock: shares of ids and of unique ids that each found in memory when its turn came
        to be prepared, unique ids and missing rows a step, and the distinct pages of the store that those lie on."""
        counts, pages = RequestCounts(), 0
        for _ in range(steps):
            unprepared = self.next + self._lookahead
            self._stream.make(unprepared + 1)
            missing = counts.add(self.bag, TABLE, self._stream.batch(unprepared).numpy())
            pages += cold_pages(self.store, self.bag, TABLE, missing)
            self.run(self.next, 1)
        return counts.figures(steps) | {"pages": pages / steps}

    def close(self) -> None:
        """Let go of the module; the store stays open, and has its rows."""
        self._steps.close()
        self.bag.close()


def in_turns(sides: Mapping[str, Side], stream: ClickStream, setting: Setting, first: int) -> dict[str, list[float]]:
    """Seconds a step of each side, a figure a round, on the steps from `first` on; neighbours' order is reversed."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(setting.rounds):
        begin = first + number * setting.steps
        stream.make(begin + setting.steps + setting.lookahead + 1)
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            seconds[name].append(sides[name].run(begin, setting.steps))
        stream.forget(begin + setting.steps)
    return seconds


def ablation(store: LmdbStore, setting: Setting, law: Zipf, rounds: int) -> dict[str, Figure]:
    """Milliseconds a step with and without a cache and prefetching: the median of some turns after a warm-up.

    Without a cache there is room for the rows of the batches on their way and no others: one without prefetching, with
    it as many as are ahead and one that is trained on.
    """
    stream = setting.stream(law)
    one, ahead = (_room_for(stream, batches) for batches in (1, setting.lookahead + 2))
    sides = {
        "none": (0, one),
        "cache": (0, None),
        "pipeline": (setting.lookahead, ahead),
        "both": (setting.lookahead, None),
    }
    figures: dict[str, Figure] = {}
    for name, (lookahead, rows) in sides.items():
        # Where there is a cache, what the first batches bring into it is not what the following ones find in it.
        warm_up = setting.warm_up if rows is None else setting.lookahead + 2
        stream = setting.stream(law)
        side = Tiered(store, setting, stream, lookahead=lookahead, cache_rows=rows)
        side.run(0, warm_up)
        turns = []
        for _ in range(rounds):
            stream.forget(side.next)
            turns.append(side.run(side.next, setting.steps))
        figures[name] = round(statistics.median(turns) * 1000, 2)
        side.close()
        del side, stream
        gc.collect()  # a loop and the batches that it had
    return figures


def _room_for(stream: ClickStream, batches: int) -> int:
    """Rows that so many batches in a row have, and a few more."""
    stream.make(batches)
    ids = torch.cat([stream.batch(number) for number in range(batches)])
    return int(len(torch.unique(ids)) * 1.05) + 64
