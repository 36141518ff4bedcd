"""A file system in user space that can lose power: what was not synced is gone, or some of it is, torn into pieces.

Behind it lies a directory that holds exactly what has been made durable:

    names.json      the durable names: path -> inode
    inode-NUMBER    the durable bytes of a file

Everything else is in the memory of the daemon, and dies with it. `fsync` and `fdatasync` of a file make its bytes and
size durable, not its name; `fsync` of a directory makes durable all changes of names so far, in their order. A write
through a descriptor opened with O_DSYNC comes with an fsync, which the kernel sends.

The power goes out

- when the daemon is killed: all is lost that was not durable; or
- just before the N-th change (`cut_at`: a write, truncation, sync or change of names). Then, with `piece_bytes`,
  of each write that was not synced every piece of so many bytes (512: a sector, 4,096: a page) reaches the disk or does
  not, whichever a coin says, and of the changes of names a first part does: disks and caches keep no order.

The kernel's page cache lies above, as for any disk, so LMDB's read-only shared map of the data file sees what was
written through the descriptor (without `direct_io`, which forbids such maps), and the writable map of lock.mdb works.
One mount has one daemon; the page cache goes when it is unmounted.

A slow disk is the same with `delay_s` before each write and sync of a file; a stuck one with `gate`, a path: while it
exists writes and syncs wait. Several requests are worked on at once then, else one after the other.

Not here: links, permissions, times, holes, more than one level of directories worth speaking of.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import signal
import stat
import subprocess
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from threading import RLock
from typing import Any

from tests.faults.oracle import Crashed
from tests.faults.victim import PATIENCE_S, Child

ROOT = 1
_NAMES = "names.json"


@dataclass(frozen=True)
class Power:
    """How the disk behaves: see the module's docstring."""

    cut_at: int = 0
    piece_bytes: int = 0
    seed: int = 0
    delay_s: float = 0.0
    gate: str = ""


@dataclass
class _Node:
    """A file or a directory: its bytes as readers see them, and what has been done to it since it was synced."""

    number: int
    mode: int
    data: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)  # (offset, bytes), or (size, None)


class Mount:
    """A mounted file system; `directory` is where. Ends with `cut`, or with `close`, when everything is synced."""

    def __init__(self, backing: Path, directory: Path, power: Power | None = None) -> None:
        self.directory = directory
        backing.mkdir(parents=True, exist_ok=True)
        directory.mkdir(parents=True, exist_ok=True)
        self._daemon = Child(_serve, str(backing), str(directory), power or Power())
        deadline = time.monotonic() + PATIENCE_S
        while not os.path.ismount(directory):
            if time.monotonic() > deadline or not self.powered:
                raise OSError(f"{directory} could not be mounted: {self._daemon.end()}")
            time.sleep(0.002)

    @property
    def powered(self) -> bool:
        """Whether the daemon lives."""
        return self._daemon.alive

    @property
    def changes(self) -> int:
        """How many changes the disk was asked for."""
        return int(os.getxattr(self.directory, "user.changes"))

    def wait_for_cut(self, writer: Child) -> None:
        """Until the power has gone out by itself; a writer that ends before that raises what it ended with."""
        writer.end_of_either(self._daemon)
        if not writer.alive and not self._daemon.ends(patience_s=10):  # the writer may see it sooner than we
            raise Crashed(f"the writer ended while there was power: {writer.end()}")

    def cut(self) -> None:
        """The power goes out, unless it has; the file system is unmounted."""
        self._daemon.finish_off()
        subprocess.run(["fusermount3", "-u", "-z", str(self.directory)], check=True, capture_output=True)

    def close(self) -> None:
        """Unmount it in peace."""
        os.sync()
        subprocess.run(["fusermount3", "-u", str(self.directory)], check=True, capture_output=True)
        self._daemon.end()


def _serve(talk: Connection, backing: str, directory: str, power: Power) -> None:
    os.setpgid(0, 0)
    _fuse_with_fallocate()(
        _operations(Disk(Path(backing), power)),
        directory,
        foreground=True,
        nothreads=not (power.delay_s or power.gate),
        big_writes=True,
        kernel_cache=True,
        use_ino=True,
        default_permissions=True,
        fsname="powerfs",
        attr_timeout=3600,
        entry_timeout=3600,
    )


