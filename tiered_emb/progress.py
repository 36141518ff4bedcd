"""Progress: what outlives a module beside its rows, and the note in which a Store keeps it (docs/formats.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from storage.errors import StorageError


@dataclass(frozen=True, slots=True)
class Progress:
    """Of one table: optimizer steps taken, and the seed of rows that were never stored."""

    steps: int
    seed: int


def note_of(progress: dict[int, Progress]) -> bytes:
    """A Store's note: ``{"tables": [[steps, seed, [table numbers]], ...]}``, tables of equal progress together."""
    together: dict[Progress, list[int]] = {}
    for number, one in sorted(progress.items()):
        together.setdefault(one, []).append(number)
    tables = [[one.steps, one.seed, numbers] for one, numbers in together.items()]
    return json.dumps({"tables": tables}, separators=(",", ":")).encode()


def progress_of(note: bytes) -> dict[int, Progress]:
    """The reverse of :func:`note_of`. Raises StorageError for a note that is not ours."""
    if not note:
        return {}
    try:
        tables = json.loads(note)["tables"]
        return {int(number): Progress(int(steps), int(seed)) for steps, seed, numbers in tables for number in numbers}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"the store keeps a note that is not of tiered tables: {note[:80]!r}; give modules a store of their own"
        ) from error
