"""The bytes of a recorded trace: a header, then blocks, each with its checksums (docs/formats.md, "A trace").

A file begins with what holds for all of it, and grows by whole blocks: names of tables, requests of some batches, and,
when it is closed, an end that says how many there were. So a recording that was killed has lost what was not yet in a
block, and no more; that it was killed shows by the missing end. A block is damaged, and never cut, if anything but
zeros follows where it is not as written.

Requests are kept raw, in the order in which they were asked for: what a batch makes of them (each id once, with its
count) follows from that, and the reverse does not. Neighbours mostly have one table, so tables are kept as runs.
They are packed with zstd at level 1: level 3 takes 1.6 times as long for a tenth less.

Shapes: N requests, B batches, R runs of requests of one table, of one block.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from storage.row_log.hashing import checksum
from storage.schema import table_number
from tiered_emb.errors import TraceError
from tiered_emb.trace.source import Source
from tiered_emb.trace.value import Ids, TableNumbers, TraceBuilder

MAGIC, VERSION = b"TETRACE\0", 1
TABLES, BATCHES, END = 1, 2, 3

_LEVEL = 1
_BLOCK_MAGIC = b"TEBK"
_HEADER = struct.Struct("<8sIIdQ")
_BLOCK = struct.Struct("<4sIQQQQQQ")
_SUM = struct.Struct("<Q")
_HEADER_BYTES, _BLOCK_BYTES = _HEADER.size + _SUM.size, _BLOCK.size + _SUM.size
_PIECE_BYTES = 1 << 22  # of what is read at once


class Requests(NamedTuple):
    """The requests of one block.

    Attributes:
        ids: (N,) int64.
        runs: (B,) uint32, how many runs each batch has.
        tables: (R,) uint32, of each run.
        counts: (R,) uint32, requests in each run.
    """

    ids: Ids
    runs: NDArray[np.uint32]
    tables: TableNumbers
    counts: NDArray[np.uint32]

    def ends(self) -> NDArray[np.int64]:
        """(B,) where the batches end, in requests."""
        by_run = np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])
        ends: NDArray[np.int64] = by_run[np.cumsum(self.runs, dtype=np.int64)]
        return ends


class _Head(NamedTuple):
    """A block's header; see docs/formats.md."""

    magic: bytes
    kind: int
    number: int
    requests: int
    batches: int
    packed_bytes: int
    raw_bytes: int
    checksum: int


def header(rate: float, seed: int) -> bytes:
    """The beginning of a file."""
    return _summed(_HEADER.pack(MAGIC, VERSION, _HEADER_BYTES, rate, seed))


def tables_block(number: int, names: Sequence[str]) -> bytes:
    """Names of tables, whose numbers follow from them."""
    return _block(TABLES, number, 0, len(names), b"".join(name.encode() + b"\0" for name in names))


def batches_block(number: int, requests: Requests) -> bytes:
    """Requests of some batches."""
    raw = b"".join(part.tobytes() for part in requests)
    return _block(BATCHES, number, len(requests.ids), len(requests.runs), raw)


def end_block(number: int, requests: int, batches: int) -> bytes:
    """What a file that was closed ends with: how much it holds."""
    return _block(END, number, requests, batches, b"")


def _block(kind: int, number: int, requests: int, batches: int, raw: bytes) -> bytes:
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(raw) if raw else b""
    head = _BLOCK.pack(_BLOCK_MAGIC, kind, number, requests, batches, len(packed), len(raw), checksum(packed))
    return _summed(head) + packed


def _summed(head: bytes) -> bytes:
    return head + _SUM.pack(checksum(head))


# ------------------------------------------------------------------------------------------------ reading


def read_tiered(source: Source, builder: TraceBuilder) -> None:
    """A trace of ours. Raises TraceError for one that is damaged, or was not closed."""
    _read_header(source, builder)
    number, kind = 0, BATCHES
    while kind in (TABLES, BATCHES):
        kind = _read_block(source, builder, number)
        number += 1
    if kind == END and source.peek(1):
        raise TraceError(f"trace {source.path} goes on behind its end, from byte {source.offset}: it is damaged")


