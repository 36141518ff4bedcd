"""What can go wrong between a batch of ids and its rows.

The tree (catch broad or narrow; errors of rows at rest live in :mod:`storage.errors`)::

    TieredEmbError
    |-- ConfigError            (ValueError)    a size, name or option that makes no sense
    |-- InvalidBatchError      (ValueError)    ids, lengths, offsets or weights that do not fit together
    |-- IdRangeError           (IndexError)    an id outside a bounded table
    |-- TierCapacityError      (MemoryError)   a batch needs more rows than a tier can hold at once
    |-- GradientError          (ArithmeticError) a gradient of a row that is not finite
    |-- PlanReleasedError      (RuntimeError)  a backward pass over rows that were updated and released, or let go
    |-- ModuleClosedError      (RuntimeError)  a module was used after close()
    |-- DataError              (ValueError)    a data file that is not what its reader expects
    |-- CheckpointError        (ValueError)    a checkpoint that is damaged, not whole, or of something else
    `-- TraceError             (ValueError)    a request trace that cannot be used: cut, damaged, foreign, there already
        `-- TraceWriteError    (OSError)       a trace could not be written: disk full, or failing

Each class also inherits the built-in that a caller of ``torch.nn.EmbeddingBag`` would expect.
"""

from __future__ import annotations


class TieredEmbError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(TieredEmbError, ValueError):
    """A size, name or option that makes no sense; says what was seen and what is expected."""


class InvalidBatchError(TieredEmbError, ValueError):
    """Ids, lengths, offsets or weights that do not fit together; nothing was changed."""


class IdRangeError(TieredEmbError, IndexError):
    """An id outside a bounded table; names table, feature, position and id. Nothing was changed."""


class TierCapacityError(TieredEmbError, MemoryError):
    """A batch needs more rows than a tier can hold at once; says how many bytes would do."""


class GradientError(TieredEmbError, ArithmeticError):
    """The summed gradient of a row is not finite; names table and id. No row was changed."""


class PlanReleasedError(TieredEmbError, RuntimeError):
    """A backward pass reached rows that an earlier one updated and released, or that a rollback let go."""


class ModuleClosedError(TieredEmbError, RuntimeError):
    """A module was used after ``close()``."""


class DataError(TieredEmbError, ValueError):
    """A data file that is not what its reader expects; names file, line and field."""


class CheckpointError(TieredEmbError, ValueError):
    """A checkpoint that is damaged, not whole, or of something else; or a moment at which none can be made or loaded.
    Says what was seen and what to do."""


class TraceError(TieredEmbError, ValueError):
    """A request trace that cannot be used: cut short, damaged, of another format; names file, place and remedy."""


class TraceWriteError(TraceError, OSError):
    """What was to be recorded could not be written; the trace is whole up to there."""
