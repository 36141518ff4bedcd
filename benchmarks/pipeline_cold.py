"""The cold part of `benchmarks.pipeline`: a process whose page cache is held below the size of its store.

The process that measures is started in a memory cgroup of its own. Once everything is warmed up, the limit of that
group becomes what the process holds anyway and so many bytes more, which is all that is left for pages of the store.
In turns with its steps fio does what a step has the disk do: as many 4 KiB reads at depth 32 as its missing rows lie on
pages, and beside them as many bytes written one after the other as the step had written.

Run as ``python -m benchmarks.pipeline_cold JSON``, which is what `measure_cold` does: prints one JSON object.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.disk import CannotMeasure, drop_page_cache, file_system, fio_mix_seconds
from benchmarks.pipeline_sides import Setting, Tiered, ablation, open_store, phase
from benchmarks.report import Figure
from benchmarks.workloads import Zipf

_LEAST_FIO_S = 1.0  # a turn of fio goes on for at least about this long
_PAGE = 4096


@dataclass(frozen=True)
class Law:
    """A workload of the cold part.

    Attributes:
        exponent: of its Zipf law.
        resident_s: what a step takes with all rows resident: the other half of the limit.
    """

    exponent: float
    resident_s: float


def measure_cold(
    path: Path, setting: Setting, laws: Mapping[str, Law], cache_bytes: int, ablation_rounds: int
) -> dict[str, dict[str, Figure]]:
    """Figures of each workload, by name, over a store on a disk, in a process of its own; of the first one with
    `ablation` unless that has no rounds.

    Raises:
        CannotMeasure: the page cache of that place cannot be held below the store's size, or fio is missing.
    """
    if file_system(path) in ("tmpfs", "ramfs"):
        raise CannotMeasure(f"{path} is in memory, not on a disk; give one with --directory")
    if shutil.which("fio") is None:
        raise CannotMeasure("fio is not installed (Debian: apt install fio)")
    drop_page_cache(path / "data.mdb")  # pages that are in memory already count against no limit
    with _memory_cgroup() as group:
        told = {
            "path": str(path),
            "setting": setting.told,
            "cache_bytes": cache_bytes,
            "rounds": ablation_rounds,
            "group": str(group),
            "laws": {name: [law.exponent, law.resident_s] for name, law in laws.items()},
        }
        command = shlex.join([sys.executable, "-m", "benchmarks.pipeline_cold", json.dumps(told)])
        joined = f"echo $$ > {shlex.quote(str(group / 'cgroup.procs'))} && exec {command}"
        root = Path(__file__).parents[1]
        done = subprocess.run(["sh", "-c", joined], check=False, stdout=subprocess.PIPE, text=True, cwd=root)
    if done.returncode:
        raise CannotMeasure(f"the process with a limited page cache ended with status {done.returncode}")
    figures: dict[str, dict[str, Figure]] = json.loads(done.stdout.splitlines()[-1])
    return figures


@contextmanager
def _memory_cgroup() -> Iterator[Path]:
    """A new memory cgroup (version 1) below this process's own, removed at the end."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":", 2)[2] for line in lines if "memory" in line.split(":")[1].split(",")), None)
    if own is None:
        raise CannotMeasure("the page cache cannot be held here: there is no memory cgroup of version 1")
    group = Path("/sys/fs/cgroup/memory") / own.lstrip("/") / f"pipeline-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise CannotMeasure(f"the page cache cannot be held here: {error}") from error
    try:
        yield group
    finally:
        with suppress(OSError):
            group.rmdir()


def hold_page_cache(group: Path, cache_bytes: int) -> None:
    """Limit a group to the anonymous memory of its processes and `cache_bytes` more; what is above goes now."""
    held = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    (group / "memory.limit_in_bytes").write_text(str(int(held["total_rss"]) + cache_bytes))


def _read_bytes() -> int:
    """Bytes that this process has had read from a disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def cold_figures(
    side: Tiered, setting: Setting, law: Law, mix: Mapping[str, float], ready: Callable[[], None]
) -> dict[str, Figure]:
    """Turns of a side that is warmed up, and of fio.

    Args:
        mix: what a step has the disk do: `pages` to be read at random, `written` bytes.
        ready: called before each turn of the side.
    """
    directory = side.store.path
    fio_steps = max(1, round(_LEAST_FIO_S / max(1e-3, mix["pages"] / 80_000)))
    cold, limits, stalled = [], [], []
    for number in range(setting.rounds):
        for ours in (True, False) if number % 2 == 0 else (False, True):
            if ours:
                ready()
                cold.append(side.run(side.next, setting.steps))
                stalled.append(side.stalled_s)
            else:
                pages, written = round(mix["pages"] * fio_steps), round(mix["written"] * fio_steps)
                limits.append(fio_mix_seconds(directory / "data.mdb", pages, written) / fio_steps)
    fio, limits = limits, [max(law.resident_s, one) for one in limits]
    beyond = [max(0.0, wait - (most - law.resident_s)) for wait, most in zip(stalled, limits, strict=True)]
    return {
        "cold_step_ms": _ms(cold),
        "limit_step_ms": _ms(limits),
        "fio_step_ms": _ms(fio),
        "cold_vs_limit": round(statistics.median(a / b for a, b in zip(cold, limits, strict=True)), 3),
        "stall_ms": _ms(stalled),
        "stall_share": round(statistics.median(a / b for a, b in zip(beyond, cold, strict=True)), 4),
    }


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1000, 2)


def _one_law(path: Path, setting: Setting, law: Law, group: Path, cache_bytes: int) -> dict[str, Figure]:
    """The cold figures of one workload.

    The pages of a step's missing rows are counted without a clock, at the end. The page cache has some of them: where
    the system read less than that, what it read is what fio is to do.
    """
    with open_store(path, setting) as store:
        stream = setting.stream(Zipf(setting.rows, law.exponent))
        side = Tiered(store, setting, stream)

        def ready() -> None:
            """Batches that were made, and what the process took since, are not to leave the page cache less."""
            stream.forget(side.next)
            hold_page_cache(group, cache_bytes)

        side.warm_up(setting)
        ready()
        before = _read_bytes()
        side.run(side.next, setting.steps)
        read = (_read_bytes() - before) / setting.steps / _PAGE
        pages = side.counted()["pages"]
        figures = cold_figures(side, setting, law, {"pages": min(read, pages), "written": side.written_bytes}, ready)
        figures |= {
            "cold_pages_a_step": round(pages),
            "cold_pages_read_a_step": round(read),
            "cold_written_mb_a_step": round(side.written_bytes / 1e6, 2),
            "page_cache_share": round(cache_bytes / store.stats().disk_bytes, 3),
        }
        side.close()
    return figures


def main(told: str) -> None:
    """See the module's docstring."""
    given = json.loads(told)
    path, group, setting = Path(given["path"]), Path(given["group"]), Setting(**given["setting"])
    figures: dict[str, dict[str, Figure]] = {}
    for name, law in given["laws"].items():
        (group / "memory.limit_in_bytes").write_text("-1")
        with phase(f"cold{name and ' ' + name}"):
            figures[name] = _one_law(path, setting, Law(*law), group, given["cache_bytes"])
    if given["rounds"]:
        first = next(iter(given["laws"]))
        with phase("cold ablation"), open_store(path, setting) as store:
            hold_page_cache(group, given["cache_bytes"] + setting.budget_bytes)  # of which each side takes its part
            law = Zipf(setting.rows, given["laws"][first][0])
            figures[first]["ablation_cold"] = ablation(store, setting, law, given["rounds"])
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1])
