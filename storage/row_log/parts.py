"""Parts: what those who work on one open store have in common - its log, its groups, and how they stay out of each
other's way. Made by `row_log.session`, handed on as one value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from storage.row_log.config import StoreConfig
from storage.row_log.group_rows import GroupRows
from storage.row_log.lock import StoreLock
from storage.row_log.log import RowLog
from storage.row_log.pins import Pins


@dataclass(frozen=True, slots=True)
class Parts:
    """See the module's docstring.

    Attributes:
        log: open for writing, or for reading.
        groups: by number; the session appends to this list.
        config: sizes and budgets.
        lock, pins: of the store.
        store: its uuid, 16 bytes.
        path: its directory.
        to_state: whether the last complete state is what an open finds, and only a flush makes one ("snapshot").
    """

    log: RowLog
    groups: list[GroupRows]
    config: StoreConfig
    lock: StoreLock
    pins: Pins
    store: bytes
    path: Path
    to_state: bool
