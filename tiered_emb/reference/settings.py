"""Options of `tiered-emb train`: what was given, what the data set's defaults add, and what makes no sense."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from storage.codecs import CODECS
from tiered_emb.cache import POLICIES, refusal
from tiered_emb.cache.admission import rule_of
from tiered_emb.config import ROUNDINGS, Rounding, TierConfig, parse_bytes
from tiered_emb.errors import ConfigError
from tiered_emb.optim import RULES, RowRule
from tiered_emb.pipeline import MOST_AHEAD

SYNTHETIC_SAMPLES = 1 << 19
INIT_RANGE = 0.05  # rows start uniform in +- this

DEFAULT_LR = {"rowwise_adagrad": 0.05, "adagrad": 0.05, "adam": 0.01, "sgd": 3.0}


@dataclass(frozen=True)
class TrainOptions:
    """As given on the command line; None = the data set's default."""

    data: str = "synthetic"
    dim: int | None = None
    batch_size: int | None = None
    epochs: int = 1
    hbm_bytes: str | None = None
    ddr_bytes: str | None = None
    store: str | None = None
    policy: str = "lru"
    optimizer: str = "rowwise_adagrad"
    lr: float | None = None
    seed: int = 0
    threads: int = 1
    check: str | None = None
    json: str | None = None
    record: str | None = None
    record_rate: float = 1.0
    min_rows: Sequence[str] = ()
    max_rows: Sequence[str] = ()
    admission: str = "always"
    lookahead: int = 2
    checkpoint_every: int | None = None
    checkpoints: str | None = None
    resume: bool = False
    precision: str = "fp32"
    rounding: str = "stochastic"


@dataclass(frozen=True)
class Settings:
    """Every option decided; see `docs/howto/train.md` for what they mean."""

    data: str
    dim: int
    batch_size: int
    epochs: int
    hbm_bytes: int
    ddr_bytes: int
    store: str | None
    policy: str
    optimizer: str
    lr: float
    seed: int
    threads: int
    record: str | None
    record_rate: float
    min_rows: dict[str, int]
    max_rows: dict[str, int]
    admission: str
    lookahead: int
    checkpoint_every: int | None = None
    checkpoints: str | None = None
    resume: bool = False
    precision: str = "fp32"
    rounding: Rounding = "stochastic"

    def rule(self) -> RowRule:
        """The row rule. Raises ConfigError on a learning rate that makes no sense."""
        return RULES[self.optimizer](lr=self.lr)

    def tiers(self, store: Path) -> TierConfig:
        """Budgets over the store at ``store``."""
        return TierConfig(
            self.hbm_bytes,
            self.ddr_bytes,
            store,
            self.policy,
            self.record,
            self.record_rate,
            min_rows=self.min_rows,
            max_rows=self.max_rows,
            admission=self.admission,
        )

    def to_json(self) -> dict[str, Any]:
        """Option -> what it was."""
        return asdict(self)


@dataclass(frozen=True)
class _Defaults:
    dim: int
    batch_size: int
    hbm_bytes: str
    ddr_bytes: str


# On a log of some thousand clicks small batches learn most. The made-up one has over a million rows of 132 bytes: its
# tiers together are less than a fifth of what they take.
_ON_FILES = _Defaults(dim=16, batch_size=128, hbm_bytes="0", ddr_bytes="256MiB")
_DEFAULTS = {"synthetic": _Defaults(dim=32, batch_size=1024, hbm_bytes="2MiB", ddr_bytes="24MiB")}