def _read_header(source: Source, builder: TraceBuilder) -> None:
    data = source.read(_HEADER_BYTES)
    if not data.startswith(MAGIC) and not MAGIC.startswith(data):
        raise TraceError(f"trace {source.path} is no trace that tiered_emb recorded: it begins with {data[:8]!r}")
    version = int.from_bytes(data[8:12], "little")
    if len(data) >= 12 and version != VERSION:
        raise TraceError(f"trace {source.path} is of version {version}, and this program reads {VERSION}")
    if len(data) < _HEADER_BYTES:
        raise TraceError(f"trace {source.path} is cut short in its header, at byte {len(data)}: nothing of it is left")
    if _summed(data[: _HEADER.size]) != data:
        raise TraceError(f"trace {source.path} is damaged in its header; record it again")
    _, _, _, builder.rate, builder.seed = _HEADER.unpack(data[: _HEADER.size])


def _read_block(source: Source, builder: TraceBuilder, number: int) -> int:
    """The kind of the next block, whose contents are taken; 0 = the file is cut, and that is tolerated."""
    start = source.offset
    data = source.read(_BLOCK_BYTES)
    if not data:
        source.end_early(f"was not closed: it has no end behind its {len(builder)} requests, at byte {start}")
        return 0
    if len(data) < _BLOCK_BYTES or _summed(data[: _BLOCK.size]) != data:
        return _end_in_block(source, start, "its header is not as written")
    head = _Head(*_BLOCK.unpack(data[: _BLOCK.size]))
    if (head.magic, head.number) != (_BLOCK_MAGIC, number) or head.kind not in (TABLES, BATCHES, END):
        raise _damage(source, start, f"block {number} is expected, and {head.magic!r} {head.number} there")
    packed = _read_all(source, head.packed_bytes)
    if len(packed) < head.packed_bytes or checksum(packed) != head.checksum:
        return _end_in_block(source, start, "its bytes do not match their checksum")
    _take(source, builder, head, packed, start)
    return head.kind


def _read_all(source: Source, count: int) -> bytes:
    """So many bytes, or all there are: a number in a file is no reason to ask for memory."""
    parts: list[bytes] = []
    while count > 0 and (part := source.read(min(count, _PIECE_BYTES))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _end_in_block(source: Source, start: int, what: str) -> int:
    """A block is not whole: the file is cut if nothing follows, or zeros for what never reached the disk."""
    while rest := source.read(_PIECE_BYTES):
        if rest.strip(b"\0"):
            raise _damage(source, start, what)
    source.end_early(f"is cut short in the block at byte {start}")
    return 0


def _damage(source: Source, start: int, what: str) -> TraceError:
    return TraceError(f"trace {source.path} is damaged in the block at byte {start}: {what}; record it again")


def _take(source: Source, builder: TraceBuilder, head: _Head, packed: bytes, start: int) -> None:
    """What a whole block says."""
    try:
        raw = zstandard.ZstdDecompressor().decompress(packed, head.raw_bytes) if packed else b""
        if head.kind == TABLES:
            names = raw.decode().split("\0")[:-1]
            builder.table_names.update((table_number(name), name) for name in names)
        elif head.kind == BATCHES:
            _add(builder, _requests(head, raw))
        elif (head.requests, head.batches) != (len(builder), builder.num_batches):
            raise ValueError(f"it counts {head.requests} requests in {head.batches} batches")
    except (ValueError, zstandard.ZstdError) as error:
        raise _damage(source, start, str(error)) from error


def _requests(head: _Head, raw: bytes) -> Requests:
    """The parts of a block. Raises ValueError if they do not fit together."""
    ids_bytes, runs_bytes = 8 * head.requests, 4 * head.batches
    runs = np.frombuffer(raw, np.uint32, head.batches, ids_bytes)
    total = int(runs.sum(dtype=np.int64))
    tables = np.frombuffer(raw, np.uint32, total, ids_bytes + runs_bytes)
    counts = np.frombuffer(raw, np.uint32, total, ids_bytes + runs_bytes + 4 * total)
    if len(raw) != ids_bytes + runs_bytes + 8 * total or counts.sum(dtype=np.int64) != head.requests:
        raise ValueError("its parts do not add up")
    return Requests(np.frombuffer(raw, np.int64, head.requests), runs, tables, counts)


def _add(builder: TraceBuilder, requests: Requests) -> None:
    builder.add_batches(requests.ends() + len(builder))
    tables = requests.tables
    if not len(tables):
        return
    one = bool((tables == tables[0]).all())
    builder.add(requests.ids, int(tables[0]) if one else np.repeat(tables, requests.counts))
