"""Every error that a store raises, so that a caller can catch broadly or narrowly.

StorageError
├── StoreConfigError       (ValueError)         an option that makes no sense
├── SchemaMismatchError    (ValueError)         a table is stored with another row schema than the one asked for
├── NotAStoreError                              the path holds something that is not a store of ours, or is not whole
├── StoreMissingError      (FileNotFoundError)  nothing is there and nothing may be created (read only)
├── StoreLockedError                            somebody else has the store open for writing
├── StoreClosedError                            a verb was called after close()
├── StoreReadOnlyError                          a write through a store that may only read
│   └── StoreForkedError                        a write in a forked child of the process that opened the store
├── StoreChangedError      (RuntimeError)       rows were put or deleted while a scan was going on
├── StoreFullError         (OSError)            disk, quota or memory map full; nothing acknowledged is lost
├── StoreIOError           (OSError)            the disk failed; close the store, reopen it, verify
├── ExportError            (ValueError)         no export of ours, or one that does not fit this store
└── CorruptionError
    ├── CorruptSegmentError                     a segment, a state record or the file that holds them is damaged
    ├── CorruptExportError                      a file of an export is damaged or missing
    └── CorruptRowError                         one row is damaged; carries `table` and `id`

A missing id is not an error: it is a bit in the `found` mask of `Store.get`.
"""

from __future__ import annotations

import errno

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class StorageError(Exception):
    """The root of every error a store raises on purpose."""


class StoreConfigError(StorageError, ValueError):
    """An option has a value that makes no sense; the message says which values do."""


class SchemaMismatchError(StorageError, ValueError):
    """A table is stored with another row schema, or two table names share a table number."""


class NotAStoreError(StorageError):
    """The path holds something else than a store, or parts of one; the message says what was seen."""


class StoreMissingError(StorageError, FileNotFoundError):
    """There is no store at the path and this open may not create one."""


class StoreLockedError(StorageError):
    """Another writer has the store; the message names it."""


class StoreClosedError(StorageError):
    """The store was closed."""


class StoreReadOnlyError(StorageError):
    """The store was opened for reading."""


class StoreForkedError(StoreReadOnlyError):
    """The store was opened by the parent of this process; only the parent may write."""


class StoreChangedError(StorageError, RuntimeError):
    """Rows were put or deleted between two blocks of one scan."""


class StoreFullError(StorageError, OSError):
    """No room on the disk or in the memory map. Rows already put stay in memory and are written once there is room."""


class StoreIOError(StorageError, OSError):
    """The disk or the file system failed. What was acknowledged is on disk; reopen the store to go on."""


class ExportError(StorageError, ValueError):
    """A directory is no export of ours, or its rows may not go into this store; the message says what would do."""


class CorruptionError(StorageError):
    """Stored bytes are not what was written."""


class CorruptSegmentError(CorruptionError):
    """A segment, a state record or the data file is damaged; the message names file and segment."""


class CorruptExportError(CorruptionError):
    """A file of an export is missing or not what was written; the message names it. Nothing was imported."""


class CorruptRowError(CorruptionError):
    """One row's bytes do not match its checksum.

    Attributes:
        table: table number (u32) of the row.
        id: id (int64) of the row.
    """

    def __init__(self, table: int, id: int, where: str = "") -> None:
        self.table = table
        self.id = id
        self.where = where
        place = f" ({where})" if where else ""
        super().__init__(
            f"row with id {id} of table number {table} is damaged: its bytes do not match their checksum{place}; "
            "put the row again from a copy, or delete the id"
        )

    def __reduce__(self) -> tuple[type[CorruptRowError], tuple[int, int, str]]:
        return type(self), (self.table, self.id, self.where)


def disk_error(error: OSError, message: str) -> StorageError:
    """The error of ours for one of the system's: no room, or a disk that fails."""
    if error.errno in NO_ROOM:
        return StoreFullError(f"{message}; free space on its disk")
    return StoreIOError(message)
