"""`tiered-emb store`: look after a store. Nothing here needs torch; what is printed: `tiered_emb.store_report`.

Exit codes as those of every command (`tiered_emb.exits`); `verify` exits with 1 if anything is damaged.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from tiered_emb.exits import FAILED, one_line_errors


@click.group()
def store() -> None:
    """Look after a store: what it holds, whether it is whole, its space."""


@store.command()
@click.argument("path")
@click.option("--json", "target", metavar="FILE|-", help="All figures as JSON; - = the last line of standard output.")
@click.option(
    "--plot", metavar="FILE", help="A picture (.png, .svg, .pdf): live bytes by age, space and writes over time."
)
def info(path: str, target: str | None, plot: str | None) -> None:
    """What a store holds and what it costs; rows are not read."""
    with one_line_errors():
        from rich.console import Console

        from storage.describe import describe_store
        from tiered_emb.outputs import check_outputs
        from tiered_emb.store_report import print_description

        check_outputs({"--json": target, "--plot": plot}, [path])
        described = describe_store(path)
        print_description(described, Console(stderr=target == "-"))
        if plot is not None:
            _draw(described, plot)
        if target is not None:
            _write_json(described.to_json(), target)


def _draw(described: Any, plot: str) -> None:
    try:
        from storage.picture import draw_store
    except ImportError as error:
        click.echo(
            f"tiered-emb: --plot needs matplotlib ({error}): pip install 'tiered-emb[plots]', or leave it out", err=True
        )
        sys.exit(FAILED)
    from tiered_emb.outputs import writing

    with writing(plot):
        draw_store(described, plot)


def _write_json(figures: dict[str, Any], target: str) -> None:
    if target == "-":
        sys.stdout.flush()
        click.echo(json.dumps(figures))
        return
    from tiered_emb.outputs import writing

    with writing(target), open(target, "w", encoding="utf-8") as file:
        file.write(json.dumps(figures, indent=2) + "\n")


@store.command()
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="The report as JSON, the last line of standard output.")
def verify(path: str, as_json: bool) -> None:
    """Read every row of a store and name what is damaged; exit code 1 if anything is."""
    with one_line_errors():
        from rich.console import Console

        from storage.verify import verify_store
        from tiered_emb.store_report import byte_bar, print_verification, verification_json

        start = time.perf_counter()
        with byte_bar("verify") as progress:
            report = verify_store(path, progress)
        print_verification(report, time.perf_counter() - start, Console(stderr=as_json))
        if as_json:
            _write_json(verification_json(report), "-")
    sys.exit(0 if report.good else FAILED)


@store.command()
@click.argument("path")
@click.option(
    "--later",
    type=click.Choice(["keep", "discard"]),
    help="What becomes of rows put after the last complete state, which a crash has left: keep them (a bare store), or "
    "go back to that state (a store of training).  [default: refuse such a store]",
)
def compact(path: str, later: str | None) -> None:
    """Rewrite the segments that hold rows nobody needs any more; needs the right to write."""
    with one_line_errors():
        from rich.console import Console

        from storage.describe import describe_store
        from storage.lmdb_store import LmdbStore
        from tiered_emb.store_report import byte_bar, print_compaction

        before = describe_store(path)
        if before.later_rows and later is None:
            click.echo(
                f"tiered-emb: {path} holds {before.later_rows:,} rows put after its last complete state, left by a "
                "crash or a writer: open it once with the program that writes it, or say --later keep or "
                "--later discard",
                err=True,
            )
            sys.exit(FAILED)
        opened: Any = LmdbStore(path, durability="snapshot" if later == "discard" else "commit")
        with opened, byte_bar("compact") as progress:
            opened.compact(progress)
        print_compaction(before, describe_store(path), Console())
