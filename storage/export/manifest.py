"""manifest.json of an export: what it holds, of which snapshot, and by which checksum each file is known.

A file's checksum is one of the checksums of its MiBs, so that it can be computed while the file is written, without
holding it, and by several threads when it is read.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from storage.errors import CorruptExportError, ExportError, StorageError
from storage.row_log.hashing import checksum, hex_checksum, long_checksum
from storage.row_log.read_threads import for_each_block, usable_threads
from storage.row_log.snapshots import Origin, check_name
from storage.schema import RowSchema, table_number
from storage.whole_files import ManifestKind, write_json

NAME = "manifest.json"
FULL, DELTA = "full", "delta"

_KIND = ManifestKind(
    "an export",
    "tiered-emb export",
    2,
    hex_checksum,
    ExportError,
    CorruptExportError,
    "; copy it once more",
    older=(1,),
)

_DIGEST_BYTES = 1 << 20
_SPAN_BYTES, _CHUNK_BYTES = 1 << 24, 1 << 26  # what one thread reads at a time, and all of them between two reports

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ExportFile:
    """One Parquet file: rows of the tables of one schema.

    Attributes:
        name: in the directory of the export.
        group: position of its schema in `ExportManifest.groups`.
        rows, deletions: how many of each it has.
        bytes, checksum: of the file; 16 hexadecimal digits.
    """

    name: str
    group: int
    rows: int
    deletions: int
    bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class ExportManifest:
    """What an export is.

    Attributes:
        kind: "full" or "delta".
        store: that it was made from.
        snapshot, note, time_s, origin: of the snapshot, as in `storage.snapshot.Snapshot`.
        rows, live_bytes: of the whole snapshot, also where the export is a delta.
        base, base_origin: name and origin of the snapshot that a delta follows; None in a full export.
        groups: schemas.
        tables: position in `groups` by table name.
        files: one for each schema that has something to tell.
        version: of the format; in version 1 a file's checksum was a chain, each MiB's the seed of the next one's.
    """

    kind: str
    store: UUID
    snapshot: str
    note: bytes
    time_s: float
    origin: Origin
    rows: int
    live_bytes: int
    base: str | None
    base_origin: Origin | None
    groups: tuple[RowSchema, ...]
    tables: dict[str, int]
    files: tuple[ExportFile, ...]
    version: int = _KIND.version

    @property
    def file_bytes(self) -> int:
        """Bytes of all Parquet files."""
        return sum(file.bytes for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """The file's contents as plain JSON types."""
        body: dict[str, Any] = {
            "kind": self.kind,
            "store": str(self.store),
            "snapshot": {
                "name": self.snapshot,
                "origin": str(self.origin),
                "time_s": self.time_s,
                "rows": self.rows,
                "live_bytes": self.live_bytes,
                "note": base64.b64encode(self.note).decode(),
            },
            "base": None if self.base_origin is None else {"name": self.base, "origin": str(self.base_origin)},
            "groups": [{"group": at, **schema.to_json()} for at, schema in enumerate(self.groups)],
            "tables": [
                {"name": name, "number": table_number(name), "group": group}
                for name, group in sorted(self.tables.items())
            ],
            "files": [asdict(file) for file in self.files],
        }
        return _KIND.seal(body)

    @classmethod
    def from_json(cls, data: Any, where: Path) -> ExportManifest:
        """Check and read a file's contents.

        Raises:
            ExportError: they are something else, or of a newer version.
            CorruptExportError: they are ours and damaged.
        """
        body = _KIND.check(data, where)
        try:
            return cls._of(body)
        except (KeyError, TypeError, ValueError, StorageError) as error:
            raise CorruptExportError(f"{where} is damaged: {error}") from error

    @classmethod
    def _of(cls, data: dict[str, Any]) -> ExportManifest:
        snapshot, base = data["snapshot"], data["base"]
        manifest = cls(
            kind=data["kind"],
            store=UUID(data["store"]),
            snapshot=check_name(snapshot["name"]),
            note=base64.b64decode(snapshot["note"]),
            time_s=float(snapshot["time_s"]),
            origin=Origin.parse(snapshot["origin"]),
            rows=int(snapshot["rows"]),
            live_bytes=int(snapshot["live_bytes"]),
            base=None if base is None else base["name"],
            base_origin=None if base is None else Origin.parse(base["origin"]),
            groups=tuple(RowSchema.from_json(group) for group in data["groups"]),
            tables={table["name"]: int(table["group"]) for table in data["tables"]},
            files=tuple(ExportFile(**file) for file in data["files"]),
            version=data["version"],
        )
        if manifest.kind not in (FULL, DELTA) or (manifest.kind == DELTA) != (base is not None):
            raise ValueError(f"kind {manifest.kind!r} with base {base!r}")
        return manifest

    def save(self, directory: Path) -> None:
        """Write the file, durably. Raises OSError."""
        write_json(directory / NAME, self.to_json())


