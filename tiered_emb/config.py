"""What a person chooses: tables, tier budgets, byte sizes. Values are checked here, once, and trusted afterwards."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal, TypedDict

import numpy as np

from storage.codecs import CODECS
from storage.store import Store
from tiered_emb.errors import ConfigError
from tiered_emb.init import Initializer, Normal

Mode = Literal["sum", "mean", "max"]
Rounding = Literal["nearest", "stochastic"]
OnNaN = Literal["error", "skip"]
ON_NAN: tuple[OnNaN, ...] = ("error", "skip")
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic")
MODES: tuple[Mode, ...] = ("sum", "mean", "max")
MAX_DIM = 1 << 16
MAX_SHARES = (1 << 16) - 2  # tables with a floor or a quota: each has a number of 16 bits

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
        min_rows: floors, by table name: rows that the table keeps in the DDR tier (in the HBM tier, if there is no DDR
            tier) once it has them, whatever other tables ask for. Names of tables that nobody opens do nothing.
        max_rows: quotas, by table name: the most rows that the table may have there; it then makes room for its new
            rows itself.
        admission: which rows that leave the HBM tier may come into the DDR tier; the others go to the store. "always";
            "tinylfu" or "tinylfu:N": those that come down at least N times (2) lately; "probability" or
            "probability:P": a share P (0.5) of those that come down.
        record: a file that is made, into which every look-up that trains records what it asks for, as a trace
            (:mod:`tiered_emb.trace`); None = no recording. It changes no bit.
        record_rate: share of the (table, id) pairs that are recorded, with all their requests.
    """

    hbm_bytes: int | str = 0
    ddr_bytes: int | str = "1GiB"
    store: str | os.PathLike[str] | Store | None = None
    policy: str = "lru"
    min_rows: Mapping[str, int] = field(default_factory=dict, hash=False, kw_only=True)
    max_rows: Mapping[str, int] = field(default_factory=dict, hash=False, kw_only=True)
    admission: str = field(default="always", kw_only=True)
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
        self._check_shares()
        self._check_admission()
        self._check_record()

    def _check_shares(self) -> None:
        """Copy floors and quotas, so that they stay what they are."""
        for what in ("min_rows", "max_rows"):
            object.__setattr__(self, what, _rows_by_table(what, getattr(self, what)))
        for name, rows in self.min_rows.items():
            if rows > self.max_rows.get(name, rows):
                raise ConfigError(f"min_rows of table {name!r} is {rows}, above its max_rows, {self.max_rows[name]}")
        if len({*self.min_rows, *self.max_rows}) > MAX_SHARES:
            raise ConfigError(f"min_rows and max_rows name more than {MAX_SHARES} tables")

    def _check_admission(self) -> None:
        if not isinstance(self.admission, str):
            raise ConfigError(f"admission is {self.admission!r}; expected a name, such as 'always'")
        if self.admission != "always" and not (self.hbm_bytes and self.ddr_bytes):
            missing = "hbm_bytes" if self.hbm_bytes == 0 else "ddr_bytes"
            raise ConfigError(
                f"admission is {self.admission!r}, but {missing} is 0: it says which of the rows that leave an HBM "
                f"tier may come into a DDR tier, and a batch's rows must all be in the tier they are worked on in"
            )

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
        precision: of a row's weights in the store, and in a DDR tier below an HBM tier: "fp32", "bf16", "fp16" or
            "int8" (with a scale and a bias a row). They are worked on as fp32, and their optimizer state stays that.
        rounding: how weights get there: "stochastic" (the default), which loses no small update on average, or
            "nearest".
        clip_value, clip_norm: the greatest magnitude of a number, and the greatest length, of a row's summed gradient,
            in this order; None = no limit.
        on_nan: what becomes of a row whose summed gradient is not finite: "error" refuses the whole update before any
            row has changed, "skip" leaves the row as it is and counts it (``stats().skipped``). On a GPU an update that
            is refused changes no row of its group either, but is reported by a later forward, backward or flush.
    """

    name: str
    num_embeddings: int | None
    embedding_dim: int
    feature_names: Sequence[str] = ()
    mode: Mode = "sum"
    init: Initializer = field(default_factory=Normal)
    precision: str = field(default="fp32", kw_only=True)
    rounding: Rounding = field(default="stochastic", kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    clip_norm: float | None = field(default=None, kw_only=True)
    on_nan: OnNaN = field(default="error", kw_only=True)

    def __post_init__(self) -> None:
        _check_name(self.name)
        for what, choices in (("precision", CODECS), ("rounding", ROUNDINGS), ("on_nan", ON_NAN)):
            if getattr(self, what) not in choices:
                raise ConfigError(
                    f"table {self.name!r}: {what} is {getattr(self, what)!r}; expected one of {', '.join(choices)}"
                )
        for what in ("clip_value", "clip_norm"):
            limit = getattr(self, what)
            if limit is not None and not (isinstance(limit, int | float) and 0 < limit < np.inf):
                raise ConfigError(f"table {self.name!r}: {what} is {limit!r}; expected a number above 0, or None")
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


class RowOptions(TypedDict, total=False):
    """What a module of one table passes on to its `TableConfig`."""

    precision: str
    rounding: Rounding
    clip_value: float | None
    clip_norm: float | None
    on_nan: OnNaN


def _check_name(name: object, where: str = "") -> None:
    if not isinstance(name, str) or not name or not name.isprintable() or len(name.encode()) > 255:
        raise ConfigError(f"{where}table name is {name!r}; expected 1 to 255 bytes of printable text")


def _rows_by_table(what: str, rows: object) -> dict[str, int]:
    """A copy, checked."""
    if not isinstance(rows, Mapping):
        raise ConfigError(f"{what} is {rows!r}; expected rows by table name, such as {{'users': 1000}}")
    for name in rows:
        _check_name(name, f"{what}: ")
    return {name: _positive(number, f"{what} of table {name!r}", (1 << 31) - 2) for name, number in rows.items()}


def _positive(number: object, what: str, largest: int) -> int:
    whole = as_int(number)
    if whole is None or not 1 <= whole <= largest:
        raise ConfigError(f"{what} is {number!r}; expected an integer from 1 to {largest}")
    return whole


def as_int(number: object) -> int | None:
    """An integer, NumPy's included, as Python's own; None for anything else, truth values included."""
    return None if isinstance(number, bool) or not isinstance(number, int | np.integer) else int(number)
