"""`tiered-emb store`: look after a store. Nothing here needs torch; what is printed: `tiered_emb.store_report`.

Exit codes as those of every command (`tiered_emb.exits`); `verify` exits with 1 if anything is damaged.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

import click

from tiered_emb.exits import FAILED, one_line_errors

_IMPORT_BUFFER_BYTES = 128 << 20  # of rows on their way to the disk: with 64 MiB an import takes a tenth longer


@click.group()
def store() -> None:
    """Look after a store: what it holds, whether it is whole, its space, exports."""


@store.command()
@click.argument("path")
@click.option("--json", "target", metavar="FILE|-", help="All figures as JSON; - = the last line of standard output.")
@click.option(
    "--plot", metavar="FILE", help="A picture (.png, .svg, .pdf): live bytes by age, space and writes over time."
)
def info(path: str, target: str | None, plot: str | None) -> None:
    """What a store holds and what it costs; rows are not read."""
    with one_line_errors():
        from storage.describe import describe_store
        from tiered_emb.outputs import check_outputs
        from tiered_emb.store_report import print_description, table_console

        check_outputs({"--json": target, "--plot": plot}, [path])
        described = describe_store(path)
        print_description(described, table_console(stderr=target == "-"))
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


_later = click.option(
    "--later",
    type=click.Choice(["keep", "discard"]),
    help="What becomes of rows put after the last complete state, which a crash has left: keep them (a bare store), or "
    "go back to that state (a store of training).  [default: refuse such a store]",
)
_as_json = click.option("--json", "as_json", is_flag=True, help="As JSON, the last line of standard output.")


def _open_to_write(path: str, later: str | None) -> Any:
    """An LmdbStore. Closing it makes a complete state, so somebody must say whether rows after the last one count."""
    from storage.lmdb_store import LmdbStore

    if later is None:
        _refuse_later_rows(path)
    return LmdbStore(path, durability="snapshot" if later == "discard" else "commit")


@store.command()
@click.argument("path")
@_later
def compact(path: str, later: str | None) -> None:
    """Rewrite the segments that hold rows nobody needs any more; needs the right to write."""
    with one_line_errors():
        from rich.console import Console

        from storage.describe import describe_store
        from tiered_emb.store_report import byte_bar, print_compaction

        before = describe_store(path)
        opened = _open_to_write(path, later)
        with opened, byte_bar("compact") as progress:
            opened.compact(progress)
        print_compaction(before, describe_store(path), Console())


# ---- snapshots


@store.command()
@click.argument("path")
@click.argument("name")
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Drop the oldest snapshots beyond N.")
@_later
@_as_json
def snapshot(path: str, name: str, keep_last: int | None, later: str | None, as_json: bool) -> None:
    """Keep the rows of a store as they are now under a name; needs the right to write."""
    with one_line_errors():
        opened = _open_to_write(path, later)
        with opened:
            made = opened.snapshot(name, keep_last=keep_last)
        click.echo(f"{path}: snapshot {made.name!r} of {made.rows:,} rows", err=as_json)
        if as_json:
            figures = asdict(made)
            note = figures.pop("note")  # bytes of the caller's, of which JSON knows nothing
            _write_json({**figures, "note_bytes": len(note)}, "-")


@store.command("list")
@click.argument("path")
@_as_json
def list_snapshots(path: str, as_json: bool) -> None:
    """The snapshots of a store, oldest first, and what only they hold."""
    with one_line_errors():
        from storage.describe import describe_store
        from tiered_emb.store_report import print_snapshots, table_console

        described = describe_store(path)
        print_snapshots(described, table_console(stderr=as_json))
        if as_json:
            _write_json({"snapshots": [asdict(one) for one in described.snapshots]}, "-")


@store.command()
@click.argument("path")
@click.argument("older")
@click.argument("newer")
@click.option("--ids", is_flag=True, help="Name every id, one a line: table, id, put or deleted.")
@_as_json
def diff(path: str, older: str, newer: str, ids: bool, as_json: bool) -> None:
    """How many rows of each table differ between two snapshots; works beside a writer."""
    with one_line_errors():
        from rich.console import Console

        from storage.lmdb_store import LmdbStore
        from tiered_emb.store_report import count_changes, print_changes, print_ids

        opened: Any = LmdbStore(path, read_only=True)
        with opened:
            counts, named = count_changes(opened, opened.diff(older, newer), ids)
        console = Console(stderr=as_json)
        if ids and not as_json:
            print_ids(named)
        else:
            print_changes(f"{path}: {older} to {newer}", counts, console)
        if as_json:
            _write_json({"tables": counts, **({"ids": named} if ids else {})}, "-")


@store.command()
@click.argument("path")
@click.argument("name")
@click.option("--drop-later", is_flag=True, help="Also drop the snapshots that are newer; refused otherwise.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_as_json
def rollback(path: str, name: str, drop_later: bool, yes: bool, as_json: bool) -> None:
    """Go back to a snapshot: all that was put or deleted since is gone, for good; needs the right to write."""
    with one_line_errors():
        from storage.lmdb_store import LmdbStore

        opened: Any = LmdbStore(path, durability="commit")
        try:
            there = opened.snapshots()
            names = [one.name for one in there]
            later = names[names.index(name) + 1 :] if name in names else []
            if not yes and name in names:
                also = f" and drops {len(later)} newer snapshots" if later and drop_later else ""
                click.confirm(
                    f"{path}: going back to {name!r} ({there[names.index(name)].rows:,} rows) takes every change since"
                    f"{also}. Go on?",
                    abort=True,
                    err=True,
                )
            opened.rollback(name, drop_later=drop_later)
            rows = opened.stats().rows
            opened.close()
        finally:
            opened.abandon()  # if it was not closed: a flush would make rows count that a crash has left
        click.echo(f"{path}: back at {name!r}, {rows:,} rows", err=as_json)
        if as_json:
            _write_json({"name": name, "rows": rows, "dropped": later}, "-")


@store.command()
@click.argument("path")
@click.argument("name")
@_later
@_as_json
def drop(path: str, name: str, later: str | None, as_json: bool) -> None:
    """Let a snapshot go; rows to come use the space of what only it held. Needs the right to write."""
    with one_line_errors():
        opened = _open_to_write(path, later)
        with opened:
            opened.drop_snapshot(name)
            left = [one.name for one in opened.snapshots()]
        click.echo(f"{path}: snapshot {name!r} is gone", err=as_json)
        if as_json:
            _write_json({"dropped": name, "left": left}, "-")


@store.command()
@click.argument("path")
@click.argument("target")
@click.option("--snapshot", required=True, metavar="NAME", help="What is exported.")
@click.option("--since", metavar="NAME", help="Only what changed since this older snapshot: a delta.")
@click.option(
    "--compression",
    type=click.Choice(["auto", "zstd", "none"]),
    default="auto",
    show_default=True,
    help="Of columns of rows; auto = zstd where it makes a column an eighth smaller.",
)
@click.option("--json", "as_json", is_flag=True, help="The report as JSON, the last line of standard output.")
def export(path: str, target: str, snapshot: str, since: str | None, compression: str, as_json: bool) -> None:
    """Write a snapshot as Parquet files into the new directory TARGET; goes on beside a writer."""
    with one_line_errors():
        from rich.console import Console

        from storage.lmdb_store import LmdbStore
        from tiered_emb.outputs import check_new_directory
        from tiered_emb.store_report import byte_bar, print_export

        check_new_directory(target, [path])
        start = time.perf_counter()
        with LmdbStore(path, read_only=True) as opened, byte_bar("export") as progress:
            report = opened.export(target, snapshot=snapshot, since=since, compression=compression, progress=progress)
        print_export(report, time.perf_counter() - start, Console(stderr=as_json))
        if as_json:
            _write_json(asdict(report), "-")


@store.command("import")
@click.argument("path")
@click.argument("source")
@click.option("--name", metavar="NAME", help="Of the snapshot that is made.  [default: as exported]")
@click.option(
    "--rollback", is_flag=True, help="Go back first, to the base of a delta or to where an import was cut off."
)
@click.option(
    "--later",
    type=click.Choice(["keep", "discard"]),
    help="What becomes of rows put after the last complete state, which a crash has left.  [default: refuse such a "
    "store]",
)
@click.option("--json", "as_json", is_flag=True, help="The report as JSON, the last line of standard output.")
def import_(path: str, source: str, name: str | None, rollback: bool, later: str | None, as_json: bool) -> None:
    """Put the export SOURCE into the store PATH, new or not, and make a snapshot of it; all of it or nothing."""
    with one_line_errors():
        from rich.console import Console

        from storage.export.manifest import load_export
        from storage.lmdb_store import LmdbStore, StoreConfig
        from tiered_emb.store_report import byte_bar, print_import

        load_export(source)  # before a store is created
        if later is None and os.path.exists(path):
            _refuse_later_rows(path)
        start = time.perf_counter()
        config = StoreConfig(write_buffer_bytes=_IMPORT_BUFFER_BYTES)
        opened: Any = LmdbStore(path, durability="commit" if later == "keep" else "snapshot", config=config)
        with opened, byte_bar("import") as progress:
            report = opened.import_(source, name=name, rollback=rollback, progress=progress)
        print_import(path, report, time.perf_counter() - start, Console(stderr=as_json))
        if as_json:
            _write_json(asdict(report), "-")


def _refuse_later_rows(path: str) -> None:
    from pathlib import Path

    from storage.describe import describe_store
    from storage.row_log.owner import Owner

    described = describe_store(path)
    if described.later_rows:
        Owner(Path(path)).close()  # beside a writer that is not the trouble; this says who it is
        click.echo(
            f"tiered-emb: {path} holds {described.later_rows:,} rows put after its last complete state, left by a "
            "crash: open it once with the program that writes it, or say --later keep or --later discard",
            err=True,
        )
        sys.exit(FAILED)
