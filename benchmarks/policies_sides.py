"""What replays and plans: ours, cachetools, and libcachesim where it is installed. Each turn gives its own seconds.

They are seconds of the thread, which all of this runs in alone: what else the machine does takes none of them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import cachetools
import numpy as np
from numpy.typing import NDArray

from tiered_emb.cache import Directory
from tiered_emb.sim import Requests
from tiered_emb.sim.curves import directory_for

Turn = Callable[[], float]
LIBCACHESIM = {
    "fifo": "FIFO",
    "lru": "LRU",
    "lfu": "LFU",
    "clock": "Clock",
    "sieve": "Sieve",
    "s3fifo": "S3FIFO",
    "arc": "ARC",
    "2q": "TwoQ",
    "wtinylfu": "WTinyLFU",
    "lirs": "LIRS",
    "belady": "Belady",
}
_CACHETOOLS: dict[str, type[cachetools.Cache[int, bool]]] = {"lru": cachetools.LRUCache, "lfu": cachetools.LFUCache}
_RECORD = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])  # oracleGeneral
_DEFAULT_BUCKETS = 24  # libcachesim's, as a power of two
_ODD = np.uint64(0x9E3779B97F4A7C15)


def ours(requests: Requests, policy: str, size: int) -> Turn:
    """`Directory.replay`."""
    missed = np.empty(len(requests), np.bool_)

    def turn() -> float:
        directory, _ = directory_for(policy, size, requests)
        start = time.thread_time()
        directory.replay(requests.tables, requests.ids, missed)
        return time.thread_time() - start

    return turn


def cachetools_side(requests: Requests, policy: str, size: int) -> Turn:
    """cachetools in a plain loop; what a miss brings in is one object."""
    ids = requests.ids.tolist()

    def turn() -> float:
        held = _CACHETOOLS[policy](size)
        start = time.thread_time()
        for id in ids:
            if id in held:
                held[id]
            else:
                held[id] = True
        return time.thread_time() - start

    return turn


def libcachesim_missing() -> str | None:
    """Why libcachesim cannot be measured, None if it can."""
    try:
        import libcachesim  # noqa: F401
    except (ImportError, OSError) as error:
        return str(error)
    return None


@contextmanager
def record_file(requests: Requests) -> Iterator[Path]:
    """The requests as a file that libcachesim maps: oracleGeneral, with the next requests that its Belady needs."""
    records = np.zeros(len(requests), _RECORD)
    records["id"], records["size"], records["next"] = requests.ids.view(np.uint64), 1, requests.next_use
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.oracleGeneral"
        records.tofile(path)
        yield path


def libcachesim_sides(records: Path, policy: str, size: int) -> dict[str, Turn]:
    """`process_trace` with a hash table that suits the cache, and with the default one of 2^24 buckets."""
    suitable = max(10, (size - 1).bit_length() + 1)
    return {
        name: _libcachesim(records, policy, size, power)
        for name, power in (("libcachesim", suitable), ("libcachesim_default", _DEFAULT_BUCKETS))
    }


def _libcachesim(records: Path, policy: str, size: int, power: int) -> Turn:
    import libcachesim

    def turn() -> float:
        reader = libcachesim.TraceReader(os.fspath(records), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        held = getattr(libcachesim, LIBCACHESIM[policy])(size, hashpower=power)
        start = time.thread_time()
        held.process_trace(reader)
        return time.thread_time() - start

    return turn


@dataclass(frozen=True)
class Plans:
    """Planned batches: `seconds` each took, and `misses`, the share of their ids that was absent."""

    seconds: list[float]
    misses: float


def plan_batches(resident: int, batch: int, batches: int, policy: str = "lru") -> Plans:
    """Plan batches of different ids on a full Directory; the most popular rows are there and were admitted last."""
    directory, random = Directory(resident, policy), np.random.default_rng(0)
    _fill(directory)
    span = _SPAN * resident
    tables, counts = np.zeros(batch, np.uint32), np.ones(batch, np.int32)
    seconds, absent = [], 0
    for number in range(-_WARM_UP, batches):
        ids = spread(_different(random, batch, span))
        start = time.thread_time()
        misses = plan(directory, tables, ids, counts)
        if number >= 0:
            seconds.append(time.thread_time() - start)
            absent += misses
    assert directory.rows == resident and directory.pinned_rows == 0
    return Plans(seconds, absent / (batch * batches))


_WARM_UP = 5
_SPAN = 3.6  # different ids for each resident one: about 13% of a batch are then absent
_BLOCK = 1 << 17


def plan(directory: Directory, tables: NDArray[np.uint32], ids: NDArray[np.int64], counts: NDArray[np.int32]) -> int:
    """What `TableGroup` does with a deduplicated batch before any row moves, and what ends it; how many were absent."""
    slots = np.empty(len(ids), np.int32)
    found = directory.find(tables, ids, slots)
    here = slots >= 0
    resident = slots[here]
    directory.touch(resident, counts[here])
    directory.pin(resident)
    missing = np.flatnonzero(~here)
    admission = directory.admit(tables[missing], ids[missing], counts[missing], np.empty(len(missing), np.int32))
    directory.pin(admission.slots)
    slots[missing] = admission.slots
    directory.unpin(slots)
    return len(ids) - found


def _fill(directory: Directory) -> None:
    """Ranks 1 .. S in, the least popular first."""
    for end in range(directory.capacity_rows, 0, -_BLOCK):
        ranks = np.arange(end, max(0, end - _BLOCK), -1, dtype=np.int64)
        n = len(ranks)
        directory.admit(np.zeros(n, np.uint32), spread(ranks), np.ones(n, np.int32), np.empty(n, np.int32))


def zipf_ids(random: np.random.Generator, n: int, span: float, skew: float = 1.05) -> NDArray[np.int64]:
    """Ranks (n,) from 1 to `span`, of rank k with a probability proportional to k^-skew."""
    drawn = np.empty(0, np.int64)
    while len(drawn) < n:
        more = random.zipf(skew, 2 * n)
        drawn = np.concatenate((drawn, more[more <= span]))
    return drawn[:n]


def _different(random: np.random.Generator, n: int, span: float) -> NDArray[np.int64]:
    """Ranks that a batch asks for, drawn until n of them are different, in order of first appearance."""
    drawn = np.empty(0, np.int64)
    while True:
        drawn = np.concatenate((drawn, zipf_ids(random, n, span)))
        unique, first = np.unique(drawn, return_index=True)
        if len(unique) >= n:
            return drawn[np.sort(first)[:n]]


def spread(ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ids of ranks, all over the 64 bits: neighbours in rank lie nowhere near each other."""
    return (ranks.view(np.uint64) * _ODD).view(np.int64)
