"""RowForm: how the rows of one schema are worked on, and how they rest.

A row is worked on as float32 numbers, its weights and then its optimizer state. Below the tier in which that happens it
lies packed by its table's codec (`storage.codecs`), which the columns of its schema tell: weights in fewer bytes,
optimizer state as it is.

Shapes: N rows, D dimension, K state width, B bytes of a packed row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from storage.codecs import CODECS, Codec, Draws
from storage.schema import RowSchema
from tiered_emb.errors import ConfigError
from tiered_emb.plan import Rows

_STEP_BYTES = 4  # of the step in which a row was changed last, which stochastic rounding asks for


@dataclass(frozen=True, slots=True)
class RowForm:
    """See the module's docstring; made by `form_of`.

    Attributes:
        schema: of rows at rest.
        codec: of their weights.
        dim: D.
        state_width: K.
    """

    schema: RowSchema
    codec: Codec
    dim: int
    state_width: int

    @property
    def width(self) -> int:
        """D + K: floats of a row that is worked on."""
        return self.dim + self.state_width

    @property
    def lossy(self) -> bool:
        """Whether a row that rests may differ from the one that was worked on."""
        return self.codec.lossy

    @property
    def worked_bytes(self) -> int:
        """Bytes of a row in the tier in which it is worked on."""
        return 4 * self.width + (_STEP_BYTES if self.lossy else 0)

    @property
    def rest_bytes(self) -> int:
        """B: bytes of a row everywhere else."""
        return self.schema.row_bytes

    def pack(self, rows: Rows, out: NDArray[np.uint8], draws: Draws) -> None:
        """Pack rows (N, D + K) into out (N, B), both C-contiguous."""
        self.codec.pack(rows, self.dim, out, draws)
        if self.state_width:
            out[:, self.rest_bytes - 4 * self.state_width :] = rows[:, self.dim :].view(np.uint8)

    def unpack(self, packed: NDArray[np.uint8], out: Rows) -> None:
        """Unpack packed (N, B) into out (N, D + K), both C-contiguous."""
        self.codec.unpack(packed, self.dim, out)
        if self.state_width:
            out[:, self.dim :].view(np.uint8)[:] = packed[:, self.rest_bytes - 4 * self.state_width :]

    def unpacked(self, packed: NDArray[np.uint8]) -> Rows:
        """Rows (N, D + K), new, of packed (N, B)."""
        rows = np.empty((len(packed), self.width), np.float32)
        self.unpack(packed, rows)
        return rows


@cache
def form_of(schema: RowSchema) -> RowForm:
    """The form that rows of a schema have. Raises ConfigError for one that no codec packs."""
    dim = schema.columns[0].width
    for codec in CODECS.values():
        columns = codec.columns(dim)
        state = schema.columns[len(columns) :]
        if schema.columns[: len(columns)] == columns and all(column.dtype == "float32" for column in state):
            return RowForm(schema, codec, dim, sum(column.width for column in state))
    raise ConfigError(f"rows of {schema} are none that a codec packs; the precisions are {', '.join(CODECS)}")
