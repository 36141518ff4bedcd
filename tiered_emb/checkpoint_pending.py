"""A checkpoint that is written while training goes on: what waits for it, and what became of it.

One at a time for a directory: who saves, loads or lists there waits for the one before. What went wrong with it is
kept until somebody asks, `PendingCheckpoint.wait` or the next verb on the directory. Its thread keeps the process from
ending before the checkpoint is whole; what a kill cuts short is none.
"""

from __future__ import annotations

import os
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
        self._process = os.getpid()
        self._ended = threading.Event()  # for a join that Ctrl-C cuts short takes the thread for ended
        self._thread = threading.Thread(target=self._run, args=(work,), name="tiered-emb-checkpoint")
        self._path = path
        self._thread.start()
        _PENDING[path] = self

    def _run(self, work: Callable[[], Outcome]) -> None:
        try:
            self._outcome = work()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def join(self) -> None:
        """Return once it has ended, well or not."""
        if self._process == os.getpid():
            self._ended.wait()

    def wait(self) -> Outcome:
        """The checkpoint, once it is whole.

        Raises:
            What `save_checkpoint` raises: there is no such checkpoint then, and the one before is as it was.
            CheckpointError: it is the process that this one was forked from that writes it.
        """
        self.join()
        if _PENDING.get(self._path) is self:
            del _PENDING[self._path]
        if self._error is not None:
            raise self._error
        if self._outcome is None:
            raise CheckpointError(f"{self._path} is written to by the process that this one was forked from: ask there")
        return self._outcome


os.register_at_fork(after_in_child=_PENDING.clear)  # they are the parent's, and so are their threads


def await_pending(path: Path) -> None:
    """Let the checkpoint be made that is being written to a directory.

    Raises:
        CheckpointError: it failed, and nobody has asked yet.
    """
    pending = _PENDING.get(path)
    if pending is not None:
        pending.join()  # a Ctrl-C meanwhile is no failure of the checkpoint
        try:
            pending.wait()
        except BaseException as error:
            raise CheckpointError(f"the last checkpoint to {path} could not be written: {error}") from error
