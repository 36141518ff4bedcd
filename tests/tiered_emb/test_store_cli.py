"""`tiered-emb store`: what is printed, written and exited with."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from storage import Column, LmdbStore, RowIds, RowSchema, StoreConfig
from storage.describe import AgeBand, Moment, describe_store
from tiered_emb import store_report
from tiered_emb.cli import main

SCHEMA = RowSchema((Column("weight", "float32", 8),))
ROWS = 5000


def _rows(seed: int = 0) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(1, 256, (ROWS, 32), dtype=np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of 5,000 rows of table "ads", half of them put twice."""
    with LmdbStore(tmp_path / "store", config=StoreConfig(segment_bytes=1 << 14)) as store:
        ads = store.open_table("ads", SCHEMA)
        store.put(RowIds.of(ads, np.arange(ROWS)), _rows())
        store.flush()
        store.put(RowIds.of(ads, np.arange(0, ROWS, 2)), _rows(1)[::2])
    return tmp_path / "store"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["store", *map(str, arguments)])


def damage(path: Path, *ids: int) -> None:
    data = bytearray((path / "data.mdb").read_bytes())
    for id in ids:
        data[data.index(_rows()[id].tobytes())] ^= 1
    (path / "data.mdb").write_bytes(data)


def test_info_says_what_a_store_holds(path: Path) -> None:
    result = run("info", path)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert describe_store(path).uuid in text
    assert "5,000 live, 7,500 stored, 0 tombstones" in text
    assert "weight float32[8]" in text
    assert "segments by age" in text
    assert "█" in text
    assert "░" in text
    assert "DAMAGED" not in text


def test_info_shows_readers_that_lag_and_what_was_written(path: Path) -> None:
    last = Moment(9, 1e9, 1 << 20, 3 << 20, 2 << 20, 3 << 20, 1 << 20)
    described = replace(describe_store(path), oldest_reader=99, oldest_reader_commits=17, history=(last,))
    facts = dict(store_report._facts(described))
    assert facts["oldest reader"] == "process 99, 17 commits behind"
    assert facts["written"] == "3.0 MiB = 1.50 x bytes put, 1.0 MiB by compaction"
    assert facts["commits"].startswith("9, the last 2001-09-0")


def test_info_as_json_is_the_last_line_of_stdout_or_a_file(path: Path, tmp_path: Path) -> None:
    result = run("info", path, "--json", "-")
    assert result.stdout.count("\n") == 1
    assert "stored" in result.stderr
    printed = json.loads(result.stdout)
    assert (printed["rows"], printed["tables"][0]["name"], printed["live_share"]) == (ROWS, "ads", ROWS / 7500)
    assert run("info", path, "--json", tmp_path / "info.json").exit_code == 0
    assert json.loads((tmp_path / "info.json").read_text())["uuid"] == printed["uuid"]


def test_info_draws(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run("info", path, "--plot", tmp_path / "store.png").exit_code == 0
    assert (tmp_path / "store.png").read_bytes().startswith(b"\x89PNG")
    wrong = run("info", path, "--plot", tmp_path / "store.abc")
    assert wrong.exit_code == 1
    assert "store.abc ends with 'abc': pictures end with one of" in wrong.stderr


def test_info_without_matplotlib_says_what_to_install(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "storage.picture", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("info", path, "--plot", tmp_path / "store.png")
    assert result.exit_code == 1
    assert "--plot needs matplotlib" in result.stderr
    assert "pip install 'tiered-emb[plots]'" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_first(path: Path, tmp_path: Path, option: str) -> None:
    result = run("info", path, option, tmp_path / "no" / "such" / "file.png")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "cannot be written" in result.stderr


def test_info_of_a_damaged_store_leaves_out_what_it_cannot_read(path: Path) -> None:
    data = bytearray((path / "data.mdb").read_bytes())
    data[data.index(b"TEROWSEG") + 48] ^= 1
    (path / "data.mdb").write_bytes(data)
    result = run("info", path)
    assert result.exit_code == 0
    assert "DAMAGED: segment" in result.stdout
    assert "left out: 1 damage; run `tiered-emb store verify`" in result.stdout


@pytest.mark.parametrize("command", ["info", "verify", "compact"])
def test_no_store_is_one_line(tmp_path: Path, command: str) -> None:
    result = run(command, tmp_path / "nothing")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"tiered-emb: {tmp_path / 'nothing'}: there is no store here")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["info", "verify", "compact", "list"])
