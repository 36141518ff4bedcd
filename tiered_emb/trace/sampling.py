"""Spatial sampling: a (table, id) pair is in a sample with all of its requests, or with none.

Whether it is follows from a hash of the pair alone, so that traces recorded and traces replayed at one rate and seed
keep the same rows (SHARDS: Waldspurger, Park, Garthwaite, Ahmad, FAST '15). The hash is the finaliser of MurmurHash3
(Appleby), which has nothing to do with those that place rows in a Directory or in a store's index: a sample must not
meet in a part of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiered_emb.errors import ConfigError
from tiered_emb.trace.value import Ids, TableNumbers

_BLOCK = 1 << 15  # requests hashed at once: their numbers stay in the processor's cache
_TABLE = np.uint64(0xC2B2AE3D27D4EB4F)
_MIX_1, _MIX_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_START = np.uint64(0x9E3779B97F4A7C15)  # without it seed 0 kept id 0 of table 0 at every rate, often a hot row
_33 = np.uint64(33)


def check_rate(rate: float, what: str = "rate") -> float:
    """``rate`` as a float. Raises ConfigError unless it is above 0 and at most 1."""
    if isinstance(rate, bool) or not isinstance(rate, int | float | np.number) or not 0 < rate <= 1:
        raise ConfigError(f"{what} is {rate!r}; expected a share of the ids, above 0 and at most 1")
    return float(rate)


def sampled(tables: TableNumbers | int, ids: Ids, rate: float, seed: int = 0) -> NDArray[np.bool_]:
    """(N,) which requests a sample keeps: those of the pairs whose hash is below rate * 2^64.

    Args:
        tables: (N,) uint32 table numbers, or one for all.
        ids: (N,) int64.
        rate: share of the pairs to keep; a sample of a lower rate is a part of one of a higher.
        seed: another one keeps other pairs; 64 bits.
    """
    limit = int(check_rate(rate) * 2.0**64)
    if limit >= 1 << 64:
        return np.ones(len(ids), np.bool_)
    kept = np.empty(len(ids), np.bool_)
    for first in range(0, len(ids), _BLOCK):
        part = slice(first, first + _BLOCK)
        mine = tables[part] if isinstance(tables, np.ndarray) else tables
        np.less(sample_hash(mine, ids[part], seed), np.uint64(limit), out=kept[part])
    return kept


def sample_hash(tables: TableNumbers | int, ids: Ids, seed: int = 0) -> NDArray[np.uint64]:
    """(N,) 64 well-spread bits of each pair."""
    start = _finalised(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) ^ _START)
    salt = np.asarray(tables, np.uint64).reshape(-1) * _TABLE ^ start
    return _finalised(ids.view(np.uint64) ^ salt)


def _finalised(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """MurmurHash3's finaliser, in place."""
    bits ^= bits >> _33
    bits *= _MIX_1
    bits ^= bits >> _33
    bits *= _MIX_2
    bits ^= bits >> _33
    return bits
