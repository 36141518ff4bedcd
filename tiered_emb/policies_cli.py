"""`tiered-emb policies`: which policy, and how much memory, for a trace of ids. Nothing here needs torch.

What is asked and answered: `tiered_emb.sim.laboratory`; what is printed: `tiered_emb.policies_report`. Exit codes as
those of every command (`tiered_emb.exits`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tiered_emb.exits import FAILED, one_line_errors

if TYPE_CHECKING:
    from tiered_emb.sim.curves import Mode
    from tiered_emb.sim.laboratory import Question, Study
    from tiered_emb.sim.requests import Requests
    from tiered_emb.sim.shards import Correction
    from tiered_emb.trace import Trace

_Number = TypeVar("_Number", int, float)
_OWN = "trace"  # --batch: as the trace has them


@click.command()
@click.option(
    "--trace", "traces", metavar="PATH", multiple=True, required=True, help="Ids as they were asked for; repeatable."
)
@click.option(
    "--format",
    "format_name",
    metavar="NAME",
    help="Of the traces, such as int64-le, text or csv; a wrong name lists all.  [default: what the trace says]",
)
@click.option("--column", metavar="NAME|N", help="Of a CSV trace: which column holds the ids.  [default: 0, the first]")
@click.option("--tolerate-cut", is_flag=True, help="Of a trace that ends too early use what is whole.")
@click.option(
    "--policy",
    metavar="A,B,...",
    help="Which policies.  [default: all, and belady, the bound; lookahead only in batches]",
)
@click.option("--sizes", metavar="ROWS,...", help="Capacities of the tier in rows.")
@click.option(
    "--fractions",
    metavar="SHARE,...",
    help="Capacities as shares of a trace's different rows.  [default: 0.01 to 0.75]",
)
@click.option(
    "--budget",
    metavar="SIZE,...",
    help="Capacities in bytes, such as 4GiB, of rows and the tier's directory, and what more memory saves; one budget "
    "is compared with a quarter of it up to four times as much. A store's index comes on top. Needs --row-bytes.",
)
@click.option("--row-bytes", type=int, metavar="N", help="Bytes of a row, optimizer state included, for --budget.")
@click.option(
    "--batch",
    metavar=f"N|{_OWN}",
    help=f"Replay batches, as training does: of N requests, or the trace's own ({_OWN}).  [default: one at a time]",
)
@click.option(
    "--lookahead",
    type=int,
    metavar="N",
    help="With --batch: how many batches ahead the policy lookahead knows what is needed.  [default: 2]",
)
@click.option(
    "--sample",
    type=float,
    metavar="RATE",
    help="Also estimate the curves from this share of the rows (SHARDS), and say how far off that is.",
)
@click.option(
    "--correction",
    type=click.Choice(["classes", "adj"]),
    default="classes",
    show_default=True,
    help="Of the sample's weight: by classes of how often rows are requested, or as in SHARDS-adj.",
)
@click.option("--no-exact", is_flag=True, help="With --sample: estimate only, for traces too long to replay.")
@click.option("--no-control", is_flag=True, help="Leave out the control: the same requests in random order.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the control and of the sample.")
@click.option("--csv", metavar="FILE", help="A line for each trace, policy and size.")
@click.option("--plot", metavar="FILE", help="A picture (.png, .svg, .pdf): a panel for each trace; adds belady.")
@click.option("--json", metavar="FILE|-", help="All figures as JSON; - = the last line of standard output.")
def policies(**options: Any) -> None:
    """Replay traces of ids under each policy and say what a tier would miss at which size.

    Requests go through the very directory that training uses, so the figures are those a tier would have.
    """
    with one_line_errors():
        _run(Options(**options))


@dataclass(frozen=True, slots=True)
class Options:
    """The options as they were given."""

    traces: tuple[str, ...]
    format_name: str | None
    column: str | None
    tolerate_cut: bool
    policy: str | None
    sizes: str | None
    fractions: str | None
    budget: str | None
    row_bytes: int | None
    batch: str | None
    lookahead: int | None
    sample: float | None
    correction: Correction
    no_exact: bool
    no_control: bool
    seed: int
    csv: str | None
    plot: str | None
    json: str | None


def _run(options: Options) -> None:
    from rich.console import Console

    from tiered_emb.errors import ConfigError
    from tiered_emb.outputs import check_outputs, writing
    from tiered_emb.policies_report import print_study, replay_bar, write_csv
    from tiered_emb.sim.laboratory import study

    if options.csv == "-":
        raise ConfigError(
            "--csv is '-'; expected the name of a file: of the formats only --json goes to standard output"
        )
    check_outputs({"--json": options.json, "--csv": options.csv, "--plot": options.plot}, options.traces)
    draw = _drawing(options.plot) if options.plot is not None else lambda studies: None
    question, console = _question(options), Console(stderr=options.json == "-")
    studies: list[Study] = []
    for path in options.traces:
        trace, requests = _read(path, options)
        with replay_bar(trace.name, question.replays()) as advance:
            studies.append(study(trace.name, requests, question, advance, trace.rate))
        print_study(studies[-1], console)
    if options.csv is not None:
        with writing(options.csv):
            write_csv(studies, options.csv)
    draw(studies)
    if options.json is not None:
        _write_json(studies, options.json)


def _question(options: Options) -> Question:
    """What the options ask. Raises ConfigError, which names the option."""
    from tiered_emb.errors import ConfigError
    from tiered_emb.sim.curves import BATCHES_AHEAD, BELADY, check_policies, check_sizes
    from tiered_emb.sim.laboratory import POLICIES_ASKED, Question

    given = [name for name in ("sizes", "fractions", "budget") if getattr(options, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"--{given[0]} and --{given[1]} both say how large the tier is; give one of them")
    if (options.budget is None) != (options.row_bytes is None):
        raise ConfigError("--budget and --row-bytes belong together: how many bytes, and how many a row takes")
    mode: Mode = "single" if options.batch is None else "batch"
    names = (
        tuple(dict.fromkeys(_split("--policy", options.policy))) if options.policy is not None else POLICIES_ASKED[mode]
    )
    check_policies(names)
    _check_lookahead(options, names)
    if options.plot is not None and BELADY not in names:
        names = (*names, BELADY)
    if options.batch not in (None, _OWN) and not (options.batch.isdecimal() and int(options.batch) > 0):
        raise ConfigError(f"--batch is {options.batch!r}; expected how many requests make a batch, or {_OWN!r}")
    sizes = _numbers("--sizes", options.sizes, int)
    if sizes:
        check_sizes(sizes)
    return Question(
        policies=names,
        sizes=sizes,
        fractions=_fractions(options.fractions),
        budgets=_budgets(options.budget),
        row_bytes=options.row_bytes or 0,
        mode=mode,
        lookahead=BATCHES_AHEAD if options.lookahead is None else options.lookahead,
        rate=options.sample,
        correction=options.correction,
        exact=not options.no_exact,
        control=not options.no_control,
        seed=options.seed,
    )


def _check_lookahead(options: Options, policies: Sequence[str]) -> None:
    """Raises ConfigError where it is given and would say nothing."""
    from tiered_emb.errors import ConfigError
    from tiered_emb.sim.curves import LOOKAHEAD

    if options.lookahead is not None and options.batch is None:
        raise ConfigError(
            f"--lookahead counts batches, and requests come one at a time: add --batch N or --batch {_OWN}"
        )
    if options.lookahead is not None and LOOKAHEAD not in policies:
        raise ConfigError(f"--lookahead is for the policy {LOOKAHEAD}, which --policy leaves out: add it there")


def _split(option: str, text: str) -> list[str]:
    from tiered_emb.errors import ConfigError

    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise ConfigError(f"{option} is {text!r}; expected values with a comma between each two")
    return parts


def _numbers(option: str, text: str | None, kind: Callable[[str], _Number]) -> tuple[_Number, ...]:
    """Numbers in ascending order, each once; () for no text. Raises ConfigError."""
    from tiered_emb.errors import ConfigError

    if text is None:
        return ()
    try:
        return tuple(sorted({kind(part) for part in _split(option, text)}))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{option} is {text!r}; expected numbers with a comma between each two") from error


def _fractions(text: str | None) -> tuple[float, ...]:
    from tiered_emb.errors import ConfigError

    fractions = _numbers("--fractions", text, float)
    if not all(0 < fraction <= 1 for fraction in fractions):
        raise ConfigError(f"--fractions is {text!r}; expected shares above 0 and at most 1")
    return fractions


def _budgets(text: str | None) -> tuple[int, ...]:
    from tiered_emb.config import parse_bytes
    from tiered_emb.errors import ConfigError
    from tiered_emb.sim.laboratory import steps_around

    budgets = _numbers("--budget", text, lambda part: parse_bytes(part, "--budget"))
    if 0 in budgets:
        raise ConfigError(f"--budget is {text}; expected bytes that hold some rows")
    return steps_around(budgets[0]) if len(budgets) == 1 else budgets


def _read(path: str, options: Options) -> tuple[Trace, Requests]:
    """A trace, and as the laboratory works on it."""
    from tiered_emb.errors import ConfigError
    from tiered_emb.sim.requests import Requests
    from tiered_emb.trace import read_trace

    column = int(options.column) if options.column is not None and options.column.isdecimal() else options.column
    trace = read_trace(path, options.format_name, column=column, tolerate_cut=options.tolerate_cut)
    requests = Requests.of_trace(trace)
    if options.batch not in (None, _OWN):
        requests = requests.every(int(options.batch))
    elif options.batch == _OWN and requests.bounds is None:
        raise ConfigError(f"trace {path} does not say where its batches begin; expected a number for --batch")
    return trace, requests


def _drawing(file: str) -> Callable[[Sequence[Study]], None]:
    """A function that draws studies to a file, made before anything is replayed."""
    try:
        from tiered_emb.sim.picture import check_picture, draw_studies
    except ImportError as error:
        click.echo(
            f"tiered-emb: --plot needs matplotlib ({error}): pip install 'tiered-emb[plots]', or leave it out", err=True
        )
        sys.exit(FAILED)
    from tiered_emb.outputs import writing

    check_picture(file)

    def draw(studies: Sequence[Study]) -> None:
        with writing(file):
            draw_studies(studies, file)

    return draw


def _write_json(studies: Sequence[Study], target: str) -> None:
    """One object for one trace; for more an object with all of them under `traces`."""
    each = [study.to_json() for study in studies]
    figures = each[0] if len(each) == 1 else {"traces": each}
    if target == "-":
        sys.stdout.flush()
        click.echo(json.dumps(figures))
        return
    from tiered_emb.outputs import writing

    with writing(target), open(target, "w", encoding="utf-8") as file:
        file.write(json.dumps(figures, indent=2) + "\n")
