"""manifest.json: what a store is, and which tables it holds. Its presence is what makes a directory a store.

It is replaced as a whole (`storage.whole_files`): there is always one, the old or the new. It is written last when a
store is created, so that a directory without it never held a row of ours.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from storage.errors import CorruptSegmentError, NotAStoreError, StorageError, StoreMissingError
from storage.row_log.hashing import hex_checksum
from storage.schema import RowSchema
from storage.whole_files import ManifestKind, write_json

VERSION = 1
NAME, DATA_NAME, LOCK_NAME, OWNER_NAME = "manifest.json", "data.mdb", "lock.mdb", "owner"
INDEX_NAME = "index"  # of the saved index, see `index_file`
OUR_NAMES = frozenset({NAME, NAME + ".tmp", INDEX_NAME, INDEX_NAME + ".tmp", DATA_NAME, LOCK_NAME, OWNER_NAME})

_KIND = ManifestKind("a store", "tiered-emb row log", VERSION, hex_checksum, NotAStoreError, CorruptSegmentError)


@dataclass
class Manifest:
    """The manifest in memory.

    Attributes:
        uuid: the store's identity, repeated in data.mdb and in every segment.
        groups: the schema of each group.
        tables: number and group of each table by name.
    """

    uuid: UUID
    groups: list[RowSchema] = field(default_factory=list)
    tables: dict[str, tuple[int, int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The file's contents as plain JSON types."""
        return _KIND.seal(
            {
                "uuid": str(self.uuid),
                "groups": [{"group": i, **schema.to_json()} for i, schema in enumerate(self.groups)],
                "tables": [{"name": n, "number": number, "group": g} for n, (number, g) in sorted(self.tables.items())],
            }
        )

    @classmethod
    def from_json(cls, data: Any, where: Path) -> Manifest:
        """Check and read a file's contents.

        Raises:
            NotAStoreError: they are something else, or of a newer version.
            CorruptSegmentError: they are ours and damaged.
        """
        body = _KIND.check(data, where)
        try:
            groups = [RowSchema.from_json(group) for group in body["groups"]]
            tables = {t["name"]: (int(t["number"]), int(t["group"])) for t in body["tables"]}
            return cls(UUID(body["uuid"]), groups, tables)
        except (KeyError, TypeError, ValueError, StorageError) as error:
            raise CorruptSegmentError(f"{where} is damaged: {error}") from error

    def with_table(self, name: str, number: int, schema: RowSchema) -> Manifest:
        """The manifest with one table more, and one group more if no table has its schema yet."""
        groups = self.groups if schema in self.groups else [*self.groups, schema]
        return Manifest(self.uuid, groups, {**self.tables, name: (number, groups.index(schema))})

    def save(self, directory: Path) -> None:
        """Replace the file, durably. Raises OSError."""
        write_json(directory / NAME, self.to_json())


def load_manifest(directory: Path) -> Manifest:
    """Read the manifest of a directory that has one. Raises as `Manifest.from_json`."""
    where = directory / NAME
    try:
        data = json.loads(where.read_text(encoding="utf-8"))
    except ValueError as error:
        raise NotAStoreError(f"{where} is not JSON ({error}): expected the manifest of a store") from error
    return Manifest.from_json(data, where)


def holds_store(directory: Path, read_only: bool) -> bool:
    """Whether a path holds a store; False means that one may be created there.

    Raises:
        NotAStoreError: it holds something else, or a store of which parts are missing.
        StoreMissingError: it holds nothing and nothing may be created.
    """
    if not directory.exists():
        if read_only:
            raise StoreMissingError(f"{directory}: there is no store here, and a reader creates none")
        return False
    if not directory.is_dir():
        raise NotAStoreError(f"{directory} is a file: expected the directory of a store, or a path to create one at")
    names = set(os.listdir(directory))
    if NAME in names:
        _check_data_file(directory)
        return True
    foreign = sorted(names - OUR_NAMES)
    if foreign:
        seen = ", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else "")
        raise NotAStoreError(
            f"{directory} holds {seen} and no {NAME}: expected a store, an empty directory or a new path"
        )
    if read_only:
        raise StoreMissingError(f"{directory} has no {NAME}: there is no store here, and a reader creates none")
    return False


def _check_data_file(directory: Path) -> None:
    data = directory / DATA_NAME
    if not data.is_file():
        with suppress(CorruptSegmentError):
            load_manifest(directory)  # of something else than a store, perhaps, which it says
        raise NotAStoreError(
            f"{directory} has a {NAME} but no {DATA_NAME}: its rows are gone; restore the file or remove both"
        )
    size = data.stat().st_size
    if size < 8192:
        raise NotAStoreError(
            f"{data} has {size} bytes: expected at least 8192; it was cut short; restore it from a copy"
        )
