"""Miss-ratio curves: requests replayed through the production Directory, once for each policy and size.

In mode "single" the requests come one by one, as in papers on caches and as other simulators replay them. In mode
"batch" they come as training makes them: each batch asks once for each of its rows, says how many of its ids named it,
pins what is there, admits what is not, and lets go of both before the next batch. So a batch never evicts its own rows,
and the ratio is of unique rows, as in a tier's counters. The policy `lookahead` is told which rows that are there the
next batches will need, as a trainer that reads ahead would tell it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tiered_emb.cache import POLICIES, Directory
from tiered_emb.cache.belady import Belady
from tiered_emb.cache.sizes import MAX_CAPACITY_ROWS
from tiered_emb.errors import ConfigError
from tiered_emb.sim.requests import Batches, Requests

Mode = Literal["single", "batch"]
BELADY, LOOKAHEAD = "belady", "lookahead"
BATCHES_AHEAD = 2  # that `lookahead` knows unless told otherwise
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
    lookahead: int = BATCHES_AHEAD,
) -> list[Curve]:
    """The curve of each policy over `sizes` (rows), all checked before the first replay.

    Args:
        policies: of `POLICY_NAMES`.
        advance: called after each replay; there are len(policies) * len(sizes).
        lookahead: how many batches behind the one in hand the policy `lookahead` knows; single requests have none.

    Raises ConfigError for an unknown policy, a size that is not between 1 and 2^31 - 2, one smaller than the largest
    batch, and for requests without batches in mode "batch".
    """
    check_policies(policies)
    check_sizes(sizes)
    if mode == "single":
        return [_curve(policy, sizes, requests, requests, advance, 0) for policy in policies]
    batches = requests.batches
    if min(sizes) < batches.largest:
        raise ConfigError(
            f"a batch of {batches.largest} different rows does not fit into {min(sizes)}; the least size for these "
            f"batches is {batches.largest}"
        )
    return [_curve(policy, sizes, batches, batches.unique, advance, lookahead) for policy in policies]


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
    policy: str,
    sizes: Sequence[int],
    replayed: Requests | Batches,
    asked: Requests,
    advance: Callable[[], None],
    lookahead: int,
) -> Curve:
    known = lookahead if policy == LOOKAHEAD else 0
    _compile(policy, replayed, known)
    misses, start = [], time.perf_counter()
    for size in sizes:
        if isinstance(replayed, Requests):
            misses.append(int(np.count_nonzero(replay_single(replayed, policy, size))))
        else:
            misses.append(replay_batches(replayed, *directory_for(policy, size, asked), known))
        advance()
    return Curve(policy, tuple(sizes), tuple(misses), len(asked), time.perf_counter() - start)


def _compile(policy: str, replayed: Requests | Batches, known: int) -> None:
    """Replay the first request twice, so that what comes after is not timed while it is compiled."""
    twice = np.zeros(2, np.int64)
    if isinstance(replayed, Requests):
        replay_single(replayed.taken(twice), policy, 1)
    else:
        two = Batches(replayed.unique.taken(twice), np.ones(2, np.int32), np.arange(3))
        replay_batches(two, *directory_for(policy, 1, two.unique), known)


def directory_for(policy: str, size: int, asked: Requests) -> tuple[Directory, Belady | None]:
    """A Directory with a policy by name, and that policy if it is Belady, who is told what will be asked.

    It has no more slots than there are rows: with more of them too none would leave, and they take memory.
    """
    size = min(size, asked.distinct)
    if policy != BELADY:
        return Directory(size, policy), None
    future = Belady(size, asked.next_use)
    return Directory(size, future), future


def replay_single(requests: Requests, policy: str, size: int) -> NDArray[np.bool_]:
    """Send requests (N,) one by one through a Directory of `size` rows; which were absent."""
    missed = np.empty(len(requests), np.bool_)
    directory_for(policy, size, requests)[0].replay(requests.tables, requests.ids, missed)
    return missed


def replay_batches(batches: Batches, directory: Directory, future: Belady | None = None, lookahead: int = 0) -> int:
    """Send batches through a Directory as training does; how many rows were absent.

    Args:
        future: the Directory's policy if it is Belady, which has to hear in which order the rows of a batch come.
        lookahead: how many further batches the policy is told of before each; each of them costs a `find`.
    """
    misses, slots = 0, np.empty(batches.largest, np.int32)
    for number in range(batches.number):
        if lookahead:
            _look_ahead(batches, directory, number, lookahead, slots)
        tables, ids, counts = batches.rows_of(number)
        found = slots[: len(ids)]
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


def _look_ahead(batches: Batches, directory: Directory, number: int, lookahead: int, slots: NDArray[np.int32]) -> None:
    """It is the turn of a batch, and the next ones need these rows. What it brings in itself is looked up next time.

    A Directory numbers batches from 1 on; `slots` is overwritten.
    """
    directory.advance(number + 1)
    for later in range(number + 1, min(number + 1 + lookahead, batches.number)):
        tables, ids, _ = batches.rows_of(later)
        found = slots[: len(ids)]
        directory.find(tables, ids, found)
        directory.foresee(found[found >= 0], later + 1)
