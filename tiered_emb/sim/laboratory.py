"""A study: all that is asked about one trace, and what came out, for tables, JSON, CSV and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tiered_emb.errors import ConfigError
from tiered_emb.sim.budgets import Gain, gains, rows_for
from tiered_emb.sim.control import shuffled
from tiered_emb.sim.curves import BATCHES_AHEAD, LOOKAHEAD, POLICY_NAMES, Curve, Mode, miss_ratio_curve
from tiered_emb.sim.requests import Requests
from tiered_emb.sim.shards import Correction, sampled_curve

# Of single requests there is nothing to know ahead: there `lookahead` is LRU.
POLICIES_ASKED: dict[Mode, tuple[str, ...]] = {
    "single": tuple(name for name in POLICY_NAMES if name != LOOKAHEAD),
    "batch": POLICY_NAMES,
}
FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75)
Curves = dict[str, Curve]
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about a trace.

    Attributes:
        policies: names of `POLICY_NAMES`.
        sizes: capacities in rows; where there are none, `budgets` (bytes, for rows of `row_bytes` and the bookkeeping
            of each policy) or else `fractions` of the trace's different rows say them; where there are no fractions,
            `FRACTIONS`, as far as they hold the largest batch.
        mode: requests one by one, or in batches as the trace has them.
        lookahead: how many batches behind the one in hand the policy `lookahead` knows, 0 or more.
        rate: also estimate the curves from this share of the rows.
        correction: of the estimate, see `tiered_emb.sim.shards`.
        exact: replay the whole trace; without it there is only the estimate.
        control: also replay the requests in random order.
        seed: of the control and of the sample.
    """

    policies: tuple[str, ...] = POLICIES_ASKED["single"]
    sizes: tuple[int, ...] = ()
    fractions: tuple[float, ...] = ()
    budgets: tuple[int, ...] = ()
    row_bytes: int = 0
    mode: Mode = "single"
    lookahead: int = BATCHES_AHEAD
    rate: float | None = None
    correction: Correction = "classes"
    exact: bool = True
    control: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.lookahead < 0:
            raise ConfigError(f"lookahead is {self.lookahead} batches; expected 0 or more")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; expected 0 or more")
        if self.mode == "batch" and self.rate is not None:
            raise ConfigError("a sample is of single requests: ask for a sample or for batches, not for both")
        if self.rate is None and not self.exact:
            raise ConfigError("without the exact curves there has to be a sampling rate: add --sample RATE")

    def sizes_for(self, requests: Requests, kept: float = 1.0) -> dict[str, tuple[int, ...]]:
        """The sizes of each policy in rows, for the rows and batches of a trace.

        Of a trace that keeps a share of the rows, `kept`, a budget's size is that share of the rows it holds.
        """
        if self.budgets and not self.sizes:
            rows = {
                name: [max(1, int(size * kept)) for size in held]
                for name, held in rows_for(self.budgets, self.row_bytes, self.policies).items()
            }
            self._check_batches_fit(rows, requests)
            return {name: tuple(held) for name, held in rows.items()}
        least = 1 if self.fractions or self.mode == "single" else requests.batches.largest
        shares = tuple(max(least, int(share * requests.distinct)) for share in self.fractions or FRACTIONS)
        return dict.fromkeys(self.policies, tuple(dict.fromkeys(self.sizes or shares)))

    def _check_batches_fit(self, rows: Mapping[str, Sequence[int]], requests: Requests) -> None:
        """Raises ConfigError, which names the budget, where the largest batch has more rows than one holds."""
        largest = requests.batches.largest if self.mode == "batch" else 0
        for policy, held in rows.items():
            if held[0] < largest:
                raise ConfigError(
                    f"a budget of {self.budgets[0]} bytes holds {held[0]} rows under {policy}, and a batch has "
                    f"{largest} different ones: give larger budgets (one alone is compared with a quarter of it)"
                )

    @property
    def looks_ahead(self) -> bool:
        """Whether a policy is told of batches to come."""
        return self.mode == "batch" and LOOKAHEAD in self.policies

    def replays(self) -> int:
        """How often `study` calls `advance`: after each exact replay, and after each estimated curve."""
        sizes = len(self.sizes or self.budgets or self.fractions or FRACTIONS)
        exact = sizes * (1 + self.control) if self.exact else 0
        estimated = 0 if self.rate is None else 1 if self.exact else 1 + self.control
        return len(self.policies) * (exact + estimated)


