"""Writer: when rows become durable - group commit, complete states, deletion of dead segments.

The order that keeps every promise (design, section 4): new segments are committed, then their addresses published,
and segments that were dead at a flush are deleted in a later commit. A state therefore never lacks a segment, and
whatever transaction was the last one that reached the disk, opening finds that state.

After StoreFullError everything stays in memory and the next commit tries again. After any other failure the disk
cannot be believed: the writer keeps the error and refuses every later write until the store is reopened.

Numbers: segments are numbered as they are opened, one counter a store. A row's epoch is the number of the segment it
was first written in, so epochs order all changes of a store; a state's epoch is the last number given out.

Owned by the store's lock.
"""

from __future__ import annotations

from dataclasses import replace

from storage.errors import StorageError, StoreFullError, StoreIOError
from storage.row_log.config import StoreConfig
from storage.row_log.group_rows import GroupRows
from storage.row_log.log import Commit, RowLog
from storage.row_log.places import NUMBER
from storage.row_log.recovery import LAST_EPOCH, replay_log
from storage.row_log.segment import read_header
from storage.row_log.state import State
from storage.row_log.write_buffer import WriteBuffer, buffer_bytes, rows_that_fit


class Writer:
    """See the module's docstring.

    Args:
        log: the store's log, open for writing.
        groups: the store's groups; the store appends to this list.
        config: sizes.
        store: uuid, 16 bytes.
        where: the store's path, for messages.

    Attributes:
        state: the last complete state.
        commits, bytes_written: since the store was opened.
    """

    def __init__(self, log: RowLog, groups: list[GroupRows], config: StoreConfig, store: bytes, where: str) -> None:
        self.commits = 0
        self.bytes_written = 0
        self._log = log
        self._groups = groups
        self._config = config
        self._store = store
        self._where = where
        self._dead: list[tuple[GroupRows, int]] = []
        self._failure: StorageError | None = None
        with log.reading() as txn:
            self.state = log.state(txn)
            numbers = log.numbers(txn)
        self._next_number = max([self.state.epoch, *numbers[-1:].tolist()]) + 1
        self._uncovered = False  # segments were committed that no state covers

    def recover(self, to_state: bool) -> None:
        """Fill the groups' indexes; with `to_state`, discard what came after the last complete state."""
        with self._log.reading() as txn:
            last = self.state.epoch if to_state else LAST_EPOCH
            later = replay_log(self._log, txn, self._groups, last, self._store, self._where)
            numbers = self._log.numbers(txn)
        if later:  # the state covers their numbers from now on, so that no segment gets one of them again
            self.state = replace(self.state, epoch=self._next_number - 1)
            self._log.commit(Commit(deletes=tuple(later), state=self.state))
        self._uncovered = not to_state and bool((numbers > self.state.epoch).any())

    def open_buffer(self, group: GroupRows) -> WriteBuffer:
        """The segment of a group that takes the next row; commits first if the write buffer is full.

        Raises:
            StoreFullError, StoreIOError: as `commit`; every row appended so far is still there.
        """
        if group.open is not None and not group.open_is_full:
            return group.open
        self._check()
        group.seal(self._store)
        group.open = self._buffer_for(group)
        group.open.begin(group.segments, self._next_number)
        self._next_number += 1
        return group.open

    def _buffer_for(self, group: GroupRows) -> WriteBuffer:
        """A buffer, within the limit: a spare one, a new one, or one that a commit sets free."""
        size, limit = self._buffer_bytes(group), self._config.write_buffer_bytes // 2
        held = sum(g.buffered_bytes for g in self._groups)
        if not group.spare and held + size > limit:
            if any(g.sealed for g in self._groups):
                self.commit()
            for other in self._groups:
                if other is not group:
                    other.spare.clear()
        if group.spare:
            return group.spare.pop()
        return WriteBuffer(group.row_bytes, self._config.filled_bytes, self._log.page_bytes)

    def flush(self, note: bytes | None) -> None:
        """Commit all rows as a complete state; nothing is written if nothing changed. Raises as `commit`."""
        self._check()
        kept = self.state.note if note is None else bytes(note)
        if not self._uncovered and not self.unwritten and kept == self.state.note:
            return
        state = State(self.state.number + 1, self._next_number - 1, kept)
        for group in self._groups:
            group.seal(self._store)
        self.commit(state)
        self.state = state
        self._dead = [(group, slot) for group in self._groups for slot in group.dead_slots()]

    def close(self) -> None:
        """Flush, unless the writer has failed; then say so if rows are lost by that. Raises as `commit`."""
        if self._failure is None or self.unwritten:
            self.flush(None)

    def commit(self, state: State | None = None) -> None:
        """Make all sealed segments durable, then publish where they are.

        Raises:
            StoreFullError: no room; call again once there is.
            StoreIOError, CorruptSegmentError: the writer writes no more.
        """
        self._check()
        sealed = [(group, *one) for group in self._groups for one in group.sealed]
        segments = tuple((buffer.number, image) for _, buffer, image in sealed)
        deletes = tuple(int(group.segments.lines[slot, NUMBER]) for group, slot in self._dead)
        try:
            self._log.commit(Commit(segments, deletes, state))
            self._publish([(group, buffer) for group, buffer, _ in sealed])
        except StoreFullError:
            raise
        except StorageError as error:
            self._failure = error
            raise
        for group, slot in self._dead:
            group.segments.give_back(slot)
        self._dead = []
        self._uncovered = state is None and (self._uncovered or len(sealed) > 0)
        self.commits += 1
        self.bytes_written += sum(len(image) for _, image in segments)

    def _publish(self, sealed: list[tuple[GroupRows, WriteBuffer]]) -> None:
        """Point committed segments into the memory map and let their buffers go."""
        with self._log.reading() as txn:
            for group, buffer in sealed:
                segment = self._log.segment(txn, buffer.number)
                header = read_header(segment, buffer.number, self._where)
                group.adopt(header, segment.ctypes.data, buffer.slot)
        for group in self._groups:
            group.spare += [buffer for buffer, _ in group.sealed]
            group.sealed.clear()

    def _check(self) -> None:
        if self._failure is not None:
            raise StoreIOError(
                f"{self._where} failed before ({self._failure}); what was committed until then is on disk: "
                "close the store, reopen it and put the rows again"
            ) from self._failure

    @property
    def unwritten(self) -> bool:
        """Whether rows exist that no commit has made durable."""
        return any(group.sealed or group.open_rows for group in self._groups)

    def memory_after(self, inserts: int) -> int:
        """As `Store.memory_after`."""
        fixed = sum(g.index.memory_bytes + g.index.jump_bytes(inserts) for g in self._groups) + 16 * inserts
        lines = sum(g.segments.memory_after(self._segments_for(g, inserts)) for g in self._groups)
        one_each = sum(self._buffer_bytes(group) for group in self._groups)
        return fixed + lines + 2 * max(one_each, self._config.write_buffer_bytes // 2)

    def _segments_for(self, group: GroupRows, rows: int) -> int:
        return -(-rows // rows_that_fit(self._config.filled_bytes, group.row_bytes)) + 1

    def _buffer_bytes(self, group: GroupRows) -> int:
        return buffer_bytes(self._config.filled_bytes, group.row_bytes, self._log.page_bytes)
