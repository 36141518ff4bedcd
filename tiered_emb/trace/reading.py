"""read_trace: a file of any format we know as a Trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from tiered_emb.errors import ConfigError, TraceError
from tiered_emb.trace.blocks import MAGIC, read_tiered
from tiered_emb.trace.fixed import INTEGERS, read_integers, read_oracle_general
from tiered_emb.trace.lines import Column, read_csv, read_text
from tiered_emb.trace.source import Progress, Source
from tiered_emb.trace.value import Trace, TraceBuilder

Reader = Callable[[Source, TraceBuilder], None]

FORMATS: Mapping[str, Reader] = MappingProxyType(
    {
        "tiered": read_tiered,
        "oracleGeneral": read_oracle_general,
        "text": read_text,
        "csv": partial(read_csv, where=Column()),
        **{name: partial(read_integers, dtype=dtype) for name, dtype in INTEGERS.items()},
    }
)

_PACKED = (".gz", ".xz", ".zst")
_BY_SUFFIX = {".oraclegeneral": "oracleGeneral", ".csv": "csv", ".tsv": "csv", ".txt": "text"}


def read_trace(
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    column: int | str | None = None,
    header: bool | None = None,
    delimiter: str | None = None,
    name: str | None = None,
    tolerate_cut: bool = False,
    progress: Progress | None = None,
) -> Trace:
    """The trace in a file, which may be compressed (gzip, xz, zstd).

    Args:
        path: of the file.
        format: one of ``FORMATS``; None = by the file's first bytes (our own), or the end of its name:
            ``.oracleGeneral``, ``.csv``, ``.tsv``, ``.txt``, each with or without ``.gz``, ``.xz``, ``.zst``, which
            has to be true then.
        column: of a CSV file, by its name or its number from 0 on; 0 if None.
        header: the first line of a CSV file holds names; None = it does if ``column`` is a name.
        delimiter: between the fields of a CSV file; None = a tab in ``.tsv``, else a comma.
        name: of the trace; None = the file's, without what follows the first dot.
        tolerate_cut: a file that ends too early gives what is whole, instead of an error.
        progress: called now and then with bytes of the file read, and its size.

    Raises ConfigError for a format that there is not, or cannot be guessed, and for options that make no sense;
    TraceError for a file that cannot be read, is damaged, cut, of another format, or holds no request.
    """
    _check_format(format)
    with Source(path, tolerate_cut=tolerate_cut, progress=progress) as source:
        format = _guessed(source) if format is None else format
        read = FORMATS[format]
        if format == "csv":
            read = partial(read_csv, where=_column(source, column, header, delimiter))
        elif (column, header, delimiter) != (None, None, None):
            raise ConfigError(f"column, header and delimiter go with format 'csv', not {format!r}")
        builder = TraceBuilder(source.path.name.split(".")[0] or source.path.name if name is None else name)
        read(source, builder)
        if len(builder) == 0:
            raise TraceError(f"trace {source.path} holds no requests ({source.size_bytes} bytes, read as {format!r})")
        return builder.trace()


def _check_format(format: str | None) -> None:
    if format is not None and format not in FORMATS:
        raise ConfigError(f"trace format is {format!r}; expected one of {', '.join(FORMATS)}")


def _guessed(source: Source) -> str:
    """The format of a file of which the first bytes or the name tell. Raises ConfigError for others."""
    if source.peek(len(MAGIC)) == MAGIC:
        return "tiered"
    suffixes = [suffix.lower() for suffix in source.path.suffixes if suffix.lower() not in _PACKED]
    found = [_BY_SUFFIX[suffix] for suffix in suffixes if suffix in _BY_SUFFIX]
    if not found:
        raise ConfigError(
            f"trace {source.path}: neither its first bytes nor its name tell the format; give one of "
            f"{', '.join(FORMATS)}"
        )
    last = source.path.suffix.lower()
    if last in _PACKED and source.packing is None and source.size_bytes:
        raise TraceError(
            f"trace {source.path} is not compressed, whatever its name says: it begins with {source.peek(16)!r}; "
            f"fetch it again, or take {last} off its name if it was unpacked"
        )
    return found[-1]


def _column(source: Source, column: int | str | None, header: bool | None, delimiter: str | None) -> Column:
    tabs = any(suffix.lower() == ".tsv" for suffix in source.path.suffixes)
    separator = delimiter if delimiter is not None else "\t" if tabs else ","
    return Column(0 if column is None else column, header, separator)
