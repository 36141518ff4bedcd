"""The disk beside what is measured on it: bytes written, the page cache, what fio gets out of the same file."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_DONTNEED = 4  # of madvise
_STILL_CACHED = 0.01
_ENGINES = ("io_uring", "libaio")
_WRITE_BLOCK = 1 << 18  # of fio's writes: a segment of the store
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t]


class CannotMeasure(Exception):
    """Something is missing or not allowed here; the message is the reason that stands beside the null."""


def written_bytes() -> int:
    """Bytes that this process has handed to the system to be written (`wchar` of /proc/self/io).

    Not `write_bytes`: where a page cache folio of several pages is written in part, that counts it whole. The count of
    the device itself agrees with `wchar` to a thousandth for writes of whole pages that are synced.
    """
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


@contextmanager
def scratch(directory: str | None) -> Iterator[Path]:
    """A new directory on a disk, removed at the end.

    Args:
        directory: where to make it; None = where temporary files go, or else /var/tmp or here, whichever is on a disk.
    """
    places = [directory] if directory else [tempfile.gettempdir(), "/var/tmp", os.getcwd()]
    place = next((place for place in places if file_system(Path(place)) not in _IN_MEMORY), places[0])
    path = Path(tempfile.mkdtemp(prefix="store-", dir=place))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def file_system(path: Path) -> str:
    """The kind of file system that a path lies on, as Linux names it."""
    found, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, name, *_ = line.split()
        if path.resolve().is_relative_to(mount) and len(mount) >= len(found):
            found, kind = mount, name
    return kind


def drop_page_cache(path: Path) -> None:
    """Have no page of a file in memory, although this process has it mapped.

    Raises:
        CannotMeasure: the system keeps pages all the same (a file system in memory, no right to drop caches).
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        _unmap(path)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if _resident_share(descriptor) > _STILL_CACHED:
            _drop_all()
        share = _resident_share(descriptor)
    finally:
        os.close(descriptor)
    if share > _STILL_CACHED:
        raise CannotMeasure(f"the page cache cannot be dropped here: {share:.0%} of {path.name} stayed in memory")


def _unmap(path: Path) -> None:
    """Take the file's pages out of this process's page tables; they are read again when they are touched."""
    size, name = path.stat().st_size, str(path.resolve())
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(name):
            first, last = (int(number, 16) for number in line.split()[0].split("-"))
            _libc.madvise(first, min(last - first, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE), _DONTNEED)


def _drop_all() -> None:
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError as error:
        raise CannotMeasure(f"the page cache cannot be dropped here: {error}") from error


def _resident_share(descriptor: int) -> float:
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as file:
        size = len(file)
        states = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(file, np.uint8)
        failed = _libc.mincore(view.ctypes.data, size, states.ctypes.data)
        del view
    return 1.0 if failed else float((states & 1).mean())


def fio_pages_per_s(path: Path, seconds: float) -> float:
    """4 KiB random reads a second at depth 32, past the page cache, out of a file.

    Raises:
        CannotMeasure: fio is missing, or can do no such reads here.
    """
    (job,) = _fio(path, [*_random_reads(path), f"--runtime={seconds}", "--time_based"])
    return float(job["read"]["iops"])


def fio_mix_seconds(path: Path, pages: int, written_bytes: int) -> float:
    """How long it takes to read so many pages of a file at random, as `fio_pages_per_s`, and to write so many bytes one
    after the other into another file beside it, both at the same time and past the page cache.

    Raises:
        CannotMeasure: fio is missing, or can do no such thing here.
    """
    beside = path.with_name("fio-writes")
    size = max(_WRITE_BLOCK, -(-written_bytes // _WRITE_BLOCK) * _WRITE_BLOCK)
    options = [*_random_reads(path), f"--io_size={pages * mmap.PAGESIZE}"]
    options += ["--name=writes", f"--filename={beside}", f"--size={size}", "--rw=write", f"--bs={_WRITE_BLOCK}"]
    options += ["--iodepth=4", "--direct=1"]
    try:
        reads, writes = _fio(path, options)
    finally:
        beside.unlink(missing_ok=True)
    return max(float(reads["read"]["runtime"]), float(writes["write"]["runtime"])) / 1000


def _random_reads(path: Path) -> list[str]:
    return [
        *("--name=cold", f"--filename={path}", "--rw=randread", "--bs=4k", "--iodepth=32", "--direct=1"),
        *("--norandommap", "--randrepeat=0"),
    ]


def _fio(path: Path, options: list[str]) -> list[dict[str, Any]]:
    """What fio says of each of its jobs."""
    if shutil.which("fio") is None:
        raise CannotMeasure("fio is not installed (Debian: apt install fio)")
    said = ""
    for engine in _ENGINES:
        command = ["fio", "--output-format=json", f"--ioengine={engine}", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            jobs: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
            return jobs
        said = (done.stderr or done.stdout).strip().splitlines()[-1]
    raise CannotMeasure(f"fio could not read {path.name} with {' or '.join(_ENGINES)}: {said}")
