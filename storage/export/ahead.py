"""A thread that makes the next item of an iterator while the last one is worked on.

As many items are made ahead as are asked for and no more: with one, at most two exist. The thread lives until the
items end or the generator is closed. Where there is none to be had, the caller makes each item when it asks for it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any, TypeVar

_T = TypeVar("_T")
_END = object()


def ahead(items: Iterable[_T], most: int = 1) -> Generator[_T, None, None]:
    """The items, in their order, made in a thread of their own, `most` ahead; what making one raises is raised here."""
    wanted, made = Semaphore(most), SimpleQueue[Any]()
    maker = _Maker(items, wanted, made)
    try:
        maker.start()
    except RuntimeError:  # no thread to be had
        yield from items
        return
    try:
        while True:
            item, error = made.get()
            if error is not None:
                raise error
            if item is _END:
                return
            wanted.release()  # the next one is made while the caller has this one
            yield item
            del item
    finally:
        maker.stopped = True
        wanted.release()
        maker.join()


class _Maker(Thread):
    """Makes items as long as they are wanted."""

    def __init__(self, items: Iterable[_T], wanted: Semaphore, made: SimpleQueue[Any]) -> None:
        super().__init__(name="tiered-emb-export", daemon=True)
        self.stopped = False
        self._arguments = items, wanted, made

    def run(self) -> None:
        """Make items until there are no more, one fails, or nobody wants them."""
        (items, wanted, made), self._arguments = self._arguments, None  # type: ignore[assignment]
        iterator = iter(items)
        try:
            while True:
                wanted.acquire()
                if self.stopped:
                    break
                item = next(iterator, _END)
                made.put((item, None))
                if item is _END:
                    break
                del item
        except BaseException as error:
            made.put((None, error))
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
