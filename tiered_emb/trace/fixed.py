"""Traces of records of one size: plain integers, and oracleGeneral of libCacheSim.

oracleGeneral (Juncheng Yang's libCacheSim; the format of most public cache traces) is records of 24 bytes, little
endian: time in seconds u32, object id u64, size in bytes u32, and the number of the next request of the same object,
or -1 or 2^63 - 1 where there is none. As libCacheSim does by default, requests of objects of size 0 are left out.

Files of integers have no mark of their own, so one of another kind cannot always be told; what is certainly text, or
one of our own traces, is refused, and so are records of oracleGeneral that no program has written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered_emb.errors import TraceError
from tiered_emb.trace.blocks import MAGIC
from tiered_emb.trace.source import Source
from tiered_emb.trace.value import TraceBuilder

INTEGERS = {
    f"{sign}int{bits}-{order}": np.dtype(f"{mark}{kind}{bits // 8}")
    for bits in (32, 64)
    for sign, kind in (("", "i"), ("u", "u"))
    for order, mark in (("le", "<"), ("be", ">"))
}
ORACLE_GENERAL = np.dtype([("clock_time", "<u4"), ("obj_id", "<u8"), ("obj_size", "<u4"), ("next_access_vtime", "<i8")])

_BLOCK_BYTES = 1 << 20
_LOOKED_AT = 256  # first bytes
_LEAST_TEXT = 48
_TEXT = frozenset(b"\t\n\r") | frozenset(range(32, 127))
_LONGEST_TRACE = 1 << 48
_NEVER = np.iinfo(np.int64).max


def read_integers(source: Source, builder: TraceBuilder, dtype: np.dtype[Any]) -> None:
    """One id a record. Unsigned 64-bit ids from 2^63 on become negative: the same bits."""
    _read_records(source, builder, dtype)


def read_oracle_general(source: Source, builder: TraceBuilder) -> None:
    """See the module's essay."""
    _read_records(source, builder, ORACLE_GENERAL)


def _read_records(source: Source, builder: TraceBuilder, dtype: np.dtype[Any]) -> None:
    _refuse_others(source)
    if source.packing is None:
        builder.expect(source.size_bytes // dtype.itemsize)
    wanted = _BLOCK_BYTES - _BLOCK_BYTES % dtype.itemsize
    while data := source.read(wanted):
        tail = len(data) % dtype.itemsize
        records = np.frombuffer(data, dtype, len(data) // dtype.itemsize)
        builder.add(records if dtype.names is None else _oracle_ids(source, records, source.offset - len(data)))
        if tail:
            source.end_early(
                f"ends in the middle of a record of {dtype.itemsize} bytes, at byte {source.offset - tail}: it is cut "
                f"short, or of another format"
            )


def _refuse_others(source: Source) -> None:
    head = source.peek(_LOOKED_AT)
    if head.startswith(MAGIC):
        raise TraceError(f"trace {source.path} is one that tiered_emb recorded: read it with format 'tiered', or none")
    if len(head) >= _LEAST_TEXT and _TEXT.issuperset(head):
        raise TraceError(f"trace {source.path} is text, not binary records: it begins with {head[:24]!r}")


def _oracle_ids(source: Source, records: NDArray[Any], offset: int) -> NDArray[np.int64]:
    following = records["next_access_vtime"]
    wrong = (following < -2) | ((following > _LONGEST_TRACE) & (following != _NEVER))
    if wrong.any():
        at = int(wrong.argmax())
        raise TraceError(
            f"trace {source.path} is not oracleGeneral: the record at byte {offset + at * ORACLE_GENERAL.itemsize} "
            f"says that its object is asked for next in request {following[at]}; name its format"
        )
    ids: NDArray[np.int64] = records["obj_id"][records["obj_size"] > 0].view(np.int64)
    return ids
