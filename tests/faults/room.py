"""Disks that are too small, and a writer on one: it is told that there is no room, and goes on once there is."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage import StoreFullError
from tests.faults.lives import Lives
from tests.faults.victim import Child


@contextmanager
def tmpfs(directory: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of so many bytes, in memory."""
    directory.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "faults", directory)
    try:
        yield directory
    finally:
        _run("umount", "-l", directory)


@contextmanager
def loop(directory: Path, size_bytes: int) -> Iterator[Path]:
    """An ext4 of so many bytes, in a file."""
    directory.mkdir()
    image = directory.with_suffix(".image")
    image.write_bytes(b"")
    _run("truncate", "-s", size_bytes, image)
    _run("mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", "-N", "64", image)
    _run("mount", "-o", "loop", image, directory)
    try:
        yield directory
    finally:
        _run("umount", "-l", directory)


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


def ballast(directory: Path, leave_bytes: int) -> Path:
    """A file that fills a disk but for so many bytes; to make room, remove it."""
    path = directory / "ballast"
    free = int(
        subprocess.run(
            ["stat", "-f", "-c", "%a %S", directory], check=True, capture_output=True, text=True
        ).stdout.split()[0]
    )
    block = int(
        subprocess.run(["stat", "-f", "-c", "%S", directory], check=True, capture_output=True, text=True).stdout
    )
    with open(path, "wb") as file:
        file.write(bytes(max(0, free * block - leave_bytes)))
    return path


def limit_file_size(writer: Child, size_bytes: int) -> None:
    """RLIMIT_FSIZE of a process; -1 takes it away."""
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def fill_and_make_room(lives: Lives, writer: Child, make_room: object) -> None:
    """Work until there is no room and a little longer, then make room; all must go on as if nothing had been.

    `writer` has a word to go on with; it is refused twice, for a store that says that it is full must go on saying so.
    """
    assert callable(make_room)
    writer.talk.send("go")
    said = writer.hear()
    if said == "open":
        said = writer.hear()
    for _ in range(2):
        assert said == "full", f"{said!r}: it should have been full by now"
        writer.talk.send("again")
        said = writer.hear()
    assert said == "full"
    make_room()
    writer.talk.send("again")
    assert writer.hear() == "done"
    writer.talk.send("close")
    ended = writer.end()
    assert ended.error is None and not ended.signal, ended
    refused = [words for words in lives.said() if words[0] == "f"]
    assert {words[2] for words in refused} == {StoreFullError.__name__}
