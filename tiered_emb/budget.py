"""HostBudget: keeps what the groups of one engine hold in host memory within ``ddr_bytes``.

Charged are, as upper bounds: the slab and Directory of every DDR tier, the Directory and staging of every HBM tier, the
buffers that rows move through, and the Store's index and buffers. Before a batch is planned, the budget adds what the
batch will move and what the Store's index may grow by; if the sum does not fit, DDR tiers are lowered until it does,
and rows without room leave for the Store. Tiers are never raised again: what grew once will be needed again.

A slot above the new capacity must not be pinned. A tier that batches are worked on in can therefore be lowered only
between steps; so while nothing is pinned the budget asks for more than the batch needs (``_CALM``), and further
forwards of the same step find room. Groups share by the bytes of one row of each of their tables.

Owned by the thread that plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from storage.schema import RowSchema
from tiered_emb.cache import room
from tiered_emb.errors import TierCapacityError
from tiered_emb.group import TableGroup
from tiered_emb.inputs import listed
from tiered_emb.moves import move_bytes
from tiered_emb.plan import IdBatch
from tiered_emb.shares import Shares
from tiered_emb.stores import BUFFER_SHARE
from tiered_emb.tier import Tier


@dataclass(frozen=True, slots=True)
class Coming:
    """A batch that is about to be planned: how many rows it has, how many of them are missing in the top tier, for how
    many there must be slots that others have no pin on (0 = the plan will see), and how many floors would keep."""

    group: TableGroup
    missing: int
    unique: int
    unpinned: int = 0
    floored: int = 0

    @classmethod
    def of(cls, group: TableGroup, batch: IdBatch) -> Coming:
        """A batch of a group, as things are."""
        floored = room.floors_in(group.top.directory, batch.tables)
        return cls(group, group.count_missing(batch), len(batch.ids), group.count_unpinned(batch), floored)


@dataclass(frozen=True, slots=True)
class _Demand:
    """What batches will need: rows to move at once, by group number, and rows the Store may take for the first time."""

    moving: dict[int, int]
    inserts: int

    @classmethod
    def of(cls, batches: Sequence[Coming], times: tuple[int, int] = (1, 1), unstored: int | None = None) -> _Demand:
        """Of batches planned one after the other, each factor times over.

        Only rows that the Store has not got can be new to it: what leaves a tier for these batches is among the
        `unstored` ones there are (None = not known), what leaves for later ones also among those that come new.
        """
        moving: dict[int, int] = {}
        for batch in batches:
            moving[batch.group.number] = max(moving.get(batch.group.number, 0), times[0] * batch.missing)
        inserts = times[1] * sum(batch.missing for batch in batches)
        if unstored is not None:
            groups = {batch.group.number: batch.group for batch in batches}.values()
            inserts = min(inserts, unstored + (times[1] - 1) * sum(group.cold.lately for group in groups))
        return cls(moving, inserts)


_NOTHING = _Demand({}, 0)
_CALM = 2, 4  # a step's later forwards may move twice, and store four times, what the first one does
_AMPLE = 2, 16  # what a shrink makes room for, so that the next one is far off


class HostBudget:
    """See the module's essay.

    Args:
        limit_bytes, shares: the budget, and how groups share it.
        store_bytes: what the Store will hold once so many rows more were put.
        stored_rows: how many it has.
        buffer_bytes: of what it holds, how much grows with the budget, by `BUFFER_SHARE` of what that grows by.

    Attributes:
        limit_bytes: the budget; 0 = no DDR tier, nothing is charged.
        peak_bytes: the most that was ever charged.
        settled: room has been made for all batches of a forward; none of their plans may ask for more, which would push
            out what the next one counts on.
    """

    def __init__(
        self,
        limit_bytes: int,
        shares: Shares,
        store_bytes: Callable[[int], int],
        stored_rows: Callable[[], int],
        buffer_bytes: int,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self.settled = False
        self._shares = shares
        self._kind = shares.kinds[shares.lowest]
        self._store_bytes = store_bytes
        self._buffer_bytes = buffer_bytes
        self._stored_rows, self._stored_before = stored_rows, stored_rows()
        self._groups: list[TableGroup] = []
        self._widest: dict[int, int] = {}  # by group number, the most distinct rows of one forward so far

    def join(self, group: TableGroup) -> None:
        """Charge this group too, and be asked before each of its plans."""
        self._groups.append(group)
        group.make_room = lambda missing, unique, floored: self.make_room(
            [Coming(group, missing, unique, floored=floored)]
        )

    def forget(self) -> None:
        """The Store has gone back to a state of before, and the tiers are empty."""
        self._stored_before = self._stored_rows()

    def charge_only(self, groups: Iterable[TableGroup]) -> None:
        """Let go of all other groups, which nobody will use."""
        self._groups = list(groups)

    def charged_bytes(self) -> int:
        """What is charged now."""
        return self._charged(_NOTHING)

    def rows_for(self, schema: RowSchema, other_bytes: int, share: float) -> int:
        """Capacity of a new DDR tier that gets ``share`` of what is left beside ``other_bytes``; an error if that does
        not do."""
        fixed = self.charged_bytes() + other_bytes
        part = int((self.limit_bytes - fixed - self.limit_bytes // 32) * share)
        row_bytes = self._shares.row_bytes(schema, "ddr")
        moving = min(move_bytes(part), part // 9) + row_bytes  # the buffer: at most an eighth of the tier
        rows = self._kind.capacity_for(max(0, part - moving), row_bytes)
        if rows < self._shares.least_rows(schema):
            raise self._none_fits(
                [schema], self._enough(fixed, self._least_part(schema) / share, len(self._groups) + 1)
            )
        return rows

    def check_new(self, schemas: Sequence[RowSchema], other_bytes: int) -> None:
        """Raise TierCapacityError unless new DDR tiers of these rows, and those there are, will have what floors keep
        and a row each beside ``other_bytes``."""
        least = max((self._least_part(schema) / self._shares.part(schema) for schema in schemas), default=0)
        fixed = self._beside_tiers(_NOTHING) + other_bytes
        if schemas and fixed + least > self.limit_bytes - self.limit_bytes // 32:
            raise self._none_fits(schemas, self._enough(fixed, least, len(self._groups) + len(schemas)))
        for group in self._groups:
            self._check_floors(group, fixed)

    def _check_floors(self, group: TableGroup, fixed_bytes: int) -> None:
        """Raise TierCapacityError if a tier does not hold its floors any more; it may be lowered, never raised."""
        schema, share = group.schema, self._shares.part(group.schema)
        least = self._shares.least_rows(schema)
        part = int((self.limit_bytes - fixed_bytes - self.limit_bytes // 32) * share)
        row_bytes = self._shares.row_bytes(schema, "ddr")
        rows = min(group.tiers[-1].capacity_rows, self._kind.capacity_for(max(0, part), row_bytes))
        if rows < least and self._shares.floors(schema):
            tier_bytes = self._tier_bytes(least, schema) / share
            enough = self._more(fixed_bytes, tier_bytes)
            raise TierCapacityError(
                f"min_rows of {listed(list(self._shares.floors(schema)))} are {least - 1} rows together, others need "
                f"one, but ddr_bytes is {self.limit_bytes}, in which {rows} rows of {row_bytes} bytes have "
                f"room: lower them, or close the modules of this store and use at least {enough} bytes"
            )

    def _least_part(self, schema: RowSchema) -> int:
        """What the smallest DDR tier of such rows needs, and the buffer beside it."""
        rows = self._shares.least_rows(schema)
        return (self._tier_bytes(rows, schema) + self._shares.row_bytes(schema, "ddr")) * 9 // 8 + 9

    def _none_fits(self, schemas: Sequence[RowSchema], enough: int) -> TierCapacityError:
        names = [name for schema in schemas for name in self._shares.floors(schema)]
        what = f"the min_rows of {listed(names)} and a row of each kind" if names else "a row of each kind"
        return TierCapacityError(
            f"ddr_bytes is {self.limit_bytes}, which does not leave room for {what} beside the bookkeeping "
            f"and the store's buffers; use at least {enough} bytes, or 0 for no DDR tier"
        )

    def _enough(self, fixed_bytes: int, tiers_bytes: float, groups: int) -> int:
        """A budget that suffices for tiers of ``tiers_bytes`` beside ``fixed_bytes``, as large as the Store's index is.

        What is fixed grows with the budget: a Store's buffers in proportion, unless they are as small or as large as
        they get, the buffers of moving rows by up to an eighth of the tiers; and a part is kept back from every new
        tier.
        """
        needed, part = fixed_bytes + tiers_bytes * 9 / 8, 15 / 16 - groups / 32
        as_large = needed / max(1 / 4, part)
        growing = (needed - self._buffer_bytes) / max(1 / 4, part - BUFFER_SHARE) if self._buffer_bytes else 0
        return int(max(as_large, growing)) + 1

    def _more(self, fixed_bytes: int, tiers_bytes: float) -> int:
        """What `_enough` says for the groups there are, and an eighth more than now at least: the next batches need
        more as the index grows, and whoever starts again does not want to do that many times."""
        return max(self._enough(fixed_bytes, tiers_bytes, len(self._groups)), self.limit_bytes * 9 // 8)

    def bytes_for(self, group: TableGroup, rows: int) -> int:
        """A budget that suffices for a batch that needs so many slots of a group's DDR tier."""
        fixed = self._beside_tiers(_Demand({group.number: rows}, rows))
        tier = self._tier_bytes(rows, group.schema) / self._shares.part(group.schema)
        return self._more(fixed, tier)

    def lower_for_new(self) -> None:
        """Lower the DDR tiers to their shares of what tiers may take; the rest is for new groups."""
        for group in self._groups:
            self._lower(group, int((self._room(_NOTHING) - self.limit_bytes // 32) * self._shares.part(group.schema)))

    def make_room(self, batches: Sequence[Coming]) -> bool:
        """Fit batches that will be planned one after the other into the budget; whether a tier was lowered.

        Lowering a tier may push out rows of the batches: count again what is missing and ask again.
        Raises TierCapacityError, with nothing changed, if the budget is too small for them.
        """
        if not self.limit_bytes:
            return False
        self._remember_widest(batches)
        need = _Demand.of(batches)
        if any(self._too_narrow(group, batches) for group in self._groups):
            raise self._too_small(batches)
        calm = not self.settled and not any(_pinned(one) for one in self._groups)
        wish = _Demand.of(batches, _CALM) if calm else need
        if self._charged(wish) <= self.limit_bytes:
            self._note(need)
            return False
        unstored = self._unstored_rows()  # takes a moment, so only here
        need = _Demand.of(batches, unstored=unstored)
        if self._charged(_Demand.of(batches, _CALM, unstored) if calm else need) <= self.limit_bytes:
            self._note(need)
            return False
        least = {group.number: self._least(group, batches) for group in self._groups}
        usual = {group.number: max(least[group.number], self._usual(group)) for group in self._groups}
        ample = _Demand.of(batches, _AMPLE, unstored)
        if calm and self._room(ample) >= sum(usual.values()) and self._share(ample, usual):
            return True
        if self._charged(need) <= self.limit_bytes:
            self._note(need)
            return False
        keeps = usual if sum(usual.values()) <= self._room(need) else least
        if sum(keeps.values()) > self._room(need) or not self._share(need, keeps):
            raise self._too_small(batches)
        return True

    def _unstored_rows(self) -> int:
        """The most rows of tiers that the Store has not got: what was initialised, less what it has got since."""
        initialised = sum(group.cold.initialised for group in self._groups)
        return max(0, initialised - max(0, self._stored_rows() - self._stored_before))

    def _share(self, demand: _Demand, least: dict[int, int]) -> bool:
        """Lower DDR tiers so that ``demand`` fits: each keeps its least and a share, by its size, of the rest. Whether
        any had to be lowered. (Rows that leave may be new to the Store's index: the caller asks again.)"""
        fixed = sum(_ddr_bytes(group) for group in self._groups if _pinned(group))
        movable = [group for group in self._groups if not _pinned(group)]
        held = sum(_ddr_bytes(group) for group in movable)
        rest = self._room(demand) - fixed - sum(least[group.number] for group in movable)
        if rest < 0:
            tiers = fixed + sum(least[group.number] for group in movable)
            enough = self._more(self._beside_tiers(demand), tiers)
            raise TierCapacityError(
                f"the ddr tier must give up {-rest} bytes for rows on the move and the store's index, but its rows are "
                f"held by forwards whose backward pass has not run: finish those first, or raise ddr_bytes from "
                f"{self.limit_bytes} to {enough}"
            )
        parts = [least[group.number] + rest * _ddr_bytes(group) // held for group in movable]
        lowered = [self._lower(group, part) for group, part in zip(movable, parts, strict=True)]
        return any(lowered)

    def _lower(self, group: TableGroup, tier_bytes: int) -> bool:
        """Lower a tier to so many bytes, but not below its floors and a row; whether it was above."""
        tier = group.tiers[-1]
        row_bytes = self._shares.row_bytes(group.schema, "ddr")
        rows = max(self._shares.least_rows(group.schema), self._kind.capacity_for(tier_bytes, row_bytes))
        if rows >= tier.capacity_rows:
            return False
        group.release_dropped()
        group.shrink(tier, rows)
        return True

    def _charged(self, demand: _Demand) -> int:
        rows = sum(host_bytes(tier) for group in self._groups for tier in group.tiers)
        moving = sum(one.moves.staging_bytes(demand.moving.get(one.number, 0)) for one in self._groups)
        return rows + moving + self._store_bytes(demand.inserts)

    def _beside_tiers(self, demand: _Demand) -> int:
        """All that is charged with ``demand``, except for the DDR tiers."""
        return self._charged(demand) - sum(map(_ddr_bytes, self._groups))

    def _room(self, demand: _Demand) -> int:
        """What the DDR tiers may take together beside ``demand``."""
        return self.limit_bytes - self._beside_tiers(demand)

    def _least(self, group: TableGroup, batches: Sequence[Coming]) -> int:
        """What a DDR tier needs: its floors and a row; where batches are worked on, the coming and the pinned rows
        beside what floors keep of others."""
        rows = self._shares.least_rows(group.schema)
        if group.lower is None:
            coming = sum(batch.unique - batch.floored for batch in batches if batch.group is group)
            rows = max(rows, rows - 1 + coming + room.pinned_above_floors(group.top.directory))
        return self._tier_bytes(rows, group.schema)

    def _usual(self, group: TableGroup) -> int:
        """What a DDR tier that batches are worked on in has had to hold for one of them so far, and an eighth more: it
        is not lowered below that for what may be a moment's need, since it would never be raised again."""
        if group.lower is not None:
            return 0
        rows = self._widest.get(group.number, 0) * 9 // 8
        return self._tier_bytes(min(group.top.capacity_rows, rows), group.schema)

    def _remember_widest(self, batches: Sequence[Coming]) -> None:
        for group in {batch.group.number: batch.group for batch in batches}.values():
            rows = sum(batch.unique for batch in batches if batch.group is group)
            self._widest[group.number] = max(self._widest.get(group.number, 0), rows)

    def _too_narrow(self, group: TableGroup, batches: Sequence[Coming]) -> bool:
        """Whether a DDR tier that is worked on has too few slots, whatever the other groups give up: none grows."""
        unpinned = sum(batch.unpinned for batch in batches if batch.group is group)
        return group.lower is None and unpinned > group.top.directory.room()

    def _tier_bytes(self, rows: int, schema: RowSchema) -> int:
        return self._kind.bytes_for(rows) + rows * self._shares.row_bytes(schema, "ddr")

    def _note(self, demand: _Demand) -> None:
        self.peak_bytes = max(self.peak_bytes, self._charged(demand))

    def _too_small(self, batches: Sequence[Coming]) -> TierCapacityError:
        unique, missing = sum(batch.unique for batch in batches), sum(batch.missing for batch in batches)
        fixed = self._beside_tiers(_Demand.of(batches))
        tiers = max(self._least(group, batches) / self._shares.part(group.schema) for group in self._groups)
        enough = self._more(fixed, tiers)
        return TierCapacityError(
            f"a batch of {unique} distinct rows, {missing} of them to be brought in, needs {enough} bytes of host "
            f"memory with the bookkeeping, the store's index as it is now and rows held by other forwards"
            f"{self._floors_kept()}, but ddr_bytes is {self.limit_bytes}: raise it to at least that or use smaller "
            f"batches"
        )

    def _floors_kept(self) -> str:
        """For messages: the floors, and what their rows take."""
        kept = {group: self._shares.least_rows(group.schema) - 1 for group in self._groups}
        names = [name for group in kept for name in self._shares.floors(group.schema)]
        if not names:
            return ""
        size = sum(rows * self._shares.row_bytes(group.schema, "ddr") for group, rows in kept.items())
        return f", and {size} for the min_rows of {listed(names)}"


def host_bytes(tier: Tier) -> int:
    """Host memory of a tier: bookkeeping and staging always, rows where the tier is host memory by name."""
    return tier.directory_bytes + tier.staging_bytes + (tier.slab_bytes if tier.name == "ddr" else 0)


def _ddr_bytes(group: TableGroup) -> int:
    return host_bytes(group.tiers[-1])


def _pinned(group: TableGroup) -> bool:
    """Whether the group's DDR tier holds slots that must not move."""
    group.release_dropped()
    return group.tiers[-1].directory.pinned_rows > 0
