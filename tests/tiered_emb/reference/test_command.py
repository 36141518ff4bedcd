from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from storage.lmdb_store import LmdbStore
from storage.schema import Column, RowSchema
from tiered_emb.cache import POLICIES
from tiered_emb.cli import main
from tiered_emb.optim import RULES
from tiered_emb.reference import command
from tiered_emb.reference.check import IDENTICAL
from tiered_emb.reference.settings import TrainOptions
from tiered_emb.trace import read_trace, sampled


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 lines of a Criteo-format file, its clicks told by C1."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "clicks.tsv"
    with path.open("w") as file:
        for _ in range(400):
            ids = rng.zipf(1.4, 26) % 500
            click = int(rng.random() < 0.2 + 0.6 * (ids[0] % 2))
            numbers = ["" if n < 0 else str(n) for n in rng.integers(-1, 50, 13)]
            file.write("\t".join([str(click), *numbers, *(f"{i:x}" for i in ids)]) + "\n")
    return path


def train(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["train", *map(str, args)])


def test_json_is_the_last_line_and_the_table_goes_elsewhere(clicks: Path, tmp_path: Path) -> None:
    result = train("--data", clicks, "--store", tmp_path / "rows", "--check", "dense", "--json", "-")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert len(result.stdout.splitlines()) == 1
    assert report["dense_check"] == "identical"
    assert {"auc", "log_loss", "samples_per_s", "losses_sha256", "rows_sha256", "tiers"} <= set(report)
    assert "against whole tables in memory: identical" in result.stderr
    assert "stored" in result.stderr


def test_json_file_and_table_on_stdout(clicks: Path, tmp_path: Path) -> None:
    result = train("--data", clicks, "--json", tmp_path / "report.json", "--hbm-bytes", "512KiB")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert [tier["name"] for tier in report["tiers"]] == ["hbm", "ddr"]
    assert "AUC" in result.stdout
    assert "hbm" in result.stdout


