"""Victims of compaction: which segments to move, the best first.

Those with the best ratio of what they give back to what they cost, older ones first (the cost-benefit rule of Rosenblum
and Ousterhout, "The design and implementation of a log-structured file system", SOSP '91): with `u` the share of a
segment that is needed, (1 - u) * age / (1 + u). Of every segment of the store that is one pass (`row_log.space`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.row_log.group_rows import GroupRows
from storage.row_log.places import COUNT, LIVE, NUMBER
from storage.row_log.space import candidates, marked


@dataclass(frozen=True, slots=True)
class Victim:
    """A segment to be moved; its slot may be another's by the time its turn comes."""

    group: GroupRows
    slot: int
    number: int

    @property
    def is_there(self) -> bool:
        """Whether the segment still has this slot. Requires: the lock, or the thread that deletes segments."""
        return int(self.group.segments.lines[self.slot, NUMBER]) == self.number

    @property
    def has_tombstones(self) -> bool:
        """Whether tombstones of it are still needed. Requires: the lock."""
        return bool(self.group.segments.lines[self.slot, COUNT] >> 32)

    @property
    def is_needed(self) -> bool:
        """Whether it still has what must be moved: since it was chosen it may have been moved for another reason."""
        line = self.group.segments.lines[self.slot]
        return int(line[LIVE]) > 0 or int(line[COUNT]) >> 32 > 0

    @property
    def bytes(self) -> int:
        """About how many bytes it takes."""
        return self.group.bytes_of([self.slot])


def best_victims(
    groups: Sequence[GroupRows], epoch: int, most: int, damaged: Collection[tuple[int, int]], *, every: bool = False
) -> list[Victim]:
    """Segments worth moving, the best first; those of the group that has a segment of moved rows open come first.

    Args:
        epoch: of the last complete state, which covers them.
        most: of them.
        damaged: group and number of segments that stay.
        every: all that anything can be dropped from, however little.
    """
    if not groups:
        return []
    slots, scores = zip(*(_scores(group, epoch, every, damaged) for group in groups), strict=True)
    owners = np.repeat(np.arange(len(slots)), [len(some) for some in slots])
    best = _greatest(np.concatenate(scores), most)
    found = [(groups[owners[at]], int(np.concatenate(slots)[at])) for at in best]
    victims = [Victim(group, slot, int(group.segments.lines[slot, NUMBER])) for group, slot in found]
    return sorted(victims, key=lambda one: (one.group.moving is None, one.group.group))  # one segment is open


def _scores(
    group: GroupRows, epoch: int, every: bool, damaged: Collection[tuple[int, int]]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Slots of a group's segments that may be moved, and what that is worth."""
    lines = group.segments.lines
    kept = marked(lines, group.slots_in_memory() | group.dying)
    if damaged:
        kept |= np.isin(lines[:, NUMBER], [number for of, number in damaged if of == group.group])
    slots, scores = np.empty(len(lines), np.int64), np.empty(len(lines), np.float64)
    count = candidates(lines, kept, epoch, every, slots, scores)
    return slots[:count], scores[:count]


def _greatest(scores: NDArray[np.float64], most: int) -> NDArray[np.intp]:
    """Positions of the greatest scores, `most` of them, greatest first; equal ones in order."""
    few = np.argpartition(-scores, most - 1)[:most] if most < len(scores) else np.arange(len(scores))
    return few[np.lexsort((few, -scores[few]))]
