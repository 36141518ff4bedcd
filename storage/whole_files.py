"""Small JSON files that are whole, the old one or the new one, and that tell whether they still say what was written.

A manifest has a format, a version and a checksum over the rest. The kinds of them (of a store, an export, a directory
of checkpoints) differ in their names, their checksum and the errors that speak of them, which a `ManifestKind` says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ManifestKind:
    """One kind of manifest.

    Attributes:
        what: "a store": for messages.
        format, version: what its files begin with.
        digest: checksum of bytes, in hexadecimal.
        foreign, damaged: errors for what is something else, or of another version; for what is ours and damaged.
        remedy: what to do about the latter; may be empty.
        older: versions of before that are read too.
    """

    what: str
    format: str
    version: int
    digest: Callable[[bytes], str]
    foreign: type[Exception]
    damaged: type[Exception]
    remedy: str = ""
    older: tuple[int, ...] = ()

    def seal(self, body: dict[str, Any]) -> dict[str, Any]:
        """The file's contents for a body of plain JSON types."""
        sealed = {"format": self.format, "version": self.version, **body}
        return {**sealed, "checksum": self._checksum(sealed)}

    def check(self, data: Any, where: Path) -> dict[str, Any]:
        """The body of what a file holds. Raises ``foreign`` and ``damaged``."""
        if not isinstance(data, dict) or data.get("format") != self.format:
            found = f", found {data['format']!r}" if isinstance(data, dict) and "format" in data else ""
            raise self.foreign(
                f'{where} is not the manifest of {self.what}: expected "format": "{self.format}" in it{found}'
            )
        read = (*self.older, self.version)
        if type(data.get("version")) is not int or data["version"] not in read:
            listed = f"version{'s' if self.older else ''} {' and '.join(map(str, read))}"
            raise self.foreign(f"{where} has version {data.get('version')}: this program reads {listed}")
        body = {name: value for name, value in data.items() if name != "checksum"}
        stored, found = data.get("checksum"), self._checksum(body)
        if stored != found:
            raise self.damaged(f"{where} is damaged: its checksum is {stored}, its contents give {found}{self.remedy}")
        return body

    def _checksum(self, body: dict[str, Any]) -> str:
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return self.digest(canonical.encode())


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Replace a file, at once and durably. Raises OSError."""
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make names in a directory durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
