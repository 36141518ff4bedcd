"""Traces of lines: one id a line, or one column of a CSV file.

An id is an integer, ``-?[0-9]+``, from -2^63 to 2^64 - 1; those from 2^63 on become negative, the same bits. Anything
else is a name, and its id is a hash of it: FNV-1a (Fowler, Noll, Vo) of 64 bits. A hash, not the number of its first
appearance, because a name then has one id in every trace and every sample, a reader needs no table of all names, and
names do not meet the small integers of the same file. That two names of a file meet has odds of n^2 / 2^65.

Blanks around an id or name are no part of it; empty lines and empty fields are no requests. In CSV a field may stand in
double quotes, which may hold delimiters, line ends and quotes given twice; a name is hashed as it stands between them.

All of it is numpy on whole blocks of text, one position of all ids after the other.

Shapes: L lines of a block, T bytes of a block.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered_emb.errors import ConfigError, TraceError
from tiered_emb.trace.source import Source
from tiered_emb.trace.value import Ids, TraceBuilder

_Text = NDArray[np.uint8]
_Places = NDArray[np.int64]

_BLOCK_BYTES = 1 << 18
_LONGEST_LINE_BYTES = 1 << 20
_MARK = b"\xef\xbb\xbf"  # with which some programs begin a file in UTF-8
_NEWLINE, _RETURN, _QUOTE, _MINUS, _ZERO = (np.uint8(ord(sign)) for sign in '\n\r"-0')
_BLANK = np.zeros(256, np.bool_)
_BLANK[[9, 11, 12, 13, 32]] = True
_MOST_DIGITS = 20  # of 2^64 - 1
_MOST_TENTH, _MOST_LAST = np.uint64((1 << 64) // 10), 5
_LEAST = np.uint64(1 << 63)
_TEN = np.uint64(10)
_FNV_START, _FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)


@dataclass(frozen=True)
class Column:
    """Where in a CSV file the ids are.

    Attributes:
        column: its name, or its number from 0 on.
        header: the first line holds names; None = it does if the column is given by name.
        delimiter: one character between fields.
    """

    column: int | str = 0
    header: bool | None = None
    delimiter: str = ","

    def __post_init__(self) -> None:
        if isinstance(self.column, bool) or not isinstance(self.column, int | str):
            raise ConfigError(f"column is {self.column!r}; expected its name, or its number from 0 on")
        if isinstance(self.column, int) and self.column < 0:
            raise ConfigError(f"column is {self.column}; columns count from 0")
        if isinstance(self.column, str) and self.header is False:
            raise ConfigError(f"column is {self.column!r}, a name, but there is to be no header; give its number")
        if not (
            isinstance(self.delimiter, str) and len(self.delimiter.encode()) == 1 and self.delimiter not in '"\n\r'
        ):
            raise ConfigError(f"delimiter is {self.delimiter!r}; expected one ASCII character between fields")

    @property
    def has_header(self) -> bool:
        """Whether the first line is one."""
        return isinstance(self.column, str) if self.header is None else self.header


class _Lines(NamedTuple):
    """Whole lines of a file.

    Attributes:
        text: (T,) bytes.
        quoted: (T,) whether a byte stands between quotes; None if there are none.
        starts, ends: (L,) of the lines, without their ends.
        number: of the first, counted from 1.
    """

    text: _Text
    quoted: NDArray[np.bool_] | None
    starts: _Places
    ends: _Places
    number: int

    def number_at(self, place: int) -> int:
        """Number of the line of the file in which a place is."""
        return self.number + int(np.count_nonzero(self.text[:place] == _NEWLINE))


def read_text(source: Source, builder: TraceBuilder) -> None:
    """One id a line."""
    for lines in _blocks(source, quotes=False):
        builder.add(ids_of(lines.text, lines.starts, lines.ends))


def read_csv(source: Source, builder: TraceBuilder, where: Column) -> None:
    """One column of a CSV file."""
    column: int | None = None if where.has_header else int(where.column)
    for lines in _blocks(source, quotes=True):
        starts, ends = _records(lines)
        if column is None and len(starts):
            column = _column_in_header(source, lines.text[starts[0] : ends[0]].tobytes(), where)
            starts, ends = starts[1:], ends[1:]
        if len(starts) and column is not None:
            begins, stops = _fields(source, lines, (starts, ends), ord(where.delimiter), column)
            builder.add(ids_of(lines.text, begins, stops))


def ids_of(text: _Text, starts: _Places, ends: _Places) -> Ids:
    """Ids of the strings ``text[starts[i]:ends[i]]`` that are more than blanks, in their order."""
    starts, ends = _trimmed(text, starts, ends)
    if not len(starts):
        return np.empty(0, np.int64)
    ids, good = _integers(text, starts, ends)
    if not good.all():
        ids[~good] = _hashes(text, starts[~good], ends[~good])
    return ids


# ------------------------------------------------------------------------------------------------ lines


def _blocks(source: Source, *, quotes: bool) -> Iterator[_Lines]:
    """All lines of a file, many at once. Raises TraceError for what is no text."""
    rest, number = b"", 1
    while data := source.read(_BLOCK_BYTES):
        begins = source.offset == len(data)
        text = np.frombuffer(rest + (data.removeprefix(_MARK) if begins else data), np.uint8)
        _refuse_zeros(source, text, number)
        lines = _whole_lines(text, number, quotes)
        rest = text[len(lines.text) :].tobytes()
        if len(rest) > _LONGEST_LINE_BYTES:
            _refuse_long(source, rest, lines.number_at(len(lines.text)), quotes)
        if len(lines.text):
            yield lines
            number = lines.number_at(len(lines.text))
    if rest and not source.cut:  # what is left before a cut may be a part of an id
        lines = _whole_lines(np.frombuffer(rest + b"\n", np.uint8), number, quotes)
        if len(lines.text) <= len(rest):
            _refuse_long(source, rest, lines.number_at(len(lines.text)), quotes)
        yield lines


def _whole_lines(text: _Text, number: int, quotes: bool) -> _Lines:
    quoted, found = None, text == _NEWLINE
    if quotes and len(marks := np.flatnonzero(text == _QUOTE)):
        quoted = np.zeros(len(text), np.bool_)
        quoted[marks] = True
        np.logical_xor.accumulate(quoted, out=quoted)
        found &= ~quoted
    ends = np.flatnonzero(found)
    stop = int(ends[-1]) + 1 if len(ends) else 0
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    return _Lines(text[:stop], None if quoted is None else quoted[:stop], starts, ends, number)


def _refuse_zeros(source: Source, text: _Text, number: int) -> None:
    if not text.all():
        line = number + int(np.count_nonzero(text[: int(text.argmin())] == _NEWLINE))
        raise TraceError(
            f"trace {source.path}, line {line}: a zero byte, so this is no text; name its format, or save it as UTF-8"
        )


def _refuse_long(source: Source, rest: bytes, line: int, quotes: bool) -> None:
    if quotes and b'"' in rest:
        raise TraceError(f'trace {source.path}, line {line}: a quote (") begins that does not end; mend the line')
    raise TraceError(
        f"trace {source.path}, line {line}: no end of the line within {len(rest)} bytes, so this is no text of ids; "
        f"name its format"
    )


def _trimmed(text: _Text, starts: _Places, ends: _Places) -> tuple[_Places, _Places]:
    """Without blanks at both ends; those that are blank are left out."""
    while (blank := (starts < ends) & _BLANK[text[ends - 1]]).any():
        ends = ends - blank
    while (blank := (starts < ends) & _BLANK[text[np.minimum(starts, len(text) - 1)]]).any():
        starts = starts + blank
    kept = starts < ends
    return (starts, ends) if kept.all() else (starts[kept], ends[kept])


# ------------------------------------------------------------------------------------------------ fields


def _records(lines: _Lines) -> tuple[_Places, _Places]:
    """The lines that are not empty, without the CR of a CR LF; blanks at the ends may be fields."""
    starts, ends = lines.starts, lines.ends
    ends = ends - ((starts < ends) & (lines.text[ends - 1] == _RETURN))
    kept = starts < ends
    return starts[kept], ends[kept]


def _column_in_header(source: Source, line: bytes, where: Column) -> int:
    fields = csv.reader([line.decode("utf-8", "replace")], delimiter=where.delimiter, skipinitialspace=True)
    names = [name.strip() for name in next(fields)]
    if isinstance(where.column, int):
        return where.column  # whether it is there, every line shows
    if where.column not in names:
        raise TraceError(
            f"trace {source.path} has no column {where.column!r}; its header has {', '.join(map(repr, names[:20]))}"
            f"{', ...' if len(names) > 20 else ''}"
        )
    return names.index(where.column)


def _fields(
    source: Source, lines: _Lines, records: tuple[_Places, _Places], delimiter: int, column: int
) -> tuple[_Places, _Places]:
    """Where the field of a column begins and ends in each record, without its quotes."""
    starts, ends = records
    found = lines.text == delimiter
    if lines.quoted is not None:
        found &= ~lines.quoted
    cuts = np.append(np.flatnonzero(found), len(lines.text))
    first = np.searchsorted(cuts, starts)
    count = np.searchsorted(cuts, ends) - first
    if (count < column).any():
        at = int((count < column).argmax())
        raise TraceError(
            f"trace {source.path}, line {lines.number_at(int(starts[at]))}: no column {column} (they count from 0) "
            f"among its {int(count[at]) + 1}; give the column, or the delimiter, that the file has"
        )
    begins = starts if column == 0 else cuts[first + column - 1] + 1
    stops = np.where(count > column, cuts[np.minimum(first + column, len(cuts) - 1)], ends)
    if lines.quoted is None:
        return begins, stops
    begins, stops = _trimmed(lines.text, begins, stops)
    both = (stops - begins >= 2) & (lines.text[begins] == _QUOTE) & (lines.text[stops - 1] == _QUOTE)
    return begins + both, stops - both


# ------------------------------------------------------------------------------------------------ ids


def _columns(lengths: _Places) -> Iterator[tuple[int, Any]]:
    """Each position in strings of these lengths, with the strings that reach it: all, or their numbers."""
    shortest = int(lengths.min())
    for at in range(shortest):
        yield at, slice(None)
    longer = np.flatnonzero(lengths > shortest)
    at = shortest
    while len(longer):
        yield at, longer
        at += 1
        longer = longer[lengths[longer] > at]


def _integers(text: _Text, starts: _Places, ends: _Places) -> tuple[Ids, NDArray[np.bool_]]:
    """The strings as integers, and which of them are some."""
    negative = text[starts] == _MINUS
    first = starts + negative
    digits = ends - first
    good = (digits > 0) & (digits <= _MOST_DIGITS)
    value = np.zeros(len(starts), np.uint64)
    for at, which in _columns(np.minimum(digits, _MOST_DIGITS)):
        digit = text[first[which] + at] - _ZERO
        before = value[which]
        fits = digit <= 9
        if at == _MOST_DIGITS - 1:
            fits &= (before < _MOST_TENTH) | ((before == _MOST_TENTH) & (digit <= _MOST_LAST))
        good[which] &= fits
        value[which] = before * _TEN + digit
    good &= ~(negative & (value > _LEAST))
    np.negative(value, out=value, where=negative)
    return value.view(np.int64), good


def _hashes(text: _Text, starts: _Places, ends: _Places) -> Ids:
    """FNV-1a of the strings' bytes."""
    value = np.full(len(starts), _FNV_START)
    for at, which in _columns(ends - starts):
        value[which] = (value[which] ^ text[starts[which] + at]) * _FNV_PRIME
    return value.view(np.int64)
