"""LMDB's errors as ours, and what its messages leave out: whether there was room, and which reader is in the way."""

from __future__ import annotations

import os
import resource
from errno import EIO
from pathlib import Path
from typing import Any

import lmdb

from storage.errors import NO_ROOM, CorruptSegmentError, StorageError, StoreFullError, StoreIOError, StoreLockedError

_FULL_TEXTS = tuple(os.strerror(code) for code in NO_ROOM)
_DAMAGED = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError)
_LAGGING_COMMITS = 16  # a reader that is further behind is named when there is no room


def translate(error: lmdb.Error, message: str, env: Any, *, no_room: bool) -> StorageError:
    """The error of ours for one of LMDB's.

    Args:
        env: the environment, in which readers may be what takes the room; None if it could not be opened.
        no_room: whether more bytes did not fit: LMDB reports a write that was cut short by that as an I/O error.
    """
    text = str(error)
    if isinstance(error, lmdb.MapFullError):
        return StoreFullError(f"{message}; raise StoreConfig.map_size_bytes{_laggard(env)}")
    if isinstance(error, lmdb.DiskError) or any(full in text for full in _FULL_TEXTS):
        return StoreFullError(f"{message}; free space on its disk{_laggard(env)}")
    if no_room and os.strerror(EIO) in text:
        return StoreFullError(f"{message}; free space on its disk{_laggard(env)}")
    if isinstance(error, _DAMAGED):
        return CorruptSegmentError(f"{message}; the data file is damaged, restore it from a copy")
    if "already open in this process" in text:
        return StoreLockedError(f"{message}; use the store object that has it")
    return StoreIOError(message)


def has_no_room(data: Path, needed: int) -> bool:
    """Whether a data file cannot grow by so many bytes, as far as the disk and the limits of this process go."""
    disk = os.statvfs(data.parent)
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    size = data.stat().st_size if data.exists() else 0
    return disk.f_bavail * disk.f_frsize < needed or (largest != resource.RLIM_INFINITY and size + needed > largest)


def has_readers(env: Any) -> bool:
    """Whether another process than this one is in LMDB's table of readers, reading or not."""
    lines = [line.split() for line in env.readers().splitlines()]
    return any(words[0].isdecimal() and int(words[0]) != os.getpid() for words in lines if len(words) == 3)


def oldest_reader(env: Any) -> tuple[int, int]:
    """The process of the read transaction that is furthest behind, and by how many transactions; (0, 0) if none is."""
    lines = [line.split() for line in env.readers().splitlines()]  # pid, thread, transaction or "-"
    old = [(int(words[2]), int(words[0])) for words in lines if len(words) == 3 and words[2].isdecimal()]
    transaction, pid = min(old, default=(0, 0))
    behind = env.info()["last_txnid"] - transaction
    return (pid, behind) if old and behind > 0 else (0, 0)


def _laggard(env: Any) -> str:
    """Who keeps the pages of deleted segments from being used again, as the end of a message."""
    pid, behind = (0, 0) if env is None else oldest_reader(env)
    if behind <= _LAGGING_COMMITS:
        return ""
    return f", or end the reader in process {pid}: it keeps what was deleted in the last {behind} commits"
