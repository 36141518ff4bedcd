"""Exports: a snapshot as a directory of Parquet files and a manifest, in full or as a delta, and back into a store.

Needs pyarrow, which is imported by the first export or import. The format: docs/formats.md.
"""

from __future__ import annotations

from storage.export.read import ImportReport, import_
from storage.export.write import ExportReport, export

__all__ = ["ExportReport", "ImportReport", "export", "import_"]
