"""Reader: a store open for reading follows what the writer commits.

Every verb runs inside a short LMDB read transaction: first the index catches up with what was committed since the last
verb, then rows are looked up and copied, then the transaction ends. So a reader sees whole commits (with durability
"snapshot", whole states), never loses an address under its hands, and pins no page between verbs.

Catching up costs what changed, not what is there. The records of the unseen commits (`row_log.commits`) name the
segments that came and went: those that came are replayed, then those that went are dropped, in which no row is live any
more. Of a log without records all segment numbers are compared instead.

What goes wrong with segments that went, and what is done:

- Their pages may hold other bytes by now, and entries of the index are recognised by the ids that segments store. So
  these ids are verified, before new segments are replayed and once more afterwards.
- With durability "snapshot" a segment that is newer than the last state waits until a state covers it.
- The reader starts over, as if it had just been opened, where that would not give what is there: ids of a segment with
  live rows are overwritten; rows of it are live still, since the writer went back to an earlier state; too many commits
  were missed; or the count of segments is another.
- Rows that were moved out of a segment which came and went unseen are newer than all that the reader has seen, so they
  are new to it (`row_log.recovery`).

A scan holds one transaction until it ends; meanwhile the reader does not follow, so that the scan and the index stay at
one commit. What the writer deletes takes space until then.

Owned by the store's lock. Slots of dropped segments are free once no gather can still be in them (`row_log.pins`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from storage.errors import CorruptSegmentError
from storage.row_log.group_rows import GroupRows
from storage.row_log.parts import Parts
from storage.row_log.places import IDS, LIVE, NUMBER
from storage.row_log.recovery import LAST_EPOCH, open_log, replay_segments
from storage.row_log.segment import HEADER_BYTES, read_header_at
from storage.row_log.state import State


@dataclass(frozen=True, slots=True)
class _Changes:
    """Numbers of segments that are new, in the order of their commits, and of known ones that went."""

    new: list[int]
    gone: set[int]


class Reader:
    """See the module's docstring.

    Args:
        parts: of the store, whose log is open for reading; `refresh` may append to its groups.
        refresh: rereads the manifest, called before segments are replayed.

    Attributes:
        state: the last complete state seen.
        starts: how often everything was replayed, the first time included.
    """

    def __init__(self, parts: Parts, refresh: Callable[[], None]) -> None:
        self.state = State(0, 0, b"")
        self.starts = 0
        self._of = parts
        self._held = ExitStack()
        self._holds = 0  # scans that are going on
        self._refresh = refresh
        self._seen = -1  # transaction; -1 = the index is not what any transaction holds
        self._commit: int | None = None  # the last one taken in; None = the log keeps no records
        self._later: list[int] = []  # segments that no state covers yet

    @contextmanager
    def view(self, follow: bool = True) -> Iterator[None]:
        """Catch up, if that is wanted; rows may be read until the block ends."""
        with self._of.log.reading() as txn:
            if follow and not self._holds and self._of.log.transaction(txn) != self._seen:
                self._follow(txn)
            yield

    def hold(self) -> None:
        """Stay at one commit until `let_go` was called as often."""
        if not self._holds:
            with ExitStack() as held:
                txn = held.enter_context(self._of.log.reading())
                if self._of.log.transaction(txn) != self._seen:
                    self._follow(txn)
                self._held = held.pop_all()
        self._holds += 1

    def let_go(self) -> None:
        """See `hold`; nothing after `close`."""
        self._holds = max(0, self._holds - 1)
        if not self._holds:
            self._held.close()

    def close(self) -> None:
        """End what scans hold."""
        self._holds = 0
        self._held.close()

    def _follow(self, txn: Any) -> None:
        changes = self._changes(txn) if self._seen >= 0 else None
        self._seen = -1
        self.state = self._of.log.state(txn)
        if changes is None or not self._take_in(txn, changes):
            self._start_over(txn)
        self._commit = self._of.log.last_commit_number(txn)
        self._of.log.find_commits()
        self._seen = self._of.log.transaction(txn)

    def _start_over(self, txn: Any) -> None:
        self.starts += 1
        self._refresh()
        for group in self._of.groups:
            group.forget()
        self._later, _ = open_log(self._of.log, txn, self._of.groups, self._last_epoch, self._of.store, self._of.path)

    @property
    def _last_epoch(self) -> int:
        return self.state.epoch if self._of.to_state else LAST_EPOCH

    # ---- what changed

    def _changes(self, txn: Any) -> _Changes | None:
        """What happened since the last transaction that was seen; None if that cannot be told."""
        if self._commit is None:
            return self._compare(txn)
        records = self._of.log.commits_since(txn, self._commit)
        if records is None or any(record.went_back for record in records):
            return None
        came = [number for record in records for number in record.new]
        went = {number for record in records for number in record.deleted}
        seen = max((group.seen_epoch for group in self._of.groups), default=0)
        if any(number <= seen for number in went.intersection(came)):
            return None  # rows as of a state that was begun before what was seen: they may have been moved, unseen
        return _Changes([number for number in came if number not in went], went.difference(came))

    def _compare(self, txn: Any) -> _Changes:
        """The same from the numbers of all segments, for a log without records."""
        numbers = self._of.log.numbers(txn)
        later = np.array(self._later, np.int64)
        known = np.concatenate([later, *(group.segments.lines[:, NUMBER] for group in self._of.groups)])
        new, gone = np.setdiff1d(numbers, known), np.setdiff1d(known[known > 0], numbers)
        return _Changes(new.tolist(), set(gone.tolist()))

    # ---- taking it in

    def _take_in(self, txn: Any, changes: _Changes) -> bool:
        """Bring the index up to date; False if only starting over can do that."""
        new = [number for number in self._later if number not in changes.gone] + changes.new
        slots = self._slots_of(sorted(changes.gone.difference(self._later)))
        live = [(group, slot) for group, slot in slots if group.segments.lines[slot, LIVE]]
        if not self._have_whole_ids(live):
            return False
        if new:
            self._refresh()
        self._later = replay_segments(
            self._of.log, txn, self._of.groups, new, self._last_epoch, self._of.store, str(self._of.path)
        )
        if not self._have_whole_ids(live) or any(group.segments.lines[slot, LIVE] for group, slot in live):
            return False
        for group, slot in slots:
            group.segments.retire(slot)
            self._of.pins.retire(partial(group.segments.give_back, slot))
        known = sum(len(group.segments) for group in self._of.groups) + len(self._later)
        return known == self._of.log.segment_count(txn)

    def _slots_of(self, numbers: list[int]) -> list[tuple[GroupRows, int]]:
        """Where segments are; those that are unknown are left out."""
        if not numbers:
            return []
        found = (
            (group, np.flatnonzero(np.isin(group.segments.lines[:, NUMBER], numbers))) for group in self._of.groups
        )
        return [(group, slot) for group, slots in found for slot in slots.tolist()]

    def _have_whole_ids(self, slots: list[tuple[GroupRows, int]]) -> bool:
        """Whether the ids of segments that went are still in the pages that were theirs."""
        for group, slot in slots:
            line = group.segments.lines[slot]
            try:
                read_header_at(int(line[IDS]) - HEADER_BYTES, int(line[NUMBER]), str(self._of.path))
            except CorruptSegmentError:
                return False
        return True
