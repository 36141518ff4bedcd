"""What a row is made of: named columns, back to back, in C order.

By convention column 0 is `weight` (one embedding vector) and the other columns are the optimizer's state, so that a
row that moves takes its state along. A schema never changes once a table was written with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

from storage.errors import StoreConfigError

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}
MAX_ROW_BYTES = 1 << 26

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,127}")


@dataclass(frozen=True, slots=True)
class Column:
    """`width` numbers of one dtype under one name."""

    name: str
    dtype: str
    width: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise StoreConfigError(f"column name {self.name!r}: expected a letter or _, then letters, digits, _ . -")
        if self.dtype not in DTYPE_BYTES:
            raise StoreConfigError(
                f"column {self.name!r} has dtype {self.dtype!r}: expected one of {sorted(DTYPE_BYTES)}"
            )
        if not isinstance(self.width, int) or isinstance(self.width, bool) or self.width < 1:
            raise StoreConfigError(
                f"column {self.name!r} has width {self.width!r}: expected a whole number of at least 1"
            )

    @property
    def bytes(self) -> int:
        """Bytes of the column in one row."""
        return DTYPE_BYTES[self.dtype] * self.width

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{self.width}]"


@dataclass(frozen=True, slots=True)
class RowSchema:
    """The columns of a row, in the order of their bytes.

    Raises:
        StoreConfigError: no columns, a name twice, or rows above 64 MiB.
    """

    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if not names:
            raise StoreConfigError("a row schema without columns: expected at least one")
        if len(set(names)) != len(names):
            raise StoreConfigError(f"row schema with columns {names}: every name may occur once")
        if self.row_bytes > MAX_ROW_BYTES:
            raise StoreConfigError(f"rows of {self.row_bytes} bytes ({self}): at most {MAX_ROW_BYTES} are supported")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: the columns back to back."""
        return sum(column.bytes for column in self.columns)

    def to_json(self) -> dict[str, Any]:
        """The schema as plain JSON types; `from_json` is its inverse."""
        return {"columns": [{"name": c.name, "dtype": c.dtype, "width": c.width} for c in self.columns]}

    @classmethod
    def from_json(cls, data: Any) -> RowSchema:
        """Read what `to_json` wrote.

        Raises:
            StoreConfigError: the data is no schema.
        """
        try:
            columns = tuple(Column(c["name"], c["dtype"], c["width"]) for c in data["columns"])
        except (KeyError, TypeError) as error:
            raise StoreConfigError(f"row schema {data!r}: expected columns with name, dtype and width") from error
        return cls(columns)

    def __str__(self) -> str:
        return " + ".join(str(column) for column in self.columns)


@cache
def table_number(name: str) -> int:
    """The number (u32) under which a table's rows are stored: the first 4 bytes of BLAKE2b of its name, little endian.

    A function of the name alone, so that a table has one number in every store whatever the order of creation.
    """
    return int.from_bytes(blake2b(name.encode()).digest()[:4], "little")
