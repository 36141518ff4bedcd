"""Policies with ghosts in plain Python, slow and short: what the compiled ones are compared with.

Queues are ordered dictionaries, oldest first, and whoever may leave is found by looking at all from the start. A batch
takes its victims as a Directory does, before the first of its rows comes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection

Row = tuple[int, int]
Queue = OrderedDict[Row, int]


class Model(ABC):
    """`queues` hold the rows, from NEW to OLD ones as the policy sees it; `ghosts` those that left."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queues: tuple[Queue, Queue] = OrderedDict(), OrderedDict()
        self.ghosts: tuple[Queue, Queue] = OrderedDict(), OrderedDict()
        self.stays: Collection[Row] = ()
        self.flight = [0, 0]

    @abstractmethod
    def miss(self, row: Row) -> int: ...

    @abstractmethod
    def victim(self, code: int) -> Row | None:
        """Who leaves for a row with this code, `stays` excepted, while `flight` rows are on their way."""

    @abstractmethod
    def insert(self, row: Row, count: int, code: int) -> None: ...

    @abstractmethod
    def hit(self, row: Row, count: int) -> None: ...

    @abstractmethod
    def resize(self, capacity: int) -> None:
        """Rows beyond the capacity are removed already."""

    def __contains__(self, row: Row) -> bool:
        return any(row in queue for queue in self.queues)

    @property
    def rows(self) -> list[Row]:
        return [row for queue in self.queues for row in queue]

    def remove(self, row: Row) -> None:
        for queue in self.queues:
            queue.pop(row, None)

    def request(self, row: Row) -> bool:
        """One request; whether it missed."""
        if row in self:
            self.hit(row, 1)
            return False
        self.admit([row], [1])
        return True

    def admit(self, rows: list[Row], counts: list[int], stays: Collection[Row] = ()) -> list[Row | None]:
        """Rows that are absent come together; who leaves for them."""
        free, codes, gone = self.capacity - len(self.rows), [], []
        self.stays, self.flight = stays, [0, 0]
        for i, row in enumerate(rows):
            codes.append(self.miss(row))
            if i >= free:
                gone.append(self.victim(codes[-1]))
                self.flight[codes[-1] > 0] += 1
        self.flight = [0, 0]
        for row, count, code in zip(rows, counts, codes, strict=True):
            self.insert(row, count, code)
        return gone

    def first(self, queue: Queue) -> Row | None:
        """The oldest that may leave."""
        return next((row for row in queue if row not in self.stays), None)


def remember(ghosts: Queue, row: Row, most: int) -> None:
    ghosts[row] = 0
    while len(ghosts) > most:
        ghosts.popitem(last=False)


class S3Fifo(Model):
    evicted = False

    @property
    def small_share(self) -> int:
        return max(1, int(self.capacity * 0.1))

    def miss(self, row: Row) -> int:
        return int(self.ghosts[0].pop(row, None) is not None)

    def victim(self, code: int) -> Row | None:
        small, main = self.queues
        self.evicted = True
        main_first = len(main) + self.flight[1] > self.capacity - self.small_share
        if main_first and (row := self.from_main()):
            return row
        while row := self.first(small):
            count = small.pop(row)
            if count < 2:
                remember(self.ghosts[0], row, int(self.capacity * 0.9))
                return row
            main[row] = 0
        return self.from_main()

    def from_main(self) -> Row | None:
        main = self.queues[1]
        while row := self.first(main):
            count = main.pop(row)
            if count == 0:
                return row
            main[row] = count - 1
        return None

    def insert(self, row: Row, count: int, code: int) -> None:
        small, main = self.queues
        full = not self.evicted and len(small) >= self.small_share
        (main if code or full else small)[row] = min(count - 1, 3)

    def hit(self, row: Row, count: int) -> None:
        for queue in self.queues:
            if row in queue:
                queue[row] = min(queue[row] + count, 3)

    def resize(self, capacity: int) -> None:
        self.evicted = self.evicted and capacity <= self.capacity
        self.capacity = capacity
        while len(self.ghosts[0]) > int(capacity * 0.9):
            self.ghosts[0].popitem(last=False)


class TwoQ(Model):
    def miss(self, row: Row) -> int:
        return int(self.ghosts[0].pop(row, None) is not None)

    def victim(self, code: int) -> Row | None:
        new, main = self.queues
        new_first = len(new) + self.flight[0] > max(1, self.capacity // 4)
        row = self.first(new if new_first else main) or self.first(main if new_first else new)
        if row and row in new:
            remember(self.ghosts[0], row, self.capacity // 2)
        if row:
            self.remove(row)
        return row

    def insert(self, row: Row, count: int, code: int) -> None:
        self.queues[code][row] = 0

    def hit(self, row: Row, count: int) -> None:
        if row in self.queues[1]:
            self.queues[1].move_to_end(row)

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        while len(self.ghosts[0]) > capacity // 2:
            self.ghosts[0].popitem(last=False)


class Arc(Model):
    target = 0.0

    def miss(self, row: Row) -> int:
        b1, b2 = self.ghosts
        if row in b1:
            self.target = min(self.target + max(len(b2) / len(b1), 1), self.capacity)
            del b1[row]
            return 1
        if row in b2:
            self.target = max(self.target - max(len(b1) / len(b2), 1), 0)
            del b2[row]
            return 2
        return 0

    def victim(self, code: int) -> Row | None:
        (t1, t2), (b1, b2) = self.queues, self.ghosts
        once = len(t1) + self.flight[0]
        forgotten = code == 0 and once >= self.capacity and not b1
        t1_first = once > self.target or (once == self.target and code == 2) or forgotten
        row = self.first(t1 if t1_first else t2) or self.first(t2 if t1_first else t1)
        if row is None:
            return None
        while code == 0 and b1 and once + len(b1) >= self.capacity:
            b1.popitem(last=False)
        if row in t2 or not forgotten:
            while len(b1) + len(b2) >= self.capacity:
                (b2 or b1).popitem(last=False)
            (b1 if row in t1 else b2)[row] = 0
        self.remove(row)
        return row

    def insert(self, row: Row, count: int, code: int) -> None:
        self.queues[code > 0 or count > 1][row] = 0

    def hit(self, row: Row, count: int) -> None:
        self.remove(row)
        self.queues[1][row] = 0

    def resize(self, capacity: int) -> None:
        b1, b2 = self.ghosts
        self.target = self.target * capacity / self.capacity
        self.capacity = capacity
        while b1 and len(self.queues[0]) + len(b1) > capacity:
            b1.popitem(last=False)
        while len(b1) + len(b2) > capacity:
            (b2 or b1).popitem(last=False)


MODELS: dict[str, type[Model]] = {"s3fifo": S3Fifo, "2q": TwoQ, "arc": Arc}
