"""Where what lies in a data file, from docs/formats.md and without our code, and what a store makes of damage there."""

from __future__ import annotations

import os
import re
import shutil
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray

from storage import CorruptRowError, LmdbStore, StorageError
from tests.faults.oracle import (
    IDS,
    TABLES,
    Crashed,
    Key,
    Undetected,
    Versions,
    difference,
    open_tables,
    read_all,
    read_ids,
)
from tests.faults.victim import Child, config

PAGE_BYTES = 4096
HEADER_BYTES = 128


@dataclass(frozen=True)
class Span:
    """Bytes first to last (exclusive) of data.mdb; `key` says which live row lies there, if that is what does."""

    first: int
    last: int
    key: Key | None = None


@dataclass(frozen=True)
class Flip:
    """One bit of data.mdb to flip, in a store that is `opened` before or afterwards, for reading or for writing too."""

    offset: int
    bit: int
    key: Key | None
    opened: bool
    read_only: bool


def spans(path: Path, live: Versions, where: str) -> list[Span]:
    """The spans of a closed store's data file of one kind: rows (live ones), ids, headers, segments (all of each), or
    pages (all of LMDB's)."""
    data = (path / "data.mdb").read_bytes()
    segments = [(at, value) for value in _segments(path) for at in [_offset_of(data, value)]]
    if where == "pages":
        return list(_between(len(data), [(at, at + len(value)) for at, value in segments]))
    if where == "segments":
        return [Span(at, at + len(value)) for at, value in segments]
    keys = {version: key for key, version in live.items()}
    found: list[Span] = []
    rows: dict[Key, Span] = {}  # of a row that compaction has moved the copy counts, in the later segment
    for at, value in segments:
        ids_at, rows_at = struct.unpack_from("<QQ", value, 72)
        if where == "headers":
            found.append(Span(at, at + HEADER_BYTES))
        elif where == "ids":
            found.append(Span(at + ids_at, at + rows_at))
        else:
            rows |= {span.key: span for span in _live_rows(at, value, rows_at, keys) if span.key is not None}
    return [*found, *rows.values()]


def _segments(path: Path) -> list[bytes]:
    with lmdb.open(str(path), readonly=True, lock=False, max_dbs=4) as env:
        segments = env.open_db(b"segments", create=False)
        with env.begin(segments) as txn:
            return [bytes(value) for _, value in txn.cursor()]


def snapshot_records(path: Path) -> list[list[Span]]:
    """Where the record of each snapshot lies: more than once, if pages that LMDB has copied still hold it."""
    data = (path / "data.mdb").read_bytes()
    with lmdb.open(str(path), readonly=True, lock=False, max_dbs=4) as env:
        states = env.open_db(b"states", create=False)
        with env.begin(states) as txn:
            records = [bytes(value) for key, value in txn.cursor() if bytes(key).startswith(b"snapshot:")]
    every = [[found.start() for found in re.finditer(re.escape(record), data)] for record in records]
    return [[Span(at, at + len(record)) for at in ats] for ats, record in zip(every, records, strict=True)]


def _offset_of(data: bytes, value: bytes) -> int:
    at = data.find(value)
    while at % PAGE_BYTES != 16:  # LMDB's page header lies in front
        at = data.find(value, at + 1)
        assert at >= 0, "a segment of the store is not in its file"
    return at


def _between(size: int, taken: list[tuple[int, int]]) -> Iterable[Span]:
    at = 0
    for first, last in [*sorted(taken), (size, size)]:
        if at < first:
            yield Span(at, first)
        at = last


def _live_rows(at: int, value: bytes, rows_at: int, keys: dict[int, Key]) -> Iterable[Span]:
    count, row_bytes, stride = (struct.unpack_from("<I", value, offset)[0] for offset in (20, 28, 32))
    for row in range(count):
        first = rows_at + row * stride
        key = keys.get(struct.unpack_from("<q", value, first + 8)[0])
        if key is not None and TABLES[key[0]][1].row_bytes == row_bytes:
            yield Span(at + first, at + first + stride, key)


