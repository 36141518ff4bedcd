"""The row log: rows appended in segments, kept as values of an LMDB environment, found through an `IdIndex`."""

from __future__ import annotations
