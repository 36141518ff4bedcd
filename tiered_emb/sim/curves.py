"""Miss-ratio curves: requests replayed through the production Directory, once for each policy and size.

In mode "single" the requests come one by one, as in papers on caches and as other simulators replay them. In mode
"batch" they come as training makes them: each batch asks once for each of its rows, says how many of its ids named it,
pins what is there, admits what is not, and lets go of both before the next batch. So a batch never evicts its own rows,
and the ratio is of unique rows, as in a tier's counters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tiered_emb.cache import POLICIES, Directory
from tiered_emb.cache.belady import Belady
from tiered_emb.cache.directory import MAX_CAPACITY_ROWS
from tiered_emb.errors import ConfigError
from tiered_emb.sim.requests import Batches, Requests

Mode = Literal["single", "batch"]
BELADY = "belady"
POLICY_NAMES = (*sorted(POLICIES), BELADY)  # the bound last


@dataclass(frozen=True, slots=True)
class Curve:
    """What one policy missed at each size.

    Attributes:
        policy: its name.
        sizes: capacity in rows.
        misses: of the requests, at each size.
        requests: that could miss: N, or U in batches.
        seconds: that all sizes together took.
    """

    policy: str
    sizes: tuple[int, ...]
    misses: tuple[int, ...]
    requests: int
    seconds: float

    @property
    def miss_ratios(self) -> tuple[float, ...]:
        """Misses a request."""
        return tuple(one / self.requests for one in self.misses)


def miss_ratio_curve(
    requests: Requests,
    policies: Sequence[str],
    sizes: Sequence[int],
    mode: Mode = "single",
    advance: Callable[[], None] = lambda: None,
) -> list[Curve]:
    """The curve of each policy over `sizes` (rows), all checked before the first replay.

    Args:
        policies: of `POLICY_NAMES`.
        advance: called after each replay; there are len(policies) * len(sizes).

    Raises ConfigError for an unknown policy, a size that is not between 1 and 2^31 - 2, one smaller than the largest
    batch, and for requests without batches in mode "batch".
    """
    check_policies(policies)
    check_sizes(sizes)
    if mode == "single":
        return [_curve(policy, sizes, requests, requests, advance) for policy in policies]
    batches = requests.batches
    if min(sizes) < batches.largest:
        raise ConfigError(
            f"a batch of {batches.largest} different rows does not fit into {min(sizes)}; the least size for these "
            f"batches is {batches.largest}"
        )
    return [_curve(policy, sizes, batches, batches.unique, advance) for policy in policies]


def check_policies(policies: Sequence[str]) -> None:
    """Raises ConfigError for a name that is none of `POLICY_NAMES`."""
    for policy in policies:
        if policy not in POLICY_NAMES:
            raise ConfigError(f"policy is {policy!r}; expected one of {', '.join(POLICY_NAMES)}")


def check_sizes(sizes: Sequence[int]) -> None:
    """Raises ConfigError for no size, or one that no Directory has."""
    if not sizes:
        raise ConfigError("there are no sizes: a curve needs one or more")
    for size in sizes:
        if not 1 <= size <= MAX_CAPACITY_ROWS:
            raise ConfigError(f"size is {size} rows; expected 1 to {MAX_CAPACITY_ROWS}")


def _curve(
    policy: str, sizes: Sequence[int], replayed: Requests | Batches, asked: Requests, advance: Callable[[], None]
) -> Curve:
    _compile(policy, replayed)
    misses, start = [], time.perf_counter()
    for size in sizes:
        if isinstance(replayed, Requests):
            misses.append(int(np.count_nonzero(replay_single(replayed, policy, size))))
        else:
            misses.append(replay_batches(replayed, *directory_for(policy, size, asked)))
        advance()
    return Curve(policy, tuple(sizes), tuple(misses), len(asked), time.perf_counter() - start)


def _compile(policy: str, replayed: Requests | Batches) -> None:
    """Replay one request, so that what comes after is not timed while it is compiled."""
    first = np.zeros(1, np.int64)
    if isinstance(replayed, Requests):
        replay_single(replayed.taken(first), policy, 1)
    else:
        one = Batches(replayed.unique.taken(first), replayed.counts[:1], np.array([0, 1]))
        replay_batches(one, *directory_for(policy, 1, one.unique))


def directory_for(policy: str, size: int, asked: Requests) -> tuple[Directory, Belady | None]:
    """A Directory with a policy by name, and that policy if it is Belady, who is told what will be asked."""
    if policy != BELADY:
        return Directory(size, policy), None
    future = Belady(size, asked.next_use)
    return Directory(size, future), future


def replay_single(requests: Requests, policy: str, size: int) -> NDArray[np.bool_]:
    """Send requests (N,) one by one through a Directory of `size` rows; which were absent."""
    missed = np.empty(len(requests), np.bool_)
    directory_for(policy, size, requests)[0].replay(requests.tables, requests.ids, missed)
    return missed


def replay_batches(batches: Batches, directory: Directory, future: Belady | None = None) -> int:
    """Send batches through a Directory as training does; how many rows were absent.

    `future` is the Directory's policy if it is Belady, which has to hear in which order the rows of a batch come.
    """
    asked, misses = batches.unique, 0
    slots = np.empty(batches.largest, np.int32)
    for start, end in pairwise(batches.ends.tolist()):
        tables, ids, counts = asked.tables[start:end], asked.ids[start:end], batches.counts[start:end]
        found = slots[: end - start]
        directory.find(tables, ids, found)
        hits, absent = np.flatnonzero(found >= 0), np.flatnonzero(found < 0)
        if future is not None:
            future.reorder(np.concatenate((hits, absent)))
        resident = found[hits]
        directory.touch(resident, counts[hits])
        directory.pin(resident)
        admitted = directory.admit(tables[absent], ids[absent], counts[absent], np.empty(len(absent), np.int32)).slots
        directory.pin(admitted)
        misses += len(absent)
        directory.unpin(resident)
        directory.unpin(admitted)
    return misses
