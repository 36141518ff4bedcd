"""The values that travel the road of one batch: ids, what is decided about them, and rows on the move.

All state of a batch is on its :class:`Plan`; there are no parallel lists and no "last batch" attribute anywhere. The
values know nothing of tiers: :mod:`tiered_emb.group` fills and reads them.

Shapes: N ids, U unique ids (of all tables of a group together), B bags, M missing rows, V victims, D dimension,
F features.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tiered_emb.config import Mode
from tiered_emb.errors import InvalidBatchError

Ids = NDArray[np.int64]
TableNumbers = NDArray[np.uint32]
Slots = NDArray[np.int32]
Rows = NDArray[np.float32]
Steps = NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class JaggedIds:
    """Bags of ids of several features, concatenated feature by feature: the collection's input.

    Attributes:
        features: F names.
        ids: (N,) integer ids; feature 0's bags first.
        offsets: (F * B + 1,) int64; bag b of feature f holds ``ids[offsets[f * B + b]:offsets[f * B + b + 1]]``.
        weights: (N,) float32, one weight an id, or None.
    """

    features: tuple[str, ...]
    ids: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None = None

    @classmethod
    def from_dict(cls, features: Mapping[str, Sequence[torch.Tensor]]) -> JaggedIds:
        """Build from ``{feature: (ids, lengths)}`` or ``{feature: (ids, lengths, weights)}``; all of one batch size."""
        if not features:
            raise InvalidBatchError("no features were given; expected {feature: (ids, lengths)}")
        parts = list(features.values())
        if len({len(part) for part in parts}) != 1 or len(parts[0]) not in (2, 3):
            raise InvalidBatchError("every feature needs (ids, lengths), or every feature (ids, lengths, weights)")
        lengths = _lengths(features)
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        weights = torch.cat([part[2] for part in parts]) if len(parts[0]) == 3 else None
        return cls(tuple(features), torch.cat([part[0].to(torch.int64) for part in parts]), offsets, weights)

    @property
    def batch_size(self) -> int:
        """B: bags a feature."""
        return (self.offsets.numel() - 1) // len(self.features)


def _lengths(features: Mapping[str, Sequence[torch.Tensor]]) -> torch.Tensor:
    """All lengths feature by feature; each feature's checked against its ids and the first feature's batch size."""
    for name, part in features.items():
        _check_part(name, part)
    first, batch_size = next(iter(features)), len(next(iter(features.values()))[1])
    for name, part in features.items():
        ids, lengths = part[0], part[1]
        if len(lengths) != batch_size:
            raise InvalidBatchError(f"feature {name!r} has {len(lengths)} bags, feature {first!r} has {batch_size}")
        if len(lengths) and int(lengths.min()) < 0:
            raise InvalidBatchError(f"feature {name!r}: bag {int(lengths.argmin())} has length {int(lengths.min())}")
        if int(lengths.sum()) != ids.numel():
            raise InvalidBatchError(
                f"feature {name!r}: lengths add up to {int(lengths.sum())}, but {ids.numel()} ids came"
            )
    return torch.cat([part[1].to(torch.int64) for part in features.values()])


def _check_part(name: str, part: Sequence[torch.Tensor]) -> None:
    """Raise InvalidBatchError unless a feature is flat tensors, integers but for the weights, which are as many as the
    ids."""
    for what, values in zip(("ids", "lengths", "weights"), part, strict=False):
        whole = what != "weights"
        if not isinstance(values, torch.Tensor) or (whole and values.dtype not in (torch.int64, torch.int32)):
            seen = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
            raise InvalidBatchError(
                f"feature {name!r}: {what} are {seen}; expected {'an int64 or int32' if whole else 'a float32'} tensor"
            )
        if values.ndim != 1:
            raise InvalidBatchError(f"feature {name!r}: {what} have shape {tuple(values.shape)}, not one dimension")
    if len(part) == 3 and len(part[2]) != len(part[0]):
        raise InvalidBatchError(f"feature {name!r} has {len(part[0])} ids and {len(part[2])} weights")


@dataclass(slots=True, eq=False)
class Bags:
    """How the N ids of a forward fall into B bags.

    Attributes:
        offsets: (B + 1,) int64.
        weights: (N,) float32 per-sample weights, or None.
        mode: how a bag's rows become one.
        copied: every bag holds one id and gets a copy of its row, as ``nn.Embedding`` gives it. (A pooled sum starts
            from 0.0, as torch's does, which turns -0.0 into 0.0.)
    """

    offsets: torch.Tensor
    weights: torch.Tensor | None
    mode: Mode
    copied: bool = False

    @property
    def num_bags(self) -> int:
        """B."""
        return self.offsets.numel() - 1


@dataclass(frozen=True, slots=True, eq=False)
class BatchArrays:
    """Memory for one batch at a time of up to N ids, used again once its rows were updated.

    Attributes:
        ids, tables, counts, inverse, slots: (N,) each, for the arrays of an :class:`IdBatch` and of its plan.
    """

    ids: Ids
    tables: TableNumbers
    counts: NDArray[np.int32]
    inverse: NDArray[np.int32]
    slots: Slots

    @classmethod
    def empty(cls, n: int) -> BatchArrays:
        """For n ids, contents undefined."""
        small = [np.empty(n, np.int32) for _ in range(3)]
        return cls(np.empty(n, np.int64), np.empty(n, np.uint32), *small)


@dataclass(slots=True, eq=False)
class IdBatch:
    """The ids of one forward in one group, each (table, id) once, in order of first appearance.

    Attributes:
        tables: (U,) uint32 table numbers.
        ids: (U,) int64.
        counts: (U,) int32, how often each was asked for.
        inverse: (N,) int32: position p of the forward asks for unique id ``inverse[p]``.
        bags: how the N positions are pooled.
        arrays: the memory that all of them lie in.
    """

    tables: TableNumbers
    ids: Ids
    counts: NDArray[np.int32]
    inverse: torch.Tensor
    bags: Bags
    arrays: BatchArrays


@dataclass(slots=True, eq=False)
class Victims:
    """Rows that leave a tier in a plan.

    Attributes:
        slots: (V,) int32 in the tier they leave; oldest first.
        tables: (V,) uint32.
        ids: (V,) int64.
        dirty: (V,) bool: differs from the Store's row.
        stored: (V,) bool: the Store has it, in whatever version.
        unsaved: (V,) bool: as `Tier.unsaved`.
        steps: (V,) uint32: as `Tier.steps_of`.
        lower_slots: (V,) int32 where they go in the tier below; -1 = past it, to the Store.
    """

    slots: Slots
    tables: TableNumbers
    ids: Ids
    dirty: NDArray[np.bool_]
    stored: NDArray[np.bool_]
    unsaved: NDArray[np.bool_]
    steps: Steps
    lower_slots: Slots

    def part(self, which: NDArray[np.bool_] | NDArray[np.intp] | slice) -> Victims:
        """Some of them."""
        return Victims(
            self.slots[which],
            self.tables[which],
            self.ids[which],
            self.dirty[which],
            self.stored[which],
            self.unsaved[which],
            self.steps[which],
            self.lower_slots[which],
        )

    @classmethod
    def none(cls) -> Victims:
        """No row leaves."""
        none, slots, numbers = np.empty(0, np.bool_), np.empty(0, np.int32), np.empty(0, np.uint32)
        return cls(slots, numbers, np.empty(0, np.int64), none, none, none, numbers, slots)


class Mark:
    """A place in an :class:`UnpinQueue`.

    Attributes:
        passed: all that was posted before it is unpinned.
    """

    passed = False


class UnpinQueue(deque["tuple[Slots, BatchArrays | None] | Mark"]):
    """Slots of plans that are over, with arrays to be used again, until the next plan is made.

    Attributes:
        over: the tiers were cleared since: what the pins that post here have pinned is not there any more.
    """

    over = False


class Pin:
    """The pins of one plan, so that they end with it whatever becomes of it.

    A plan that is dropped (its output was never used, an exception) posts its slots to ``unpinned``, which the planner
    empties before the next plan: dropping may happen in any thread and at any moment, a Directory is one thread's.
    """

    __slots__ = ("_released", "_unpinned", "slots")

    def __init__(self, slots: Slots, unpinned: UnpinQueue) -> None:
        self.slots = slots
        self._released = False
        self._unpinned = unpinned

    @property
    def released(self) -> bool:
        """The slots may hold other rows, or none."""
        return self._released or self._unpinned.over

    def release(self, spare: BatchArrays | None) -> None:
        """Post the slots, and arrays that nobody needs any more; once."""
        if not self._released:
            self._released = True
            self._unpinned.append((self.slots, spare))

    def __del__(self) -> None:
        self.release(None)


@dataclass(slots=True, eq=False)
class Plan:
    """What is decided about one batch before any row moves.

    Attributes:
        number: of the forward that uses it, counted upwards; until then, of the plan.
        batch: the ids.
        slots: (U,) int32 top-tier slot of each unique id, pinned until release.
        missing: (M,) int32 positions in ``batch.ids`` that are not in the top tier yet; the H that lie in the lower
            tier come first.
        lower_from: (H,) int32 lower-tier slots they come from.
        victims: rows that leave the top tier.
        lower_victims: rows that leave the lower tier.
        arg: (B, D) int32, the positions that won max bags; set by the lookup.
        pin: holds the slots; released with the plan, or when the plan is dropped.
    """

    number: int
    batch: IdBatch
    slots: Slots
    missing: Slots
    lower_from: Slots
    victims: Victims = field(default_factory=Victims.none)
    lower_victims: Victims = field(default_factory=Victims.none)
    arg: torch.Tensor | None = None
    pin: Pin | None = None

    @property
    def released(self) -> bool:
        """The pins are gone; the slots may hold other rows."""
        return self.pin is None or self.pin.released
