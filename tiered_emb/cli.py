"""`tiered-emb`: the command line. Commands import what they need when they run, so that `--help` is quick.

How they end, and their exit codes: `tiered_emb.exits`.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from tiered_emb.exits import INTERRUPTED, CommandGroup, one_line_errors
from tiered_emb.policies_cli import policies
from tiered_emb.store_cli import store


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tiered-emb")
def main() -> None:
    """Embedding tables larger than memory, spread over HBM, DDR and SSD."""


main.add_command(store)
main.add_command(policies)


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
    "--checkpoint-every",
    metavar="STEPS",
    type=int,
    help="Save a checkpoint so often, at the start and at the end; needs --store.  [default: never]",
)
@click.option(
    "--checkpoints",
    metavar="DIRECTORY",
    help="Where checkpoints are.  [default: beside the store, its name.checkpoints]",
)
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint, or start if there is nothing yet.")
@click.option(
    "--policy",
    default="lru",
    show_default=True,
    help="Which rows leave a tier first: lru, lfu, sieve, s3fifo, arc, ...; a wrong name lists all.",
)
@click.option(
    "--min-rows", metavar="NAME=ROWS", multiple=True, help="Rows that a table keeps in the DDR tier; repeatable."
)
@click.option("--max-rows", metavar="NAME=ROWS", multiple=True, help="Rows that a table may have there; repeatable.")
@click.option(
    "--admission",
    default="always",
    show_default=True,
    help="Which rows that leave the HBM tier may come into the DDR tier: always, tinylfu[:N], probability[:P].",
)
@click.option(
    "--lookahead", type=int, default=2, show_default=True, help="Batches whose rows are brought in ahead; 0 = none."
)
@click.option(
    "--optimizer",
    default="rowwise_adagrad",
    show_default=True,
    help="Row rule: rowwise_adagrad, sgd, adagrad, adam, rowwise_adam, adamw, lamb, ftrl, or your own.",
)
@click.option("--lr", type=float, help="Learning rate of the row rule.  [default: by rule]")
@click.option(
    "--precision",
    default="fp32",
    show_default=True,
    help="Of weights below the tier they are worked on in, and at rest: fp32, bf16, fp16, int8.",
)
@click.option(
    "--rounding", default="stochastic", show_default=True, help="How weights get there: stochastic or nearest."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of rows, MLPs and made-up clicks.")
@click.option("--threads", type=int, default=1, show_default=True, help="Of torch and of the row kernels.")
@click.option("--record", metavar="FILE", help="Record which rows are asked for, as a trace in a new file.")
@click.option("--record-rate", type=float, default=1.0, show_default=True, help="Share of the ids to record.")
@click.option("--check", type=click.Choice(["dense"]), help="Train again on whole tables in memory and compare.")
@click.option("--json", metavar="FILE|-", help="The report as JSON; - = the last line of standard output.")
def train(**options: Any) -> None:
    """Train a click model (DLRM) over tiered tables and test it on the last tenth."""
    with one_line_errors():
        from tiered_emb.reference.command import train as run
        from tiered_emb.reference.interrupt import Interrupted
        from tiered_emb.reference.settings import TrainOptions

        try:
            code = run(TrainOptions(**options))
        except Interrupted as stopped:
            click.echo(f"tiered-emb: {stopped}", err=True)
            code = INTERRUPTED
    sys.exit(code)
