"""ArrayPolicy: a policy whose state is a NamedTuple of arrays, with the batch verbs that a Directory calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.cache.verbs import (
    CURSOR_FIELDS,
    Guard,
    hit_all,
    insert_all,
    make_room,
    miss_all,
    remove_all,
    take_victims,
)

State = TypeVar("State", bound=tuple[Any, ...])
_Scalar = TypeVar("_Scalar", bound=np.generic)

Arrays = dict[str, NDArray[Any]]


class ArrayPolicy(ABC, Generic[State]):
    """An order of slots: see `tiered_emb.cache.verbs` for what it is made of.

    Attributes:
        bytes_per_slot: of the state.
        has_ghosts: whether it remembers rows that left, so that `miss` says something.
        cursor: int64 (CURSOR_FIELDS,), scratch of the kernels.
        state: the arrays. Kernels change what is in them; only `resize`, `clear`, `load` and `grow` replace them.
    """

    bytes_per_slot: ClassVar[int]
    has_ghosts: ClassVar[bool] = True

    def __init__(self, capacity_rows: int) -> None:
        self.capacity_rows = capacity_rows
        self.state = self.make(capacity_rows)
        self.cursor = np.zeros(CURSOR_FIELDS, np.int64)

    @staticmethod
    @abstractmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Most bytes it comes to hold beyond `bytes_per_slot` a slot."""

    @abstractmethod
    def make(self, capacity_rows: int) -> State:
        """The state of an empty order."""

    @abstractmethod
    def resized(self, capacity_rows: int) -> State:
        """The state with another number of slots; those at and above it are out of the order already."""

    def grow(self) -> None:
        """Make room for what a verb said it had none for."""
        raise AssertionError(f"{type(self).__name__} does not grow")

    @property
    def memory_bytes(self) -> int:
        """Bytes held now."""
        return sum(array.nbytes for array in self.state)

    def insert(
        self,
        slots: NDArray[np.int32],
        tables: NDArray[np.uint32],
        ids: NDArray[np.int64],
        counts: NDArray[np.int32],
        codes: NDArray[np.int8],
    ) -> None:
        """Slots (N,), not in the order, got rows that were requested `counts` (N,) times; `codes` of `make_room`."""
        done = insert_all(self.state, slots, tables, ids, counts, codes, 0)
        while done < len(slots):
            self.grow()
            done = insert_all(self.state, slots, tables, ids, counts, codes, done)

    def touch(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Slots (N,) of the order were requested `counts` (N,) times each, in this order."""
        done = hit_all(self.state, slots, counts, 0)
        while done < len(slots):
            self.grow()
            done = hit_all(self.state, slots, counts, done)

    def remove(self, slots: NDArray[np.int32]) -> None:
        """Slots (N,) of the order lost their rows."""
        remove_all(self.state, slots)

    def make_room(
        self,
        guard: Guard,
        tables: NDArray[np.uint32],
        ids: NDArray[np.int64],
        free: int,
        codes: NDArray[np.int8],
        out: NDArray[np.int32],
    ) -> int:
        """Take a victim for each of the rows (N,) beyond the first `free` out of the order; returns how many there are.

        Args:
            codes: int8 (N,), written for `insert`; (0,) unless it `has_ghosts`.
            out: (N - free,), the victims, first one first.
        """
        return int(make_room(self.state, guard, self.cursor, tables, ids, free, codes, out))

    def miss(self, tables: NDArray[np.uint32], ids: NDArray[np.int64], codes: NDArray[np.int8]) -> None:
        """Rows (N,) are absent and will be admitted; `codes` is written for `take` and `insert`."""
        miss_all(self.state, tables, ids, codes)

    def take(self, guard: Guard, codes: NDArray[np.int8], out: NDArray[np.int32]) -> int:
        """Take as many victims as `out` has room for out of the order; returns how many there are."""
        return int(take_victims(self.state, guard, self.cursor, codes, out))

    def foresee(self, slots: NDArray[np.int32], batch: int) -> None:
        """Slots (N,) hold rows that a batch to come will need; most policies do not care."""

    def advance(self, batch: int) -> None:
        """It is this batch's turn; what was foreseen for it is over."""

    def resize(self, capacity_rows: int) -> None:
        """Slots at and above the new capacity are gone already; the others keep their order."""
        self.state = self.resized(capacity_rows)
        self.capacity_rows = capacity_rows

    def clear(self) -> None:
        """Forget every slot."""
        self.state = self.make(self.capacity_rows)

    def save(self) -> Arrays:
        """Copies of all there is to know, by name."""
        names: tuple[str, ...] = self.state._fields  # type: ignore[attr-defined]
        return {name: array.copy() for name, array in zip(names, self.state, strict=True)}

    def load(self, arrays: Arrays) -> None:
        """Go on where another policy of the same kind and capacity was saved.

        Raises ValueError, with nothing changed, for arrays of other names, lengths or types.
        """
        names: tuple[str, ...] = self.state._fields  # type: ignore[attr-defined]
        if set(arrays) != set(names):
            raise ValueError(f"{type(self).__name__} has arrays {sorted(names)}, not {sorted(arrays)}")
        self.check_saved(arrays)
        self.state = type(self.state)(*(_own(arrays[name]) for name in names))

    def check_saved(self, arrays: Arrays) -> None:
        """Refuse arrays that cannot be those of this capacity; raises ValueError."""
        for name, array in zip(self.state._fields, self.state, strict=True):  # type: ignore[attr-defined]
            other = arrays[name]
            if other.dtype != array.dtype or other.shape != array.shape:
                raise ValueError(
                    f"{name} of {type(self).__name__} is {array.dtype} {array.shape}, not {other.dtype} {other.shape}"
                )


def resized(array: NDArray[_Scalar], size: int) -> NDArray[_Scalar]:
    """A copy with `size` elements: cut, or extended by zeros."""
    result: NDArray[_Scalar] = zeros(size, array.dtype)
    kept = min(size, len(array))
    result[:kept] = array[:kept]
    return result


def _own(array: NDArray[Any]) -> NDArray[Any]:
    """A copy in memory of its own."""
    copy = zeros(len(array), array.dtype)
    copy[:] = array
    return copy
