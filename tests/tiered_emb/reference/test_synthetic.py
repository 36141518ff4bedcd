from __future__ import annotations

import numpy as np
import pytest
import torch

from tiered_emb.config import parse_bytes
from tiered_emb.reference.metrics import auc
from tiered_emb.reference.settings import SYNTHETIC_SAMPLES, TrainOptions, decide
from tiered_emb.reference.stream import ClickBatch, Part
from tiered_emb.reference.synthetic import SyntheticStream


def columns(batch: ClickBatch) -> np.ndarray:
    """Ids (B, C)."""
    return batch.sparse.ids.numpy().reshape(26, -1).T


def test_batches_do_not_depend_on_their_size_or_on_earlier_reads() -> None:
    stream = SyntheticStream(20_000, seed=3)
    assert (stream.samples(Part.TRAIN), stream.samples(Part.HELD_OUT)) == (18_000, 2_000)
    whole, pieces = list(stream.batches(Part.TRAIN, 18_000)), list(SyntheticStream(20_000, 3).batches(Part.TRAIN, 700))
    assert len(whole) == 1
    assert np.array_equal(columns(whole[0]), np.concatenate([columns(piece) for piece in pieces]))
    assert torch.equal(whole[0].labels, torch.cat([piece.labels for piece in pieces]))
    assert torch.equal(whole[0].dense, torch.cat([piece.dense for piece in pieces]))
    held_out = next(iter(stream.batches(Part.HELD_OUT, 2_000)))
    longer = next(iter(SyntheticStream(40_000, 3).batches(Part.TRAIN, 20_000)))
    assert np.array_equal(columns(held_out), columns(longer)[18_000:])


def test_planted_weights_are_a_pure_function_of_column_and_id() -> None:
    stream = SyntheticStream(1000, seed=5)
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (5000, 26))
    weights = stream.weights(ids)
    assert np.array_equal(weights[::-1], stream.weights(np.ascontiguousarray(ids[::-1])))
    assert abs(weights.mean()) < 0.02
    assert abs(weights.std() - 1) < 0.02
    same_id = stream.weights(np.full((1, 26), 7))
    assert len(set(same_id[0].tolist())) == 26  # the column counts, too
    assert not np.array_equal(same_id, SyntheticStream(1000, seed=6).weights(np.full((1, 26), 7)))


@pytest.mark.parametrize("seed", range(6))
def test_the_best_auc_and_the_click_rate_are_plausible_for_any_seed(seed: int) -> None:
    stream = SyntheticStream(120_000, seed)
    batch = next(iter(stream.batches(Part.HELD_OUT, 12_000)))
    assert batch.planted is not None
    assert 0.75 < auc(batch.planted, batch.labels.numpy()) < 0.85
    assert 0.2 < float(batch.labels.mean()) < 0.3
    assert abs(batch.planted.mean() - float(batch.labels.mean())) < 0.015


def test_ids_are_skewed_and_spread_over_64_bits() -> None:
    ids = columns(next(iter(SyntheticStream(100_000, 0).batches(Part.TRAIN, 90_000))))
    for column in (0, 25):
        distinct, counts = np.unique(ids[:, column], return_counts=True)
        assert counts.max() > 0.1 * len(ids)
        assert (counts == 1).sum() > 0.5 * len(distinct)
        assert distinct.min() < -(2**62)
        assert distinct.max() > 2**62


def test_a_default_run_touches_a_million_rows_and_its_tiers_hold_a_fifth() -> None:
    stream = SyntheticStream(SYNTHETIC_SAMPLES, seed=0)
    by_column = [[] for _ in range(26)]
    for batch in stream.batches(Part.TRAIN, 1 << 16):
        for column, ids in enumerate(columns(batch).T):
            by_column[column].append(np.unique(ids))
    rows = sum(len(np.unique(np.concatenate(parts))) for parts in by_column)
    settings = decide(TrainOptions())
    row_bytes = 4 * (settings.dim + settings.rule().state_width(settings.dim))
    assert rows >= 1_000_000
    assert settings.hbm_bytes + settings.ddr_bytes <= rows * row_bytes / 5
    assert parse_bytes("24MiB") == settings.ddr_bytes
