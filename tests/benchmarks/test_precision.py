"""`python -m benchmarks precision`: every figure is there, sides of a seed are paired, and bytes are what rows take."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.precision_bytes import disk_bytes, moved_bytes
from benchmarks.precision_speed import DIRECTIONS, speeds
from benchmarks.precision_training import Outcome, Side, in_new_process, train
from storage.codecs import CODECS
from tiered_emb.reference.stream import Part
from tiered_emb.reference.synthetic import SyntheticStream

SAMPLES = 6000


def side(precision: str, seed: int = 0, cache_share: float = 0.3) -> Side:
    return Side(precision, seed, SAMPLES, 8, cache_share)


@pytest.fixture(scope="module")
def whole() -> Outcome:
    return train(side("fp32", cache_share=1.0))


def test_a_table_whole_in_memory_is_charged_by_its_rows(whole: Outcome) -> None:
    batches = SyntheticStream(SAMPLES, 0).batches(Part.TRAIN, 1024)
    ids = np.concatenate([batch.sparse.ids.numpy().reshape(26, -1) for batch in batches], 1)
    assert whole.rows == sum(len(np.unique(column)) for column in ids) <= whole.cache_rows
    assert whole.rest_bytes == whole.moved_bytes == 0
    assert 36 + 30 < whole.tier_bytes / whole.rows < 36 + 50  # 9 floats, and bookkeeping


def test_a_cache_over_fp32_rows_changes_no_bit_of_the_quality(whole: Outcome) -> None:
    cached = train(side("fp32"))
    assert cached.cache_rows < cached.rows == whole.rows and cached.moved_bytes > 0
    assert cached.auc == whole.auc


def test_a_cache_over_int8_rows_repeats_itself_in_another_process(whole: Outcome) -> None:
    first = train(side("int8"))
    assert first == in_new_process(side("int8"))
    assert first.auc != whole.auc and first.planted_auc == whole.planted_auc
    assert 20 + 20 < first.rest_bytes / first.rows < 20 + 40  # 8 bytes, scale, bias and state; id and index


def test_half_of_the_bytes_move(tmp_path: Path) -> None:
    assert moved_bytes(3000, 16, "fp32") == 2 * moved_bytes(3000, 16, "bf16") > 2 * 3000 * 64
    fp32, bf16 = (disk_bytes(3000, 16, name, tmp_path / name) for name in ("fp32", "bf16"))
    assert 3000 * 32 < bf16 < 0.75 * fp32


def test_every_codec_that_packs_is_timed() -> None:
    found = speeds(300, 16, 2)
    assert set(found) == {name for name, codec in CODECS.items() if codec.lossy}
    assert all(set(ways) == set(DIRECTIONS) and min(ways.values()) > 0 for ways in found.values())


def test_small_sizes_give_every_figure_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--seeds", "2", "--samples", "3000", "--dim", "8", "--rows", "1500", "--directory", str(tmp_path)]
    assert main(["precision", *small, "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["seeds"] == 2 and figures["bf16_bytes_ratio"] == 0.5
    for prefix, name in (("auc", "mixed"), ("auc_bf16", "bf16"), ("auc_fp16", "fp16")):
        drops = figures[f"{prefix}_drops"]
        assert len(drops) == 2 and figures[f"{prefix}_drop"] == pytest.approx(np.mean(drops), abs=2e-6)
        assert figures[f"{prefix}_drop_sd"] == pytest.approx(np.std(drops, ddof=1), abs=2e-6)
        assert figures["auc_fp32"] - figures[f"auc_{name}"] == pytest.approx(figures[f"{prefix}_drop"], abs=3e-6)
    held = figures["cache_bytes"] + figures["int8_rest_bytes"]
    assert figures["least_memory_ratio"] <= figures["memory_ratio"]
    assert figures["memory_ratio"] == pytest.approx(figures["fp32_bytes"] / held, rel=0.1)
    assert set(figures["unpack_gb_per_s"]) == {"bf16", "fp16", "int8"}
    assert len(figures["pack_gb_per_s"]) == 6
    assert not list(tmp_path.iterdir())
