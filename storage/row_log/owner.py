"""One writer a store: an exclusive `flock` on the owner file and on the data file, held as long as the store is open.

The owner file says who holds it, for the message to a second writer. The data file is locked as well so that a hard
link to it in another directory does not get round the lock. A lock dies with its process, so nothing has to be
cleaned up after a kill. A forked child inherits the descriptors; `let_go` closes them there, so that the child does
not keep the lock when its parent has gone.

Readers hold no lock of ours where LMDB can know of them. In a directory that they may not write it cannot: there they
hold a shared `flock` on the data file, and writers are kept away.

`flock` works between containers that share a file system; over NFS it depends on the mount.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path

from storage.errors import StoreLockedError
from storage.row_log.manifest import DATA_NAME, LOCK_NAME, OWNER_NAME


class Owner:
    """The right to write to a store. Close it to give it up.

    Raises:
        StoreLockedError: another process, or another store object of this one, has it; the message names the holder.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptors: list[int] = []
        weakref.finalize(self, _close_all, self._descriptors)  # a store that was dropped without close()
        try:
            if not _lock(self._descriptors, directory / OWNER_NAME, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX):
                raise StoreLockedError(
                    f"{directory} is open for writing by {_signer(directory)}: close it there, "
                    "or open the store here with read_only=True"
                )
            self._sign()
        except BaseException:
            self.close()
            raise

    def lock_data_file(self) -> None:
        """Lock the data file too, which exists only now."""
        data = self._directory / DATA_NAME
        if not _lock(self._descriptors, data, os.O_RDONLY, fcntl.LOCK_EX):
            raise StoreLockedError(
                f"{data} is locked by {_locker(data)}, which has it open in another directory, or reads it without "
                "the right to write lock.mdb: close it there"
            )

    def _sign(self) -> None:
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(self._descriptors[0], 0)
        os.pwrite(self._descriptors[0], json.dumps(about).encode(), 0)

    def close(self) -> None:
        """Give up the right to write."""
        _close_all(self._descriptors)

    let_go = close  # in a forked child: the parent's lock stays, since it is one lock with two descriptors


class DataFileShare:
    """The right to read a store whose directory may not be written, so that LMDB would not know of the reader.

    A shared lock on the data file instead: there is no writer as long as it is held. Close it to give it up.

    Raises:
        StoreLockedError: there is a writer.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptors: list[int] = []
        weakref.finalize(self, _close_all, self._descriptors)
        data = directory / DATA_NAME
        if not _lock(self._descriptors, data, os.O_RDONLY, fcntl.LOCK_SH):
            self.close()
            raise StoreLockedError(
                f"{directory} is open for writing by {_locker(data)}: to read beside it, {directory / LOCK_NAME} "
                "must be writable"
            )

    def close(self) -> None:
        """Let writers in."""
        _close_all(self._descriptors)


def _lock(descriptors: list[int], path: Path, flags: int, kind: int) -> bool:
    """Open and `flock` a file, and keep the descriptor; False if somebody else has it."""
    descriptors.append(os.open(path, flags, 0o644))
    try:
        fcntl.flock(descriptors[-1], kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        with suppress(OSError):  # of a file system that has gone; the descriptor is closed all the same
            os.close(descriptors.pop())


def _locker(path: Path) -> str:
    """Who has a file locked, as far as Linux says."""
    inode = path.stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if "FLOCK" in words and any(word.endswith(f":{inode}") for word in words):
            return f"process {words[words.index('FLOCK') + 3]}"
    return "another process"


def _signer(directory: Path) -> str:
    try:
        about = json.loads((directory / OWNER_NAME).read_text())
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process that does not say which it is"
