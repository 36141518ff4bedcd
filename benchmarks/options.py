"""What the options of several questions have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

_Number = TypeVar("_Number", int, float)


def at_least(least: float, kind: Callable[[str], _Number] = int) -> Callable[[str], _Number]:
    """An argument's type: whole numbers, or those that ``kind`` makes of a text, from ``least`` on."""

    def number(text: str) -> _Number:
        value = kind(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is too few; expected {least} or more")
        return value

    number.__name__ = "integer" if kind is int else "number"  # in argparse's messages
    return number