def test_a_difference_ends_with_1(clicks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_emb.reference.job.Job.check", lambda *args: "step 3: table 'C1', id 4")
    result = train("--data", clicks, "--check", "dense")
    assert result.exit_code == 1
    assert "step 3: table 'C1', id 4" in result.stdout
    assert IDENTICAL not in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dim", "0"], "--dim is 0; expected an integer from 1 to 65536"),
        (["--batch-size", "-4"], "--batch-size is -4; expected"),
        (["--epochs", "0"], "--epochs is 0; expected"),
        (["--threads", "0"], "--threads is 0; expected"),
        (["--seed", "-1"], "--seed is -1; expected"),
        (["--ddr-bytes", "12 parsecs"], "--ddr-bytes is '12 parsecs'; expected a number of bytes such as"),
        (["--hbm-bytes", "-5"], "--hbm-bytes is '-5'; expected"),
        (["--hbm-bytes", "0", "--ddr-bytes", "0"], "--hbm-bytes and --ddr-bytes are both 0"),
        (["--policy", "mru"], f"--policy is 'mru'; expected one of {', '.join(sorted(POLICIES))}"),
        (["--admission", "some"], "--admission is 'some'; expected one of always, tinylfu, probability, or with a"),
        (["--admission", "tinylfu"], "--admission is 'tinylfu', but --hbm-bytes is 0: it says which of the rows"),
        (["--min-rows", "C1"], "--min-rows is 'C1'; expected a table and a number of rows, such as C1=1000"),
        (["--min-rows", "C1=7", "--min-rows", "C1=8"], "--min-rows is given twice for table 'C1', 7 and 8 rows"),
        (["--min-rows", "C1=0"], "--min-rows of table 'C1' is 0; expected an integer from 1"),
        (["--max-rows", "C1=5", "--min-rows", "C1=6"], "--min-rows of table 'C1' is 6, above its --max-rows, 5"),
        (["--max-rows", "C99=5"], "--max-rows names table 'C99'; expected one of C1, C2"),
        (["--max-rows", "C1=100000000"], "--max-rows of table 'C1' is 100000000, but --ddr-bytes is 268435456"),
        (["--optimizer", "lion"], f"--optimizer is 'lion'; expected one of {', '.join(sorted(RULES))}"),
        (["--lr", "nan"], "RowwiseAdagrad: --lr is nan"),
        (["--record", "a", "--record-rate", "1.5"], "--record-rate is 1.5; expected a share of the ids"),
        (["--record-rate", "0.5"], "--record-rate is 0.5, but nothing is recorded"),
        (["--precision", "fp8"], "--precision is 'fp8'; expected one of bf16, fp16, fp32, int8"),
        (["--rounding", "up"], "--rounding is 'up'; expected one of nearest, stochastic"),
        (
            ["--precision", "int8", "--check", "dense"],
            "--check dense proves equality to the bit, and rows of --precision int8 are rounded",
        ),
        (["--json", "/no/such/place/report.json"], "--json /no/such/place/report.json is in /no/such/place"),
    ],
)
def test_options_that_make_no_sense_end_with_2_and_one_line(clicks: Path, options: list[str], message: str) -> None:
    result = train("--data", clicks, *options)
    assert result.exit_code == 2
    assert result.stderr.startswith("tiered-emb: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_budget_that_does_not_do_names_its_option(clicks: Path) -> None:
    result = train("--data", clicks, "--ddr-bytes", "1KiB")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("tiered-emb: --ddr-bytes is 1024, which does not leave room")


@pytest.mark.parametrize("lr", ["1e30", "1e38"])
def test_a_diverged_run_ends_with_1_and_one_line(clicks: Path, tmp_path: Path, lr: str) -> None:
    result = train("--data", clicks, "--optimizer", "sgd", "--lr", lr, "--store", tmp_path / "rows")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert re.match(r"tiered-emb: training diverged: .* is (nan|inf).* a smaller --lr ", line)
    assert "rows holds" in line


def test_a_malformed_line_ends_with_1_and_one_line(clicks: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.tsv"
    lines = clicks.read_text().splitlines()
    lines[200] = lines[200].replace("\t", " ", 1)
    bad.write_text("\n".join(lines))
    result = train("--data", bad)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"tiered-emb: {bad}, line 201: field 1 (label) is '")


def test_a_recorded_run_gives_the_same_bits_and_a_trace_of_all_it_trained_on(clicks: Path, tmp_path: Path) -> None:
    found = []
    for options in (
        [],
        ["--record", tmp_path / "all.bin"],
        ["--record", tmp_path / "some.bin", "--record-rate", "0.25"],
    ):
        result = train("--data", clicks, "--check", "dense", "--json", "-", *options)
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout.splitlines()[-1]))
    assert all(report["dense_check"] == IDENTICAL for report in found)
    assert len({(report["losses_sha256"], report["rows_sha256"]) for report in found}) == 1
    whole, part = read_trace(tmp_path / "all.bin"), read_trace(tmp_path / "some.bin")
    assert (len(whole), whole.num_batches) == (360 * 26, 3)
    assert sorted(whole.table_names.values()) == sorted(f"C{column}" for column in range(1, 27))
    lines = [line.split("\t")[14:] for line in clicks.read_text().splitlines()[:128]]
    first = {(f"C{column + 1}", int(line[column], 16)) for line in lines for column in range(26)}
    tables, ids = next(whole.each_batch())
    asked = {(whole.table_names[table], id) for table, id in zip(tables.tolist(), ids.tolist(), strict=True)}
    assert asked == first
    kept = sampled(*whole.part(0, len(whole)), 0.25)
    assert 0 < kept.sum() < len(whole)
    assert np.array_equal(part.ids, whole.ids[kept])


def test_a_trace_that_is_there_already_ends_with_1_and_one_line(clicks: Path, tmp_path: Path) -> None:
    (tmp_path / "all.bin").write_text("precious")
    result = train("--data", clicks, "--record", tmp_path / "all.bin")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert re.match(r"tiered-emb: trace .*all\.bin is there already and is not overwritten", line)
    assert (tmp_path / "all.bin").read_text() == "precious"


