"""One store and the lives of its writers: each ends somehow, what is left is judged, and the next goes on with it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storage import StoreConfig
from tests.faults.oracle import Expected, Journal, Versions
from tests.faults.victim import Child, Ended, call, config, inspect, inspect_snapshots, write

WITHOUT_END = 1 << 40


class Lives:
    """A store at `directory / "s"`, and the journal of its writers outside it.

    Args:
        directory: exists.
        durability: of the store.
        seed, kinds: of the workload.
        sizes: of the store.
        outside: where the journal is kept, if not in `directory`: for a file system that dies.
    """

    def __init__(
        self,
        directory: Path,
        durability: str,
        seed: int,
        *,
        kinds: Sequence[str] | None = None,
        sizes: StoreConfig | None = None,
        outside: Path | None = None,
    ) -> None:
        self.path = directory / "s"
        self.durability = durability
        self.expected = Expected(seed, kinds)
        self.disk_bytes = 0
        self._sizes = sizes or config()
        self._journal = (outside or directory) / "journal"

    def born(self, operations: int = WITHOUT_END) -> Child:
        """A writer that will do so many operations, and waits for a word to begin."""
        self._journal.unlink(missing_ok=True)
        last = self.expected.next_number + operations
        return Child(write, self.path, self.durability, self._sizes, self.expected, self._journal, last)

    def said(self) -> list[list[str]]:
        """The journal of the last writer."""
        return Journal.read(self._journal)

    def judge(self, powered: bool = True) -> Versions:
        """What is left of the last writer's life is judged, read by a reader and by a writer.

        Args:
            powered: False if the machine died: what the writer ended with is then nobody's concern.

        Raises:
            Lost, Undetected, Crashed: it is not as it must be.
        """
        self.expected.follow(words for words in self.said() if powered or words[0] != "x")
        self._journal.unlink(missing_ok=True)
        read = None
        if self.expected.next_number % 2 and (self.path / "manifest.json").exists():
            read = call(inspect, self.path, self.durability, True)
        found, note, self.disk_bytes = call(inspect, self.path, self.durability)
        if read is not None:  # while another reader lives, LMDB shows readers the transaction before an unfinished one
            copy.deepcopy(self.expected).judge(read[0], read[1], self.durability)
        snapshots = call(inspect_snapshots, self.path, self.durability, bool(self.expected.next_number % 3))
        self.expected.judge(found, note, self.durability, snapshots)
        return found

    def live(self, operations: int) -> Ended:
        """A whole life in which nothing happens to the writer."""
        writer = self.born(operations)
        writer.talk.send("go")
        writer.talk.send("close")
        return writer.end()


def wait_for(writer: Child, *words: Any) -> Any:
    """What a writer says, which must be one of these words."""
    heard = writer.hear()
    if heard not in words:
        raise AssertionError(f"the writer said {heard!r}, not one of {words}")
    return heard
