"""HostBudget: keeps what the groups of one engine hold in host memory within ``ddr_bytes``.

Charged are, as upper bounds: the slab and Directory of every DDR tier, the Directory of every HBM tier, the buffers
that rows move through, and the Store's index and buffers. Before a batch is planned, the budget adds what the batch
will move and what the Store's index may grow by; if the sum does not fit, DDR tiers are lowered until it does, and rows
without room leave for the Store. Tiers are never raised again: what grew once will be needed again.

A slot above the new capacity must not be pinned. A tier that batches are worked on in can therefore be lowered only
between steps; so while nothing is pinned the budget asks for more than the batch needs (``_CALM``), and further
forwards of the same step find room. Groups share by the bytes of one row of each of their tables.

Owned by the thread that plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiered_emb.cache import Directory
from tiered_emb.errors import TierCapacityError
from tiered_emb.group import TableGroup
from tiered_emb.tier import Tier


@dataclass(frozen=True, slots=True)
class Coming:
    """A batch that is about to be planned: how many of its rows are missing in the top tier, and how many it has."""

    group: TableGroup
    missing: int
    unique: int


@dataclass(frozen=True, slots=True)
class _Demand:
    """What batches will need: rows to move at once, by group number, and rows the Store may take for the first time."""

    moving: dict[int, int]
    inserts: int

    @classmethod
    def of(cls, batches: Sequence[Coming], times: tuple[int, int] = (1, 1)) -> _Demand:
        """Of batches planned one after the other, each factor times over."""
        moving: dict[int, int] = {}
        for batch in batches:
            moving[batch.group.number] = max(moving.get(batch.group.number, 0), times[0] * batch.missing)
        return cls(moving, times[1] * sum(batch.missing for batch in batches))


_NOTHING = _Demand({}, 0)
_CALM = 2, 4  # a step's later forwards may move twice, and store four times, what the first one does
_AMPLE = 2, 16  # what a shrink makes room for, so that the next one is far off


class HostBudget:
    """See the module's essay.

    Attributes:
        limit_bytes: the budget; 0 = no DDR tier, nothing is charged.
        peak_bytes: the most that was ever charged.
    """

    def __init__(self, limit_bytes: int, policy: str, store_bytes: Callable[[int], int]) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._policy = policy
        self._store_bytes = store_bytes
        self._groups: list[TableGroup] = []

    def join(self, group: TableGroup) -> None:
        """Charge this group too, and be asked before each of its plans."""
        self._groups.append(group)
        group.make_room = lambda missing, unique: self.make_room([Coming(group, missing, unique)])

    def charged_bytes(self) -> int:
        """What is charged now."""
        return self._charged(_NOTHING)

    def rows_for(self, row_bytes: int, other_bytes: int, share: float) -> int:
        """Capacity of a new DDR tier that gets ``share`` of what is left beside ``other_bytes``; an error if none."""
        spare = self.limit_bytes - self.charged_bytes() - other_bytes
        rows = Directory.capacity_for(
            max(0, int((spare - self.limit_bytes // 32) * share)), row_bytes + 1, self._policy
        )
        if rows == 0:
            need = self.limit_bytes - spare + int((self._tier_bytes(1, row_bytes) + self.limit_bytes // 32) / share) + 1
            raise TierCapacityError(
                f"ddr_bytes is {self.limit_bytes}, of which {max(0, spare)} are left for rows of {row_bytes} bytes: "
                f"not one fits; use at least {need} bytes, or 0 for no DDR tier"
            )
        return rows

    def lower_for(self, shares: dict[int, float]) -> None:
        """Lower the DDR tiers to ``shares`` (by group number) of what they may take; the rest is for new groups."""
        for group in self._groups:
            part = int(self._room(_NOTHING) * shares[group.number])
            self._lower(group, max(part, self._tier_bytes(1, group.schema.row_bytes)))

    def make_room(self, batches: Sequence[Coming]) -> bool:
        """Fit batches that will be planned one after the other into the budget; whether a tier was lowered.

        Lowering a tier may push out rows of the batches: count again what is missing and ask again.
        Raises TierCapacityError, with nothing changed, if the budget is too small for them.
        """
        if not self.limit_bytes:
            return False
        need = _Demand.of(batches)
        calm = not any(_pinned(one) for one in self._groups)
        wish = _Demand.of(batches, _CALM) if calm else need
        if self._charged(wish) <= self.limit_bytes:
            self._note(need)
            return False
        least = {group.number: self._least(group, batches) for group in self._groups}
        ample = _Demand.of(batches, _AMPLE)
        if calm and self._room(ample) >= sum(least.values()):
            return self._share(ample, least)
        if self._charged(need) <= self.limit_bytes:
            self._note(need)
            return False
        short = sum(least.values()) - self._room(need)
        if short > 0:
            raise self._too_small(batches, short)
        return self._share(need, least)

    def _share(self, demand: _Demand, least: dict[int, int]) -> bool:
        """Lower DDR tiers until ``demand`` fits: each keeps its least and a share, by its size, of the rest."""
        fixed = sum(_ddr_bytes(group) for group in self._groups if _pinned(group))
        movable = [group for group in self._groups if not _pinned(group)]
        held = sum(_ddr_bytes(group) for group in movable)
        rest = self._room(demand) - fixed - sum(least[group.number] for group in movable)
        if rest < 0:
            raise TierCapacityError(
                f"the ddr tier must give up {-rest} bytes for rows on the move and the store's index, but its rows are "
                f"held by forwards whose backward pass has not run: raise ddr_bytes, or finish those first"
            )
        for group in movable:
            self._lower(group, least[group.number] + rest * _ddr_bytes(group) // held)
        return True

    def _lower(self, group: TableGroup, tier_bytes: int) -> None:
        tier = group.tiers[-1]
        rows = Directory.capacity_for(tier_bytes, group.schema.row_bytes + 1, self._policy)
        if rows < tier.capacity_rows:
            group.release_dropped()
            group.shrink(tier, max(1, rows))

    def _charged(self, demand: _Demand) -> int:
        rows = sum(host_bytes(tier) for group in self._groups for tier in group.tiers)
        moving = sum(one.staging_bytes(demand.moving.get(one.number, 0)) for one in self._groups)
        return rows + moving + self._store_bytes(demand.inserts)

    def _room(self, demand: _Demand) -> int:
        """What the DDR tiers may take together beside ``demand``."""
        return self.limit_bytes - self._charged(demand) + sum(_ddr_bytes(group) for group in self._groups)

    def _least(self, group: TableGroup, batches: Sequence[Coming]) -> int:
        """What a DDR tier needs: where batches are worked on, the coming rows beside the pinned ones; else one row."""
        coming = sum(batch.unique for batch in batches if batch.group is group)
        rows = max(1, coming + group.top.directory.pinned_rows) if group.lower is None else 1
        return self._tier_bytes(rows, group.schema.row_bytes)

    def _tier_bytes(self, rows: int, row_bytes: int) -> int:
        return Directory.bytes_for(rows, self._policy) + rows * (row_bytes + 1)

    def _note(self, demand: _Demand) -> None:
        self.peak_bytes = max(self.peak_bytes, self._charged(demand))

    def _too_small(self, batches: Sequence[Coming], short: int) -> TierCapacityError:
        unique, missing = sum(batch.unique for batch in batches), sum(batch.missing for batch in batches)
        return TierCapacityError(
            f"a batch of {unique} distinct rows, {missing} of them to be brought in, needs {self.limit_bytes + short} "
            f"bytes of host memory with the bookkeeping and the store's index, but ddr_bytes is {self.limit_bytes}: "
            f"raise it to at least that or use smaller batches"
        )


def host_bytes(tier: Tier) -> int:
    """Host memory of a tier: bookkeeping always, rows where the tier is host memory by name."""
    return tier.directory_bytes + (tier.slab_bytes if tier.name == "ddr" else 0)


def _ddr_bytes(group: TableGroup) -> int:
    return host_bytes(group.tiers[-1])


def _pinned(group: TableGroup) -> bool:
    """Whether the group's DDR tier holds slots that must not move."""
    group.release_dropped()
    return group.tiers[-1].directory.pinned_rows > 0
