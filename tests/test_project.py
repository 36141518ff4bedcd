"""What the project promises about itself: its layers, its public names, its documents, its targets."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "storage").rglob("*.py"), *(ROOT / "tiered_emb").rglob("*.py")])
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Layers


def test_import_contracts_hold() -> None:
    result = _run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")
    assert result.returncode == 0, result.stdout


def test_storage_works_without_torch() -> None:
    program = "import storage, sys; assert not {'torch', 'tiered_emb'} & set(sys.modules), 'storage imported it'"
    result = _run(sys.executable, "-c", program)
    assert result.returncode == 0, result.stderr


def test_triton_is_left_alone_until_a_gpu_asks_for_it() -> None:
    program = "import tiered_emb, sys; assert 'triton' not in sys.modules, 'tiered_emb imported it'"
    result = _run(sys.executable, "-c", program)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("forbidden", "allowed"),
    [
        (r"parallel=True|\bprange\b", ()),  # its thread layers kill forked children and abort under two threads
        (r"fastmath=", ()),  # the bits of a sum are part of its definition
        (r"writemap=True|map_async=True|readahead=True", ()),
        (r"\bpickle\b|torch\.load\((?!.*weights_only=True)", ()),  # nothing that is read from a file may run code
        (
            r"threading\.Thread\(|ThreadPoolExecutor\(|multiprocessing",
            ("tiered_emb/workers.py", "tiered_emb/pipeline.py", "tiered_emb/checkpoint_pending.py"),
        ),
    ],
)
def test_sources_leave_out(forbidden: str, allowed: tuple[str, ...]) -> None:
    found = [
        f"{_id(path)}:{number}: {line.strip()}"
        for path in SOURCES
        if _id(path) not in allowed
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(forbidden, line.partition("#")[0]) and "`" not in line
    ]
    assert not found, "\n".join(found)


# Public names


@pytest.mark.parametrize("package", ["storage", "tiered_emb"])
def test_public_names_are_complete(package: str) -> None:
    module = importlib.import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    bound = {name.name for node in imports if str(node.module).startswith(f"{package}.") for name in node.names}
    names = module.__all__
    assert len(names) == len(set(names))
    assert set(names) == bound  # their order is ruff's to check (RUF022)
    assert set(names) <= set(dir(module))
    assert all(getattr(module, name).__name__ == name for name in names)
    with pytest.raises(AttributeError, match="no attribute 'Tiered'"):
        module.Tiered  # noqa: B018


# Documents


def _python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", ["README.md", "docs/tour.md"])
def test_example_runs(document: str, tmp_path: Path) -> None:
    blocks = _python_blocks(ROOT / document)
    assert blocks
    (tmp_path / "example.py").write_text("\n".join(blocks))
    result = _run(sys.executable, "-W", "error", "example.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def _prose(document: Path) -> str:
    return re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=_id)
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", _prose(document))
    lost = [target for target in targets if "://" not in target and not (document.parent / target).exists()]
    assert not lost


@pytest.mark.parametrize("document", DOCUMENTS, ids=_id)
def test_files_that_are_mentioned_exist(document: Path) -> None:
    """Every `path/file.ext` in backticks is a file of the repository, named from its root or from a package."""
    places = [ROOT, ROOT / "storage", ROOT / "tiered_emb"]
    text = re.sub(r"\*\*One file\*\*, `[^`]+`", "", _prose(document))  # how-tos: the reader's own files
    mentioned = set(re.findall(r"(?<!\[)`([\w./-]+\.(?:py|md|toml|txt))`", text))
    assert not sorted(path for path in mentioned if not any((place / path).exists() for place in places))


@pytest.mark.parametrize("document", DOCUMENTS, ids=_id)
def test_names_that_are_mentioned_exist(document: Path) -> None:
    for name in sorted(set(re.findall(r"`((?:storage|tiered_emb)(?:\.\w+)+)`", document.read_text()))):
        if not name.endswith((".py", ".md")):
            _resolve(name)


def _resolve(name: str) -> object:
    """The module, or the attribute of a module or class, that a dotted name stands for."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("document", DOCUMENTS, ids=_id)
def test_commands_that_are_mentioned_exist(document: Path) -> None:
    text = document.read_text()
    targets = set(re.findall(r"\bmake ([a-z]+)`", text)) - _targets()
    benchmarks = {name for name in re.findall(r"-m benchmarks (\w+)", text) if not _is_benchmark(name)}
    commands = set(re.findall(r"(?:`|/)tiered-emb ([a-z]\w*)", text)) - _commands()
    assert (targets, benchmarks, commands) == (set(), set(), set())


def _is_benchmark(name: str) -> bool:
    return (ROOT / "benchmarks" / f"{name}.py").exists()


@cache
def _commands() -> set[str]:
    result = _run(str(Path(sys.executable).with_name("tiered-emb")), "--help")
    return set(re.findall(r"^  ([a-z]+) ", result.stdout.partition("Commands:")[2], re.MULTILINE))


def test_changelog_starts_with_what_is_unreleased() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert len(headings) == len(set(headings))


# Targets and dependencies


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("target", ["venv", "demo", "test", "bench"])
def test_make_knows(target: str) -> None:
    result = _run("make", "--dry-run", target)
    assert result.returncode == 0, result.stderr
    assert re.search(rf"^{target}  ", _run("make", "help").stdout, re.MULTILINE)


def test_ci_script_is_executable_and_parses() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert _run("bash", "-n", str(script)).returncode == 0


def test_every_dependency_is_pinned() -> None:
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)]
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)  # exact, and no local suffix
    assert {_name(line) for line in wanted} <= {_name(pin) for pin in pins}


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>\[ ]", requirement)[0]).lower()
