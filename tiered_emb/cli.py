"""`tiered-emb`: the command line. Commands import what they need when they run, so that `--help` is quick.

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

_ARGUMENT = re.compile(r"(?<![-\w/.'])(hbm_bytes|ddr_bytes|lr)(?![-\w/.'])")


class _Group(click.Group):
    """A group whose commands end in one line on Ctrl-C, also while they still import what they need."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("tiered-emb: interrupted", err=True)
            ctx.exit(INTERRUPTED)


@contextmanager
def _one_line_errors() -> Iterator[None]:
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


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tiered-emb")
def main() -> None:
    """Embedding tables larger than memory, spread over HBM, DDR and SSD."""


@main.command()
@click.option(
    "--data",
    metavar="PATH|movielens|synthetic",
    default="synthetic",
    show_default=True,
    help="Clicks: a Criteo-format file (.tsv, .tsv.gz), MovieLens-100k, or made up with a known best AUC.",
)
@click.option("--dim", type=int, help="Floats a row.  [default: 16; synthetic 32]")
@click.option("--batch-size", type=int, help="Samples a step.  [default: 128; synthetic 1024]")
@click.option("--epochs", type=int, default=1, show_default=True, help="Passes over the first nine tenths.")
@click.option(
    "--hbm-bytes",
    metavar="SIZE",
    help="Device memory for rows, such as 256KiB; 0 = no HBM tier.  [default: 0; synthetic 2MiB]",
)
@click.option(
    "--ddr-bytes", metavar="SIZE", help="Host memory for rows and all bookkeeping.  [default: 256MiB; synthetic 24MiB]"
)
@click.option("--store", metavar="DIRECTORY", help="Where rows rest; new, or without rows.  [default: temporary]")
@click.option(
    "--policy", default="lru", show_default=True, help="Which rows leave a tier first: lru, lfu, or your own."
)
@click.option(
    "--optimizer",
    default="rowwise_adagrad",
    show_default=True,
    help="Row rule: rowwise_adagrad, adagrad, adam, sgd, or your own.",
)
@click.option("--lr", type=float, help="Learning rate of the row rule.  [default: by rule]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of rows, MLPs and made-up clicks.")
@click.option("--threads", type=int, default=1, show_default=True, help="Of torch and of the row kernels.")
@click.option("--check", type=click.Choice(["dense"]), help="Train again on whole tables in memory and compare.")
@click.option("--json", metavar="FILE|-", help="The report as JSON; - = the last line of standard output.")
def train(**options: Any) -> None:
    """Train a click model (DLRM) over tiered tables and test it on the last tenth."""
    with _one_line_errors():
        from tiered_emb.reference.command import train as run
        from tiered_emb.reference.interrupt import Interrupted
        from tiered_emb.reference.settings import TrainOptions

        try:
            code = run(TrainOptions(**options))
        except Interrupted as stopped:
            click.echo(f"tiered-emb: {stopped}", err=True)
            code = INTERRUPTED
    sys.exit(code)
