"""Rows at rest: a store maps (table, id) to the bytes of a row. Imports neither torch nor `tiered_emb`."""

from __future__ import annotations

from storage.describe import StoreDescription, describe_store
from storage.errors import (
    CorruptExportError,
    CorruptionError,
    CorruptRowError,
    CorruptSegmentError,
    ExportError,
    NotAStoreError,
    SchemaMismatchError,
    StorageError,
    StoreChangedError,
    StoreClosedError,
    StoreConfigError,
    StoreForkedError,
    StoreFullError,
    StoreIOError,
    StoreLockedError,
    StoreMissingError,
    StoreReadOnlyError,
)
from storage.export import ExportReport, ImportReport
from storage.heap_store import HeapStore
from storage.lmdb_store import LmdbStore, StoreConfig
from storage.memory_store import MemoryStore
from storage.schema import Column, RowSchema, table_number
from storage.store import HintedStore, RowIds, Store, Stored, StoreStats, TableRef
from storage.verify import Damage, VerifyReport, verify_store

__all__ = [
    "Column",
    "CorruptExportError",
    "CorruptRowError",
    "CorruptSegmentError",
    "CorruptionError",
    "Damage",
    "ExportError",
    "ExportReport",
    "HeapStore",
    "HintedStore",
    "ImportReport",
    "LmdbStore",
    "MemoryStore",
    "NotAStoreError",
    "RowIds",
    "RowSchema",
    "SchemaMismatchError",
    "StorageError",
    "Store",
    "StoreChangedError",
    "StoreClosedError",
    "StoreConfig",
    "StoreConfigError",
    "StoreDescription",
    "StoreForkedError",
    "StoreFullError",
    "StoreIOError",
    "StoreLockedError",
    "StoreMissingError",
    "StoreReadOnlyError",
    "StoreStats",
    "Stored",
    "TableRef",
    "VerifyReport",
    "describe_store",
    "table_number",
    "verify_store",
]
