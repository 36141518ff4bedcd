"""Measurements, one file a question: ``python -m benchmarks NAME [--json -|FILE]``.

A question is a module with ``QUESTION`` (one line), ``add_options(parser)`` and ``measure(options) -> Report``, and a
line in ``__main__.NAMES``. Rules that every one of them keeps:

- Sides are compared within one process and interleaved (A B B A), and a ratio is the median of the ratios of
  neighbours: a shared machine that slows down slows both sides down.
- Every row and every state of every side is written before anything is timed: a baseline whose pages fault is none.
- The raw figures of both sides stand beside each ratio. What could not be measured is null, with the reason.
"""

from __future__ import annotations
