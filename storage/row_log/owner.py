"""One writer a store: an exclusive `flock` on the owner file and on the data file, held as long as the store is open.

The owner file says who holds it, for the message to a second writer. The data file is locked as well so that a hard
link to it in another directory does not get round the lock. A lock dies with its process, so nothing has to be
cleaned up after a kill. A forked child inherits the descriptors; `let_go` closes them there, so that the child does
not keep the lock when its parent has gone.

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
from pathlib import Path

from storage.errors import StoreLockedError
from storage.row_log.manifest import DATA_NAME, OWNER_NAME


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
            self._lock(directory / OWNER_NAME, os.O_RDWR | os.O_CREAT)
            self._sign()
        except BaseException:
            self.close()
            raise

    def lock_data_file(self) -> None:
        """Lock the data file too, which exists only now."""
        self._lock(self._directory / DATA_NAME, os.O_RDONLY)

    def _lock(self, path: Path, flags: int) -> None:
        descriptor = os.open(path, flags, 0o644)
        self._descriptors.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise StoreLockedError(
                f"{self._directory} is open for writing by {_holder(self._directory)}: close it there, "
                "or open the store here with read_only=True"
            ) from None

    def _sign(self) -> None:
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(self._descriptors[0], 0)
        os.pwrite(self._descriptors[0], json.dumps(about).encode(), 0)

    def close(self) -> None:
        """Give up the right to write."""
        _close_all(self._descriptors)

    let_go = close  # in a forked child: the parent's lock stays, since it is one lock with two descriptors


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _holder(directory: Path) -> str:
    try:
        about = json.loads((directory / OWNER_NAME).read_text())
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process that does not say which it is"
