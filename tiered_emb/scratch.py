"""Arrays that outlive a step so that the step allocates nothing: grown when a batch is larger than any before it."""

from __future__ import annotations

from typing import Any

from numpy.typing import DTypeLike, NDArray

from storage.memory import zeros


class Scratch:
    """Named arrays, reused. What one call wrote is overwritten by the next call of the same name.

    Belongs to one thread at a time.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}

    def take(self, name: str, shape: int | tuple[int, int], dtype: DTypeLike) -> NDArray[Any]:
        """A C-ordered array of this shape, contents undefined; the same memory as the last of this name, if it fits."""
        size = shape if isinstance(shape, int) else shape[0] * shape[1]
        kept = self._arrays.get(name)
        if kept is None or len(kept) < size or kept.dtype != dtype:
            self._arrays.pop(name, None)  # freed first: never two of one name at once
            kept = self._arrays[name] = zeros(size, dtype)
        return kept[:size].reshape(shape)

    def drop(self, name: str) -> None:
        """Free the array of this name, if there is one."""
        self._arrays.pop(name, None)

    @property
    def memory_bytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self._arrays.values())
