"""`tiered-emb policies`: what is printed, written and exited with."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from click.testing import CliRunner, Result

from tiered_emb import policies_report
from tiered_emb.cache import Directory
from tiered_emb.cli import main
from tiered_emb.sim import POLICY_NAMES
from tiered_emb.trace import TraceWriter

IDS = (np.random.default_rng(0).zipf(1.2, 4000) % 500).astype(np.int64)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "[red]shop.txt"  # names are not taken for markup
    path.write_text("\n".join(map(str, IDS.tolist())))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["policies", *map(str, arguments)])


def figures(result: Result) -> dict[str, object]:
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == 1
    return dict(json.loads(lines[-1]))


def test_misses_by_policy_and_size_as_json(trace: Path) -> None:
    result = run("--trace", trace, "--policy", "belady,lru", "--sizes", "50,7,50", "--json", "-")
    printed = json.loads(result.stdout.splitlines()[-1])
    assert figures(result) == printed
    assert (printed["requests"], printed["distinct"], printed["mode"]) == (4000, len(np.unique(IDS)), "single")
    assert list(printed["miss_ratio"]) == ["belady", "lru"]
    for size in (7, 50):
        missed = Directory(size, "lru").replay(np.zeros(4000, np.uint32), IDS, np.empty(4000, np.bool_))
        assert printed["miss_ratio"]["lru"][str(size)] == missed / 4000
        difference = printed["control"]["lru"][str(size)] - missed / 4000
        assert printed["recency"]["lru"][str(size)] == difference
        assert printed["miss_ratio"]["belady"][str(size)] < missed / 4000
    assert list(printed["miss_ratio"]["lru"]) == ["7", "50"]
    assert printed["seconds"].keys() == {"belady", "lru"}
    assert "[red]shop" in result.stderr


def test_all_policies_and_eight_sizes_unless_told_otherwise(trace: Path) -> None:
    result = run("--trace", trace)
    assert result.exit_code == 0, result.output
    for name in POLICY_NAMES:
        assert (f"\n {name} " in result.stdout) == (name != "lookahead")  # LRU, where no batch is planned
    assert "4,000 requests of" in result.stdout
    assert "hits in 100: by popularity" in result.stdout
    assert "hits in 100" not in run("--trace", trace, "--policy", "lru", "--no-control").stdout


def test_fractions_are_of_the_rows_of_each_trace(trace: Path) -> None:
    distinct = len(np.unique(IDS))
    printed = json.loads(run("--trace", trace, "--policy", "lru", "--fractions", "0.5,0.001", "--json", "-").stdout)
    assert list(printed["miss_ratio"]["lru"]) == ["1", str(distinct // 2)]


def test_more_than_one_trace(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("when,item\n1,a\n2,b\n3,a\n")
    result = run(
        "--trace", other, "--trace", other, "--column", "item", "--policy", "lru", "--sizes", "2", "--json", "-"
    )
    first, second = json.loads(result.stdout)["traces"]
    assert first["miss_ratio"] == second["miss_ratio"] == {"lru": {"2": 2 / 3}}
    assert first["trace"] == "other"


def test_batches_of_n_and_of_the_trace(trace: Path, tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.trace"
    with TraceWriter(recorded) as writer:
        for start in range(0, 4000, 100):
            writer.append(0, IDS[start : start + 100])
    options = "--policy", "lru,lfu,belady", "--sizes", "150", "--json", "-"
    own = json.loads(run("--trace", recorded, "--batch", "trace", *options).stdout)
    said = json.loads(run("--trace", trace, "--batch", "100", *options).stdout)
    assert own["miss_ratio"] == said["miss_ratio"]
    assert (own["mode"], own["batches"]) == ("batch", 40)
    assert own["counted_requests"] == sum(len(np.unique(IDS[i : i + 100])) for i in range(0, 4000, 100))
    single = json.loads(run("--trace", trace, *options).stdout)
    assert single["miss_ratio"]["lru"]["150"] < own["miss_ratio"]["lru"]["150"]


def test_in_batches_a_policy_looks_ahead(trace: Path) -> None:
    options = "--trace", trace, "--batch", "50", "--policy", "lru,lookahead,belady", "--sizes", "60", "--json", "-"
    none, two, four = (json.loads(run(*options, "--lookahead", n).stdout) for n in (0, 2, 4))
    assert none["miss_ratio"]["lookahead"] == none["miss_ratio"]["lru"]
    by_policy = {name: ratios["60"] for name, ratios in two["miss_ratio"].items()}
    assert by_policy["belady"] < four["miss_ratio"]["lookahead"]["60"] < by_policy["lookahead"] < by_policy["lru"]
    assert two["control"]["lookahead"]["60"] < two["control"]["lru"]["60"]
    default = run(*options)
    figures = json.loads(default.stdout)
    assert figures["miss_ratio"] == two["miss_ratio"]
    assert [each["lookahead_batches"] for each in (none, figures, four)] == [0, 2, 4]
    counted = figures["counted_requests"]
    assert f"80 batches that ask for {counted:,}; lookahead knows the next 2" in " ".join(default.stderr.split())
    every = json.loads(run("--trace", trace, "--batch", "50", "--sizes", "60", "--no-control", "--json", "-").stdout)
    assert list(every["miss_ratio"]) == list(POLICY_NAMES)


def test_single_requests_have_nothing_to_look_ahead_to(trace: Path) -> None:
    printed = json.loads(run("--trace", trace, "--policy", "lru,lookahead", "--sizes", "60", "--json", "-").stdout)
    assert printed["lookahead_batches"] is None
    assert printed["miss_ratio"]["lru"] == printed["miss_ratio"]["lookahead"]


def test_batches_choose_default_sizes_that_hold_them(trace: Path) -> None:
    printed = json.loads(run("--trace", trace, "--batch", "200", "--policy", "lru", "--json", "-").stdout)
    largest = max(len(np.unique(IDS[i : i + 200])) for i in range(0, 4000, 200))
    assert min(map(int, printed["miss_ratio"]["lru"])) == largest


def test_budgets_and_what_more_memory_saves(trace: Path) -> None:
    budgets = "--budget", "8KiB,16KiB,32KiB", "--row-bytes", "64"
    result = run("--trace", trace, "--policy", "lru,lfu", *budgets, "--json", "-")
    lines = json.loads(result.stdout)["budgets"]
    assert [line["budget_bytes"] for line in lines] == [8192, 16384, 32768] * 2
    first, second, last = lines[:3]
    assert first["rows"] == Directory.capacity_for(8192, 64, "lru")
    assert first["misses_saved"] == round((first["miss_ratio"] - second["miss_ratio"]) * 4000)
    assert first["misses_saved_per_mib"] == first["misses_saved"] * (1 << 20) / 8192
    assert second["more_bytes"] == 16384
    assert "misses_saved" not in last
    assert lines[3]["rows"] == Directory.capacity_for(8192, 64, "lfu")
    assert "what the step to the next one saves" in result.stderr
    one = json.loads(
        run("--trace", trace, "--policy", "lru", "--budget", "8KiB", "--row-bytes", 64, "--json", "-").stdout
    )
    assert [line["budget_bytes"] for line in one["budgets"]] == [2048, 4096, 8192, 12288, 16384, 32768]


def test_a_sample_beside_the_exact_curve_and_alone(trace: Path) -> None:
    options = "--trace", trace, "--policy", "lru,fifo", "--sizes", "40,200", "--json", "-"
    both = json.loads(run(*options, "--sample", "0.5", "--seed", "3").stdout)
    exact = json.loads(run(*options).stdout)
    alone = json.loads(run(*options, "--sample", "0.5", "--seed", "3", "--no-exact").stdout)
    other = json.loads(run(*options, "--sample", "0.5", "--seed", "3", "--correction", "adj").stdout)
    assert both["miss_ratio"] == exact["miss_ratio"]
    assert both["sample"]["miss_ratio"] == alone["miss_ratio"] == alone["sample"]["miss_ratio"]
    assert other["sample"]["miss_ratio"] != both["sample"]["miss_ratio"]
    for policy in ("lru", "fifo"):
        pairs = [(both["miss_ratio"][policy][size], alone["miss_ratio"][policy][size]) for size in ("40", "200")]
        error = both["sample"]["mean_absolute_error"][policy]
        assert error == pytest.approx(sum(abs(a - b) for a, b in pairs) / 2)
        assert 0 < error < 0.1


def test_a_recorded_sample_says_so_and_is_not_sampled_again(tmp_path: Path) -> None:
    path = tmp_path / "thin.trace"
    with TraceWriter(path, rate=0.5) as writer:
        writer.append(0, IDS)
    result = run("--trace", path, "--policy", "lru", "--sizes", "40", "--json", "-")
    assert json.loads(result.stdout)["trace_rate"] == 0.5
    assert "a sample of 0.5 of the rows" in result.stderr
    refused = run("--trace", path, "--policy", "lru", "--sizes", "40", "--sample", "0.1")
    assert refused.exit_code == 2
    assert "trace thin is a sample of 0.5 of the rows already" in refused.stderr


def test_csv_has_a_line_for_each_trace_policy_and_size(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "curves.csv"
    assert (
        run("--trace", trace, "--policy", "lru,lfu", "--sizes", "7,50", "--csv", file, "--sample", "0.5").exit_code == 0
    )
    with open(file, newline="") as opened:
        lines = list(csv.DictReader(opened))
    assert [(line["policy"], line["size_rows"]) for line in lines] == [
        (p, s) for p in ("lru", "lfu") for s in ("7", "50")
    ]
    for line in lines:
        assert line["trace"] == "[red]shop"
        assert float(line["miss_ratio"]) == pytest.approx(int(line["misses"]) / int(line["requests"]), abs=1e-6)
        assert 0 < float(line["shuffled_miss_ratio"]) < 1
        assert 0 < float(line["sampled_miss_ratio"]) < 1
    assert run("--trace", trace, "--policy", "lru", "--sizes", "7", "--csv", file, "--no-control").exit_code == 0
    assert file.read_text().splitlines()[1].endswith(",,")


def test_a_picture_has_belady_in_it(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for ending, begins in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        file = tmp_path / f"curves.{ending}"
        options = "--policy", "lru,lfu", "--sizes", "7,50", "--sample", "0.5", "--plot", file, "--json", "-"
        result = run("--trace", trace, "--trace", trace, *options)
        assert result.exit_code == 0, result.output
        assert file.read_bytes().startswith(begins)
        assert list(json.loads(result.stdout)["traces"][0]["miss_ratio"]) == ["lru", "lfu", "belady"]


def test_a_picture_without_matplotlib_says_what_to_install(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tiered_emb.sim.picture", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("--trace", trace, "--plot", tmp_path / "curves.png")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "pip install 'tiered-emb[plots]'" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "lru,lur"], f"policy is 'lur'; expected one of {', '.join(POLICY_NAMES)}"),
        (["--policy", "lru,"], "--policy is 'lru,'; expected values with a comma between each two"),
        (["--sizes", "0"], "size is 0 rows; expected 1 to"),
        (["--sizes", "ten"], "--sizes is 'ten'; expected numbers with a comma between each two"),
        (["--fractions", "0.1,2"], "--fractions is '0.1,2'; expected shares above 0 and at most 1"),
        (["--sizes", "5", "--fractions", "0.5"], "--sizes and --fractions both say how large the tier is"),
        (["--budget", "1GiB"], "--budget and --row-bytes belong together"),
        (["--row-bytes", "64"], "--budget and --row-bytes belong together"),
        (["--budget", "plenty", "--row-bytes", "64"], "--budget is 'plenty'; expected a number of bytes"),
        (["--budget", "100", "--row-bytes", "64"], "holds no row of 64 bytes and its bookkeeping under"),
        (["--budget", "1GiB", "--row-bytes", "0"], "a row has 0 bytes; expected 1 or more"),
        (["--batch", "0"], "--batch is '0'; expected how many requests make a batch, or 'trace'"),
        (["--batch", "trace"], "does not say where its batches begin; expected a number for --batch"),
        (["--batch", "1000", "--sizes", "20"], "does not fit into 20; the least size for these batches is"),
        (["--batch", "10", "--sample", "0.1"], "ask for a sample or for batches, not for both"),
        (["--lookahead", "2"], "--lookahead counts batches, and requests come one at a time: add --batch N"),
        (["--batch", "9", "--policy", "lru", "--lookahead", "2"], "--lookahead is for the policy lookahead"),
        (["--batch", "9", "--lookahead", "-1"], "lookahead is -1 batches; expected 0 or more"),
        (
            ["--batch", "100", "--budget", "8KiB", "--row-bytes", "64", "--policy", "lru"],
            "a budget of 2048 bytes holds 19 rows under lru, and a batch has",
        ),
        (["--csv", "all.json", "--json", "all.json"], "all.json is named twice"),
        (["--csv", "-"], "--csv is '-'; expected the name of a file"),
        (["--csv", "all.json", "--json", "./all.json"], "all.json is named twice"),
        (["--budget", "0", "--row-bytes", "4"], "--budget is 0; expected bytes that hold some rows"),
        (["--seed", "-1"], "seed is -1; expected 0 or more"),
        (["--sample", "1.5"], "rate is 1.5"),
        (["--no-exact"], "without the exact curves there has to be a sampling rate"),
        (["--format", "parquet"], "trace format is 'parquet'"),
        (["--csv", "/no/such/place/curves.csv"], "/no/such/place/curves.csv cannot be written"),
        (["--plot", "curves.abc"], "curves.abc ends with 'abc': pictures end with one of"),
    ],
)
def test_options_that_make_no_sense_are_one_line(trace: Path, options: list[str], message: str) -> None:
    result = run("--trace", trace, *options)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("tiered-emb: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("contents", "options", "message"),
    [
        (None, [], "cannot be opened"),
        (b"", [], "holds no requests"),
        (b"12345", ["--format", "int64-be"], "ends in the middle of a record"),
    ],
)
def test_traces_that_cannot_be_read_are_one_line(
    tmp_path: Path, contents: bytes | None, options: list[str], message: str
) -> None:
    path = tmp_path / "bad.txt"
    if contents is not None:
        path.write_bytes(contents)
    result = run("--trace", path, *options)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("tiered-emb: trace ")
    assert str(path) in result.stderr
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("packing", ["gz", "xz", "zst"])
def test_a_trace_that_is_cut_short_is_refused_unless_that_is_tolerated(tmp_path: Path, packing: str) -> None:
    pack = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstandard.ZstdCompressor().compress}[packing]
    path = tmp_path / f"cut.csv.{packing}"
    ids = np.random.default_rng(0).integers(0, 2**62, 40_000)  # zstd gives what it has in blocks of 128 KiB
    data = pack("\n".join(map(str, ids.tolist())).encode())
    path.write_bytes(data[:-1000])
    refused = run("--trace", path)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "is cut short" in refused.stderr
    assert "(--tolerate-cut) to use what is whole" in refused.stderr
    options = "--policy", "lru", "--sizes", "10", "--no-control", "--json", "-"
    printed = json.loads(run("--trace", path, "--tolerate-cut", *options).stdout)
    assert 1000 < printed["requests"] < 40_000


def test_a_name_that_says_compressed_of_a_file_that_is_not(tmp_path: Path) -> None:
    path = tmp_path / "page.txt.xz"
    path.write_bytes(b"<html>not found</html>\n")
    result = run("--trace", path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is not compressed, whatever its name says: it begins with b'<html>not found<'" in result.stderr
    assert run("--trace", path, "--format", "text", "--policy", "lru", "--sizes", "1").exit_code == 0


def test_one_of_each_is_no_plural(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("7\n")
    options = "--policy", "lru,belady", "--no-control"
    assert "1 request of 1 row, one at a time" in run("--trace", path, *options).stdout
    assert "1 request of 1 row, 1 batch that asks for 1" in run("--trace", path, "--batch", "9", *options).stdout


def test_the_golden_ratios_of_a_real_trace(require_shared: Callable[[str], Path]) -> None:
    path = require_shared("traces/web12.trace.xz")
    options = "--format", "int32-be", "--policy", "lru,belady", "--sizes", "137,687", "--no-control", "--json", "-"
    printed = json.loads(run("--trace", path, *options).stdout)
    with open(require_shared("traces/golden.csv"), newline="") as file:
        golden = {(row["trace"], row["policy"].lower(), row["cache_objects"]): row for row in csv.DictReader(file)}
    for policy, ratios in printed["miss_ratio"].items():
        for size, ratio in ratios.items():
            assert f"{ratio:.6f}" == golden["web12", policy, size]["miss_ratio"]


def test_progress_is_plain_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter(range(0, 100, 4))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    with policies_report.replay_bar("[shop]", 8) as advance:
        for _ in range(8):
            advance()
    assert capsys.readouterr().err.splitlines() == ["[shop]: 3 of 8 replays", "[shop]: 6 of 8 replays"]


def test_names_and_sizes_are_whole_in_80_columns(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("\n".join(map(str, range(300_000))))
    sizes = "100000,120000,140000,160000,180000,200000,220000,240000"
    printed = run("--trace", path, "--policy", "lfu-aged,lru", "--sizes", sizes).stdout
    assert max(map(len, printed.splitlines())) <= 80
    assert {f"{int(size):,}" for size in sizes.split(",")} <= set(printed.split())
    assert all(line.split()[0] in ("policy", "lfu-aged", "lru") for line in printed.splitlines() if "+0.0" in line)
    assert "lfu-aged" in printed.split("hits in 100")[1].split()


def test_the_laboratory_needs_no_torch(trace: Path) -> None:
    program = (
        "import sys\n"
        "from tiered_emb.cli import main\n"
        "try:\n"
        f"    main(['policies', '--trace', {str(trace)!r}, '--policy', 'lru', '--sizes', '9', '--json', '-'])\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert '"miss_ratio"' in result.stdout


@pytest.mark.parametrize("option", ["--csv", "--json", "--plot"])
def test_no_file_is_written_over_a_trace(trace: Path, tmp_path: Path, option: str) -> None:
    before, link = trace.read_bytes(), tmp_path / "curves.svg"
    link.symlink_to(trace)
    for name in (trace, link):
        result = run("--trace", trace, option, name, "--sizes", 10)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert f"would be written over {trace}" in result.stderr
    assert trace.read_bytes() == before


@pytest.mark.parametrize("option", ["--csv", "--json"])
def test_a_full_disk_is_one_line(trace: Path, option: str) -> None:
    result = run("--trace", trace, option, "/dev/full", "--sizes", 10, "--policy", "lru")
    assert result.exit_code == 2
    assert result.stderr == "tiered-emb: /dev/full cannot be written: No space left on device\n"