def test_an_export_is_no_damaged_store(tmp_path: Path, path: Path, command: str) -> None:
    run("snapshot", path, "one")
    run("export", path, tmp_path / "export", "--snapshot", "one")
    done = run(command, tmp_path / "export")
    assert done.exit_code == 1
    assert "is not the manifest of a store" in done.stderr
    assert "found 'tiered-emb export'" in done.stderr


def test_verify_of_a_good_store(path: Path) -> None:
    result = run("verify", path)
    assert result.exit_code == 0, result.output
    assert f"{path}: good. Read 7,500 rows (5,000 live) in " in result.stdout


def test_verify_names_table_and_id_of_every_damaged_row(path: Path) -> None:
    damage(path, 17, 20, 4999)
    result = run("verify", path)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("table ads id 17: row with id 17 of table ads: its bytes do not match their checksum")
    assert lines[1].startswith("table ads id 20: superseded row with id 20")
    assert lines[2].startswith("table ads id 4999: ")
    assert lines[3].startswith(f"{path}: DAMAGED in 3 places. Read 7,500 rows (5,000 live)")
    assert len(lines) == 4


def test_verify_prints_twenty_lines_and_counts_the_rest(path: Path) -> None:
    damage(path, *range(1, 61, 2))
    lines = run("verify", path).stdout.splitlines()
    assert len(lines) == 22
    assert lines[20] == "... and 10 more"


def test_verify_as_json(path: Path) -> None:
    damage(path, 17)
    result = run("verify", path, "--json")
    assert result.exit_code == 1
    printed = json.loads(result.stdout.splitlines()[-1])
    assert (printed["good"], printed["damage_count"]) == (False, 1)
    assert (printed["damages"][0]["table"], printed["damages"][0]["id"]) == ("ads", 17)
    assert "table ads id 17" in result.stderr


def test_verify_names_the_file_or_the_segment(path: Path) -> None:
    data = bytearray((path / "data.mdb").read_bytes())
    data[data.index(b"TEROWSEG") + 130] ^= 1
    (path / "data.mdb").write_bytes(data)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace("ads", "adz"))
    lines = run("verify", path).stdout.splitlines()
    assert lines[0].startswith("manifest.json: ")
    assert lines[1].startswith("segment ")
    assert lines[2].endswith("1 segment could not be read")


