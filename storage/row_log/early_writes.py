"""Writing that begins early: the disk works while a commit still copies, and not only at the sync that ends it.

LMDB copies the pages of a transaction into the page cache and then syncs the file, so the disk idles during the one and
the processor during the other. A thread that asks the system every millisecond to begin with what there is
(sync_file_range(2)) has both work at once: an import of 1 M rows of 260 bytes took nine tenths of the time. It orders
nothing and promises nothing; the sync does. For commits that follow each other without a pause; others would only share
the processor with one thread more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

_EVERY_S = 0.001
_BEGIN_TO_WRITE = 2  # SYNC_FILE_RANGE_WRITE

_begin: Any = getattr(ctypes.CDLL(None), "sync_file_range", None)  # None: a system without it
if _begin is not None:
    _begin.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


@contextmanager
def writing_early(data: Path) -> Iterator[None]:
    """Have the disk begin with what is written to a file meanwhile; where that cannot be done nothing happens."""
    if _begin is None:
        yield
        return
    done = Event()
    thread = Thread(target=_begin_again_and_again, args=(data, done), name="tiered-emb writes", daemon=True)
    with suppress(RuntimeError):  # no thread to be had
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()


def _begin_again_and_again(data: Path, done: Event) -> None:
    with suppress(OSError), open(data, "rb", buffering=0) as file:
        while not done.wait(_EVERY_S) and _begin(file.fileno(), 0, 0, _BEGIN_TO_WRITE) == 0:
            pass