def load_export(path: str | os.PathLike[str]) -> ExportManifest:
    """The manifest of an export; its files are not looked at.

    Raises:
        ExportError: the path holds no export, or one of a newer version.
        CorruptExportError: the manifest is damaged.
    """
    where = Path(path) / NAME
    try:
        text = where.read_bytes()
    except OSError as error:
        raise ExportError(f"{path} is no export: {where} cannot be read ({error.strerror or error})") from error
    try:
        data = json.loads(text.decode())
    except ValueError as error:
        raise CorruptExportError(f"{where} is damaged or no manifest of an export: it is not JSON ({error})") from error
    return ExportManifest.from_json(data, where)


def verify_files(directory: Path, manifest: ExportManifest, progress: Progress, threads: int | None = None) -> None:
    """Read every file once.

    Args:
        threads: that read, this one among them; None = as for a get.

    Raises:
        CorruptExportError: one is missing, of another size, or its bytes give another checksum.
    """
    done = 0
    for file in manifest.files:
        for bytes_read in verified(directory / file.name, file, threads, chained=manifest.version == 1):
            done += bytes_read
            progress(done, manifest.file_bytes)


def verified(path: Path, expected: ExportFile, threads: int | None = None, *, chained: bool = False) -> Iterator[int]:
    """Read a file; how many bytes came each time. Raises as `verify_files`."""
    if not path.is_file() or path.stat().st_size != expected.bytes:
        seen = f"has {path.stat().st_size:,} bytes" if path.is_file() else "is missing"
        raise CorruptExportError(f"{path} {seen}: expected {expected.bytes:,}; copy the export once more")
    with open(path, "rb", buffering=0) as file:
        if chained:
            found = yield from _read_chain(file, expected.bytes)
        else:
            found = yield from _read_spans(file, expected.bytes, threads or usable_threads())
    if found != expected.checksum:
        raise CorruptExportError(
            f"{path} is damaged: its checksum is {found}, expected {expected.checksum}; copy it once more"
        )


def _read_spans(file: FileIO, size: int, threads: int) -> Generator[int, None, str]:
    digests: dict[int, int] = {}
    for first in range(0, size, _CHUNK_BYTES):
        stop = min(first + _CHUNK_BYTES, size)
        for_each_block(
            lambda start, _: digests.update(_span_digests(file.fileno(), start)),
            range(first, stop, _SPAN_BYTES),
            threads,
        )
        yield stop - first
    return _joined([digests[at] for at in range(0, size, _DIGEST_BYTES)])


def _read_chain(file: FileIO, size: int) -> Generator[int, None, str]:
    value, block = 0, memoryview(bytearray(_DIGEST_BYTES))
    for start in range(0, size, _DIGEST_BYTES):
        filled = _read_at(file.fileno(), start, block)
        value = checksum(block[:filled], value)
        yield filled
    return f"{value:016x}"


def _span_digests(file: int, start: int) -> dict[int, int]:
    """Of the blocks of one span of a file, by where they begin."""
    block, digests = memoryview(bytearray(_DIGEST_BYTES)), {}
    for at in range(start, start + _SPAN_BYTES, _DIGEST_BYTES):
        digests[at] = long_checksum(block[: _read_at(file, at, block)])
    return digests


def _read_at(file: int, at: int, block: memoryview) -> int:
    """Fill a block as far as the file goes; how far."""
    filled = 0
    while n := os.preadv(file, [block[filled:]], at + filled):
        filled += n
    return filled


def _joined(digests: list[int]) -> str:
    return hex_checksum(np.array(digests, "<u8").tobytes())


class FileChecksum:
    """The checksum of a file whose bytes come in order, in pieces of any size."""

    def __init__(self) -> None:
        self._digests: list[int] = []
        self._block = bytearray(_DIGEST_BYTES)
        self._filled = 0

    def add(self, data: memoryview) -> None:
        """Take in the next bytes."""
        while len(data):
            taken = min(len(data), _DIGEST_BYTES - self._filled)
            if taken == _DIGEST_BYTES:  # straight from where they are
                self._digests.append(long_checksum(data[:taken]))
            else:
                self._block[self._filled : self._filled + taken] = data[:taken]
                self._filled += taken
            if self._filled == _DIGEST_BYTES:
                self._digests.append(long_checksum(memoryview(self._block)))
                self._filled = 0
            data = data[taken:]

    def digest(self) -> str:
        """16 hexadecimal digits of the bytes so far."""
        rest = memoryview(self._block)[: self._filled]
        return _joined([*self._digests, long_checksum(rest)] if self._filled else self._digests)
