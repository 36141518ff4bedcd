"""What a byte budget holds, and what more memory would buy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tiered_emb.cache import Directory
from tiered_emb.errors import ConfigError
from tiered_emb.sim.curves import BELADY, Curve, check_policies


def rows_for(budgets: Sequence[int], row_bytes: int, policies: Sequence[str]) -> dict[str, list[int]]:
    """Rows that each budget (bytes) holds under each policy, which has bookkeeping of its own.

    Belady's costs nothing that a tier could pay: it gets as many rows as the thriftiest of the others, or as LRU's if
    there are none, so that it is a bound of them all.

    Raises ConfigError for an unknown policy, a row without bytes, and a budget that holds no row.
    """
    check_policies(policies)
    if row_bytes < 1:
        raise ConfigError(f"a row has {row_bytes} bytes; expected 1 or more")
    real = [policy for policy in policies if policy != BELADY] or ["lru"]
    rows = {policy: [Directory.capacity_for(budget, row_bytes, policy) for budget in budgets] for policy in real}
    for policy, held in rows.items():
        for budget, size in zip(budgets, held, strict=True):
            if size == 0:
                raise ConfigError(
                    f"a budget of {budget} bytes holds no row of {row_bytes} bytes and its bookkeeping under {policy}; "
                    f"expected {row_bytes + Directory.bytes_for(1, policy)} bytes or more"
                )
    rows[BELADY] = [max(held) for held in zip(*rows.values(), strict=True)]
    return {policy: rows[policy] for policy in policies}


@dataclass(frozen=True, slots=True)
class Gain:
    """What the step from one budget to the next saves.

    Attributes:
        budget_bytes: before.
        more_bytes: what is added.
        misses: before.
        saved: misses fewer after; negative where more memory makes a policy worse (Belady's anomaly).
    """

    budget_bytes: int
    more_bytes: int
    misses: int
    saved: int

    @property
    def relative(self) -> float:
        """Share of the misses that are saved."""
        return self.saved / self.misses if self.misses else 0.0

    def saved_per(self, unit_bytes: int) -> float:
        """Misses saved for each further unit, on average over the step."""
        return self.saved * unit_bytes / self.more_bytes


def gains(curve: Curve, budgets: Sequence[int]) -> list[Gain]:
    """The gain of each step between budgets (ascending), whose rows are the sizes of the curve."""
    return [
        Gain(before, after - before, missed, missed - missed_after)
        for (before, after), (missed, missed_after) in zip(pairwise(budgets), pairwise(curve.misses), strict=True)
    ]
