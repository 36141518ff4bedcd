"""TraceWriter: records what is asked for, batch by batch, in our own format.

What was appended is held until there is enough for a block, and written as a whole block: 64 Ki requests, half a
mebibyte, or one batch of more. Nothing is synced to the disk: a trace is a measurement, not data.

An append takes its batch, or raises and does not: before it takes one, it writes what is held, if that is enough for a
block. So after a full disk has been freed the same batch can be appended, and there is neither a hole nor a double. A
block of which only a part could be written is taken off the file again.

One thread at a time. A forked child of the process that opened the file cannot append, and its ``close`` writes
nothing.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import numpy as np

from tiered_emb.errors import ConfigError, InvalidBatchError, TraceError, TraceWriteError
from tiered_emb.trace.blocks import Requests, batches_block, end_block, header, tables_block
from tiered_emb.trace.sampling import check_rate, sampled
from tiered_emb.trace.value import Ids, TableNumbers

_BLOCK_REQUESTS = 1 << 16
_BLOCK_BATCHES = 1 << 12


class TraceWriter:
    """A trace while it is recorded; see the module's essay.

    Args:
        path: of the file; one that is there is refused.
        tables: their names; more can be added.
        rate: share of the (table, id) pairs to record; see :func:`tiered_emb.trace.sampled`.
        seed: of that sample.
        overwrite: a file that is there is replaced.

    Attributes:
        path: of the file.
        requests: recorded so far.
        batches: recorded so far.

    Raises ConfigError for a rate or seed that makes no sense, TraceError for a file that is there already,
    TraceWriteError for one that cannot be made.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tables: Iterable[str] = (),
        *,
        rate: float = 1.0,
        seed: int = 0,
        overwrite: bool = False,
    ) -> None:
        if not 0 <= seed < 1 << 64:
            raise ConfigError(f"seed is {seed}; expected an integer from 0 to 2^64 - 1")
        self.path = Path(path)
        self.requests = 0
        self.batches = 0
        self._rate = check_rate(rate)
        self._seed = seed
        self._names: set[str] = set()
        self._held: list[Requests] = []
        self._held_requests = self._blocks = self._size = 0
        self._process = os.getpid()
        self._closed = False
        try:
            self._file = io.FileIO(self.path, "w" if overwrite else "x")
        except FileExistsError as error:
            raise TraceError(
                f"trace {self.path} is there already and is not overwritten; give another name, or remove it"
            ) from error
        except OSError as error:
            raise TraceWriteError(f"trace {self.path} cannot be written: {error.strerror or error}") from error
        try:
            self._write(header(self._rate, seed))
            self.add_tables(tables)
        except BaseException:
            self._file.close()
            self.path.unlink()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied: two writers of one file would mix their blocks."""
        raise TypeError(f"the writer of trace {self.path} cannot be copied; open another file")

    def add_tables(self, names: Iterable[str]) -> None:
        """Keep the names of these tables too; ids of others may be appended, and are known by number alone."""
        self._check_open()
        new = [name for name in dict.fromkeys(names) if name not in self._names]
        if any("\0" in name for name in new):
            raise ConfigError(f"trace {self.path}: a table name holds a zero character")
        if new:
            self._write_block(tables_block(self._blocks, new))
            self._names.update(new)

    def append(self, tables: TableNumbers | int, ids: Ids) -> None:
        """Record one batch: ``ids`` (N,) in the order they were asked for, of one table or each of its own (N,).

        Raises InvalidBatchError, and TraceWriteError if the disk is full or fails. Nothing is taken then, and the
        batch can be appended again.
        """
        if isinstance(tables, np.ndarray) and tables.shape != ids.shape:
            raise InvalidBatchError(f"trace {self.path}: {len(tables)} table numbers came with {len(ids)} ids")
        self.make_room()
        kept = slice(None) if self._rate == 1 else sampled(tables, ids, self._rate, self._seed)
        ids = ids[kept].astype(np.int64)
        tables = tables[kept] if isinstance(tables, np.ndarray) else tables
        self._held.append(_as_runs(tables, ids))
        self._held_requests += len(ids)
        self.requests += len(ids)
        self.batches += 1

    def make_room(self) -> None:
        """Write what is held, if it is enough for a block: the next append will not write, and cannot fail for it."""
        self._check_open()
        if self._held_requests >= _BLOCK_REQUESTS or len(self._held) >= _BLOCK_BATCHES:
            self._write_held()

    def flush(self) -> None:
        """Write what is held, however little."""
        self._check_open()
        self._write_held()

    def close(self) -> None:
        """Write what is held, and the end. A trace of no batch is of no use, and its file is removed.

        Raises TraceWriteError if that cannot be written; the file is closed all the same, and holds all whole blocks.
        """
        if self._closed:
            return
        self._closed = True
        with self._file:
            if os.getpid() != self._process:
                return
            if self.batches == 0:
                self.path.unlink(missing_ok=True)
                return
            self._write_held()
            self._write_block(end_block(self._blocks, self.requests, self.batches))

    def _write_held(self) -> None:
        if self._held:
            self._write_block(batches_block(self._blocks, _joined(self._held)))
            self._held = []
            self._held_requests = 0

    def _write_block(self, block: bytes) -> None:
        self._write(block)
        self._blocks += 1

    def _write(self, data: bytes) -> None:
        """All of it, or nothing."""
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file.fileno(), data[written:], self._size + written)
        except OSError as error:
            with suppress(OSError):  # the next block is written over it, wherever the file ends
                self._file.truncate(self._size)
            raise TraceWriteError(
                f"trace {self.path} cannot be written: {error.strerror or error}; what is in it is whole up to "
                f"byte {self._size}; free space on its disk, or train without recording"
            ) from error
        self._size += len(data)

    def _check_open(self) -> None:
        if self._closed:
            raise TraceError(f"trace {self.path} is closed; open another file")
        if os.getpid() != self._process:
            raise TraceError(
                f"trace {self.path} was opened by process {self._process}, of which this one is a fork; only the "
                f"parent records: look up rows here without recording"
            )


def _as_runs(tables: TableNumbers | int, ids: Ids) -> Requests:
    """One batch."""
    if not isinstance(tables, np.ndarray):
        tables = np.full(min(len(ids), 1), tables, np.uint32)
        counts = np.full(len(tables), len(ids), np.uint32)
    else:
        starts = np.flatnonzero(np.diff(tables, prepend=~tables[:1]))
        counts = np.diff(starts, append=len(tables)).astype(np.uint32)
        tables = tables[starts]
    return Requests(ids, np.array([len(tables)], np.uint32), tables, counts)


def _joined(batches: list[Requests]) -> Requests:
    """Many batches as one block."""
    ids, runs, tables, counts = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return Requests(ids, runs, tables, counts)
