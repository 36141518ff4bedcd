"""What a person chooses: tables, tier budgets, byte sizes. Values are checked here, once, and trusted afterwards."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

import numpy as np

from storage.store import Store
from tiered_emb.errors import ConfigError
from tiered_emb.init import Initializer, Normal

Mode = Literal["sum", "mean", "max"]
MODES: tuple[Mode, ...] = ("sum", "mean", "max")
MAX_DIM = 1 << 16

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(size: int | str, what: str = "size") -> int:
    """Bytes meant by ``size``: an integer, or text such as ``"0"``, ``"256MiB"``, ``"1.5 GB"``.

    ``what`` names the option in the error. Raises ConfigError for anything else, negative sizes included.
    """
    whole = as_int(size)
    if whole is not None and whole >= 0:
        return whole
    if whole is not None:
        raise ConfigError(f"{what} is {whole} bytes; expected 0 (no such tier) or more")
    text = size if isinstance(size, str) else ""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(
            f"{what} is {size!r}; expected a number of bytes such as 0, 65536, '256KiB', '1.5GiB' or '2GB'"
        )
    number = Decimal(match[1]) * _UNITS[match[2].lower()]
    if 0 < number < 1:
        raise ConfigError(f"{what} is {size!r}, less than a byte; expected 0 (no such tier) or more")
    return int(number)


@dataclass(frozen=True)
class TierConfig:
    """Budgets and places of the tiers under a module.

    Attributes:
        hbm_bytes: device memory for rows; 0 = no HBM tier.
        ddr_bytes: host memory of the engine: slab, directories, index, staging, write buffer; 0 = no DDR tier.
        store: where cold rows rest. None keeps them in host memory (outside the budget), a path opens or creates an
            ``LmdbStore`` there (modules naming one path share it and its budget), a ``Store`` is used as it is.
        policy: which rows leave first, by name (``tiered_emb.cache.POLICIES``); both tiers use it.
        record: a file that is made, into which every look-up that trains records what it asks for, as a trace
            (:mod:`tiered_emb.trace`); None = no recording. It changes no bit.
        record_rate: share of the (table, id) pairs that are recorded, with all their requests.
    """

    hbm_bytes: int | str = 0
    ddr_bytes: int | str = "1GiB"
    store: str | os.PathLike[str] | Store | None = None
    policy: str = "lru"
    record: str | os.PathLike[str] | None = None
    record_rate: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "hbm_bytes", parse_bytes(self.hbm_bytes, "hbm_bytes"))
        object.__setattr__(self, "ddr_bytes", parse_bytes(self.ddr_bytes, "ddr_bytes"))
        if not isinstance(self.store, str | os.PathLike | None) and not hasattr(self.store, "open_table"):
            raise ConfigError(f"store is {self.store!r}; expected a path, a Store, or None for host memory")
        if isinstance(self.store, str) and not self.store:
            raise ConfigError("store is an empty path; expected a directory's, or None for host memory")
        if not isinstance(self.policy, str):
            raise ConfigError(f"policy is {self.policy!r}; expected a name, such as 'lru'")
        if self.hbm_bytes == 0 and self.ddr_bytes == 0:
            raise ConfigError("hbm_bytes and ddr_bytes are both 0: a batch needs a tier to be worked on in")
        self._check_record()

    def _check_record(self) -> None:
        if not isinstance(self.record, str | os.PathLike | None) or self.record == "":
            raise ConfigError(f"record is {self.record!r}; expected the path of a file to make, or None")
        if self.record is not None:
            object.__setattr__(self, "record", os.fspath(self.record))
        rate = self.record_rate
        if isinstance(rate, bool) or not isinstance(rate, int | float | np.number) or not 0 < rate <= 1:
            raise ConfigError(f"record_rate is {rate!r}; expected a share of the ids, above 0 and at most 1")
        object.__setattr__(self, "record_rate", float(rate))
        if self.record is None and rate != 1:
            raise ConfigError(f"record_rate is {rate}, but nothing is recorded; give the file with record")

    @property
    def hbm_budget_bytes(self) -> int:
        """``hbm_bytes`` as a number."""
        return int(self.hbm_bytes)

    @property
    def ddr_budget_bytes(self) -> int:
        """``ddr_bytes`` as a number."""
        return int(self.ddr_bytes)


@dataclass(frozen=True)
class TableConfig:
    """One embedding table and the features that look it up.

    Attributes:
        name: unique in its store; the rows' initial numbers depend on it.
        num_embeddings: ids are 0 .. num_embeddings-1; None = any 64-bit integer.
        embedding_dim: floats a row.
        feature_names: features that share the table; empty = one feature of the table's name.
        mode: how a bag's rows become one: "sum", "mean" or "max".
        init: the numbers of a row never stored before.
    """

    name: str
    num_embeddings: int | None
    embedding_dim: int
    feature_names: Sequence[str] = ()
    mode: Mode = "sum"
    init: Initializer = field(default_factory=Normal)

    def __post_init__(self) -> None:
        _check_name(self.name)
        dim = _positive(self.embedding_dim, f"table {self.name!r}: embedding_dim", MAX_DIM)
        object.__setattr__(self, "embedding_dim", dim)
        if self.num_embeddings is not None:
            rows = _positive(self.num_embeddings, f"table {self.name!r}: num_embeddings", (1 << 63) - 1)
            object.__setattr__(self, "num_embeddings", rows)
        if isinstance(self.init, type) or not hasattr(self.init, "fill"):
            raise ConfigError(f"table {self.name!r}: init is {self.init!r}; expected an initializer, such as Normal()")
        if self.mode not in MODES:
            raise ConfigError(f"table {self.name!r}: mode is {self.mode!r}; expected one of {', '.join(MODES)}")
        if isinstance(self.feature_names, str):
            raise ConfigError(
                f"table {self.name!r}: feature_names is one string; expected a list such as [{self.feature_names!r}]"
            )
        object.__setattr__(self, "feature_names", tuple(self.feature_names) or (self.name,))


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or not name.isprintable() or len(name.encode()) > 255:
        raise ConfigError(f"table name is {name!r}; expected 1 to 255 bytes of printable text")


def _positive(number: object, what: str, largest: int) -> int:
    whole = as_int(number)
    if whole is None or not 1 <= whole <= largest:
        raise ConfigError(f"{what} is {number!r}; expected an integer from 1 to {largest}")
    return whole


def as_int(number: object) -> int | None:
    """An integer, NumPy's included, as Python's own; None for anything else, truth values included."""
    return None if isinstance(number, bool) or not isinstance(number, int | np.integer) else int(number)