@dataclass(frozen=True, slots=True)
class Study:
    """What came out.

    Attributes:
        trace: its name.
        question: what was asked.
        requests: ids in the trace.
        distinct: different rows.
        batches: in the trace, 0 for single requests.
        curves: by policy; of the sample if nothing else was asked for.
        kept: share of the rows that the trace itself keeps: where it was recorded as a sample its sizes are those of
            the sample, so that a tier of `size / kept` rows is meant.
        control: the curves of the requests in random order.
        sampled: the estimates, where there are exact curves beside them.
    """

    trace: str
    question: Question
    requests: int
    distinct: int
    batches: int
    curves: Curves
    kept: float = 1.0
    control: Curves = field(default_factory=dict)
    sampled: Curves = field(default_factory=dict)

    @property
    def how(self) -> str:
        """How the requests came, for headings."""
        if not self.batches:
            return "one at a time"
        counted = next(iter(self.curves.values())).requests
        knows = f"; lookahead knows the next {self.question.lookahead}" if self.question.looks_ahead else ""
        asks = "batch that asks" if self.batches == 1 else "batches that ask"
        return f"{self.batches:,} {asks} for {counted:,}{knows}"

    def recency(self, policy: str) -> list[float]:
        """At each size the part of the hit ratio that the order of the requests gives; the rest is popularity."""
        pairs = zip(self.control[policy].miss_ratios, self.curves[policy].miss_ratios, strict=True)
        return [shuffled - own for shuffled, own in pairs]

    def sampling_error(self, policy: str) -> float:
        """Mean absolute difference of sampled and exact miss ratios over the sizes."""
        sampled, exact = self.sampled[policy].miss_ratios, self.curves[policy].miss_ratios
        return float(np.mean(np.abs(np.subtract(sampled, exact))))

    def gains(self, policy: str) -> list[Gain]:
        """What each step to the next budget saves; nothing where no budgets were asked for."""
        return gains(self.curves[policy], self.question.budgets) if self.has_budgets else []

    @property
    def has_budgets(self) -> bool:
        """Whether the sizes are those of budgets."""
        return bool(self.question.budgets) and not self.question.sizes

    def to_json(self) -> dict[str, Any]:
        """All of it in plain JSON types. Ratios by policy and size in rows."""
        figures: dict[str, Any] = {
            "trace": self.trace,
            "requests": self.requests,
            "distinct": self.distinct,
            "trace_rate": self.kept,
            "mode": self.question.mode,
            "batches": self.batches,
            "lookahead_batches": self.question.lookahead if self.question.looks_ahead else None,
            "counted_requests": next(iter(self.curves.values())).requests,
            "miss_ratio": {name: _by_size(curve) for name, curve in self.curves.items()},
            "seconds": {name: round(curve.seconds, 4) for name, curve in self.curves.items()},
        }
        if self.control:
            figures["control"] = {name: _by_size(curve) for name, curve in self.control.items()}
            figures["recency"] = {
                name: dict(zip(map(str, curve.sizes), self.recency(name), strict=True))
                for name, curve in self.curves.items()
            }
        if self.question.rate is not None:
            figures["sample"] = self._sample_json(self.question.rate)
        if self.has_budgets:
            figures["budgets"] = [line for name in self.curves for line in self._budget_lines(name)]
        return figures

    def _sample_json(self, rate: float) -> dict[str, Any]:
        of = self.sampled or self.curves
        return {
            "rate": rate,
            "correction": self.question.correction,
            "seed": self.question.seed,
            "miss_ratio": {name: _by_size(curve) for name, curve in of.items()},
            "mean_absolute_error": {name: self.sampling_error(name) for name in self.sampled},
        }

    def _budget_lines(self, policy: str) -> Iterator[dict[str, Any]]:
        curve, steps = self.curves[policy], [*self.gains(policy), None]
        for i, gain in enumerate(steps):
            line: dict[str, Any] = {
                "policy": policy,
                "budget_bytes": self.question.budgets[i],
                "rows": curve.sizes[i],
                "miss_ratio": curve.miss_ratios[i],
            }
            if gain is not None:
                line |= {
                    "more_bytes": gain.more_bytes,
                    "misses_saved": gain.saved,
                    "misses_saved_per_mib": gain.saved_per(_MIB),
                    "misses_saved_share": gain.relative,
                }
            yield line

    def csv_lines(self) -> Iterator[dict[str, Any]]:
        """A line for each policy and size, under `CSV_COLUMNS`; empty where nothing was measured."""
        for name, curve in self.curves.items():
            for i, size in enumerate(curve.sizes):
                yield {
                    "trace": self.trace,
                    "policy": name,
                    "size_rows": size,
                    "budget_bytes": self.question.budgets[i] if self.has_budgets else "",
                    "requests": curve.requests,
                    "misses": curve.misses[i],
                    "miss_ratio": f"{curve.miss_ratios[i]:.6f}",
                    "shuffled_miss_ratio": f"{self.control[name].miss_ratios[i]:.6f}" if self.control else "",
                    "sampled_miss_ratio": f"{self.sampled[name].miss_ratios[i]:.6f}" if self.sampled else "",
                }