def _fuse_with_fallocate() -> Any:
    """fusepy's FUSE, and the operation that libfuse 2.9 added behind those that fusepy knows."""
    import fuse

    pointer = ctypes.c_void_p
    fallocate = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, pointer
    )
    later = [(name, pointer) for name in ("poll", "write_buf", "read_buf", "flock")] + [("fallocate", fallocate)]

    class Operations(ctypes.Structure):
        _fields_ = [*fuse.fuse_operations._fields_, *later]

    class Fuse(fuse.FUSE):  # type: ignore[misc]
        def fallocate(self, path: bytes, mode: int, offset: int, length: int, _: int) -> int:
            return int(self.operations("fallocate", path.decode(), offset + length) or 0)

    fuse.fuse_operations = Operations
    return Fuse


class Disk:
    """The bytes, durable and not."""

    def __init__(self, backing: Path, power: Power) -> None:
        self._backing, self._power = backing, power
        self._coin = random.Random(power.seed)
        self.lock = RLock()
        self.changes = 0
        names = (
            json.loads((backing / _NAMES).read_text())
            if (backing / _NAMES).exists()
            else {"/": [ROOT, stat.S_IFDIR | 0o755]}
        )
        self._durable: dict[str, list[int]] = names
        self._pending: list[tuple[str, str, list[int]]] = []  # (verb, path, [number, mode]) of names
        self.nodes = {path: _Node(number, mode) for path, (number, mode) in names.items()}
        self._next = 1 + max(node.number for node in self.nodes.values())
        for node in self.nodes.values():
            if self._file(node).exists():
                node.data += self._file(node).read_bytes()

    def _file(self, node: _Node) -> Path:
        return self._backing / f"inode-{node.number}"

    def change(self, slow: bool = False) -> None:
        """Before each change: wait if the disk is slow, and fail if it is now that the power goes out."""
        if slow:
            time.sleep(self._power.delay_s)
            while self._power.gate and os.path.exists(self._power.gate):
                time.sleep(0.001)
        with self.lock:
            self.changes += 1
            if self.changes == self._power.cut_at:
                self._lose()

    def _lose(self) -> None:
        """The power goes out."""
        if self._power.piece_bytes:
            kept = self._pending[: self._coin.randint(0, len(self._pending))]
            for node in self._all_nodes():
                self._tear(node)
            self._save_names(kept)
        os.kill(os.getpid(), signal.SIGKILL)

    def _all_nodes(self) -> list[_Node]:
        return list({node.number: node for node in self.nodes.values()}.values())

    def _tear(self, node: _Node) -> None:
        size, pieces = self._power.piece_bytes, []
        for offset, data in node.pending:
            if data is None:
                pieces.append((offset, data))
                continue
            first = 0
            while first < len(data):
                end = min(len(data), first + size - (offset + first) % size)
                pieces.append((offset + first, data[first:end]))
                first = end
        self._write(node, [piece for piece in pieces if self._coin.random() < 0.5])

    def _write(self, node: _Node, pieces: list[tuple[int, bytes | None]]) -> None:
        with open(os.open(self._file(node), os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
            for offset, data in pieces:
                if data is None:
                    file.truncate(offset)
                else:
                    file.seek(offset)
                    file.write(data)

    def _save_names(self, pending: list[tuple[str, str, list[int]]]) -> None:
        for verb, path, entry in pending:
            if verb == "add":
                self._durable[path] = entry
            else:
                self._durable.pop(path, None)
        new = self._backing / (_NAMES + ".new")
        new.write_text(json.dumps(self._durable))
        new.rename(self._backing / _NAMES)

    def sync(self, node: _Node) -> None:
        """Bytes and size of a file are durable."""
        self._write(node, node.pending)
        node.pending = []

    def sync_names(self) -> None:
        """All names are durable."""
        self._save_names(self._pending)
        self._pending = []

    def node(self, path: str) -> _Node:
        """The file at a path."""
        if path not in self.nodes:
            raise OSError(errno.ENOENT, path)
        return self.nodes[path]

    def make(self, path: str, mode: int) -> _Node:
        """A new file or directory."""
        node = self.nodes[path] = _Node(self._next, mode)
        self._next += 1
        self._pending.append(("add", path, [node.number, mode]))
        return node

    def remove(self, path: str) -> None:
        """Take a name away."""
        self.nodes.pop(path)
        self._pending.append(("remove", path, []))

    def rename(self, old: str, new: str) -> None:
        """One change: after a power cut the new name is what it was, or is the file."""
        node = self.nodes[new] = self.nodes.pop(old)
        self._pending.append(("add", new, [node.number, node.mode]))
        self._pending.append(("remove", old, []))


def _operations(disk: Disk) -> Any:
    """fusepy's view of a disk; made here so that nothing else needs fusepy."""
    from fuse import FuseOSError, Operations

    class Calls(Operations):  # type: ignore[misc]
        use_ns = True

        def __call__(self, name: str, *arguments: Any) -> Any:
            try:
                if name in ("write", "fsync"):
                    disk.change(slow=True)
                elif name in ("truncate", "fallocate", "create", "mkdir", "unlink", "rmdir", "rename", "fsyncdir"):
                    disk.change()
                with disk.lock:
                    return getattr(self, name)(*arguments)
            except FuseOSError:
                raise
            except OSError as error:
                raise FuseOSError(error.errno) from error

        def getattr(self, path: str, fh: Any = None) -> dict[str, int]:
            node = disk.node(path)
            size = len(node.data)
            links = 2 if stat.S_ISDIR(node.mode) else 1
            return {
                "st_ino": node.number,
                "st_mode": node.mode,
                "st_nlink": links,
                "st_size": size,
                "st_blocks": -(-size // 512),
            }

        def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
            if name != "user.changes":
                raise FuseOSError(errno.ENODATA)
            return str(disk.changes).encode()

        def statfs(self, path: str) -> dict[str, int]:
            return {"f_bsize": 4096, "f_frsize": 4096, "f_blocks": 1 << 20, "f_bavail": 1 << 20, "f_bfree": 1 << 20}

        def readdir(self, path: str, fh: Any) -> list[str]:
            return [
                ".",
                "..",
                *(p.rpartition("/")[2] for p in disk.nodes if p != "/" and (p.rpartition("/")[0] or "/") == path),
            ]

        def open(self, path: str, flags: int) -> int:
            return disk.node(path).number

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            return disk.make(path, stat.S_IFREG | (mode & 0o7777)).number

        def mkdir(self, path: str, mode: int) -> None:
            disk.make(path, stat.S_IFDIR | (mode & 0o7777))

        def read(self, path: str, size: int, offset: int, fh: Any) -> bytes:
            return bytes(disk.node(path).data[offset : offset + size])

        def write(self, path: str, data: bytes, offset: int, fh: Any) -> int:
            node = disk.node(path)
            if len(node.data) < offset:
                node.data.extend(bytes(offset - len(node.data)))
            node.data[offset : offset + len(data)] = data
            node.pending.append((offset, data))
            return len(data)

        def truncate(self, path: str, length: int, fh: Any = None) -> None:
            node = disk.node(path)
            del node.data[length:]
            node.data.extend(bytes(length - len(node.data)))
            node.pending.append((length, None))

        def fallocate(self, path: str, length: int) -> None:
            if length > len(disk.node(path).data):
                self.truncate(path, length)

        def fsync(self, path: str, datasync: int, fh: Any) -> None:
            disk.sync(disk.node(path))

        def fsyncdir(self, path: str, datasync: int, fh: Any) -> None:
            disk.sync_names()

        def unlink(self, path: str) -> None:
            disk.remove(path)

        rmdir = unlink

        def rename(self, old: str, new: str) -> None:
            disk.rename(old, new)

        def chmod(self, path: str, mode: int) -> None:
            disk.node(path).mode = mode

        def utimens(self, path: str, times: Any = None) -> None:
            pass

    return Calls()
