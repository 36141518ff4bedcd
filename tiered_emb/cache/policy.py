"""The policies by name. A new one is a file like `lru.py`, a line here, and a line in the policies' contract test."""

from __future__ import annotations

from typing import Any

from tiered_emb.cache.arc import Arc
from tiered_emb.cache.arrays import ArrayPolicy
from tiered_emb.cache.clock import Clock
from tiered_emb.cache.fifo import Fifo
from tiered_emb.cache.lfu import Lfu
from tiered_emb.cache.lfu_aged import LfuAged
from tiered_emb.cache.lirs import Lirs
from tiered_emb.cache.lookahead import Lookahead
from tiered_emb.cache.lru import Lru
from tiered_emb.cache.s3fifo import S3Fifo
from tiered_emb.cache.sieve import Sieve
from tiered_emb.cache.twoq import TwoQ
from tiered_emb.cache.wtinylfu import WTinyLfu

POLICIES: dict[str, type[ArrayPolicy[Any]]] = {
    "lru": Lru,
    "lfu": Lfu,
    "lfu-aged": LfuAged,
    "lirs": Lirs,
    "fifo": Fifo,
    "clock": Clock,
    "sieve": Sieve,
    "lookahead": Lookahead,
    "s3fifo": S3Fifo,
    "2q": TwoQ,
    "arc": Arc,
    "wtinylfu": WTinyLfu,
}

# Known by name, and no policy of a tier: why not.
LABORATORY_ONLY = {
    "belady": "belady must know every request to come, so it is only for traces: see `tiered-emb policies --help`",
}


def refusal(policy: str) -> str:
    """Why a name is not in `POLICIES`, to be put behind "policy is 'name'; "."""
    choices = f"expected one of {', '.join(sorted(POLICIES))}"
    return f"{choices} ({LABORATORY_ONLY[policy]})" if policy in LABORATORY_ONLY else choices


def policy_of(policy: str | ArrayPolicy[Any], capacity_rows: int) -> ArrayPolicy[Any]:
    """The policy itself, or the one of a name; raises ValueError where there is none of this capacity."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"unknown cache policy {policy!r}: {refusal(policy)}")
        return POLICIES[policy](capacity_rows)
    if policy.capacity_rows != capacity_rows:
        raise ValueError(f"a policy of {policy.capacity_rows} slots cannot order a Directory of {capacity_rows}")
    return policy