@pytest.fixture
def compacting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The durabilities with which a store was opened to be compacted."""
    calls: list[str] = []

    def compact(store: LmdbStore, progress: Callable[[int, int], None] | None = None) -> None:
        calls.append(store.durability)
        assert progress is not None
        progress(5, 10)
        progress(10, 10)

    monkeypatch.setattr(LmdbStore, "compact", compact, raising=False)
    return calls


def test_compact_says_before_and_after(path: Path, compacting: list[str]) -> None:
    result = run("compact", path)
    assert result.exit_code == 0, result.output
    assert compacting == ["commit"]
    for line in ("rows stored", "of them live", "segments", "bytes of segments", "bytes on disk"):
        assert line in result.stdout
    assert "7,500" in result.stdout


def test_compact_of_a_crashed_store_asks_what_becomes_of_its_later_rows(path: Path, compacting: list[str]) -> None:
    store = LmdbStore(path, config=StoreConfig(segment_bytes=1 << 14, write_buffer_bytes=1 << 15))
    store.put(RowIds.of(store.open_table("ads", SCHEMA), np.arange(ROWS)), _rows(2))
    store.abandon()
    later = describe_store(path).later_rows
    assert 0 < later <= ROWS
    result = run("compact", path)
    assert result.exit_code == 1
    assert f"holds {later:,} rows put after its last complete state" in result.stderr
    assert compacting == []
    assert "rows that no complete state covers" in run("info", path).stdout
    assert run("compact", path, "--later", "discard").exit_code == 0
    assert compacting == ["snapshot"]
    assert describe_store(path).later_rows == 0
    assert run("verify", path).exit_code == 0


def test_compact_keeps_later_rows_where_it_is_told_so(path: Path, compacting: list[str]) -> None:
    store = LmdbStore(path, config=StoreConfig(segment_bytes=1 << 14, write_buffer_bytes=1 << 15))
    store.put(RowIds.of(store.open_table("ads", SCHEMA), np.arange(ROWS)), _rows(2))
    store.abandon()
    assert run("compact", path, "--later", "keep").exit_code == 0
    assert compacting == ["commit"]
    assert describe_store(path).later_rows == 0


def test_progress_is_plain_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter(range(0, 100, 4))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    with store_report.byte_bar("verify") as progress:
        for done in range(1, 9):
            progress(done << 20, 8 << 20)
    assert capsys.readouterr().err.splitlines() == [
        "verify 38%: 3.0 MiB of 8.0 MiB",
        "verify 75%: 6.0 MiB of 8.0 MiB",
    ]


def test_names_are_not_taken_for_markup(tmp_path: Path) -> None:
    with LmdbStore(tmp_path / "[red]store") as store:
        store.open_table("[bold]", SCHEMA)
    text = run("info", tmp_path / "[red]store").stdout
    assert "[bold]" in text
    assert "[red]store" in text.replace("\n", "")


def test_the_store_commands_need_no_torch(path: Path) -> None:
    program = (
        "import sys\n"
        "from tiered_emb.cli import main\n"
        "try:\n"
        f"    main(['store', 'verify', {str(path)!r}])\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert ": good. " in result.stdout


def test_age_bars_are_filled_by_live_share(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=100).print(store_report._ages((AgeBand(2, 1, 9, 750, 1000),)))
    line = next(line for line in capsys.readouterr().out.splitlines() if "1 to 9" in line)
    assert "75%" in line
    assert (line.count("█"), line.count("░")) == (15, 5)


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize("name", ["data.mdb", "manifest.json", "new.svg"])
def test_nothing_is_written_into_the_store_that_is_looked_at(path: Path, option: str, name: str) -> None:
    before = {file: file.read_bytes() for file in path.iterdir()}
    result = run("info", path, option, path / name)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert f"would be written over {path}" in result.stderr
    assert {file: file.read_bytes() for file in path.iterdir()} == before


def test_a_full_disk_is_one_line(path: Path) -> None:
    result = run("info", path, "--json", "/dev/full")
    assert result.exit_code == 2
    assert result.stderr == "tiered-emb: /dev/full cannot be written: No space left on device\n"


class TestSnapshots:
    @pytest.fixture
    def kept(self, path: Path) -> Path:
        """Snapshots "first" of 5,000 rows and "[second]", 200 rows of which differ and 7 are gone."""
        with LmdbStore(path, config=StoreConfig(segment_bytes=1 << 14)) as store:
            ads = store.open_table("ads", SCHEMA)
            store.snapshot("first", b"note")
            store.put(RowIds.of(ads, np.arange(200)), _rows(2)[:200])
            store.delete(RowIds.of(ads, np.arange(1000, 1007)))
            store.snapshot("[second]")
        return path

    def test_are_made_listed_and_dropped(self, path: Path) -> None:
        assert "no snapshots" in run("list", path).stdout
        made = run("snapshot", path, "one")
        assert (made.exit_code, made.stdout) == (0, f"{path}: snapshot 'one' of 5,000 rows\n")
        as_json = run("snapshot", path, "two", "--json")
        assert json.loads(as_json.stdout)["rows"] == ROWS and "snapshot 'two'" in as_json.stderr
        run("snapshot", path, "three", "--keep-last", 2)
        listed = json.loads(run("list", path, "--json").stdout)["snapshots"]
        assert [(one["name"], one["rows"], one["only_bytes"]) for one in listed] == [
            ("two", ROWS, 0),
            ("three", ROWS, 0),
        ]
        assert "156.2 KiB" in run("list", path).stdout
        gone = run("drop", path, "two", "--json")
        assert json.loads(gone.stdout) == {"dropped": "two", "left": ["three"]}

    def test_a_name_in_a_pipe_is_in_one_piece(self, path: Path) -> None:
        name = "checkpoint 9f2c1e55-7c1b-4a0e-8f0e-0c6f9b1f3d11 step-1000000 of the run that went best"
        run("snapshot", path, name)
        for command in ("list", "info"):
            assert name in run(command, path).stdout

    def test_what_is_refused_is_said_in_the_words_of_the_command_line(self, kept: Path) -> None:
        assert "drop them, or set --drop-later" in run("rollback", kept, "first", "--yes").stderr

    def test_info_shows_what_only_they_hold(self, kept: Path) -> None:
        with LmdbStore(kept) as store:
            ads = store.open_table("ads", SCHEMA)
            for seed in (3, 4):
                store.put(RowIds.of(ads, np.arange(ROWS)), _rows(seed))
                store.flush()
        described = describe_store(kept)
        assert [one.name for one in described.snapshots] == ["first", "[second]"]
        first, second = described.snapshots
        assert first.only_bytes == 0, "the second one holds every segment of it too"
        assert 0 < second.only_bytes < second.bytes
        text = run("info", kept).stdout
        assert "first" in text and "[second]" in text and "only it holds" in text
        before = described.snapshots[1].only_bytes
        assert run("drop", kept, "first").exit_code == 0
        assert describe_store(kept).snapshots[0].only_bytes > before

    def test_are_compared(self, kept: Path) -> None:
        result = run("diff", kept, "first", "[second]", "--json")
        assert json.loads(result.stdout) == {"tables": {"ads": {"put": 200, "deleted": 7}}}
        assert "[second]" in result.stderr
        with_ids = json.loads(run("diff", kept, "first", "[second]", "--json", "--ids").stdout)["ids"]["ads"]
        assert (sorted(with_ids["put"]), sorted(with_ids["deleted"])) == (list(range(200)), list(range(1000, 1007)))
        lines = run("diff", kept, "first", "[second]", "--ids").stdout.splitlines()
        assert len(lines) == 207 and "ads\t1003\tdeleted" in lines
        assert "no row differs" in run("diff", kept, "first", "first").stdout
        assert run("diff", kept, "[second]", "first").exit_code == 1

    def test_going_back_asks_and_does_nothing_unless_told_to(self, kept: Path) -> None:
        def rows() -> int:
            with LmdbStore(kept, read_only=True) as store:
                return store.stats().rows

        said_no = CliRunner().invoke(main, ["store", "rollback", str(kept), "first", "--drop-later"], input="n\n")
        assert said_no.exit_code == 1
        assert "takes every change since and drops 1 newer snapshots. Go on?" in said_no.stderr
        refused = run("rollback", kept, "first", "--yes")
        assert refused.exit_code == 1 and "has snapshots newer than 'first'" in refused.stderr
        assert rows() == ROWS - 7
        done = run("rollback", kept, "first", "--drop-later", "--yes", "--json")
        assert json.loads(done.stdout) == {"name": "first", "rows": ROWS, "dropped": ["[second]"]}
        assert rows() == ROWS
        with LmdbStore(kept) as store:
            assert store.note == b"note"
        said_yes = CliRunner().invoke(main, ["store", "rollback", str(kept), "first"], input="y\n")
        assert said_yes.exit_code == 0

    @pytest.mark.parametrize("command", [("snapshot", "x"), ("drop", "first")])
    def test_rows_that_a_crash_has_left_are_asked_about(self, kept: Path, command: tuple[str, str]) -> None:
        store = LmdbStore(kept, config=StoreConfig(segment_bytes=1 << 14, write_buffer_bytes=1 << 15))
        ads = store.open_table("ads", SCHEMA)
        store.put(RowIds.of(ads, np.arange(ROWS)), _rows(9))
        store.put(RowIds.of(ads, np.arange(ROWS)), _rows(9))
        store.abandon()
        refused = run(command[0], kept, command[1])
        assert refused.exit_code == 1 and "say --later keep or --later discard" in refused.stderr
        assert run(command[0], kept, command[1], "--later", "discard").exit_code == 0
        with LmdbStore(kept, durability="snapshot") as store:
            assert store.stats().rows == ROWS - 7

    @pytest.mark.parametrize("command", [["drop", "none"], ["rollback", "none", "--yes"], ["diff", "first", "none"]])
    def test_one_that_is_not_there_is_one_line(self, kept: Path, command: list[str]) -> None:
        result = run(command[0], kept, *command[1:])
        assert result.exit_code == 1
        assert "has no snapshot 'none'; the newest there are: 'first', '[second]'" in result.stderr
        assert "Traceback" not in result.output

    @pytest.mark.parametrize("name", ["", "a\nb", "first"])
    def test_a_name_that_none_may_have_is_one_line(self, kept: Path, name: str) -> None:
        result = run("snapshot", kept, name)
        assert result.exit_code == 1 and "Traceback" not in result.output and result.stderr.count("\n") == 1

    def test_damage_names_them(self, kept: Path) -> None:
        data = bytearray((kept / "data.mdb").read_bytes())
        at = -1
        while (at := data.find(b"TESNAPS\0", at + 1)) >= 0:
            data[at + 30] ^= 1
        (kept / "data.mdb").write_bytes(data)
        result = run("verify", kept)
        assert result.exit_code == 1
        assert "snapshot first: the record of snapshot 'first'" in result.stdout
        assert "snapshot [second]: the record of snapshot '[second]'" in result.stdout
        assert describe_store(kept).snapshots == ()
        assert run("list", kept).stdout.count("DAMAGED") == 2
