"""StoreConfig: the sizes of an LmdbStore. None of them is part of the format; each open may choose others."""

from __future__ import annotations

from dataclasses import dataclass

from storage.errors import StoreConfigError
from storage.id_index import MAX_SHARDS

_LEAST_BYTES = 1 << 13
_SEGMENT_BYTES = 1 << 18  # small, since a hole between segments is lost to those that are larger
_LARGE_SEGMENT_BYTES = 1 << 22
_MANY_SEGMENTS = 1 << 16  # beyond which larger ones are better than more
_SEGMENT_ROWS, _BESIDE_BYTES = 1800, 12  # a row is stored with a checksum and an id


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Sizes of a store.

    Attributes:
        segment_bytes: about how large a new segment is; half of write_buffer_bytes if that is less. None = 256 KiB, or
            what 1,800 rows need, and more in a store that has 16 GiB and more when it is opened.
        write_buffer_bytes: host memory for rows not yet committed and for LMDB's copy of them during a commit. Each
            group needs room for one segment all the same.
        map_size_bytes: greatest size of the data file; address space, not disk.
        index_shards: parts of the index that grow alone, a power of two; None = by the sizes of buffer and store.
        compact_bytes_per_s: most bytes a second that compaction may write; None = what keeping to max_space_ratio
            takes, 0 = it never runs by itself.
        max_space_ratio: bytes of the data file for each byte of a live row as put, beyond which segments are compacted;
            more than 1.2. A smaller ratio costs more writing.
        read_threads: that work on one get of many rows, the caller's among them; None = one a processor, 4 at most.

    Raises:
        StoreConfigError: a size that makes no sense.
    """

    segment_bytes: int | None = None
    write_buffer_bytes: int = 16 << 20
    map_size_bytes: int = 1 << 40
    index_shards: int | None = None
    compact_bytes_per_s: int | None = None
    max_space_ratio: float = 2.0
    read_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("segment_bytes", "write_buffer_bytes", "map_size_bytes"):
            size = getattr(self, name)
            if size is None and name == "segment_bytes":
                continue
            if not isinstance(size, int) or size < _LEAST_BYTES:
                raise StoreConfigError(f"{name}={size!r}: expected a whole number of bytes, {_LEAST_BYTES} at least")
        shards = self.index_shards
        if shards is not None and not (2 <= shards <= MAX_SHARDS and shards & (shards - 1) == 0):
            raise StoreConfigError(f"index_shards={shards}: expected a power of two from 2 to {MAX_SHARDS}, or None")
        rate = self.compact_bytes_per_s
        if rate is not None and (not isinstance(rate, int) or rate < 0):
            raise StoreConfigError(f"compact_bytes_per_s={rate!r}: expected a whole number of bytes, 0, or None")
        threads = self.read_threads
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise StoreConfigError(f"read_threads={threads!r}: expected a whole number of threads, 1 at least, or None")
        if not self.max_space_ratio > 1.2:
            raise StoreConfigError(f"max_space_ratio={self.max_space_ratio!r}: expected a number above 1.2")

    def filled_bytes(self, row_bytes: int, store_bytes: int = 0) -> int:
        """Size to which segments of such rows are filled in a store of about so many bytes.

        With LMDB's 16 bytes in front they end where a page ends. What a segment costs by itself is to be shared by some
        rows, wide ones too.
        """
        if self.segment_bytes is not None:
            return min(self.segment_bytes, self.write_buffer_bytes // 2) - 16
        wide = -(-_SEGMENT_ROWS * (row_bytes + _BESIDE_BYTES) // _SEGMENT_BYTES) * _SEGMENT_BYTES
        many = 1 << (store_bytes // _MANY_SEGMENTS).bit_length()
        most = min(_LARGE_SEGMENT_BYTES, self.write_buffer_bytes // 8)
        return max(min(_SEGMENT_BYTES, self.write_buffer_bytes // 2), min(max(wide, many), most)) - 16

    def bulk_bytes(self) -> int:
        """Size to which segments are filled while many rows come that are new: what each costs by itself tells then,
        and none of them will fit into a hole anyway. 0 = as otherwise."""
        return 0 if self.segment_bytes is not None else min(_LARGE_SEGMENT_BYTES, self.write_buffer_bytes // 8) - 16

    def shards_for(self, rows: int) -> int:
        """Index shards for a store of about so many rows: enough that a shard stays small, and that of a thousand
        rows one or two share their tags with others; few if memory is scarce."""
        if self.index_shards is not None:
            return self.index_shards
        least = 16 if self.write_buffer_bytes < 1 << 20 else 256
        wanted = 1 << max(0, (rows >> 15).bit_length())
        return min(MAX_SHARDS, max(least, wanted))
