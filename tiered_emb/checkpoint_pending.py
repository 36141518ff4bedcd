"""A checkpoint that is written while training goes on: what waits for it, and what became of it.

One at a time for a directory: who saves, loads or lists there waits for the one before. What went wrong with it is
kept until somebody asks, `PendingCheckpoint.wait` or the next verb on the directory. Its thread keeps the process from
ending before the checkpoint is whole; what a kill cuts short is none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from tiered_emb.errors import CheckpointError

Outcome = TypeVar("Outcome")

_PENDING: dict[Path, PendingCheckpoint[Any]] = {}


class PendingCheckpoint(Generic[Outcome]):
    """See the module's docstring; made by `save_checkpoint(..., background=True)`."""

    def __init__(self, path: Path, work: Callable[[], Outcome]) -> None:
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="tiered-emb-checkpoint")
        self._path = path
        self._thread.start()  # first: one that did not start would be waited for
        _PENDING[path] = self

    def _run(self, work: Callable[[], Outcome]) -> None:
        try:
            self._outcome = work()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> Outcome:
        """The checkpoint, once it is whole.

        Raises:
            What `save_checkpoint` raises: there is no such checkpoint then, and the one before is as it was.
        """
        self._thread.join()
        if _PENDING.get(self._path) is self:
            del _PENDING[self._path]
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome


def await_pending(path: Path) -> None:
    """Let the checkpoint be made that is being written to a directory.

    Raises:
        CheckpointError: it failed, and nobody has asked yet.
    """
    pending = _PENDING.get(path)
    if pending is not None:
        try:
            pending.wait()
        except BaseException as error:
            raise CheckpointError(f"the last checkpoint to {path} could not be written: {error}") from error