def decide(options: TrainOptions) -> Settings:
    """Fill in defaults and check every number. Raises ConfigError, which names the option."""
    defaults = _DEFAULTS.get(options.data, _ON_FILES)
    if options.policy not in POLICIES:
        raise ConfigError(f"--policy is {options.policy!r}; {refusal(options.policy)}")
    try:
        rule_of(options.admission, 1)
    except ValueError as error:
        raise ConfigError(f"--admission is {options.admission!r}; {error}") from None
    _check_choice("--optimizer", options.optimizer, RULES)
    _check_precision(options)
    lr = DEFAULT_LR.get(options.optimizer, 0.01) if options.lr is None else options.lr
    if not 0 <= options.seed < 1 << 63:
        raise ConfigError(f"--seed is {options.seed}; expected an integer from 0 to 2^63 - 1")
    settings = Settings(
        data=options.data,
        dim=_positive("--dim", defaults.dim if options.dim is None else options.dim, 1 << 16),
        batch_size=_positive(
            "--batch-size", defaults.batch_size if options.batch_size is None else options.batch_size, 1 << 24
        ),
        epochs=_positive("--epochs", options.epochs, 1 << 31),
        hbm_bytes=parse_bytes(defaults.hbm_bytes if options.hbm_bytes is None else options.hbm_bytes, "--hbm-bytes"),
        ddr_bytes=parse_bytes(defaults.ddr_bytes if options.ddr_bytes is None else options.ddr_bytes, "--ddr-bytes"),
        store=options.store,
        policy=options.policy,
        optimizer=options.optimizer,
        lr=lr,
        seed=options.seed,
        threads=_positive("--threads", options.threads, 1024),
        record=options.record,
        record_rate=options.record_rate,
        min_rows=_rows_by_table("--min-rows", options.min_rows),
        max_rows=_rows_by_table("--max-rows", options.max_rows),
        admission=options.admission,
        lookahead=_lookahead(options.lookahead),
        checkpoint_every=_every(options),
        checkpoints=_checkpoints(options),
        resume=options.resume,
        precision=options.precision,
        rounding=cast(Rounding, options.rounding),
    )
    settings.rule()
    settings.tiers(Path("unused"))
    return settings


def _rows_by_table(option: str, given: Sequence[str]) -> dict[str, int]:
    """What ``NAME=ROWS`` say, one or more to an option."""
    found: dict[str, int] = {}
    for text in given:
        name, _, rows = text.rpartition("=")
        if not name or not rows.isascii() or not rows.isdigit() or len(rows) > 18:
            raise ConfigError(f"{option} is {text!r}; expected a table and a number of rows, such as C1=1000")
        if name in found:
            raise ConfigError(
                f"{option} is given twice for table {name!r}, {found[name]} and {rows} rows; give one of them"
            )
        found[name] = int(rows)
    return found


def _every(options: TrainOptions) -> int | None:
    every = options.checkpoint_every
    return None if every is None else _positive("--checkpoint-every", every, 1 << 62)


def _checkpoints(options: TrainOptions) -> str | None:
    """Where checkpoints are, or would be; None without a store that stays."""
    wanted = {
        "--checkpoint-every": options.checkpoint_every is not None,
        "--checkpoints": options.checkpoints is not None,
        "--resume": options.resume,
    }
    asked = [name for name, given in wanted.items() if given]
    if options.store is None:
        if asked:
            raise ConfigError(f"{asked[0]} needs --store: without it the rows are gone at the end of the run")
        return None
    if options.resume and options.check is not None:
        raise ConfigError("--check compares a whole run, and --resume goes on with a part of one: leave one out")
    return options.checkpoints or f"{os.path.normpath(options.store)}.checkpoints"


def _lookahead(batches: int) -> int:
    if not 0 <= batches <= MOST_AHEAD:
        raise ConfigError(f"--lookahead is {batches}; expected a number of batches from 0 to {MOST_AHEAD}")
    return batches


def _positive(option: str, number: int, largest: int) -> int:
    if not 1 <= number <= largest:
        raise ConfigError(f"{option} is {number}; expected an integer from 1 to {largest}")
    return number


def _check_precision(options: TrainOptions) -> None:
    _check_choice("--precision", options.precision, CODECS)
    _check_choice("--rounding", options.rounding, ROUNDINGS)
    if options.check is not None and CODECS[options.precision].lossy:
        raise ConfigError(
            f"--check {options.check} proves equality to the bit, and rows of --precision {options.precision} are "
            f"rounded when they leave the tier they are worked on in: leave one of them out"
        )


def _check_choice(option: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(f"{option} is {name!r}; expected one of {', '.join(sorted(known))}")
