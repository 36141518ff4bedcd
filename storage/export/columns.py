"""Rows as columns of Arrow, and back: how a row looks in a Parquet file.

`table`, `id`, one column for each of the schema, in its order, and in deltas `deleted`. A column of one number is that
number; one of several is their bytes, little endian, as fixed-size binary, with dtype and width in the field's
metadata. Lists of floats would read more nicely and take three times as long, since Parquet writes two levels beside
each number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage.errors import CorruptExportError, StoreConfigError
from storage.schema import Column, RowSchema, table_number
from storage.store import Mask, RowBytes

Part: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.int64], RowBytes, Mask | None]

TABLE, ID, DELETED = "table", "id", "deleted"

_NO_ARROW_DTYPE = frozenset({"bfloat16"})
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
_WORTH = 0.875  # what zstd must leave of a column, at most


def arrow() -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet.

    Raises:
        StoreConfigError: they are not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise StoreConfigError(
            f"exports and imports need pyarrow ({error}): pip install 'tiered-emb[export]'"
        ) from error
    return pyarrow, pyarrow.parquet


def column_names(schema: RowSchema) -> list[str]:
    """Names of the row's columns in a file: their own, with _ behind those that are taken."""
    taken, names = {TABLE, ID, DELETED}, []
    own = {column.name for column in schema.columns}
    for column in schema.columns:
        name = column.name
        while name in taken or (name != column.name and name in own):
            name += "_"
        taken.add(name)
        names.append(name)
    return names


def file_schema(schema: RowSchema, delta: bool) -> Any:
    """The Arrow schema of a file."""
    pa, _ = arrow()
    fields = [
        pa.field(TABLE, pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field(ID, pa.int64(), nullable=False),
    ]
    for name, column in zip(column_names(schema), schema.columns, strict=True):
        meta = {"column": column.name, "dtype": column.dtype, "width": str(column.width)}
        fields.append(pa.field(name, _type_of(column), nullable=False, metadata=meta))
    if delta:
        fields.append(pa.field(DELETED, pa.bool_(), nullable=False))
    return pa.schema(fields)


def _type_of(column: Column) -> Any:
    pa, _ = arrow()
    if column.width > 1 or column.dtype in _NO_ARROW_DTYPE:
        return pa.binary(column.bytes)
    return pa.from_numpy_dtype(np.dtype(column.dtype))


class Block:
    """Rows of one schema, column by column, filled from the front.

    Args:
        schema: of the rows.
        capacity: rows.
        tables: names of the tables that may come.
        delta: whether there is a column `deleted`.

    Attributes:
        rows: how many there are.
        schema, capacity, delta: as given.
    """

    def __init__(self, schema: RowSchema, capacity: int, tables: Sequence[str], delta: bool) -> None:
        self.rows, self.capacity = 0, capacity
        self.schema, self.delta = schema, delta
        self._names = sorted(tables, key=table_number)
        self._numbers = np.array([table_number(name) for name in self._names], np.uint32)
        self._codes, self._ids = np.empty(capacity, np.int32), np.empty(capacity, np.int64)
        self._deleted = np.zeros(capacity if delta else 0, np.bool_)
        self._columns = [np.empty((capacity, column.bytes), np.uint8) for column in schema.columns]

    def add(self, tables: NDArray[np.uint32], ids: NDArray[np.int64], rows: RowBytes, deleted: Mask | None) -> None:
        """Append rows. Requires: there is room."""
        part = slice(self.rows, self.rows + len(ids))
        self._codes[part] = np.searchsorted(self._numbers, tables)
        self._ids[part] = ids
        if deleted is not None:
            self._deleted[part] = deleted
        start = 0
        for column, held in zip(self.schema.columns, self._columns, strict=True):
            held[part] = rows[:, start : start + column.bytes]
            start += column.bytes
        self.rows = part.stop

    @property
    def bytes(self) -> int:
        """Of the rows, as put."""
        return self.rows * self.schema.row_bytes

    @property
    def deletions(self) -> int:
        """How many of the rows are deleted ones."""
        return int(self._deleted[: self.rows].sum()) if self.delta else 0

    def to_arrow(self) -> Any:
        """The rows as an Arrow table that shares memory with this block."""
        pa, _ = arrow()
        n, target = self.rows, file_schema(self.schema, self.delta)
        codes = pa.array(self._codes[:n])
        arrays = [pa.DictionaryArray.from_arrays(codes, pa.array(self._names, pa.string())), pa.array(self._ids[:n])]
        for field, held in zip(list(target)[2:], self._columns, strict=False):
            arrays.append(pa.Array.from_buffers(field.type, n, [None, pa.py_buffer(held)]))
        if self.delta:
            arrays.append(pa.array(self._deleted[:n]))
        return pa.Table.from_arrays(arrays, schema=target)

    def compressible(self) -> list[str]:
        """Names of the row's columns of which zstd would leave at most seven eighths, by samples all over the block."""
        pa, _ = arrow()
        codec, found = pa.Codec("zstd", compression_level=1), []
        for name, held in zip(column_names(self.schema), self._columns, strict=True):
            flat = held[: self.rows].reshape(-1)
            starts = range(0, len(flat), max(_SAMPLE_BYTES, len(flat) // _SAMPLES))
            sample = np.concatenate([flat[start : start + _SAMPLE_BYTES] for start in starts])
            if len(codec.compress(sample.tobytes(), asbytes=True)) <= _WORTH * len(sample):
                found.append(name)
        return found


def rows_of(table: Any, schema: RowSchema, numbers: Mapping[str, int], where: str, most: int) -> Iterator[Part]:
    """Table numbers, ids, row bytes and deletions of an Arrow table, in parts of at most `most` rows.

    Args:
        numbers: of the tables that may come, by name.

    Raises:
        CorruptExportError: the table is not what `Block.to_arrow` gives.
    """
    expected = file_schema(schema, DELETED in table.schema.names)
    if not table.schema.equals(expected) or any(column.null_count for column in table.columns):
        raise CorruptExportError(f"{where} has columns {table.schema.names} of other types than its manifest says")
    for batch in table.to_batches(max_chunksize=most):
        yield _part(batch, schema, numbers, where)


def _part(batch: Any, schema: RowSchema, numbers: Mapping[str, int], where: str) -> Part:
    names, n = batch.column(0).dictionary.to_pylist(), batch.num_rows
    if unknown := [name for name in names if name not in numbers]:
        raise CorruptExportError(f"{where} has rows of table {unknown[0]!r}, which its manifest does not name")
    lookup = np.array([numbers[name] for name in names], np.uint32)
    tables = lookup[batch.column(0).indices.to_numpy(zero_copy_only=False)]
    data = np.empty((n, schema.row_bytes), np.uint8)
    start = 0
    for column, array in zip(schema.columns, batch.columns[2:], strict=False):
        held = np.frombuffer(array.buffers()[1], np.uint8, n * column.bytes, array.offset * column.bytes)
        data[:, start : start + column.bytes] = held.reshape(n, column.bytes)
        start += column.bytes
    deleted = batch.column(DELETED).to_numpy(zero_copy_only=False) if DELETED in batch.schema.names else None
    return tables, batch.column(1).to_numpy(), data, deleted