CSV_COLUMNS = (
    "trace",
    "policy",
    "size_rows",
    "budget_bytes",
    "requests",
    "misses",
    "miss_ratio",
    "shuffled_miss_ratio",
    "sampled_miss_ratio",
)


def study(
    trace: str,
    requests: Requests,
    question: Question,
    advance: Callable[[], None] = lambda: None,
    kept: float = 1.0,
) -> Study:
    """Answer a question about a trace; `advance` is called `question.replays()` times or less.

    Raises ConfigError, before the first replay, for policies and sizes that make no sense for this trace, and where a
    sample of a sample is asked for.
    """
    if kept < 1 and question.rate is not None:
        raise ConfigError(f"trace {trace} is a sample of {kept:.3g} of the rows already; replay it as it is")
    sizes = question.sizes_for(requests, kept)
    exact = _replayed(requests, question, sizes, advance) if question.exact else {}
    sampled = _sampled(requests, question, sizes, advance)
    control: Curves = {}
    if question.control:
        mixed = shuffled(requests, question.seed)
        control = (_replayed if question.exact else _sampled)(mixed, question, sizes, advance)
    batches = len(requests.bounds) - 1 if question.mode == "batch" and requests.bounds is not None else 0
    curves, beside = (exact, sampled) if question.exact else (sampled, {})
    return Study(trace, question, len(requests), requests.distinct, batches, curves, kept, control, beside)


def _replayed(
    requests: Requests, question: Question, sizes: dict[str, tuple[int, ...]], advance: Callable[[], None]
) -> Curves:
    """Policies of the same sizes together, so that batches are deduplicated once."""
    curves: Curves = {}
    for same in dict.fromkeys(sizes.values()):
        names = [name for name in sizes if sizes[name] == same]
        replayed = miss_ratio_curve(requests, names, same, question.mode, advance, question.lookahead)
        curves |= {curve.policy: curve for curve in replayed}
    return {name: curves[name] for name in sizes}


def _sampled(
    requests: Requests, question: Question, sizes: dict[str, tuple[int, ...]], advance: Callable[[], None]
) -> Curves:
    if question.rate is None:
        return {}
    curves: Curves = {}
    for name, own in sizes.items():
        curves[name] = sampled_curve(requests, name, own, question.rate, question.seed, question.correction)
        advance()
    return curves


def _by_size(curve: Curve) -> dict[str, float]:
    return dict(zip(map(str, curve.sizes), curve.miss_ratios, strict=True))


def steps_around(budget: int) -> tuple[int, ...]:
    """Budgets (bytes) to compare one with: a quarter, a half, itself, one and a half, twice and four times as much."""
    return tuple(dict.fromkeys(max(1, budget * quarters // 4) for quarters in (1, 2, 4, 6, 8, 16)))
