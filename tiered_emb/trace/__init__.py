"""Traces: which rows were asked for, in which order, so that policies can be replayed without training.

::

    value.py      Trace, what every reader gives and every replay takes
    reading.py    read_trace: the formats by name, and how one is guessed
    source.py     the bytes of a file, unpacked as they are read
    fixed.py      records of one size: integers, libCacheSim's oracleGeneral
    lines.py      text and CSV
    blocks.py     the bytes of our own format (docs/formats.md)
    writer.py     TraceWriter, which records it
    sampling.py   which ids a sample keeps

A trace is read in blocks: beside the arrays it ends up in, a reader holds a few megabytes. Whatever is wrong with a
file is a ``TraceError`` that names file and place.
"""

from __future__ import annotations

from tiered_emb.trace.reading import FORMATS, read_trace
from tiered_emb.trace.sampling import sampled
from tiered_emb.trace.value import Trace
from tiered_emb.trace.writer import TraceWriter

__all__ = ["FORMATS", "Trace", "TraceWriter", "read_trace", "sampled"]
