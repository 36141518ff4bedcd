"""All rows that a run has ever updated, in order of table name and id, read once out of the store.

A scan gives rows in the order of the log. They are spooled to an unnamed temporary file and read back in order, so that
memory holds 16 bytes a row and not the rows.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Rows = NDArray[np.float32]

_BLOCK_ROWS = 1 << 14


class RowsAtRest:
    """Blocks of (table name, ids (N,), rows (N, W)) of one width W, sorted. Use it in a ``with`` statement."""

    def __init__(self, blocks: Iterable[tuple[str, Ids, Rows]]) -> None:
        self._file = tempfile.TemporaryFile(prefix="tiered-emb-")  # noqa: SIM115 - closed by __exit__
        self._ids: dict[str, list[Ids]] = {}
        self._places: dict[str, list[Ids]] = {}
        self._width = 0
        self.rows = 0
        for name, ids, rows in blocks:
            self._file.write(np.ascontiguousarray(rows).tobytes())
            self._ids.setdefault(name, []).append(ids.copy())
            self._places.setdefault(name, []).append(np.arange(self.rows, self.rows + len(ids)))
            self._width = rows.shape[1]
            self.rows += len(ids)
        self._file.flush()

    def tables(self) -> list[str]:
        """Names of the tables that have rows, sorted."""
        return sorted(self._ids)

    def blocks(self, table: str) -> Iterator[tuple[Ids, Rows]]:
        """Ids and rows of one table in blocks, by ascending id."""
        if table not in self._ids:
            return
        ids, places = np.concatenate(self._ids[table]), np.concatenate(self._places[table])
        order = np.argsort(ids)
        spooled = np.memmap(self._file, np.float32, "r", shape=(self.rows, self._width))
        for first in range(0, len(order), _BLOCK_ROWS):
            part = order[first : first + _BLOCK_ROWS]
            yield ids[part], np.asarray(spooled[places[part]])

    def sha256(self) -> str:
        """Over each table's name and a zero byte, then row by row the id (8 bytes) and the row with its optimizer state
        (4 bytes a number), little endian."""
        digest = hashlib.sha256()
        for table in self.tables():
            digest.update(table.encode() + b"\0")
            for ids, rows in self.blocks(table):
                named = [ids.astype("<i8")[:, None].view(np.uint8), rows.astype("<f4").view(np.uint8)]
                digest.update(np.concatenate(named, axis=1).tobytes())
        return digest.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
