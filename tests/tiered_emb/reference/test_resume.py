"""`tiered-emb train --resume`: a run that was stopped, killed or is over goes on to the numbers of one that was not."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.tiered_emb.reference.test_training import Clicks, interrupt_at
from tiered_emb import list_checkpoints
from tiered_emb.cli import main
from tiered_emb.errors import DataError
from tiered_emb.reference import job
from tiered_emb.reference.training import Learner

ROOT = Path(__file__).resolve().parents[3]
STEPS = 36  # of two epochs of Clicks
SMALL = ("--data", "clicks.tsv", "--dim", "8", "--batch-size", "32", "--ddr-bytes", "256KiB", "--epochs", "2")
HASHES = ("losses_sha256", "rows_sha256", "auc", "samples", "steps")


def train(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["train", *SMALL, *map(str, args)])


def done(*args: str | Path) -> tuple[list[object], str]:
    """What must be equal of a run that is expected to end well, and what it says."""
    result = train(*args, "--json", "-")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    return [report[name] for name in HASHES], result.stderr


@pytest.fixture
def clicks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], None]:
    def use(on_batch: Callable[[int], None] = lambda number: None) -> None:
        monkeypatch.setattr(job, "open_stream", lambda settings, console: Clicks(on_batch))

    use()
    return use


@pytest.fixture
def expected(clicks: object, tmp_path: Path) -> list[object]:
    """Of the run that nothing stops."""
    found, _ = done("--store", tmp_path / "whole")
    assert found[-1] == STEPS
    return found


def die_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner raises before it takes its next step after so many."""
    learn, taken = Learner.learn, [0]

    def counted(self: Learner, loss: object) -> None:
        if taken[0] == step:
            raise MemoryError("as good as killed")
        taken[0] += 1
        learn(self, loss)  # type: ignore[arg-type]

    monkeypatch.setattr(Learner, "learn", counted)


@pytest.mark.parametrize("lookahead", ["0", "2", "5"])
def test_ctrl_c_and_resume_come_to_the_same_numbers(
    clicks: Callable[..., None], expected: list[object], tmp_path: Path, lookahead: str
) -> None:
    store = "--store", tmp_path / "rows", "--checkpoint-every", "5", "--lookahead", lookahead
    clicks(interrupt_at(9))
    stopped = train(*store)
    step = int(re.findall(r"interrupted after step (\d+); --resume goes on from step \1", stopped.output)[0])
    assert (stopped.exit_code, step % 5 > 0) == (130, True)
    assert not (tmp_path / "rows.checkpoints" / "running").exists()
    clicks()
    found, said = done(*store, "--resume")
    assert found == expected
    assert f"resuming at step {step}\n" in said
    assert [one.step for one in list_checkpoints(tmp_path / "rows.checkpoints")] == [35, 36]
    found, said = done(*store, "--resume")  # of a run that is over
    assert (found, "resuming at step 36\n" in said) == (expected, True)


def test_no_checkpoint_changes_a_number(expected: list[object], tmp_path: Path) -> None:
    assert done("--store", tmp_path / "rows", "--checkpoint-every", "1")[0] == expected


def test_other_budgets_policy_place_and_more_epochs(
    clicks: Callable[..., None], expected: list[object], tmp_path: Path
) -> None:
    saves = "--store", tmp_path / "rows", "--checkpoints", tmp_path / "saves"
    done(*saves, "--checkpoint-every", "5", "--epochs", "1")
    other = "--ddr-bytes", "1MiB", "--hbm-bytes", "64KiB", "--policy", "lfu", "--lookahead", "1"
    found, _ = done(*saves, "--resume", *other)
    assert found == expected
    assert [one.step for one in list_checkpoints(tmp_path / "saves")] == [15, 18]


