"""FIFO: the victim is the row that was admitted longest ago; the list of LRU, in which a request moves nothing.

Thread: the Directory's owner. It knows nothing of ids, and pins only as an argument.
"""

from __future__ import annotations

from tiered_emb.cache.lru import Lru, LruState, insert_newest, remove_slot, take_oldest_slot
from tiered_emb.cache.verbs import implement


class FifoState(LruState):
    """As of LRU."""


class Fifo(Lru):
    """First in, first out; requests change nothing."""

    kind = FifoState


def _hit(state, slot, count):  # type: ignore[no-untyped-def]
    return True


implement(FifoState, hit=_hit, insert=insert_newest, remove=remove_slot, victim=take_oldest_slot)
