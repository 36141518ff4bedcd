"""Numbers as people read them."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(number: int) -> str:
    """Bytes, such as 1.5 MiB."""
    amount, unit = float(number), 0
    while amount >= 1023.95 and unit < len(_UNITS) - 1:  # from there on it would be rounded to 1024.0
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{number} B"


def counted(number: int, what: str) -> str:
    """Such as 1 row, or 1,061,331 rows."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
