"""Which rows a tier below takes in: a row that will not come again need not push out one that will.

A rule is asked about rows as they come down. It counts what it is asked about and says who may come in; the tier does
the rest. A rule's answers depend on its arrays and on what it was asked, on nothing else, so a run that is saved and
loaded repeats them.

    always          every row
    tinylfu         rows requested at least `least` times lately, by TinyLFU's sketch (`tiered_emb.cache.sketch`)
    probability     each request lets its row in with probability p, by a pure hash

A tier asks about a row each time it comes down, as one request: what was asked for while the row was above, the tier
above has served. So `least=2` lets in what came down before, was needed again and comes down a second time. Free slots
make no difference.

Thread: the tier's owner. A rule knows nothing of slots, pins or victims.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
from numba import njit, uint64
from numpy.typing import NDArray

from storage.memory import held_bytes
from tiered_emb.cache import sketch
from tiered_emb.cache.arrays import Arrays
from tiered_emb.cache.probing import name_of
from tiered_emb.cache.sketch import ask_for_counters, estimate, fold, increment, make_sketch

REQUESTS_PER_SLOT = 10  # that TinyLFU's sketch counts between two halvings
_AHEAD = 16
_MIX_1, _MIX_2, _WEYL = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15
_TO_UNIT = 2.0**-53


class AdmissionRule(ABC):
    """Says which rows may come in. Made for a tier of `capacity_rows` slots, at least 1.

    Attributes:
        setting: what its one number is, if it has one: see `rule_of`.
    """

    setting: ClassVar[type[int] | type[float] | None] = None

    def __init__(self, capacity_rows: int) -> None:
        if capacity_rows < 1:
            raise ValueError(f"admission is for a tier of at least one row, not {capacity_rows}")
        self.capacity_rows = capacity_rows

    @abstractmethod
    def admits(
        self,
        tables: NDArray[np.uint32],
        ids: NDArray[np.int64],
        counts: NDArray[np.int32],
        out: NDArray[np.bool_],
    ) -> None:
        """Rows (N,) were requested `counts` (N,) times each: count that, and write to `out` (N,) which may come in.

        Rows are looked at in their order; `count` requests are as many single ones, any of which lets the row in.
        Allocates nothing.
        """

    @staticmethod
    @abstractmethod
    def bytes_for(capacity_rows: int) -> int:
        """Most bytes that `memory_bytes` comes to be."""

    def resize(self, capacity_rows: int) -> None:
        """The tier has another capacity, at least 1, from now on; what was counted stays known."""
        self.capacity_rows = capacity_rows

    def save(self) -> Arrays:
        """Copies of all there is to know, by name."""
        return {name: array.copy() for name, array in self._arrays().items()}

    def load(self, arrays: Arrays) -> None:
        """Go on where another rule of the same kind, capacity and settings was saved.

        Raises ValueError, with nothing changed, for arrays of other names, lengths or types.
        """
        own = self._arrays()
        if set(arrays) != set(own):
            raise ValueError(f"{type(self).__name__} has arrays {sorted(own)}, not {sorted(arrays)}")
        for name, array in own.items():
            other = arrays[name]
            if other.dtype != array.dtype or other.shape != array.shape:
                raise ValueError(
                    f"{name} of {type(self).__name__} is {array.dtype} {array.shape}, not {other.dtype} {other.shape}"
                )
        for name, array in own.items():
            array[:] = arrays[name]

    @property
    def memory_bytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self._arrays().values())

    def _arrays(self) -> Arrays:
        """The arrays themselves, by name."""
        return {}


class Always(AdmissionRule):
    """Every row may come in."""

    def admits(
        self,
        tables: NDArray[np.uint32],
        ids: NDArray[np.int64],
        counts: NDArray[np.int32],
        out: NDArray[np.bool_],
    ) -> None:
        """See `AdmissionRule`."""
        out[:] = True

    @staticmethod
    def bytes_for(capacity_rows: int) -> int:
        """Nothing."""
        return 0


class TinyLfuAdmission(AdmissionRule):
    """A row may come in once it was requested at least `least` times lately, this time included.

    *Lately* is since counters stood at half of what they do: they are halved every 10 S requests of S slots. The sketch
    may take a row for one requested more often, never for one requested less often than since the last halving: of rows
    that come once and no others, about 12 in 100 come in with least=2, and one in 10,000 with least=3 (measured, 1,000
    to 100,000 slots).
    Raises ValueError if `least` is not between 1 and 15, where counters end.
    """

    setting = int

    def __init__(self, capacity_rows: int, least: int = 2) -> None:
        super().__init__(capacity_rows)
        if not 1 <= least <= sketch.MOST:
            raise ValueError(f"least={least}: a row can be seen 1 to {sketch.MOST} times before it comes in")
        self.least = least
        self._words, self._clock = make_sketch(capacity_rows, REQUESTS_PER_SLOT * capacity_rows)

    def admits(
        self,
        tables: NDArray[np.uint32],
        ids: NDArray[np.int64],
        counts: NDArray[np.int32],
        out: NDArray[np.bool_],
    ) -> None:
        """See `AdmissionRule`."""
        assert len(tables) == len(ids) == len(counts) == len(out)
        _admit_seen(self._words, self._clock, self.least, tables, ids, counts, out)

    def resize(self, capacity_rows: int) -> None:
        """See `AdmissionRule`: the sketch is folded into one of the new size."""
        super().resize(capacity_rows)
        words, clock = make_sketch(capacity_rows, REQUESTS_PER_SLOT * capacity_rows)
        fold(self._words, self._clock, words, clock)
        self._words, self._clock = words, clock

    @staticmethod
    def bytes_for(capacity_rows: int) -> int:
        """Most bytes that `memory_bytes` comes to be: 8 a slot."""
        return held_bytes(sketch.word_count(capacity_rows), 8) + 16

    def _arrays(self) -> Arrays:
        return {"words": self._words, "clock": self._clock}


class ProbabilityAdmission(AdmissionRule):
    """A row may come in with probability `p` at each request, whatever it is.

    The draw is a pure hash of the seed, the row, and how many requests were asked about before; there is no other
    generator. Raises ValueError if p is not between 0 and 1.
    """

    setting = float

    def __init__(self, capacity_rows: int, p: float = 0.5, seed: int = 0) -> None:
        super().__init__(capacity_rows)
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p={p} is no probability: choose one from 0 to 1")
        self.p, self.seed = float(p), seed
        self._asked = np.zeros(1, np.int64)

    def admits(
        self,
        tables: NDArray[np.uint32],
        ids: NDArray[np.int64],
        counts: NDArray[np.int32],
        out: NDArray[np.bool_],
    ) -> None:
        """See `AdmissionRule`."""
        assert len(tables) == len(ids) == len(counts) == len(out)
        _admit_drawn(self._asked, self.p, np.uint64(self.seed & 0xFFFFFFFFFFFFFFFF), tables, ids, counts, out)

    @staticmethod
    def bytes_for(capacity_rows: int) -> int:
        """Most bytes that `memory_bytes` comes to be."""
        return 8

    def _arrays(self) -> Arrays:
        return {"asked": self._asked}


ADMISSIONS: dict[str, type[AdmissionRule]] = {
    "always": Always,
    "tinylfu": TinyLfuAdmission,
    "probability": ProbabilityAdmission,
}


def rule_of(admission: str, capacity_rows: int) -> AdmissionRule:
    """The rule that a text names, with its number or without: "always", "tinylfu", "tinylfu:3", "probability:0.1".

    Raises ValueError for any other, and for a number that is out of range.
    """
    kind, number = _kind_of(admission)
    rule: Any = kind  # those that have a number take it
    made: AdmissionRule = rule(capacity_rows, *number)
    return made


def admission_bytes(admission: str, capacity_rows: int) -> int:
    """Most bytes that the rule comes to hold."""
    return _kind_of(admission)[0].bytes_for(capacity_rows)


def _kind_of(admission: str) -> tuple[type[AdmissionRule], tuple[float, ...]]:
    """The kind of rule, and its number if there is one."""
    name, colon, text = admission.partition(":")
    kind = ADMISSIONS.get(name)
    if kind is not None and not colon:
        return kind, ()
    if kind is not None and kind.setting is not None:
        with suppress(ValueError):
            return kind, (kind.setting(text),)
    raise ValueError(f"expected one of {', '.join(ADMISSIONS)}, or with a number 'tinylfu:3' or 'probability:0.1'")


@njit(nogil=True, cache=True)
def _admit_seen(words, clock, least, tables, ids, counts, out):  # type: ignore[no-untyped-def]
    """Count each row's requests; it may come in if it was seen often enough at one of them."""
    last = len(ids) - 1
    for i in range(len(ids)):
        later = min(i + _AHEAD, last)
        ask_for_counters(words, name_of(tables[later], ids[later]))
        name, left, enough = name_of(tables[i], ids[i]), np.int64(counts[i]), False
        while left > 0 and not enough:
            increment(words, clock, name, 1)
            enough = estimate(words, name) >= least
            left -= 1
        increment(words, clock, name, left)
        out[i] = enough


@njit(forceinline=True)
def _draw(seed, name, asked):  # type: ignore[no-untyped-def]
    """A number in [0, 1) for a request: two rounds of splitmix64's mixer."""
    x = name ^ (seed * uint64(_MIX_2)) ^ (uint64(asked) * uint64(_WEYL))
    for _ in range(2):
        x = (x ^ (x >> uint64(30))) * uint64(_MIX_1)
        x = (x ^ (x >> uint64(27))) * uint64(_MIX_2)
        x ^= x >> uint64(31)
    return np.float64(x >> uint64(11)) * _TO_UNIT


@njit(nogil=True, cache=True)
def _admit_drawn(asked, p, seed, tables, ids, counts, out):  # type: ignore[no-untyped-def]
    """A draw for each request."""
    for i in range(len(ids)):
        name, out[i] = name_of(tables[i], ids[i]), False
        for k in range(counts[i]):
            if _draw(seed, name, asked[0] + k) < p:
                out[i] = True
                break
        asked[0] += counts[i]
