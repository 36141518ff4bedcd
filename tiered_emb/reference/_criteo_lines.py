"""Lines of a Criteo-format file turned into numbers: a Numba kernel for the many, plain Python for the one that is
wrong.

A line is 40 fields between tabs: the label (0 or 1), I1 .. I13 (integers, may be negative or empty), C1 .. C26 (1 to 16
hexadecimal digits, may be empty); it ends with a newline, which a carriage return may precede. The kernel stops at the
first line that is anything else and says only where it starts; :func:`diagnose` reads that line again and says why.
"""

# Decorators of Numba have no types.
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

NUMBERS = 13
COLUMNS = 26
FIELDS = 1 + NUMBERS + COLUMNS
FIELD_NAMES = ("label", *(f"I{i + 1}" for i in range(NUMBERS)), *(f"C{i + 1}" for i in range(COLUMNS)))
MAX_DIGITS = 18  # of an integer, so that it fits 64 bits
MAX_HEX_DIGITS = 16

_TAB, _NEWLINE, _RETURN, _MINUS = 9, 10, 13, 45


@dataclass(frozen=True, eq=False)
class ParsedLines:
    """L lines as they stand in the file.

    Attributes:
        labels: (L,) float32.
        numbers: (L, 13) int64, 0 where the field is empty.
        ids: (L, 26) int64, the hexadecimal digits as 64 bits, 0 where the field is empty.
        present: (L, 26) bool, False where the field is empty.
        bad: where in the text the first line starts that is no such line; -1 = all are.
    """

    labels: NDArray[np.float32]
    numbers: NDArray[np.int64]
    ids: NDArray[np.int64]
    present: NDArray[np.bool_]
    bad: int


def parse_lines(text: bytes) -> ParsedLines:
    """The lines of ``text``, which ends with a newline, up to the first bad one."""
    lines = text.count(b"\n")
    labels = np.empty(lines, np.float32)
    numbers = np.empty((lines, NUMBERS), np.int64)
    ids = np.empty((lines, COLUMNS), np.int64)
    present = np.empty((lines, COLUMNS), np.bool_)
    parsed, bad = _parse(np.frombuffer(text, np.uint8), labels, numbers, ids, present)
    return ParsedLines(labels[:parsed], numbers[:parsed], ids[:parsed], present[:parsed], bad)


def diagnose(line: bytes) -> str:
    """What is wrong with a line that :func:`parse_lines` refused, naming the field."""
    fields = line.removesuffix(b"\r").split(b"\t")
    for at, (name, field) in enumerate(zip(FIELD_NAMES, fields, strict=False)):
        if expected := _expected(name, field):
            return f"field {at + 1} ({name}) is {_shown(field)}; expected {expected}"
    if len(fields) < FIELDS:
        missing = f"field {len(fields) + 1} ({FIELD_NAMES[len(fields)]}) is missing"
        return f"{missing}: the line has {len(fields)} fields between tabs, expected {FIELDS}"
    return f"field {FIELDS + 1} is one too many: the line has {len(fields)} fields between tabs, expected {FIELDS}"


def _expected(name: str, field: bytes) -> str:
    """What a field should have been; empty where it is right."""
    if name == "label":
        return "" if field in (b"0", b"1") else "0 or 1"
    if name.startswith("I"):
        digits = field.removeprefix(b"-")
        right = not field or (digits.isdigit() and len(digits) <= MAX_DIGITS)
        return "" if right else f"an integer of at most {MAX_DIGITS} digits, or nothing"
    right = len(field) <= MAX_HEX_DIGITS and all(byte in b"0123456789abcdefABCDEF" for byte in field)
    return "" if right else f"1 to {MAX_HEX_DIGITS} hexadecimal digits, or nothing"


def _shown(field: bytes) -> str:
    try:
        text = field.decode()
    except UnicodeDecodeError:
        return repr(field[:40]).removeprefix("b") + ("..." if len(field) > 40 else "")
    return repr(text[:40]) + ("..." if len(text) > 40 else "")


@njit(nogil=True, cache=True)
def _parse(text: Any, labels: Any, numbers: Any, ids: Any, present: Any) -> Any:
    """Lines parsed, and the start of the first bad line or -1. Every line of `text` ends with a newline."""
    start = 0
    for line in range(len(labels)):
        at = start + 1
        if text[start] != 48 and text[start] != 49:
            return line, start
        labels[line] = text[start] - 48
        for field in range(NUMBERS):
            if text[at] != _TAB:
                return line, start
            at = _integer(text, at + 1, numbers, line, field)
            if at < 0:
                return line, start
        for field in range(COLUMNS):
            if text[at] != _TAB:
                return line, start
            first = at + 1
            at = _hexadecimal(text, first, ids, line, field)
            if at - first > MAX_HEX_DIGITS:
                return line, start
            present[line, field] = at > first
        if text[at] == _RETURN:
            at += 1
        if text[at] != _NEWLINE:
            return line, start
        start = at + 1
    return len(labels), -1


@njit(nogil=True, cache=True)
def _integer(text: Any, at: Any, numbers: Any, line: Any, field: Any) -> Any:
    """Where the integer at `at` ends, once its value is written; -1 = it has a sign alone or too many digits."""
    negative = text[at] == _MINUS
    first = at + 1 if negative else at
    at = first
    number = np.int64(0)
    while 48 <= text[at] <= 57 and at - first <= MAX_DIGITS:
        number = number * 10 + (np.int64(text[at]) - 48)
        at += 1
    numbers[line, field] = -number if negative else number
    return -1 if at - first > MAX_DIGITS or (negative and at == first) else at


@njit(nogil=True, cache=True)
def _hexadecimal(text: Any, at: Any, ids: Any, line: Any, field: Any) -> Any:
    """Where the digits at `at` end, once their value is written; the value is right if they are at most 16."""
    bits = np.uint64(0)
    while True:
        digit = np.uint64(text[at])
        if np.uint64(48) <= digit <= np.uint64(57):
            digit -= np.uint64(48)
        elif np.uint64(97) <= digit <= np.uint64(102):
            digit -= np.uint64(87)
        elif np.uint64(65) <= digit <= np.uint64(70):
            digit -= np.uint64(55)
        else:
            ids[line, field] = np.int64(bits)
            return at
        bits = (bits << np.uint64(4)) | digit
        at += 1
