"""`python -m benchmarks compression`: every figure is there, and what is measured is what it says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.compression import LEVELS, WAYS, split, unsplit
from benchmarks.export_copy import export_vs_copy
from storage import Column, LmdbStore, RowIds, RowSchema

pytest.importorskip("pyarrow")


def test_split_bytes_stand_together_and_come_back() -> None:
    assert split(bytes(range(10))) == bytes([0, 4, 1, 5, 2, 6, 3, 7, 8, 9])
    for size in range(20):
        assert unsplit(split(bytes(range(size)))) == bytes(range(size))


def test_small_sizes_give_every_figure_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LmdbStore(tmp_path / "store") as store:
        table = store.open_table("a", RowSchema((Column("weight", "float32", 64), Column("sum", "float32", 1))))
        rows = np.random.default_rng(0).standard_normal((3000, 65), np.float32)
        store.put(RowIds.of(table, np.arange(3000)), rows.view(np.uint8))
    (tmp_path / "work").mkdir()
    options = ["--mb", "1", "--rows", "1000", "--store", str(tmp_path / "store"), "--directory", str(tmp_path / "work")]
    assert main(["compression", *options, "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    for way in WAYS:
        for level in LEVELS:
            assert 0.5 < figures[f"ratio_{way}_{level}"] < 1.01
            assert figures[f"mb_per_s_{way}_{level}"] > 0
    assert figures["ratio_split"] <= figures["ratio_raw"] < figures["export_ratio_none"]
    assert figures["export_ratio_zstd"] < figures["export_ratio_none"]
    assert figures["export_vs_copy"] == min(figures["export_ratio_to_copy"], figures["import_ratio_to_copy"]) > 0
    assert not list((tmp_path / "work").iterdir())
    with LmdbStore(tmp_path / "store", read_only=True) as store:
        assert store.snapshots() == []


def test_export_beside_copy_is_reusable(tmp_path: Path) -> None:
    figures = export_vs_copy(500, 8, tmp_path, rounds=2)
    assert figures["export_row_bytes"] == 500 * 36
    assert len(figures["copy_seconds"]) == len(figures["import_seconds"]) == 2  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
