"""Made-up clicks whose best reachable AUC is known: every id has a planted weight, and the coin is thrown with it.

A sample has 26 ids and 13 normal numbers. The id of a column is drawn by a power law over 2^40 ranks, its exponent
between 1.15 and 1.5 by column, so that a few ids take most of the draws and a long tail is seen once; the rank is
scrambled to a 64-bit id by a bijection, so that nothing about an id tells how frequent it is. The weight of an id, in
head and tail alike, is a standard normal number that is a pure function of (seed, column, id). The click's log odds
are the sum of its ids' weights and a linear function of its numbers, scaled to a standard deviation of 1.4 and
shifted to a click rate of a quarter (measured on a sample of their own). With that spread the true probabilities
themselves reach an AUC of about 0.8, which no model can beat but by luck; a model that knows only ids it has seen
falls short of it by what the tail keeps to itself.

Block n is a pure function of (seed, n): a stream is made in blocks as it is read, and none is kept. Another machine's
`pow` and `log` may differ in a last bit, so that the ids, and with them the bits of a run, are those of one machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiered_emb.errors import ConfigError
from tiered_emb.reference.stream import ClickBatch, Columns, Feature, Part, held_out_samples, rebatch

_COLUMNS = 26
_NUMBERS = 13
_BLOCK_SAMPLES = 8192
_CALIBRATION_BLOCKS = 4
_RANKS = 2.0**40
_SPREAD = 1.4  # standard deviation of the log odds
_CLICK_RATE = 0.25
_SHARE_OF_NUMBERS = 0.15  # of the variance of the log odds
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class _Scale:
    """What turns raw sums of weights into log odds."""

    mean: float
    std: float
    bias: float


class SyntheticStream:
    """26 unbounded features; see the module's essay. `samples` in all, the held-out tenth included."""

    def __init__(self, samples: int, seed: int) -> None:
        if samples < 2:
            raise ConfigError(f"a synthetic stream of {samples} samples cannot be split; expected 2 or more")
        self.name = "synthetic"
        self.features = tuple(Feature(f"C{column + 1}") for column in range(_COLUMNS))
        self.dense_width = _NUMBERS
        self._names = tuple(feature.name for feature in self.features)
        self._samples = samples
        self._held_out = held_out_samples(samples, self.name)
        self._seed = seed & 0xFFFFFFFFFFFFFFFF
        self._exponents = np.linspace(1.15, 1.5, _COLUMNS)
        self._slopes = _unit_vector(np.random.default_rng([self._seed, 0]))
        self._scale = self._calibrate()

    def samples(self, part: Part) -> int:
        """As `ClickStream.samples`."""
        return self._held_out if part is Part.HELD_OUT else self._samples - self._held_out

    def batches(self, part: Part, batch_size: int) -> Iterator[ClickBatch]:
        """As `ClickStream.batches`."""
        border = self._samples - self._held_out
        first, stop = (0, border) if part is Part.TRAIN else (border, self._samples)
        for columns in rebatch(self._blocks(first, stop), batch_size):
            yield columns.batch(self._names)

    def weights(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Planted weights (B, C) of ids (B, C): standard normal, by the method of Box and Muller on a hash."""
        salt = (np.arange(_COLUMNS, dtype=np.uint64) + np.uint64(1)) * _GOLDEN + np.uint64(self._seed)
        bits = _mix(_mix(ids.view(np.uint64) ^ _mix(salt)))
        radius = np.sqrt(-2.0 * np.log(((bits >> np.uint64(40)) + 0.5) * 2.0**-24))
        weights: NDArray[np.float64] = radius * np.cos((bits & np.uint64(0xFFFFFF)) * (2.0**-24 * 2.0 * np.pi))
        return weights

    def _blocks(self, first: int, stop: int) -> Iterator[Columns]:
        """Samples first .. stop-1."""
        for number in range(first // _BLOCK_SAMPLES, -(-stop // _BLOCK_SAMPLES)):
            start = number * _BLOCK_SAMPLES
            yield self._block(number).part(max(0, first - start), min(_BLOCK_SAMPLES, stop - start))

    def _block(self, number: int) -> Columns:
        rng = np.random.default_rng([self._seed, 1, number])
        ids, dense = self._draw(rng)
        scale = self._scale
        log_odds = (self._raw(ids, dense) - scale.mean) / scale.std + scale.bias
        planted = 1.0 / (1.0 + np.exp(-log_odds))
        labels = (rng.random(len(planted)) < planted).astype(np.float32)
        return Columns(labels, dense, ids, np.ones(ids.shape, np.bool_), planted)

    def _draw(self, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids (B, C) and numbers (B, I): ranks by the inverse of the bounded Pareto distribution, then scrambled."""
        uniform = rng.random((_BLOCK_SAMPLES, _COLUMNS))
        power = 1.0 - self._exponents
        ranks = np.floor((1.0 - uniform * (1.0 - _RANKS**power)) ** (1.0 / power)).astype(np.uint64)
        ids = _mix(ranks + np.arange(_COLUMNS, dtype=np.uint64) * _GOLDEN).view(np.int64)
        return ids, rng.standard_normal((_BLOCK_SAMPLES, _NUMBERS), np.float32)

    def _raw(self, ids: NDArray[np.int64], dense: NDArray[np.float32]) -> NDArray[np.float64]:
        """Unscaled sums (B,), of which the numbers are to make up their share of the variance."""
        share = np.sqrt(_SHARE_OF_NUMBERS / (1.0 - _SHARE_OF_NUMBERS))
        raw: NDArray[np.float64] = self.weights(ids).sum(1) / self._id_spread + share * (dense @ self._slopes)
        return raw

    def _calibrate(self) -> _Scale:
        """The scale by which samples of their own have the spread and the click rate they should."""
        draws = [self._draw(np.random.default_rng([self._seed, 2, number])) for number in range(_CALIBRATION_BLOCKS)]
        ids, dense = (np.concatenate(parts) for parts in zip(*draws, strict=True))
        self._id_spread = float(self.weights(ids).sum(1).std())
        raw = self._raw(ids, dense)
        mean, std = float(raw.mean()), float(raw.std()) / _SPREAD
        return _Scale(mean, std, _bias_for((raw - mean) / std, _CLICK_RATE))


def _unit_vector(rng: np.random.Generator) -> NDArray[np.float32]:
    slopes = rng.standard_normal(_NUMBERS)
    return (slopes / np.linalg.norm(slopes)).astype(np.float32)


def _bias_for(log_odds: NDArray[np.float64], rate: float) -> float:
    """What to add to `log_odds` so that their mean probability is `rate`, by bisection."""
    low, high = -30.0, 30.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if (1.0 / (1.0 + np.exp(-(log_odds + middle)))).mean() > rate else (middle, high)
    return low


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit words that leaves no pattern: the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
