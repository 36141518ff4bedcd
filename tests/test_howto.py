"""The how-tos, followed to the letter in a copy of the sources: their files, their changes, then the tests they name.

In a how-to a `python` block is the contents of a file, the next of those named in bold; a `diff` block names its file
in the first line and stands for the only place where its unchanged lines are found. What a reader has followed in this
very tree is there already, and is not changed again.
"""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("page", ["add-a-policy", "add-a-row-rule", "add-a-store"])
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
