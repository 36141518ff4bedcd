"""verify_store: read every byte of a store that a checksum covers, and say what is not as it was written.

It needs no right to write, works beside a writer (on what was committed when it began), and goes on after each damage:
the manifest, the data file's own pages, the state, the records of snapshots and whether the segments they list are
there, every segment's header and block of ids, every row's checksum (live rows, older versions and tombstones alike,
since a disk that loses one loses the other) and the zeros behind the rows.
Rows are read segment after segment, with the pages of the next ones asked for, so at the disk's speed.

Memory: an index of the store, about 12 bytes a row, which tells live rows from older versions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage.row_log.group_rows import who
from storage.row_log.manifest import DATA_NAME
from storage.row_log.move import verify_rows
from storage.row_log.pages import ask_for
from storage.row_log.places import MAX_SEGMENT_ROWS
from storage.row_log.survey import Damage, Survey, SurveyedSegment

__all__ = ["Damage", "VerifyReport", "verify_store"]

MAX_DAMAGES = 10_000  # listed; more are counted
_AHEAD_BYTES = 64 << 20
_8 = np.uint64(8)


@dataclass(slots=True)
class VerifyReport:
    """What `verify_store` read and found.

    Attributes:
        path: of the store.
        rows, live_rows: stored rows read, tombstones included; those of them that a look-up would find.
        segments: read, of which `unread_segments` could not be, whose rows are in no other count.
        bytes: of the segments read.
        damages: the first 10,000.
        damage_count: of all.
    """

    path: str
    rows: int = 0
    live_rows: int = 0
    segments: int = 0
    unread_segments: int = 0
    bytes: int = 0
    damages: list[Damage] = field(default_factory=list)
    damage_count: int = 0

    @property
    def good(self) -> bool:
        """Whether everything is as it was written."""
        return self.damage_count == 0

    def add(self, damage: Damage) -> None:
        """Count a damage, and list it while there is room."""
        self.damage_count += 1
        if len(self.damages) < MAX_DAMAGES:
            self.damages.append(damage)


def verify_store(path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Read a whole store; see the module's docstring.

    Args:
        path: of its directory.
        progress: called with (bytes read, bytes in all) while rows are read.

    Raises:
        StoreMissingError, NotAStoreError: there is no store at the path.
        StoreLockedError: this process has the store open, or there is a writer and lock.mdb may not be written.
    """
    report = VerifyReport(os.fspath(path))
    with Survey(Path(os.path.realpath(path))) as survey:
        for damage in survey.damages:
            report.add(damage)
        report.unread_segments = sum(damage.segment is not None for damage in survey.damages)
        total = sum(segment.header.size for segment in survey.segments.values())
        for batch in survey.reading():
            asked = 0
            for i, (segment, data) in enumerate(batch):
                asked = max(asked, i)
                asked = _ask_ahead(batch, i, asked)
                _verify_segment(survey, segment, data, report)
                if progress is not None:
                    progress(report.bytes, total)
    return report


def _ask_ahead(batch: list[tuple[SurveyedSegment, NDArray[np.uint8]]], at: int, asked: int) -> int:
    """Ask for segments until enough are in flight behind the one to be read; the first one not asked for."""
    while asked < len(batch) and sum(len(data) for _, data in batch[at:asked]) < _AHEAD_BYTES:
        ask_for(batch[asked][1].ctypes.data, len(batch[asked][1]))
        asked += 1
    return asked


def _verify_segment(survey: Survey, segment: SurveyedSegment, data: NDArray[np.uint8], report: VerifyReport) -> None:
    header, lines = segment.header, segment.group.segments.lines
    report.segments += 1
    report.bytes += len(data)
    report.rows += header.rows
    report.live_rows += segment.live
    damaged = np.empty(header.rows, np.bool_)
    if verify_rows(lines, np.uint64(header.stride), segment.slot, damaged):
        for row in np.flatnonzero(damaged).tolist():
            report.add(_row_damage(survey, segment, row))
    if data[header.rows_at + header.rows * header.stride :].any():
        message = f"segment {header.number} of {survey.path} has bytes other than zero behind its rows"
        report.add(Damage(DATA_NAME, message, header.number))


def _row_damage(survey: Survey, segment: SurveyedSegment, row: int) -> Damage:
    """The damage of a row, under its stored table number and id, which were verified before."""
    table, id = who(segment.group.segments.lines, np.uint64(segment.slot * MAX_SEGMENT_ROWS + row))
    found = segment.group.index.find(
        segment.group.segments.lines, np.array([table], np.uint32), np.array([id], np.int64)
    )
    live = int(found[0]) == segment.slot * MAX_SEGMENT_ROWS + row
    name = survey.table_name(table)
    kind = "row" if live else "superseded row"
    holders = survey.holders_of(segment.header.number)
    held = f", which snapshot {holders[0]!r} holds" if holders else ""
    message = (
        f"{kind} with id {id} of table {name}: its bytes do not match their checksum "
        f"(row {row} of segment {segment.header.number}{held})"
    )
    return Damage(DATA_NAME, message, segment.header.number, name, id, live)