def test_a_run_that_failed_says_where_to_go_on_and_loses_what_came_later(
    clicks: Callable[..., None], expected: list[object], tmp_path: Path
) -> None:
    def fail(number: int) -> None:
        if number == 9:
            raise DataError("clicks.tsv, line 300: field 2 (I1) is 'x'")

    store = "--store", tmp_path / "rows", "--checkpoint-every", "4"
    clicks(fail)
    failed = train(*store, "--lookahead", "0")
    assert failed.exit_code == 1
    assert "line 300: field 2 (I1) is 'x'; --resume goes on from step 8" in failed.output
    clicks()
    found, said = done(*store, "--resume")
    assert found == expected
    assert "resuming at step 8; 1 step after it is discarded\n" in said


@pytest.mark.parametrize("before", [0, 1])
def test_a_kill_between_a_snapshot_and_its_checkpoint_loses_neither(
    clicks: object, expected: list[object], tmp_path: Path, before: int
) -> None:
    """The store has the rows of a checkpoint then that will never be whole: of the first one, or a later one."""
    program = (
        "import os, sys\n"
        "from tests.tiered_emb.reference.test_training import Clicks\n"
        "from tiered_emb.checkpoint_files import Folder\n"
        "from tiered_emb.cli import main\n"
        "from tiered_emb.reference import job\n"
        "job.open_stream = lambda settings, console: Clicks(lambda number: None)\n"
        "finish, left = Folder.finish, [int(sys.argv.pop(1))]\n"
        "def killed(folder, manifest):\n"
        "    left[0] -= 1\n"
        "    os._exit(9) if left[0] < 0 else finish(folder, manifest)\n"
        "Folder.finish = killed\n"
        "main()\n"
    )
    store = "--store", str(tmp_path / "rows"), "--checkpoint-every", "5"
    command = [sys.executable, "-c", program, str(before + 1), "train", *SMALL, *store]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, cwd=ROOT, env=environment, check=False, timeout=240).returncode == 9
    found, said = done(*store, "--resume")
    assert found == expected
    assert f"resuming at step {5 * before}" in said
    assert "the last run was killed" in said


def test_nothing_to_resume_starts_at_the_beginning(expected: list[object], tmp_path: Path) -> None:
    found, said = done("--store", tmp_path / "rows", "--resume")
    assert found == expected
    assert re.search(r"nothing to resume in .*rows.checkpoints: starting at step 0\n", said)


def test_rows_without_resume_are_refused(clicks: object, tmp_path: Path) -> None:
    store = "--store", tmp_path / "rows"
    done(*store, "--checkpoint-every", "20")
    refused = train(*store)
    assert refused.exit_code == 2
    assert re.search(r"already holds \d+ rows, and .*rows.checkpoints a checkpoint of step 36 .*: go on with --resume,",
                     refused.output)  # fmt: skip
    done("--store", tmp_path / "others")
    refused = train("--store", tmp_path / "others", "--resume")
    assert refused.exit_code == 2
    assert re.search(r"others holds \d+ rows, but .* no checkpoint of the run that left them", refused.output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--batch-size", "16"],
            "--batch-size is 16, but the run of the checkpoint had 32, and would have come to other",
        ),
        (["--lr", "0.5"], "--lr is 0.5, but"),
        (["--threads", "2"], "--threads is 2, but"),
        (["--rounding", "nearest"], "--rounding is nearest, but the run of the checkpoint had stochastic"),
        (["--seed", "1"], "was made with seed 0, not 1"),
        (["--check", "dense"], "--check compares a whole run, and --resume goes on with a part"),
    ],
)
def test_options_that_lead_elsewhere_are_refused(
    clicks: object, tmp_path: Path, options: list[str], message: str
) -> None:
    store = "--store", tmp_path / "rows"
    whole, _ = done(*store, "--checkpoint-every", "20", "--epochs", "1")
    refused = train(*store, "--resume", *options)
    assert refused.exit_code == 2
    assert message in refused.output
    assert done(*store, "--resume", "--epochs", "1")[0] == whole


@pytest.mark.parametrize("option", [["--checkpoint-every", "5"], ["--resume"], ["--checkpoints", "x"]])
def test_without_a_store_there_is_nothing_to_go_on_with(clicks: object, option: list[str]) -> None:
    refused = train(*option)
    assert refused.exit_code == 2
    assert f"{option[0]} needs --store" in refused.output


