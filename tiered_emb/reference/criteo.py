"""Click logs in the format of the Criteo challenges, plain or gzipped, read as a stream and never held whole.

The first pass counts lines, so that the last tenth can be held out and progress be shown; every later pass reads
blocks of about a mebibyte. Ids are used as they are, as 64-bit integers in unbounded tables; an empty field is an
empty bag. Numbers are squeezed by sign(x) * log(1 + |x|), an empty one is 0.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from tiered_emb.errors import DataError
from tiered_emb.reference._criteo_lines import COLUMNS, FIELD_NAMES, NUMBERS, ParsedLines, diagnose, parse_lines
from tiered_emb.reference.stream import ClickBatch, Columns, Feature, Part, held_out_samples, rebatch

_BLOCK_BYTES = 1 << 20  # of text
_LONGEST_LINE_BYTES = 1 << 20  # that is believed

Advance = Callable[[int, int], None]
"""Called with bytes of the file read so far and in all."""


class CriteoStream:
    """The clicks of one file. Raises DataError where it is missing, no regular file, or has too few lines."""

    def __init__(self, path: Path, advance: Advance = lambda done, total: None) -> None:
        try:
            regular = path.is_file()
        except OSError as error:  # a folder on the way that may not be entered
            raise _unreadable(path, error) from error
        if not regular:
            what = "is not a regular file" if path.exists() else "does not exist"
            raise DataError(
                f"{path} {what}; expected a Criteo-format file (.tsv or .tsv.gz), 'movielens' or 'synthetic'"
            )
        self.name = str(path)
        self.features = tuple(Feature(name) for name in FIELD_NAMES[1 + NUMBERS :])
        self.dense_width = NUMBERS
        self._path = path
        self._names = tuple(feature.name for feature in self.features)
        self._lines = sum(block.count(b"\n") for block, _ in self._blocks(advance))
        self._held_out = held_out_samples(self._lines, self.name)

    def samples(self, part: Part) -> int:
        """As `ClickStream.samples`."""
        return self._held_out if part is Part.HELD_OUT else self._lines - self._held_out

    def batches(self, part: Part, batch_size: int) -> Iterator[ClickBatch]:
        """As `ClickStream.batches`. DataError names file, line and field."""
        border = self._lines - self._held_out
        first, stop = (0, border) if part is Part.TRAIN else (border, self._lines)
        for columns in rebatch(self._columns(first, stop), batch_size):
            yield columns.batch(self._names)

    def _columns(self, first: int, stop: int) -> Iterator[Columns]:
        """Lines first .. stop-1, counted from 0. Lines before are skipped without a look into them."""
        for block, line in self._blocks(lambda done, total: None):
            if line >= stop:
                return
            skipped = max(0, first - line)
            block = _lines(block, skipped, stop - line)
            if block:
                yield self._parsed(block, line + skipped)

    def _parsed(self, block: bytes, line: int) -> Columns:
        parsed = parse_lines(block)
        if parsed.bad >= 0:
            bad = block[parsed.bad : block.index(b"\n", parsed.bad)]
            raise DataError(f"{self._path}, line {line + len(parsed.labels) + 1}: {diagnose(bad)}")
        return Columns(parsed.labels, _squeezed(parsed), parsed.ids, parsed.present)

    def _blocks(self, advance: Advance) -> Iterator[tuple[bytes, int]]:
        """Blocks of whole lines, and the number of lines before each."""
        line, rest = 0, b""
        with self._open() as file:
            total = os.fstat(file.fileno()).st_size
            for text in self._texts(file):
                advance(file.tell(), total)
                end = text.rfind(b"\n") + 1
                if end:
                    block = rest + text[:end]
                    yield block, line
                    line += block.count(b"\n")
                    rest = text[end:]
                else:
                    rest += text
                if len(rest) > _LONGEST_LINE_BYTES:
                    raise DataError(
                        f"{self._path}, line {line + 1}: over {_LONGEST_LINE_BYTES} bytes without a newline; expected "
                        f"text with {len(FIELD_NAMES)} fields between tabs a line"
                    )
        if rest:
            yield rest + b"\n", line

    def _open(self) -> IO[bytes]:
        try:
            return self._path.open("rb")
        except OSError as error:
            raise _unreadable(self._path, error) from error

    def _texts(self, file: IO[bytes]) -> Iterator[bytes]:
        """The text of the file in pieces, unpacked if the file starts as gzip does."""
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        source = gzip.GzipFile(fileobj=file) if zipped else file
        try:
            while text := source.read(_BLOCK_BYTES):
                yield text
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{self._path} is a damaged or incomplete gzip file: {error}") from error
        except OSError as error:
            raise _unreadable(self._path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror or error}")


def _lines(block: bytes, first: int, stop: int) -> bytes:
    """Lines first .. stop-1 of a block of whole lines."""
    if first == 0 and stop >= len(block):
        return block
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1
    if first >= len(ends):
        return b""
    start = int(ends[first - 1]) if first else 0
    return block[start : int(ends[min(stop, len(ends)) - 1])]


def _squeezed(parsed: ParsedLines) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    numbers = parsed.numbers.astype(np.float64)
    return (np.sign(numbers) * np.log1p(np.abs(numbers))).astype(np.float32)


assert len(FIELD_NAMES) == 1 + NUMBERS + COLUMNS
