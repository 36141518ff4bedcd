"""Directories of checkpoints: what a manifest says, how a checkpoint becomes whole, and what a crash leaves.

::

    PATH/checkpoints.json      which directory of checkpoints this is: an id, part of the names of its snapshots
    PATH/<tag>/manifest.json   what the checkpoint consists of; its presence under a tag is what makes it one
    PATH/<tag>/dense.pt        what belongs beside the rows
    PATH/<tag>/tiers.npz       which rows were in which slots, and what policies knew of them
    PATH/<tag>.tmp             one that is being made, or goes: not a checkpoint
    PATH/rows                  a store for rows of modules whose own store is in memory

A checkpoint appears by one rename, after all that it names is durable, and goes by one, before anything of that is let
go. So a manifest under a tag never names what is not there, wherever a crash comes, as long as nobody else drops its
snapshots. Byte by byte: docs/formats.md.

One process at a time. This module knows files; rows are `tiered_emb.checkpoint_rows`'s.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from storage.whole_files import ManifestKind, sync_directory, write_json
from tiered_emb.errors import CheckpointError, ConfigError

MANIFEST, DENSE, TIERS = "manifest.json", "dense.pt", "tiers.npz"

_FOLDER, _FOLDER_FORMAT = "checkpoints.json", "tiered-emb checkpoints"
LEAVING = ".tmp"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,127}")
_RESERVED = re.compile(r"rows(-[0-9]+)?")

_KIND = ManifestKind(
    "a checkpoint",
    "tiered-emb checkpoint",
    1,
    lambda data: hashlib.sha256(data).hexdigest(),
    CheckpointError,
    CheckpointError,
    "; put it back from a copy, or remove its directory",
)


@dataclass(frozen=True)
class TableEntry:
    """One table: its name, dimension, seed, and the columns of its rows as `RowSchema.to_json` gives them."""

    name: str
    dim: int
    seed: int
    columns: list[dict[str, Any]]


@dataclass(frozen=True)
class ModuleEntry:
    """One tiered module: which of the stores it is over, its steps, rule, learning rate, and tables."""

    store: int
    steps: int
    rule: str
    lr: float
    tables: list[TableEntry]


@dataclass(frozen=True)
class TierEntry:
    """One tier: the columns of its rows, "hbm" or "ddr", and what must be equal for its directory to be loaded."""

    columns: list[dict[str, Any]]
    tier: str
    capacity_rows: int
    policy: str
    admission: str


@dataclass(frozen=True)
class StoreEntry:
    """One store.

    Attributes:
        path: from the directory of checkpoints; `place` is where it was on that machine.
        uuid: of the store.
        snapshot, origin: its snapshot's name and origin.
        copied: the store is the checkpoints' own, for rows that are kept in memory.
        budget: what `TierConfig` said, as far as it bears on the tiers.
        tiers: over it.
    """

    path: str
    place: str
    uuid: str
    snapshot: str
    origin: str
    copied: bool
    budget: dict[str, Any]
    tiers: list[TierEntry]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        tag: its name.
        number: counts the checkpoints of a directory upwards; the newest has the greatest.
        time_s: when it was made, in seconds of Unix time.
        step: the most steps of any module.
        modules: by name in the model.
        stores: that modules refer to by position.
        files: bytes and SHA-256 of each file beside the manifest, by name.
    """

    tag: str
    number: int
    time_s: float
    step: int
    modules: dict[str, ModuleEntry]
    stores: list[StoreEntry]
    files: dict[str, dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """The file's contents as plain JSON types."""
        return _KIND.seal(asdict(self))

    @classmethod
    def from_json(cls, data: Any, where: Path) -> Manifest:
        """Check and read a file's contents. Raises CheckpointError."""
        body = _KIND.check(data, where)
        modules = {name: _entry(ModuleEntry, one, tables=TableEntry) for name, one in body["modules"].items()}
        stores = [_entry(StoreEntry, one, tiers=TierEntry) for one in body["stores"]]
        rest = {name: body[name] for name in ("tag", "number", "time_s", "step", "files")}
        return cls(**rest, modules=modules, stores=stores)


def _entry(kind: Callable[..., Any], data: dict[str, Any], **parts: Callable[..., Any]) -> Any:
    return kind(**{**data, **{name: [part(**one) for one in data[name]] for name, part in parts.items()}})


class Folder:
    """A directory of checkpoints.

    Attributes:
        path: of it, absolute.
        id: of it, wherever it is moved to; hexadecimal.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = False) -> None:
        self.path = Path(os.path.realpath(path))
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{path} is a file: expected a directory of checkpoints, or a path to make one at")
        if create and not (self.path / _FOLDER).exists():
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / _FOLDER, {"format": _FOLDER_FORMAT, "version": 1, "id": uuid4().hex[:12]})
            sync_directory(self.path.parent)
        try:
            self.id = str(json.loads((self.path / _FOLDER).read_text())["id"])
        except FileNotFoundError:
            raise CheckpointError(f"{path} has no {_FOLDER}: there are no checkpoints here") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.path / _FOLDER} is damaged ({error}): put it back from a copy") from error

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Folder | None:
        """The directory, if there is one of checkpoints."""
        return cls(path) if (Path(path) / _FOLDER).exists() else None

    def snapshot_name(self, tag: str) -> str:
        """Under which stores keep the rows of a checkpoint."""
        return f"checkpoint:{self.id}:{tag}"

    def is_ours(self, snapshot: str) -> bool:
        """Whether a snapshot was made for a checkpoint of this directory."""
        return snapshot.startswith(f"checkpoint:{self.id}:")

    # ---- what is there

    def manifests(self) -> list[Manifest]:
        """Of all checkpoints that are whole, oldest first. Raises CheckpointError for a damaged one."""
        tags = [entry.name for entry in os.scandir(self.path) if entry.is_dir() and _is_tag(entry.name)]
        there = [self.manifest(tag) for tag in tags if (self.path / tag / MANIFEST).exists()]
        return sorted(there, key=lambda one: one.number)

    def manifest(self, tag: str) -> Manifest:
        """Of one checkpoint. Raises CheckpointError if there is none, or it is damaged."""
        where = self.path / (tag if _is_tag(tag) else LEAVING) / MANIFEST
        try:
            data = json.loads(where.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            there = ", ".join(one.tag for one in self.manifests()[-5:])
            raise CheckpointError(
                f"{self.path} has no checkpoint {tag!r}; the newest there are: {there or 'none'}"
            ) from None
        except ValueError as error:
            raise CheckpointError(
                f"{where} is damaged: it is not JSON ({error}); put it back from a copy, or remove {where.parent}"
            ) from error
        return Manifest.from_json(data, where)

    def check(self, manifest: Manifest) -> None:
        """Read all files of a checkpoint. Raises CheckpointError for one that is not as it was written."""
        for name, expected in manifest.files.items():
            where = self.path / manifest.tag / name
            if not where.exists():
                raise CheckpointError(f"{where} is missing: put it back from a copy, or load another checkpoint")
            if (found := _description(where)) != expected:
                raise CheckpointError(
                    f"{where} is damaged: it has {found['bytes']} bytes with SHA-256 {found['sha256'][:16]}..., "
                    f"written were {expected['bytes']} with {expected['sha256'][:16]}...; put it back from a copy, or "
                    f"load another checkpoint"
                )

    # ---- one more, and fewer

    def new_tag(self, tag: str | None, step: int) -> str:
        """The tag that is asked for, or one that tells the step. Raises ConfigError if it cannot be one or is taken."""
        taken = {entry.name for entry in os.scandir(self.path) if not entry.name.endswith(LEAVING)}
        if tag is None:
            names = (f"step-{step}" if n == 1 else f"step-{step}-{n}" for n in range(1, len(taken) + 2))
            return next(name for name in names if name not in taken)
        if not isinstance(tag, str) or not _is_tag(tag):
            raise ConfigError(
                f"tag is {tag!r}; expected 1 to 128 letters, digits, _ . + = -, not beginning with a mark, not ending "
                f"in {LEAVING}, and not 'rows'"
            )
        if tag in taken:
            raise ConfigError(f"{self.path} has {tag!r} already: give another tag, or remove that directory first")
        return tag

    def begin(self, tag: str) -> Path:
        """Where the files of a new checkpoint go, empty; what a crash has left here is removed."""
        self.clean()
        place = self.path / (tag + LEAVING)
        place.mkdir()
        return place

    def finish(self, manifest: Manifest) -> None:
        """Make the checkpoint whole whose other files are written, at once and durably."""
        place = self.path / (manifest.tag + LEAVING)
        write_json(place / MANIFEST, manifest.to_json())
        os.rename(place, self.path / manifest.tag)
        sync_directory(self.path)

    def withdraw(self, tags: Iterable[str]) -> None:
        """Have checkpoints be none any more, durably; `clean` removes their files, `restore` takes it back."""
        for tag in tags:
            os.rename(self.path / tag, self.path / (tag + LEAVING))
        sync_directory(self.path)

    def restore(self, tags: Iterable[str]) -> None:
        """Take `withdraw` back."""
        for tag in tags:
            os.rename(self.path / (tag + LEAVING), self.path / tag)
        sync_directory(self.path)

    def clean(self) -> None:
        """Remove what was begun and not finished, or withdrawn."""
        for entry in list(os.scandir(self.path)):
            if entry.is_dir(follow_symlinks=False) and entry.name.endswith(LEAVING):
                shutil.rmtree(entry.path)

    def next_number(self) -> int:
        """For a new checkpoint."""
        return max((one.number for one in self.manifests()), default=0) + 1


def written(place: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Have ``write`` fill a new file; `synced` makes it durable."""
    with open(place, "wb") as file:
        write(file)


def synced(place: Path) -> dict[str, Any]:
    """Make a file durable that was written before; bytes and SHA-256 of it."""
    with open(place, "rb") as file:
        os.fsync(file.fileno())
    return _description(place)


def now_s() -> float:
    """Unix time."""
    return round(time.time(), 3)


def _is_tag(name: str) -> bool:
    return bool(_TAG.fullmatch(name)) and not name.endswith(LEAVING) and not _RESERVED.fullmatch(name)


def _description(place: Path) -> dict[str, Any]:
    with open(place, "rb") as file:
        return {"bytes": place.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
