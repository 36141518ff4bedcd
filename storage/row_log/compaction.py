"""Compaction: segments of which little is live give their live rows to new segments, and go.

Which segments: `row_log.victims`. When: as soon as segments take more than
`max_space_ratio` times the live rows' bytes, less what a few commits need until the pages of dead segments are free
again. Rows are stored with 16 bytes of checksum and id at most, so narrow ones cannot keep to a ratio near 1: at least
half of what the ratio allows beyond 1 is always allowed beyond the stored bytes. How much: what brings space back under
that line; at most `_ROUND_BYTES` between two commits, so that puts go on; never more a second than
`compact_bytes_per_s`.

A moved row is readable in its new segment at once and keeps its epoch; `row_log.move` says how a put or a delete of the
same row wins. The old segment is not touched. It is deleted, by a commit, once the new one is committed and a complete
state no longer needs it, so a crash leaves the old segment or both, and both say the same.

Only segments that the last complete state covers are moved: then a moved segment never mixes rows from both sides of a
state, and what came after a state can still be dropped as whole segments.

Tombstones move along until nothing is left that they hide. That is looked up, in the ids of all segments, when there
is one tombstone for every `_ROWS_A_TOMBSTONE` rows.

A row whose bytes are damaged stays where it is, and its segment with it, so that the damage is found under its id.

Runs in the maintenance thread; takes the store's lock for a few thousand rows at a time. What it has moved waits until
a segment is full, and then for the next commit; it has one made (`row_log.committer`) when as many segments wait as
its memory allows for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage.errors import CorruptSegmentError, StorageError
from storage.row_log.committer import Committer
from storage.row_log.gather import SEGMENT_FULL
from storage.row_log.group_rows import GroupRows
from storage.row_log.hidden import Hidden, hidden_by
from storage.row_log.move import count_tombstones, move_rows, verify_rows
from storage.row_log.pages import ask_for
from storage.row_log.parts import Parts
from storage.row_log.places import COUNT, IDS, MAX_SLOTS, NUMBER, ROWS
from storage.row_log.victims import Victim, best_victims
from storage.row_log.write_buffer import WriteBuffer, buffer_bytes

Progress: TypeAlias = Callable[[int, int], None]

_BLOCK_ROWS = 1024  # moved under one hold of the lock
_ROUND_BYTES = 16 << 20
_LEAST_SEGMENTS = 8  # a store of fewer full segments is left alone
_GAPS = 0.04  # of the file lie between segments, too small for one
_ROWS_A_TOMBSTONE = 8
_LEAST_TOMBSTONES = 4096
_CHOSEN = 8  # victims at a time
_BREATH_S = 1e-4  # between two rounds, in which others get at the lock
_PAUSE_S = 0.05  # between two looks at a budget that is used up
_PATIENCE_S = 0.1  # with readers that keep committed buffers in memory


@dataclass(slots=True)
class FullCompaction:
    """A compaction of everything, for which somebody waits.

    Attributes:
        progress: is told bytes done and bytes in all.
        end_scans: ends scans that go on, under the lock.
        ended, cancelled: by the thread that compacts; by who has waited.
        error: what `progress` raised.
    """

    progress: Progress
    end_scans: Callable[[], None]
    ended: bool = False
    cancelled: bool = False
    error: Exception | None = None


class Compactor:
    """See the module's docstring.

    Args:
        parts: of the store.
        committer: gives numbers, and commits what is sealed.

    Attributes:
        holds: for which no row may move: scans that go on, all of which a verb that writes ends, and closing.
        rows_moved, bytes_moved: since the store was opened; stored bytes of the rows.
        slack_bytes: what the file takes beside segments that are needed, about; set by the writer.
    """

    def __init__(self, parts: Parts, committer: Committer) -> None:
        self.rows_moved = self.bytes_moved = self.slack_bytes = 0
        self.holds: set[object] = set()
        self._of = parts
        self._committer = committer
        self._damaged: set[tuple[int, int]] = set()  # group and number of segments that keep damaged rows
        self._reached: dict[tuple[int, int], int] = {}  # rows done of segments that were left half way
        self._allowance, self._since = 0.0, time.monotonic()
        self._swept = 0  # tombstones that the last sweep left
        self._sweep: Iterator[bool] | None = None  # the one that goes on

    # ---- when and what

    def is_due(self) -> bool:
        """Whether there is something to do by itself, now. Requires: the lock."""
        return self._of.config.compact_bytes_per_s != 0 and not self.holds and self._excess_bytes() > 0

    def _excess_bytes(self) -> int:
        """How much more space is needed by live segments than they should take. Requires: the lock."""
        used = allowed = 0
        ratio = self._of.config.max_space_ratio
        for group in self._of.groups:
            used += group.bytes_in_use()[1]
            of_row = max(ratio * group.row_bytes, (1 + ratio) / 2 * (group.stride + 8))
            allowed += int(of_row * group.index.rows)
        least = _LEAST_SEGMENTS * max([self._of.log.page_bytes, *(group.filled_bytes for group in self._of.groups)])
        slack = min(self.slack_bytes, allowed // 4) + int(_GAPS * allowed)
        return used - max(allowed - slack, least)

    def _is_far_behind(self, excess: int) -> bool:
        """Whether puts should rather wait than go on. Requires: the lock."""
        if self._of.config.compact_bytes_per_s is not None:
            return False
        live = sum(group.index.rows * group.row_bytes for group in self._of.groups)
        return excess > max([live // 50, *(group.filled_bytes for group in self._of.groups)])

    def _victims(self, epoch: int, most: int, *, every: bool = False) -> list[Victim]:
        """Segments worth moving, the best first. Requires: the lock."""
        return best_victims(self._of.groups, epoch, most, self._damaged, every=every)

    # ---- a round

    def run(self, epoch: int, wanted_elsewhere: Callable[[], bool]) -> float | None:
        """Bring space back within its bounds, as far as one round goes.

        Args:
            epoch: of the last complete state.
            wanted_elsewhere: whether a commit is waited for, under the lock.

        Returns:
            Seconds after which to come back, None if there is nothing left to do.
        """
        if self._of.config.compact_bytes_per_s == 0:
            return None
        self._sweep_if_due(epoch, wanted_elsewhere)
        begun = self.bytes_moved
        while self.bytes_moved - begun < _ROUND_BYTES:
            with self._of.lock:
                excess = self._excess_bytes()
                if excess <= 0 or self.holds:
                    return None
                if wanted_elsewhere() and not self._is_far_behind(excess):
                    return _BREATH_S
                victims = self._victims(epoch, _CHOSEN)
            if not victims:
                return None
            for victim in victims:
                if not self._afford():
                    return _PAUSE_S
                if self.holds:
                    return None
                self._move(victim)
        return _BREATH_S

    def run_all(self, epoch: int, work: FullCompaction) -> None:
        """Move everything that has dead rows, whatever the budget; `work` gets what its progress raises."""
        self._commit_moved()
        with self._of.lock:
            victims = self._victims(epoch, MAX_SLOTS, every=True)
            sizes = [victim.bytes for victim in victims]
        kept = self._hidden(victims)
        try:
            for at, victim in enumerate(victims):
                work.progress(sum(sizes[:at]), sum(sizes))
                if work.cancelled:
                    break
                self._move(victim, *kept[victim.group.group], end_scans=work.end_scans)
            else:
                work.progress(sum(sizes), sum(sizes))
        except StorageError:
            raise
        except Exception as error:  # of the caller's own
            work.error = error
        self._commit_moved()

    def _commit_moved(self) -> None:
        """Have no moved rows in memory."""
        with self._of.lock:
            for group in self._of.groups:
                group.seal_moving(self._of.store, self._committer.take_number)
        self._committer.commit()

    def _afford(self) -> bool:
        """Whether the bandwidth budget allows for another segment."""
        rate = self._of.config.compact_bytes_per_s
        if rate is None:
            return True
        now = time.monotonic()
        self._allowance = min(self._allowance + (now - self._since) * rate, float(rate))
        self._since = now
        return self._allowance > 0

    # ---- one segment

    def _move(
        self,
        victim: Victim,
        hashes: NDArray[np.uint64] | None = None,
        needed: NDArray[np.bool_] | None = None,
        *,
        end_scans: Callable[[], None] | None = None,
    ) -> None:
        """Move what a committed segment still has that is needed; sealed segments are left for the next commit.

        Args:
            hashes, needed: as `move_rows`; None = no tombstone is dropped.
            end_scans: ends scans that go on, under the lock; None = they go first.
        """
        damaged = self._verify(victim) if victim.is_there and victim.is_needed else None  # only this thread deletes
        if damaged is None:
            return
        hashes = np.zeros(0, np.uint64) if hashes is None else hashes
        needed = np.zeros(0, np.bool_) if needed is None else needed
        key = victim.group.group, victim.number
        at = self._reached.get(key, 0)
        while at < len(damaged):
            with self._of.lock:
                if end_scans is not None:
                    end_scans()
                if self.holds or not victim.is_there:
                    return
                at = self._reached[key] = self._move_block(victim, at, damaged, hashes, needed)
                sealed = sum(one.bytes for group in self._of.groups for one, _ in group.sealed if one.moved)
            full = sealed >= self._most_sealed(victim.group) * self._buffer_bytes(victim.group)
            self._of.lock.give_way()
            if full:
                self._committer.commit()
                with self._of.lock:  # for readers, who keep what was committed in memory
                    self._of.lock.wait_for(lambda: not self._of.pins.waiting, _PATIENCE_S)
        self._reached.pop(key, None)  # it was for a move that is cut short: no tombstone is moved, and counted, twice

    def forget(self) -> None:
        """Have segments that were left half way begun anew. Requires: the index is saved next, and nothing moves.

        Who opens the store does not know how far they were moved, and would take their tombstones off once more.
        """
        for group in self._of.groups:
            lines = group.segments.lines
            left = [number for of, number in self._reached if of == group.group]
            for slot in np.flatnonzero(np.isin(lines[:, NUMBER], left)):
                lines[slot, COUNT] = (lines[slot, COUNT] & 0xFFFFFFFF) | count_tombstones(lines, slot) << 32
        self._reached.clear()

    def start_over(self) -> None:
        """The store went back to a snapshot: nothing that was begun goes on."""
        self._reached.clear()
        self._sweep, self._swept = None, 0

    def _verify(self, victim: Victim) -> NDArray[np.bool_] | None:
        """Which rows of a segment are damaged, with all its pages read; None if its ids cannot be believed."""
        group, slot, lines = victim.group, victim.slot, victim.group.segments.lines
        rows = int(lines[slot, COUNT]) & 0xFFFFFFFF
        damaged = np.zeros(rows, np.bool_)
        begin, end = int(lines[slot, IDS]), int(lines[slot, ROWS]) + rows * group.stride
        ask_for(begin, end - begin)
        try:
            group.check_ids(slot)
        except CorruptSegmentError:
            self._damaged.add((group.group, victim.number))
            return None
        if verify_rows(lines, np.uint64(group.stride), slot, damaged):
            self._damaged.add((group.group, victim.number))
        return damaged

    def _move_block(
        self,
        victim: Victim,
        start: int,
        damaged: NDArray[np.bool_],
        hashes: NDArray[np.uint64],
        needed: NDArray[np.bool_],
    ) -> int:
        group, slot = victim.group, victim.slot
        buffer = group.moving or self._open(group)
        lines = group.segments.lines
        before = int(lines[buffer.slot, COUNT]) & 0xFFFFFFFF
        stop = min(start + _BLOCK_ROWS, len(damaged))
        at, status = move_rows(
            group.index.table,
            group.index.shift,
            lines,
            np.uint64(group.stride),
            slot,
            start,
            stop,
            damaged,
            buffer.slot,
            buffer.capacity,
            buffer.epochs,
            hashes,
            needed,
        )
        moved = (int(lines[buffer.slot, COUNT]) & 0xFFFFFFFF) - before
        if moved:
            group.moved_from.add(slot)
        self.rows_moved += moved
        self.bytes_moved += moved * group.stride
        self._allowance -= moved * group.stride
        if status == SEGMENT_FULL or at == len(damaged):
            self._seal_full(group, buffer)
        return int(at)

    def _seal_full(self, group: GroupRows, buffer: WriteBuffer) -> None:
        if int(group.segments.lines[buffer.slot, COUNT]) & 0xFFFFFFFF == buffer.capacity:
            group.seal_moving(self._of.store, self._committer.take_number)

    def _open(self, group: GroupRows) -> WriteBuffer:
        """Begin a segment for moved rows; that of another group is finished as it is, so that one at a time is open."""
        for other in self._of.groups:
            other.seal_moving(self._of.store, self._committer.take_number)
        group.moving = WriteBuffer(group.row_bytes, group.filled_bytes, self._of.log.page_bytes, moved=True)
        group.buffered_bytes += group.moving.bytes
        group.moving.begin(group.segments, self._committer.take_number())
        return group.moving

    def _most_sealed(self, group: GroupRows) -> int:
        """Segments of moved rows that may wait for a commit."""
        return max(1, self._of.config.write_buffer_bytes // 4 // self._buffer_bytes(group))

    def memory_bytes(self) -> int:
        """The most host memory that compaction takes by itself, with LMDB's copy of what is being committed."""
        if self._of.config.compact_bytes_per_s == 0:
            return 0
        return max(((1 + 2 * self._most_sealed(g)) * self._buffer_bytes(g) for g in self._of.groups), default=0)

    def _buffer_bytes(self, group: GroupRows) -> int:
        return buffer_bytes(group.filled_bytes, group.row_bytes, self._of.log.page_bytes, moved=True)

    # ---- tombstones

    def _sweep_if_due(self, epoch: int, wanted_elsewhere: Callable[[], bool]) -> None:
        """Go on with a sweep, or begin one if tombstones have become many: until somebody waits, within the budget."""
        with self._of.lock:
            rows = sum(group.index.rows for group in self._of.groups)
            due = self._tombstones() > max(rows // _ROWS_A_TOMBSTONE, 2 * self._swept, _LEAST_TOMBSTONES)
            if self.holds or not (due or self._sweep):
                return
        self._sweep = self._sweep or self._sweeping(epoch)
        while self._afford():
            if not next(self._sweep, False):
                self._sweep = None
                return
            with self._of.lock:
                if wanted_elsewhere():
                    return

    def _sweeping(self, epoch: int) -> Iterator[bool]:
        """Drop all tombstones that hide nothing any more; True after each segment."""
        with self._of.lock:
            every = self._victims(epoch, MAX_SLOTS, every=True)
            left = [victim for victim in every if victim.has_tombstones]
        while left:
            some, left = left[:_CHOSEN], left[_CHOSEN:]
            self._commit_moved()
            with self._of.lock:
                some = [victim for victim in some if victim.is_there and victim.has_tombstones]
            kept = self._hidden(some)
            for victim in some:
                self._move(victim, *kept[victim.group.group])
                yield True
        with self._of.lock:
            self._swept = self._tombstones()

    def _tombstones(self) -> int:
        return sum(int((group.segments.lines[:, COUNT] >> 32).sum()) for group in self._of.groups)

    def _hidden(self, victims: list[Victim]) -> dict[int, Hidden]:
        """By number of the group, what the tombstones of these segments hide."""
        slots: dict[int, list[int]] = {group.group: [] for group in self._of.groups}
        for victim in victims:
            slots[victim.group.group].append(victim.slot)
        return {group.group: hidden_by(group, slots[group.group]) for group in self._of.groups}
