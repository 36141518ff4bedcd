"""describe_store: what a store holds and what it costs, without reading its rows.

Reads the manifest, the ids of all segments and the records of commits, as opening a store does. Works beside a writer,
on what it has committed. What is damaged is left out and named in `damages`; `storage.verify` reads the rows as well.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
from numba import njit

from storage.id_index import ADDRESS, CAPACITY, PLACE_MASK
from storage.row_log.manifest import DATA_NAME, VERSION
from storage.row_log.places import stored_table
from storage.row_log.raw import load64
from storage.row_log.survey import Damage, Survey, SurveyedSegment

__all__ = ["AgeBand", "Moment", "SnapshotDescription", "StoreDescription", "TableDescription", "describe_store"]

AGE_BANDS = 10
_0, _8 = np.uint64(0), np.uint64(8)


@dataclass(frozen=True, slots=True)
class TableDescription:
    """A table: `rows` are live, `columns` as `RowSchema` prints them."""

    name: str
    number: int
    group: int
    columns: str
    row_bytes: int
    rows: int
    live_bytes: int


@dataclass(frozen=True, slots=True)
class AgeBand:
    """A tenth of the segments, in the order of their rows' last changes (the least epoch of each).

    Attributes:
        segments: how many; their numbers may be anything, since moved rows keep their epochs.
        first_epoch, last_epoch: of their rows.
        live_bytes, bytes: of their live rows as stored; of the segments.
    """

    segments: int
    first_epoch: int
    last_epoch: int
    live_bytes: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Moment:
    """A store at one of its commits; bytes put, written and moved count from its creation on.

    Attributes:
        commit, time_s: number of the commit; seconds of Unix time.
        live_bytes: bytes of the live rows without any overhead.
        disk_bytes: what the data file occupied.
        put_bytes, written_bytes, moved_bytes: rows put, segments written, segments written by compaction.
    """

    commit: int
    time_s: float
    live_bytes: int
    disk_bytes: int
    put_bytes: int
    written_bytes: int
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotDescription:
    """A named snapshot.

    Attributes:
        name, time_s: its name; when it was made, in seconds of Unix time.
        rows, live_bytes: of it, without any overhead.
        segments, bytes: that hold them; of the segments.
        only_bytes: of the segments in which no row is live now and which no other snapshot holds: about what the file
            gets back when it is dropped.
        note_bytes: size of its note.
        origin: which state of which store it is, "uuid:number".
    """

    name: str
    time_s: float
    rows: int
    live_bytes: int
    segments: int
    bytes: int
    only_bytes: int
    note_bytes: int
    origin: str


@dataclass(frozen=True, slots=True)
class StoreDescription:
    """What `describe_store` found; all sizes in bytes.

    Attributes:
        path, uuid, format_version: the store; uuid is "" if the manifest is damaged.
        segment_versions: formats of the segments, as in docs/formats.md.
        tables: by name; of tables whose names are lost with the manifest there are none.
        groups: schemas that tables share.
        rows, live_bytes: live rows, and their bytes without any overhead.
        stored_rows, tombstones: rows in segments, older versions and tombstones included; tombstones.
        segments, segment_bytes, disk_bytes: number and bytes of segments; bytes that the data file occupies.
        state, note_bytes: number of the last complete state (-1 if its record is damaged); size of its note.
        later_rows: rows stored since it, which a writer will cover with its next state and a crash leaves.
        oldest_reader, oldest_reader_commits: process that pins the oldest commit, and its lag in commits; 0 = none.
        snapshots: oldest first.
        ages: from the oldest to the newest segments.
        history: oldest first, closer together towards the end; empty for stores that keep no records of commits.
        damages: what had to be left out.
    """

    path: str
    uuid: str
    format_version: int
    segment_versions: tuple[int, ...]
    tables: tuple[TableDescription, ...]
    groups: int
    rows: int
    live_bytes: int
    stored_rows: int
    tombstones: int
    segments: int
    segment_bytes: int
    disk_bytes: int
    state: int
    note_bytes: int
    later_rows: int
    oldest_reader: int
    oldest_reader_commits: int
    snapshots: tuple[SnapshotDescription, ...]
    ages: tuple[AgeBand, ...]
    history: tuple[Moment, ...]
    damages: tuple[Damage, ...]

    @property
    def space_ratio(self) -> float | None:
        """Disk bytes for each live byte; None while no row is live."""
        return self.disk_bytes / self.live_bytes if self.live_bytes else None

    @property
    def live_share(self) -> float | None:
        """Share of the stored rows that are live; None if there are none."""
        return self.rows / self.stored_rows if self.stored_rows else None

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON types."""
        return {**asdict(self), "space_ratio": self.space_ratio, "live_share": self.live_share}