def test_a_path_that_is_no_store_and_a_store_of_another_schema(clicks: Path, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to_grandma.txt").write_text("Dear")
    result = train("--data", clicks, "--store", tmp_path / "letters")
    assert result.exit_code == 1
    assert "letters" in result.stderr
    with LmdbStore(tmp_path / "rows") as store:
        store.open_table("C1", RowSchema((Column("weight", "float32", 8),)))
    result = train("--data", clicks, "--store", tmp_path / "rows")
    assert result.exit_code == 1
    assert "C1" in result.stderr
    assert "Traceback" not in result.output


def test_ctrl_c_before_training_ends_with_130(clicks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_job", interrupted)
    result = train("--data", clicks)
    assert result.exit_code == 130
    assert result.stderr == "tiered-emb: interrupted\n"


def python(program: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter, in which nothing is imported yet."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


def test_ctrl_c_during_imports_ends_with_130_and_one_line() -> None:
    result = python(
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(name, path, target=None):\n"
        "        if name == 'torch': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder)\n"
        "from tiered_emb.cli import main\n"
        "main(['train'])"
    )
    assert result.returncode == 130
    assert result.stderr == "tiered-emb: interrupted\n"


def test_help_imports_neither_torch_nor_numba() -> None:
    result = python(
        "import sys\n"
        "from tiered_emb.cli import main\n"
        "try:\n"
        "    main(['train', '--help'])\n"
        "finally:\n"
        "    assert not {'torch', 'numba'} & set(sys.modules)"
    )
    assert result.returncode == 0, result.stderr


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "tiered_emb", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("tiered-emb, version ")


def test_help_names_every_option() -> None:
    text = CliRunner().invoke(main, ["train", "--help"]).stdout
    options = TrainOptions.__dataclass_fields__
    assert len(options) == 25
    for option in options:
        assert f"--{option.replace('_', '-')} " in text


def test_criteo_sample_through_three_tiers(require_shared: Callable[[str], Path], tmp_path: Path) -> None:
    sample = require_shared("data/criteo/criteo_7200.tsv.gz")
    found = []
    for policy, hbm, ddr in (("lru", "256KiB", "2MiB"), ("lfu", "0", "2MiB")):
        result = train(
            *("--data", sample, "--dim", "16", "--batch-size", "128", "--store", tmp_path / policy),
            *("--hbm-bytes", hbm, "--ddr-bytes", ddr, "--policy", policy, "--check", "dense", "--json", "-"),
        )
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout.splitlines()[-1]))
        for tier in found[-1]["tiers"]:
            assert tier["hits"] > 0
            assert tier["evictions"] > 0
            assert tier["peak_bytes"] <= tier["capacity_bytes"]
        assert found[-1]["tiers"][-1]["write_backs"] > 0
        assert found[-1]["store"]["bytes_read"] > 0
        assert found[-1]["dense_check"] == IDENTICAL
        assert found[-1]["auc"] >= 0.72
    assert found[0]["losses_sha256"] == found[1]["losses_sha256"]
    assert found[0]["rows_sha256"] == found[1]["rows_sha256"]


def test_floors_quotas_and_admission_change_no_bit(clicks: Path, tmp_path: Path) -> None:
    hashes = set()
    for more in ([], ["--min-rows", "C1=20", "--min-rows", "C2=5", "--max-rows", "C3=90", "--admission", "tinylfu:3"]):
        budgets = ["--hbm-bytes", "256KiB", "--ddr-bytes", "2MiB", "--store", tmp_path / f"rows{len(more)}"]
        result = train("--data", clicks, *budgets, *more, "--check", "dense", "--json", "-")
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout.splitlines()[-1])
        assert report["dense_check"] == "identical"
        hashes.add(report["rows_sha256"])
    assert len(hashes) == 1
    assert report["settings"]["min_rows"] == {"C1": 20, "C2": 5}
    assert report["settings"]["max_rows"] == {"C3": 90}
    assert report["settings"]["admission"] == "tinylfu:3"


def test_the_report_is_not_written_over_what_is_read_or_recorded(clicks: Path, tmp_path: Path) -> None:
    before, trace = clicks.read_bytes(), tmp_path / "asked.trace"
    for options in (["--json", clicks], ["--record", trace, "--json", trace]):
        result = train("--data", clicks, *options)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "would be written over" in result.stderr
    assert clicks.read_bytes() == before
    assert not trace.exists()


def test_a_report_to_a_device_or_a_link_leaves_it_what_it_is(clicks: Path, tmp_path: Path) -> None:
    """Renamed over /dev/null it made a file of it, for every program of the machine."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "report.json")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert train("--data", clicks, "--json", pipe).exit_code == 0
        assert json.loads(os.read(reader, 1 << 20))["settings"]
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert train("--data", clicks, "--json", link).exit_code == 0
    assert link.is_symlink()
    assert json.loads((tmp_path / "report.json").read_text())["settings"]
