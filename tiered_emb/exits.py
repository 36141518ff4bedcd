"""How commands end: exit codes, Ctrl-C, and the errors of this project as one line.

Exit codes: 0 done, 1 failed, 2 an option that makes no sense, 130 Ctrl-C. Errors that this project raises on purpose
are one line on stderr; any other is a bug and keeps its traceback.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

FAILED, MISUSED, INTERRUPTED = 1, 2, 130

_ARGUMENT = re.compile(
    r"(?<![-\w/.'])(hbm_bytes|ddr_bytes|lr|record_rate|min_rows|max_rows|admission|drop_later|keep_last)(?![-\w/.'])"
)


class CommandGroup(click.Group):
    """A group whose commands end in one line on Ctrl-C, also while they still import what they need."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("tiered-emb: interrupted", err=True)
            ctx.exit(INTERRUPTED)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """The errors of this project as one line and an exit code, not a traceback."""
    from storage.errors import StorageError
    from tiered_emb.errors import ConfigError, TieredEmbError

    try:
        yield
    except (TieredEmbError, StorageError) as error:
        click.echo(f"tiered-emb: {_as_options(str(error))}", err=True)
        sys.exit(MISUSED if isinstance(error, ConfigError) else FAILED)


def _as_options(message: str) -> str:
    """A message of the library, whose arguments are options here."""
    return _ARGUMENT.sub(lambda found: "--" + found[0].replace("_", "-"), message)