def test_steps_are_counted_from_one(clicks: object, tmp_path: Path) -> None:
    refused = train("--store", tmp_path / "rows", "--checkpoint-every", "0")
    assert (refused.exit_code, "--checkpoint-every is 0; expected an integer from 1" in refused.output) == (2, True)


# ---- killed


def write_clicks(path: Path) -> None:
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(400):
            ids = rng.zipf(1.4, 26) % 500
            numbers = [str(n) for n in rng.integers(0, 50, 13)]
            file.write("\t".join([str(int(ids[0] % 2)), *numbers, *(f"{i:x}" for i in ids)]) + "\n")


def test_a_run_killed_at_a_random_step_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    """SIGKILL, wherever the threads are then; twice, the second time after a resume."""
    write_clicks(tmp_path / "clicks.tsv")
    whole, _ = done("--data", tmp_path / "clicks.tsv", "--store", tmp_path / "whole", "--batch-size", "16")
    assert whole[-1] == 46
    seed = random.randrange(1 << 30)
    first, second = random.Random(seed).sample(range(1, 18), 2)
    store = ["--data", tmp_path / "clicks.tsv", "--store", tmp_path / "rows", "--batch-size", "16"]
    every = ["--checkpoint-every", "4", "--resume"]
    for count in (first, second):
        program = f"""
import os, signal, sys
from tiered_emb.cli import main
from tiered_emb.reference.training import Learner
learn, left = Learner.learn, [{count}]
def counted(self, loss):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    learn(self, loss)
Learner.learn = counted
main()
"""
        killed = subprocess.run(
            [sys.executable, "-c", program, "train", *SMALL, *map(str, store + every)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert killed.returncode == -signal.SIGKILL, (seed, killed.stderr)
    found, said = done(*store, *every)
    assert found == whole, seed
    done_before = 4 * (first // 4)
    at = done_before + 4 * (second // 4) if done_before else 4 * (second // 4)
    # each kill may have caught the newest checkpoint on its way
    lines = {step: f"resuming at step {step}\n" if step else "starting at step 0\n" for step in (at, at - 4, at - 8)}
    resumed = [step for step, line in lines.items() if line in said]
    assert len(resumed) == 1, (seed, first, second, said)
    assert not resumed[0] or "the last run was killed, and what it did after its last checkpoint is lost" in said


# ---- another run


def test_a_directory_of_checkpoints_is_one_runs_at_a_time(tmp_path: Path) -> None:
    import fcntl

    write_clicks(tmp_path / "clicks.tsv")
    options = ["--data", tmp_path / "clicks.tsv", "--store", tmp_path / "rows", "--batch-size", "16"]
    every = ["--checkpoint-every", "4", "--resume"]
    checkpoints = tmp_path / "rows.checkpoints"
    checkpoints.mkdir()
    with (checkpoints / "running").open("w") as running:
        fcntl.flock(running, fcntl.LOCK_EX)
        running.write("4711\n")
        running.flush()
        refused = subprocess.run(
            [sys.executable, "-m", "tiered_emb", "train", *SMALL, *map(str, [*options, *every])],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert refused.returncode == 2
    assert "process 4711 is running and saves its checkpoints to" in refused.stderr
    assert (checkpoints / "running").read_text() == "4711\n"
    found, said = done(*options, *every)
    assert found[-1] == 46
    assert "was killed" not in said or "nothing to resume" in said
    assert not (checkpoints / "running").exists()


def test_what_can_be_no_directory_of_checkpoints_is_said_in_a_line(tmp_path: Path) -> None:
    write_clicks(tmp_path / "clicks.tsv")
    refused = subprocess.run(
        [sys.executable, "-m", "tiered_emb", "train", *SMALL, "--data", str(tmp_path / "clicks.tsv"),
         "--store", str(tmp_path / "rows"), "--checkpoints", str(tmp_path / "clicks.tsv"), "--checkpoint-every", "4"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip
    assert refused.returncode in (1, 2)
    assert "Traceback" not in refused.stderr
    assert "clicks.tsv" in refused.stderr