def describe_store(path: str | os.PathLike[str]) -> StoreDescription:
    """Look a store over; see the module's docstring.

    Raises:
        StoreMissingError, NotAStoreError: there is no store at the path.
        StoreLockedError: this process has the store open, or there is a writer and lock.mdb may not be written.
    """
    with Survey(Path(os.path.realpath(path))) as survey:
        segments = list(survey.segments.values())
        manifest, state = survey.manifest, survey.state
        rows, moments, reader = _live_rows(survey), _moments(survey), (0, 0)
        if survey.log is not None:
            reader = survey.log.oldest_reader()
        return StoreDescription(
            path=os.fspath(path),
            uuid=str(manifest.uuid) if manifest else _uuid_of(segments),
            format_version=VERSION,
            segment_versions=tuple(sorted({segment.header.version for segment in segments})),
            tables=_tables(survey, rows),
            groups=len(manifest.groups) if manifest else len(survey.groups),
            rows=sum(group.index.rows for group in survey.groups.values()),
            live_bytes=sum(group.index.rows * group.row_bytes for group in survey.groups.values()),
            stored_rows=sum(segment.header.rows for segment in segments),
            tombstones=sum(segment.header.tombstones for segment in segments),
            segments=len(segments),
            segment_bytes=sum(segment.header.size for segment in segments),
            disk_bytes=(survey.path / DATA_NAME).stat().st_blocks * 512,
            state=state.number if state else -1,
            note_bytes=len(state.note) if state else 0,
            later_rows=sum(one.header.rows for one in segments if state and one.header.last_epoch > state.epoch),
            oldest_reader=reader[0],
            oldest_reader_commits=reader[1],
            snapshots=_snapshots(survey),
            ages=_ages(segments),
            history=moments,
            damages=tuple(survey.damages),
        )


def _uuid_of(segments: list[SurveyedSegment]) -> str:
    return str(UUID(bytes=segments[0].header.store)) if segments else ""


def _tables(survey: Survey, rows: Mapping[int, int]) -> tuple[TableDescription, ...]:
    if survey.manifest is None:
        return ()
    found = []
    for name, (number, group) in sorted(survey.manifest.tables.items()):
        schema, live = survey.manifest.groups[group], rows.get(number, 0)
        found.append(
            TableDescription(name, number, group, str(schema), schema.row_bytes, live, live * schema.row_bytes)
        )
    return tuple(found)


@njit(nogil=True, cache=True)
def _count_tables(shards: Any, segments: Any, known: Any, counts: Any) -> None:
    """Add the rows that an index leads to to the counts of their tables; `known` is sorted."""
    for shard in range(len(shards)):
        entries = np.uint64(shards[shard, ADDRESS])
        for i in range(shards[shard, CAPACITY]):
            place = load64(entries + np.uint64(i) * _8) & PLACE_MASK
            if place != _0:
                at = np.searchsorted(known, np.uint32(stored_table(segments, place)))
                if at < len(known):
                    counts[at] += 1


def _live_rows(survey: Survey) -> dict[int, int]:
    """Live rows by table number. All rows of a group with one table are that table's."""
    counts: dict[int, int] = {}
    for group in survey.groups.values():
        numbers = survey.tables_of(group.group)
        counted = np.full(len(numbers), group.index.rows)
        if len(numbers) > 1:
            counted[:] = 0
            _count_tables(group.index.table, group.segments.lines, numbers, counted)
        counts |= dict(zip(numbers.tolist(), counted.tolist(), strict=True))
    return counts


def _snapshots(survey: Survey) -> tuple[SnapshotDescription, ...]:
    held = Counter(number for one in survey.snapshots for number in one.segments.tolist())
    found = []
    for one in survey.snapshots:
        there = [survey.segments[number] for number in one.segments.tolist() if number in survey.segments]
        only = [segment for segment in there if held[segment.header.number] == 1 and not segment.live]
        found.append(
            SnapshotDescription(
                name=one.name,
                time_s=one.time_us / 1e6,
                rows=one.rows,
                live_bytes=one.live_bytes,
                segments=len(one.segments),
                bytes=sum(segment.header.size for segment in there),
                only_bytes=sum(segment.header.size for segment in only),
                note_bytes=len(one.state.note),
                origin=str(one.origin),
            )
        )
    return tuple(found)


def _ages(segments: list[SurveyedSegment]) -> tuple[AgeBand, ...]:
    """Tenths of the segments, by the age of their oldest row; fewer where there are fewer than ten segments."""
    ordered = sorted(segments, key=lambda segment: (segment.header.first_epoch, segment.header.number))
    bands = np.array_split(np.arange(len(ordered)), min(AGE_BANDS, len(ordered)) or 1)
    return tuple(_band([ordered[i] for i in band]) for band in bands if len(band))


def _band(segments: list[SurveyedSegment]) -> AgeBand:
    headers = [segment.header for segment in segments]
    return AgeBand(
        segments=len(segments),
        first_epoch=min(header.first_epoch for header in headers),
        last_epoch=max(header.last_epoch for header in headers),
        live_bytes=sum(segment.live * segment.header.stride for segment in segments),
        bytes=sum(header.size for header in headers),
    )


def _moments(survey: Survey) -> tuple[Moment, ...]:
    return tuple(
        Moment(
            commit=record.number,
            time_s=record.time_us / 1e6,
            live_bytes=record.totals.live_bytes,
            disk_bytes=record.totals.file_bytes,
            put_bytes=record.totals.put_bytes,
            written_bytes=record.totals.written_bytes,
            moved_bytes=record.totals.moved_bytes,
        )
        for record in survey.history
        if record.totals.file_bytes  # 0 where whoever committed counted nothing
    )
