"""Rows at rest: stores that keep embedding rows by (table, id) on disk, in memory or behind a wire."""
