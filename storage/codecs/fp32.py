"""fp32: rows as they are worked on."""

from __future__ import annotations

import numpy as np

from storage.codecs._codec import Draws, Packed, Rows
from storage.schema import Column


class Fp32:
    """Nothing is packed and nothing is lost."""

    name = "fp32"
    lossy = False

    def columns(self, dim: int) -> tuple[Column, ...]:
        """`weight`, D numbers."""
        return (Column("weight", "float32", dim),)

    def pack(self, rows: Rows, dim: int, out: Packed, draws: Draws) -> None:
        """As `Codec.pack`."""
        out[:, : 4 * dim] = rows[:, :dim].view(np.uint8)

    def unpack(self, packed: Packed, dim: int, out: Rows) -> None:
        """As `Codec.unpack`."""
        out[:, :dim].view(np.uint8)[:] = packed[:, : 4 * dim]
