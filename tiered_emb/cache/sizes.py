"""How many rows fit in so many bytes."""

from __future__ import annotations

from collections.abc import Callable

MAX_CAPACITY_ROWS = 2**31 - 2  # int32 slots, and node numbers one above them


def most_rows(budget_bytes: int, row_bytes: int, bytes_for: Callable[[int], int]) -> int:
    """Most rows, 0 included, of at least `row_bytes` each that fit in a budget; `bytes_for` says what so many take."""
    fits, too_many = 0, min(budget_bytes // row_bytes, MAX_CAPACITY_ROWS) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if bytes_for(middle) <= budget_bytes:
            fits = middle
        else:
            too_many = middle
    return fits
