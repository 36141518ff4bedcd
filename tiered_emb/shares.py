"""Shares: how the tables of one engine divide its budgets.

Groups share a budget by the bytes of one row of each of their tables. Inside a group rows compete, whatever their
table, within floors (``min_rows``) and quotas (``max_rows``), which hold in the lowest tier. A table that a module has
let go of keeps its share, its floor too, as long as the engine lives: its rows are still there.

Owned by the thread that plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from storage.schema import RowSchema, table_number
from tiered_emb.cache.sizes import MAX_CAPACITY_ROWS
from tiered_emb.config import TierConfig
from tiered_emb.errors import ConfigError, TierCapacityError
from tiered_emb.inputs import listed
from tiered_emb.row_form import form_of
from tiered_emb.tier import Bookkeeping


class Shares:
    """See the module's essay.

    Attributes:
        kinds: the bookkeeping of each tier, by its name.
        lowest: name of the tier in which floors and quotas hold.
    """

    def __init__(self, config: TierConfig) -> None:
        self._config = config
        self._names: dict[RowSchema, list[str]] = {}
        shared = Bookkeeping(config.policy, len({*config.min_rows, *config.max_rows}), config.admission)
        self.lowest = "ddr" if config.ddr_budget_bytes else "hbm"
        self.kinds = {"hbm": Bookkeeping(config.policy), "ddr": shared} if self.lowest == "ddr" else {"hbm": shared}

    @property
    def schemas(self) -> Iterable[RowSchema]:
        """Of all tables, in the order in which they came."""
        return self._names.keys()

    def saved(self) -> dict[RowSchema, list[str]]:
        """What :meth:`restore` takes."""
        return {schema: list(names) for schema, names in self._names.items()}

    def restore(self, saved: dict[RowSchema, list[str]]) -> None:
        """Be as then."""
        self._names = saved

    def add(self, name: str, schema: RowSchema) -> None:
        """Give a table a share, unless it has one. Raises ConfigError for a quota that no budget of this size fills."""
        names = self._names.setdefault(schema, [])
        if name not in names:
            self._check_quota(name, self.row_bytes(schema, self.lowest))
            names.append(name)

    def row_bytes(self, schema: RowSchema, tier: str) -> int:
        """Bytes of a row in the tier of that name: packed, if it is worked on in another one."""
        packed = tier == "ddr" and self._config.hbm_budget_bytes
        return form_of(schema).rest_bytes if packed else form_of(schema).worked_bytes

    def weight(self, schema: RowSchema) -> int:
        """Bytes of one row of each table of a group, as it is worked on."""
        return form_of(schema).worked_bytes * len(self._names.get(schema, ()))

    @property
    def whole(self) -> int:
        """The sum of the weights."""
        return sum(map(self.weight, self.schemas))

    def part(self, schema: RowSchema, among: Iterable[RowSchema] | None = None) -> float:
        """A group's part of a budget, or of what is left of it for some groups."""
        return self.weight(schema) / sum(map(self.weight, self.schemas if among is None else among))

    def floors(self, schema: RowSchema) -> dict[str, int]:
        """Floors of a group's tables, by name."""
        return self._of(schema, self._config.min_rows)

    def quotas(self, schema: RowSchema) -> dict[str, int]:
        """Quotas of a group's tables, by name."""
        return self._of(schema, self._config.max_rows)

    def least_rows(self, schema: RowSchema) -> int:
        """Rows that the group's lowest tier must have room for: what floors keep, and one."""
        return 1 + sum(self.floors(schema).values())

    def hbm_rows(self, schema: RowSchema, most: int | None = None) -> int:
        """Rows that a group's HBM tier gets, ``most`` at most if it is there already; an error if they do not do."""
        budget = self._config.hbm_budget_bytes
        part = budget * self.weight(schema) // self.whole
        row_bytes = self.row_bytes(schema, "hbm")
        rows = min(part // row_bytes, MAX_CAPACITY_ROWS if most is None else most)
        least = self.least_rows(schema) if self.lowest == "hbm" else 1
        if rows < least:
            names = listed(list(self.floors(schema)))
            why = "not one fits" if least == 1 else f"{rows} fit, min_rows of {names} are {least - 1}, others need one"
            raise TierCapacityError(
                f"hbm_bytes is {budget}, of which {part} go to rows of {row_bytes} bytes: {why}; use at least "
                f"{self.hbm_bytes(schema, least)} bytes{'' if least == 1 else ' from the start'}, or 0 for no HBM tier"
            )
        return rows

    def hbm_bytes(self, schema: RowSchema, rows: int) -> int:
        """The budget whose part for rows of this schema holds so many."""
        return -(-rows * self.row_bytes(schema, "hbm") * self.whole // self.weight(schema))

    def _of(self, schema: RowSchema, rows: Mapping[str, int]) -> dict[str, int]:
        return {name: rows[name] for name in self._names.get(schema, ()) if name in rows} if rows else {}

    def _check_quota(self, name: str, row_bytes: int) -> None:
        quota = self._config.max_rows.get(name, 1)
        budget = self._config.ddr_budget_bytes or self._config.hbm_budget_bytes
        in_host = self.lowest == "ddr"
        most = self.kinds["ddr"].capacity_for(budget, row_bytes) if in_host else budget // row_bytes
        if quota > max(1, most):
            raise ConfigError(
                f"max_rows of table {name!r} is {quota}, but {self.lowest}_bytes is {budget}, which holds {most} rows "
                f"of {row_bytes} bytes at most: lower it, or leave it out"
            )


def by_number(rows: Mapping[str, int]) -> dict[int, int]:
    """The same by table number."""
    return {table_number(name): count for name, count in rows.items()}