def some_flips(rng: np.random.Generator, places: Sequence[Span], count: int) -> list[Flip]:
    """Bits of these spans, each span as likely as another."""
    chosen = (places[int(rng.integers(len(places)))] for _ in range(count))
    return [
        Flip(
            int(rng.integers(s.first, s.last)),
            int(rng.integers(8)),
            s.key,
            bool(rng.integers(2)) and s.key is not None,
            bool(rng.integers(2)),
        )
        for s in chosen
    ]


def flip_all(path: Path, live: Versions, note: bytes, flips: Sequence[Flip]) -> int:
    """Flip bits of copies of a closed store, one at a time; how many of them the store found.

    Raises:
        Undetected: a store gave other rows than were put, or a damaged live row as if nothing were.
        Crashed: a store that was opened or read killed its process, or hung.
    """
    child, heard, doing = Child(_flip_all, path, live, note, flips), None, None
    try:
        while isinstance(heard := child.hear(), Flip):
            doing = heard
    except EOFError:
        raise Crashed(f"a process died of signal {child.end().signal} over {doing}") from None
    child.end()
    _, found, error = heard
    if error is not None:
        raise error
    return int(found)


def _flip_all(talk: Connection, path: Path, live: Versions, note: bytes, flips: Sequence[Flip]) -> int:
    found, copy = 0, path.with_name(f"{path.name}-flipped")
    for flip in flips:
        talk.send(flip)
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(path, copy)
        found += _is_found(copy, live, note, flip)
    shutil.rmtree(copy, ignore_errors=True)
    return found


def _is_found(path: Path, live: Versions, note: bytes, flip: Flip) -> bool:
    sizes = config()
    if flip.opened:
        sizes = replace(sizes, compact_bytes_per_s=0)  # a row that was moved before the flip is not damaged by it
    else:
        flip_bit(path / "data.mdb", flip.offset, flip.bit)
    try:
        with LmdbStore(path, config=sizes, read_only=flip.read_only) as store:
            if flip.opened:
                flip_bit(path / "data.mdb", flip.offset, flip.bit)
            if flip.key is not None:
                _check_row(store, live, flip)
                return True
            if read_all(store) != live or store.note != note:
                raise Undetected(f"{flip}: {difference(read_all(store), live)}; note {store.note!r}, not {note!r}")
    except StorageError:
        return True
    return False


def flip_bit(path: Path, offset: int, bit: int) -> None:
    """Flip one bit of a file."""
    with open(path, "r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), offset)


def _check_row(store: LmdbStore, live: Versions, flip: Flip) -> None:
    """All other rows are there, and this one is named."""
    assert flip.key is not None
    tables, (table, id) = open_tables(store), flip.key
    others = read_ids(store, tables, IDS[id != IDS])
    if others != {key: version for key, version in live.items() if key[1] != id}:
        raise Undetected(f"{flip}: another row than the damaged one differs")
    one = np.array([id])
    for look in (lambda: read_ids(store, tables[: table + 1], one), lambda: list(store.scan(tables[table].group))):
        try:
            look()
        except CorruptRowError as error:
            if (error.table, error.id) != (tables[table].number, id) or str(id) not in str(error):
                raise Undetected(f"{flip}: {error} names another row") from error
        else:
            raise Undetected(f"{flip}: a damaged row was handed out, or is missing")


def cut_short(talk: Connection, path: Path, live: Versions, sizes: NDArray[np.int64]) -> int:
    """Truncate copies of a closed store's data file, and open and read them; how many were refused.

    Raises:
        Undetected: a store opened and did not give all its rows.
    """
    refused, copy = 0, path.with_name(f"{path.name}-cut")
    for size in sizes.tolist():
        for read_only in (True, False):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(path, copy)
            os.truncate(copy / "data.mdb", size)
            try:
                with LmdbStore(copy, config=config(), read_only=read_only) as store:
                    if read_all(store) != live:
                        raise Undetected(f"cut to {size} bytes: {difference(read_all(store), live)}")
            except StorageError:
                refused += 1
    return refused


def refusal(talk: Connection, path: Path, read_only: bool) -> BaseException | None:
    """The error that opening a store raises."""
    try:
        LmdbStore(path, config=config(), read_only=read_only).close()
    except StorageError as error:
        return error
    return None
