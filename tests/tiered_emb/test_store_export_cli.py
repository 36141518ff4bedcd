"""`tiered-emb store export` and `import`: what is printed, refused, written and exited with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from storage import Column, LmdbStore, RowIds, RowSchema
from tiered_emb.cli import main

pytest.importorskip("pyarrow")

SCHEMA = RowSchema((Column("weight", "float32", 8),))
ROWS = 5000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of 5,000 rows of table "ads" with snapshots "monday" and, 100 rows changed and 3 deleted, "tuesday"."""
    with LmdbStore(tmp_path / "store") as store:
        ads = store.open_table("ads", SCHEMA)
        rows = np.random.default_rng(0).integers(1, 256, (ROWS, 32), dtype=np.uint8)
        store.put(RowIds.of(ads, np.arange(ROWS)), rows)
        store.snapshot("monday", b"of monday")
        store.put(RowIds.of(ads, np.arange(100)), rows[100:200])
        store.delete(RowIds.of(ads, np.arange(200, 203)))
        store.snapshot("tuesday")
    return tmp_path / "store"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["store", *map(str, arguments)])


def rows_in(path: Path) -> int:
    with LmdbStore(path, read_only=True) as store:
        return store.stats().rows


def test_there_and_back(path: Path, tmp_path: Path) -> None:
    result = run("export", path, tmp_path / "full", "--snapshot", "monday")
    assert result.exit_code == 0, result.output
    assert "full export of snapshot 'monday', 5,000 rows in" in result.stdout
    result = run("export", path, tmp_path / "delta", "--snapshot", "tuesday", "--since", "monday")
    assert "delta export of snapshot 'tuesday' since 'monday', 100 rows and 3 deletions in" in result.stdout
    result = run("import", tmp_path / "copy", tmp_path / "full", "--name", "base")
    assert result.exit_code == 0, result.output
    assert "snapshot 'base' from the full export" in result.stdout
    assert run("import", tmp_path / "copy", tmp_path / "delta").exit_code == 0
    assert rows_in(tmp_path / "copy") == ROWS - 3
    with LmdbStore(tmp_path / "copy", read_only=True) as store:
        assert [one.name for one in store.snapshots()] == ["base", "tuesday"]
        assert store.snapshots()[0].note == b"of monday"


def test_json_is_the_last_line_of_stdout(path: Path, tmp_path: Path) -> None:
    result = run("export", path, tmp_path / "x", "--snapshot", "monday", "--json")
    assert result.stdout.count("\n") == 1
    assert "full export" in result.stderr
    written = json.loads(result.stdout)
    assert (written["rows"], written["kind"], written["base"]) == (ROWS, "full", None)
    brought = json.loads(run("import", tmp_path / "t", tmp_path / "x", "--json").stdout)
    assert (brought["rows"], brought["snapshot"], brought["origin"]) == (ROWS, "monday", written["origin"])


def test_compression_is_an_option(path: Path, tmp_path: Path) -> None:
    sizes = {}
    for kind in ("none", "zstd"):
        run("export", path, tmp_path / kind, "--snapshot", "monday", "--compression", kind)
        sizes[kind] = sum(file.stat().st_size for file in (tmp_path / kind).glob("*.parquet"))
    assert sizes["zstd"] < sizes["none"]


@pytest.mark.parametrize(
    ("target", "message"), [("store", "cannot be made"), ("no/such", "cannot be made"), ("store/x", "would lie in")]
)
def test_foolish_targets(path: Path, tmp_path: Path, target: str, message: str) -> None:
    before = sorted(path.iterdir())
    result = run("export", path, tmp_path / target, "--snapshot", "monday")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert sorted(path.iterdir()) == before


def test_what_is_not_there(path: Path, tmp_path: Path) -> None:
    result = run("export", path, tmp_path / "x", "--snapshot", "sunday")
    assert result.exit_code == 1
    assert "has no snapshot 'sunday'; the newest there are: 'monday', 'tuesday'" in result.stderr
    assert run("export", tmp_path / "nowhere", tmp_path / "x", "--snapshot", "monday").exit_code == 1
    assert run("export", path, tmp_path / "x").exit_code == 2
    result = run("import", tmp_path / "new", path)
    assert result.exit_code == 1
    assert "is not the manifest of an export" in result.stderr
    assert not (tmp_path / "new").exists() and not (tmp_path / "x").exists()
    assert result.output.count("\n") == 1


def test_an_import_that_does_not_fit(path: Path, tmp_path: Path) -> None:
    run("export", path, tmp_path / "full", "--snapshot", "monday")
    run("export", path, tmp_path / "delta", "--snapshot", "tuesday", "--since", "monday")
    result = run("import", path, tmp_path / "delta")
    assert result.exit_code == 1
    assert "was changed after its snapshot 'monday': go back to that" in result.stderr
    assert run("import", path, tmp_path / "delta", "--rollback").exit_code == 0
    assert rows_in(path) == ROWS - 3
    data = bytearray((tmp_path / "full" / "rows-0.parquet").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "full" / "rows-0.parquet").write_bytes(data)
    result = run("import", tmp_path / "new", tmp_path / "full")
    assert result.exit_code == 1
    assert "rows-0.parquet is damaged" in result.stderr
    assert rows_in(tmp_path / "new") == 0


def test_rows_that_no_state_covers_are_asked_about(path: Path, tmp_path: Path) -> None:
    run("export", path, tmp_path / "delta", "--snapshot", "tuesday", "--since", "monday")
    with LmdbStore(path) as store:
        store.rollback("monday", drop_later=True)
    store = LmdbStore(path, durability="snapshot")
    ads = store.open_table("ads", SCHEMA)
    for _ in range(40):  # until some are committed
        store.put(RowIds.of(ads, np.arange(70_000)), np.zeros((70_000, 32), np.uint8))
    store.abandon()
    result = run("import", path, tmp_path / "delta")
    assert result.exit_code == 1
    assert "rows put after its last complete state" in result.stderr
    assert run("import", path, tmp_path / "delta", "--later", "keep").exit_code == 1  # they are changes
    with LmdbStore(path) as store:
        store.rollback("monday")
    assert run("import", path, tmp_path / "delta", "--later", "discard").exit_code == 0
    assert rows_in(path) == ROWS - 3


def test_without_pyarrow_one_line_says_what_to_install(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = run("export", path, tmp_path / "x", "--snapshot", "monday")
    assert result.exit_code == 1
    assert "pip install 'tiered-emb[export]'" in result.stderr
    assert result.output.count("\n") == 1
