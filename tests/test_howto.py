"""The how-tos, followed to the letter in a copy of the sources: their files, their changes, then the tests they name.

In a how-to a `python` block is the contents of a file, the next of those named in bold; a `diff` block names its file
in the first line and stands for the only place where its unchanged lines are found. What a reader has followed in this
very tree is there already, and is not changed again.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources and their tests, compiled kernels included, where they may be changed; ../shared lies beside them."""
    tree = tmp_path / "tree"
    for name in ("storage", "tiered_emb", "tests"):
        shutil.copytree(ROOT / name, tree / name)
    shutil.copy(ROOT / "pyproject.toml", tree)
    (tmp_path / "shared").symlink_to(ROOT.parent / "shared")
    return tree


def _blocks(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(python|diff)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def _apply(diff: str, tree: Path) -> None:
    header, *lines = diff.splitlines()
    path = tree / header.removeprefix("# ")
    old = "\n".join(line[1:] for line in lines if line[0] in " -")
    new = "\n".join(line[1:] for line in lines if line[0] in " +")
    text = path.read_text()
    if new in text:  # followed before
        return
    assert text.count(old) == 1, f"{header} does not hold exactly once, so the page needs this change too:\n{old}"
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("page", ["add-a-codec", "add-a-policy", "add-a-row-rule", "add-a-store"])
def test_followed_to_the_letter(page: str, copy: Path) -> None:
    text = (ROOT / "docs" / "howto" / f"{page}.md").read_text()
    files = re.findall(r"^\*\*One [a-z ]*file\*\*, `([^`]+)`", text, re.MULTILINE)
    blocks = _blocks(text)
    contents = [body for kind, body in blocks if kind == "python"]
    for path, body in zip(files, contents, strict=True):
        if (copy / path).exists() and (copy / path).read_text() != body:
            pytest.skip(f"{path} is there already and is not the page's: the page needs another example")
        (copy / path).write_text(body)
    for kind, body in blocks:
        if kind == "diff":
            _apply(body, copy)
    (command,) = re.findall(r"`\.venv/bin/python (-m pytest [^`]+)`", text)
    result = subprocess.run(
        [sys.executable, *command.split(), "-q", "-p", "no:cacheprovider"],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(re.findall(r"(\d+) passed", result.stdout)[0]) >= 5  # the new thing's tests ran


def _scripts(text: str) -> list[list[str]]:
    """The commands of a page in its order, `python` blocks and the lines of `sh` blocks, each with its exit code."""
    found = []
    for kind, body in re.findall(r"^```(python|sh)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for script in [body] if kind == "python" else body.splitlines():
            line, _, code = script.partition("# exit code ") if kind == "sh" else (script, "", "")
            found.append([kind, line, code or "0"])
    return found


def _followed(place: Path, kind: str, script: str, code: str = "0") -> subprocess.CompletedProcess[str]:
    """What a command of a page says where it is given, with the exit code that the page promises."""
    command = ["-m", "tiered_emb", *shlex.split(script)[1:]] if kind == "sh" else ["-c", script]
    result = subprocess.run(
        [sys.executable, "-W", "error", *command],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == int(code), (script, result.stdout, result.stderr)
    return result


def test_a_store_is_looked_after_as_the_page_says(tmp_path: Path) -> None:
    said = []
    for kind, script, code in _scripts((ROOT / "docs" / "howto" / "look-after-a-store.md").read_text()):
        said.append(_followed(tmp_path, kind, script, code).stdout)
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    damaged = [text for text in said if "DAMAGED in 1 place" in text]
    assert len(damaged) == 1
    assert re.match(r"table ads id \d+: (superseded )?row with id \d+ of table ads: its bytes", damaged[0])


def test_states_are_kept_and_gone_back_to_as_the_page_says(tmp_path: Path) -> None:
    said = []
    for kind, script, code in _scripts((ROOT / "docs" / "howto" / "go-back.md").read_text()):
        result = _followed(tmp_path, kind, script, code)
        said.append(result.stdout + result.stderr)
    assert any('{"tables": {"ads": {"put": 500, "deleted": 1}}}' in text for text in said)
    assert any("ads\t19999\tdeleted" in text for text in said)
    assert any("rows has snapshots newer than 'monday' ('tuesday')" in text for text in said)
    assert '"name": "wednesday"' in said[-2] and '"name": "monday"' not in said[-2]
    assert "good" in said[-1]


def test_a_store_is_used_by_itself_as_the_page_says(tmp_path: Path) -> None:
    scripts = [body for _, body, _ in _scripts((ROOT / "docs" / "howto" / "use-a-store.md").read_text())]
    assert len(scripts) == 2
    for script in (scripts[0], scripts[0].split("with LmdbStore")[0] + scripts[1]):
        _followed(tmp_path, "python", script)


def test_training_is_saved_and_gone_on_with_as_the_page_says(tmp_path: Path) -> None:
    scripts = [body for _, body, _ in _scripts((ROOT / "docs" / "howto" / "checkpoint.md").read_text())]
    assert len(scripts) == 2
    result = _followed(tmp_path, "python", "\n".join(scripts))
    assert result.stdout == "['step-30', 'step-40']\n"


def test_a_store_is_exported_as_the_page_says(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    scripts = _scripts((ROOT / "docs" / "howto" / "export-a-store.md").read_text())
    assert [kind for kind, _, _ in scripts] == ["python", *["sh"] * 5, "python"]
    for kind, script, code in scripts:
        _followed(tmp_path, kind, script, code)


@pytest.mark.parametrize("page", ["optimizers", "precision"])
def test_scripts_of_a_page_run_as_they_are(page: str, tmp_path: Path) -> None:
    scripts = [
        body for kind, body, _ in _scripts((ROOT / "docs" / "howto" / f"{page}.md").read_text()) if kind == "python"
    ]
    assert len(scripts) == 2
    for script in scripts:
        _followed(tmp_path, "python", script)
