"""The bytes of a trace file, plain or out of gzip, xz or zstd, as they are needed.

What a file is packed with is told by its first bytes, not by its name. A compressed file may consist of several
members, one after the other. One that ends in the middle is an error, unless cuts are tolerated: then it ends where
the bytes that are whole do. Memory: what is asked for, and what one block of compressed bytes becomes.
"""

from __future__ import annotations

import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import zstandard

from tiered_emb.errors import TraceError

Progress = Callable[[int, int], None]

_PLAIN_BYTES = 1 << 20
_PACKED_BYTES = 1 << 13  # zstd may make 32,000 times as many of them
_REPORT_BYTES = 1 << 22  # read between two reports of progress
_DAMAGED = (zlib.error, lzma.LZMAError, zstandard.ZstdError)


class _Unpacker(Protocol):
    """What the three libraries have in common."""

    @property
    def eof(self) -> bool:
        """The member has ended."""

    @property
    def unused_data(self) -> bytes:
        """Bytes behind its end."""

    def decompress(self, data: bytes, /) -> bytes:
        """The next bytes."""


def _unpackers() -> dict[str, tuple[tuple[bytes, ...], Callable[[], _Unpacker]]]:
    skippable = tuple(bytes([low]) + b"\x2a\x4d\x18" for low in range(0x50, 0x60))
    return {
        "gzip": ((b"\x1f\x8b\x08",), lambda: zlib.decompressobj(zlib.MAX_WBITS | 16)),
        "xz": ((b"\xfd7zXZ\0",), lzma.LZMADecompressor),
        "zstd": ((b"\x28\xb5\x2f\xfd", *skippable), lambda: zstandard.ZstdDecompressor().decompressobj()),
    }


class Source:
    """A file to read from front to back; closed by leaving the ``with`` block.

    Attributes:
        path: of the file.
        size_bytes: of the file.
        packing: "gzip", "xz", "zstd", or None for a plain file.
        offset: unpacked bytes that were read so far.
        tolerate_cut: a file that ends too early ends there, and is no error.
        cut: it did.

    Raises TraceError for a file that cannot be opened or read, is damaged, or ends too early.
    """

    def __init__(self, path: str | os.PathLike[str], *, tolerate_cut: bool = False, progress: Progress | None) -> None:
        self.path = Path(path)
        self.offset = 0
        self.tolerate_cut = tolerate_cut
        self.cut = False
        self._progress = progress
        self._reported = self._read = 0
        try:
            self._file = io.FileIO(self.path)
        except OSError as error:
            raise TraceError(f"trace {self.path} cannot be opened: {error.strerror or error}") from error
        self.size_bytes = os.fstat(self._file.fileno()).st_size
        self._rest = memoryview(b"")
        self.packing = self._packing()
        self._chunks = self._plain() if self.packing is None else self._unpacked(self.packing)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, count: int) -> bytes:
        """The next ``count`` bytes; fewer only at the end."""
        data = self._take(count)
        self.offset += len(data)
        return data

    def peek(self, count: int) -> bytes:
        """As :meth:`read`, but the bytes can be read again."""
        data = self._take(count)
        self._rest = memoryview(data + self._rest)
        return data

    def end_early(self, message: str) -> None:
        """The file ends where it should not: note it if that is tolerated, else raise TraceError."""
        if not self.tolerate_cut:
            raise TraceError(
                f"trace {self.path} {message}; give tolerate_cut=True (--tolerate-cut) to use what is whole"
            )
        self.cut = True

    def _take(self, count: int) -> bytes:
        parts, have = [self._rest], len(self._rest)
        while have < count and (chunk := next(self._chunks, b"")):
            parts.append(memoryview(chunk))
            have += len(chunk)
        over = max(0, have - count)
        last = parts[-1]
        parts[-1], self._rest = last[: len(last) - over], last[len(last) - over :]
        return b"".join(parts)

    def _packing(self) -> str | None:
        head = self._next(16)
        self._file.seek(0)
        self._read = 0
        return next((name for name, (magics, _) in _unpackers().items() if head.startswith(magics)), None)

    def _next(self, count: int) -> bytes:
        """Bytes of the file itself; none at its end."""
        try:
            data: bytes = self._file.read(count) or b""
        except OSError as error:
            raise TraceError(f"trace {self.path} cannot be read: {error.strerror or error}") from error
        self._read += len(data)
        if self._progress is not None and (not data or self._read >= self._reported + _REPORT_BYTES):
            self._reported = self._read
            self._progress(self._read, self.size_bytes)
        return data

    def _plain(self) -> Iterator[bytes]:
        while data := self._next(_PLAIN_BYTES):
            yield data

    def _unpacked(self, packing: str) -> Iterator[bytes]:
        _, make = _unpackers()[packing]
        member, unpacked, ended = make(), 0, False
        while data := self._next(_PACKED_BYTES):
            while data:
                if ended:
                    data = data.lstrip(b"\0")  # padding between members
                    if not data:
                        break
                    member, ended = make(), False
                try:
                    out = member.decompress(data)
                except _DAMAGED as error:
                    raise TraceError(
                        f"trace {self.path}: its {packing} data are damaged behind byte {unpacked} of what they hold "
                        f"({error}); fetch or record it again"
                    ) from error
                unpacked += len(out)
                if out:
                    yield out
                ended = member.eof
                data = member.unused_data if ended else b""
        if not ended:
            self.end_early(
                f"is cut short: its {packing} data end in the middle, behind byte {unpacked} of what they hold"
            )
