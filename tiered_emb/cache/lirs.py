"""LIRS: rows whose requests follow each other closely stay, however long ago the last one was.

Jiang and Zhang, "LIRS: an efficient low inter-reference recency set replacement policy to improve buffer cache
performance", SIGMETRICS '02. Nearly all slots hold LIR rows (low inter-reference recency); 1%, at least one, are left
for HIR rows, the ones that come and go. Two orders, oldest request first:

    stack   all rows requested since the LIR row whose last request is the oldest: LIR rows, HIR rows, and rows that
            have left (*gone*: only their name is kept). Its lowest row is always a LIR row: when that one is lowered
            or leaves, what lies below the next LIR row is pruned.
    queue   the HIR rows that are here. Its first one is the victim, and stays in the stack as gone if it was in it.

A row that is requested while it is HIR or gone, and in the stack, was requested twice within a shorter time than the
lowest LIR row: it becomes LIR, and that one becomes HIR, at the end of the queue. A row in the queue only is put on the
stack, and at the end of the queue. While fewer rows are LIR than may be, new ones are LIR.

Where the paper leaves a choice we follow libCacheSim: the stack holds at most 2 S names of S slots, and the name that
goes first is that of the row that left first. We do not follow it where a row in the queue only is requested: it then
lowers a LIR row, and evicts a row for that; here nobody leaves, as in the paper. The miss ratios are the same to within
0.0003 on the golden traces, and on loops, scans and mixtures of Zipf's law.

In batches: all victims of a batch are taken before its rows come in. If the queue has no more that may leave, the
oldest LIR rows leave, forgotten, and as many slots are *lent* to the queue: what comes in is HIR all the same, so a
batch of rows never seen does not become LIR. A slot is given back when a row becomes LIR by its requests.

Layout: nodes 0, 1, 2 are the heads of the rings of LIR rows, of the queue, and of gone rows by the time they left;
node `slot + 3` stands for a slot, nodes from S + 3 on for gone rows. The stack is a ring of its own with head 0. The
names of gone rows are found by a table as in `tiered_emb.cache.probing`. A name is 64 bits mixed of table and id: rows
of one table never share one, and if two of different tables do (one pair in 2^64) one may be taken for the other that
left.

Thread: the Directory's owner.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, uint64
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.cache.arrays import ArrayPolicy
from tiered_emb.cache.links import cut
from tiered_emb.cache.probing import bucket_count, name_of, probe, put, take_out
from tiered_emb.cache.rings import ask_for_ring, empty_rings, join, oldest_free
from tiered_emb.cache.verbs import implement

HIR_SHARE = 100  # one slot in so many is for HIR rows
STACK_NAMES = 2  # names in the stack, at most, for each slot
_LIR, _QUEUE, _GONE, _HEADS = 0, 1, 2, 3
_STACK = 0  # the stack's head
_IN_STACK, _IS_LIR = 1, 2
_WAS_GONE = 1  # what `miss` says of a row that it found in the stack
_NODE_BYTES = 8 + 8 + 8 + 1
# What `numbers` holds: rows that are LIR; names in the stack; gone rows; the chain of their nodes that are unused (0
# ends it), and the first node never used; slots lent to the queue; most LIR rows; most names in the stack.
_LIRS, _NAMES, _GHOSTS, _UNUSED, _FRESH, _LENT, _MOST_LIRS, _MOST_NAMES, _NUMBERS = range(9)
MAX_CAPACITY_ROWS = 2**30 - 2**25  # nodes are int32, and there are 2.01 for each slot


class LirsState(NamedTuple):
    """See the module's docstring; N is the number of nodes.

    Attributes:
        stack: int32 (2 N,), the ring of the stack.
        links: int32 (2 N,), the rings of LIR rows, of the queue and of gone rows.
        names: uint64 (N,), of each node's row.
        marks: uint8 (N,), whether a node is in the stack (1), and LIR (2).
        buckets: uint64, the table that finds gone rows.
        numbers: int64 (8,), see above.
    """

    stack: NDArray[np.int32]
    links: NDArray[np.int32]
    names: NDArray[np.uint64]
    marks: NDArray[np.uint8]
    buckets: NDArray[np.uint64]
    numbers: NDArray[np.int64]


class Lirs(ArrayPolicy[LirsState]):
    """The oldest of the rows whose requests lie far apart."""

    bytes_per_slot = 65

    @staticmethod
    def reserve_bytes(capacity_rows: int) -> int:
        """Bytes beyond `bytes_per_slot` a slot: heads, numbers, and the least sizes of small orders."""
        return 8 * _NUMBERS + _NODE_BYTES * (_HEADS + 3) + 8 * 16

    def make(self, capacity_rows: int) -> LirsState:
        """An empty order. Raises ValueError for a capacity above MAX_CAPACITY_ROWS."""
        if capacity_rows > MAX_CAPACITY_ROWS:
            raise ValueError(f"lirs orders at most {MAX_CAPACITY_ROWS} slots, not {capacity_rows}")
        most_lirs = capacity_rows - max(1, capacity_rows // HIR_SHARE)
        # Full, the stack holds `most_lirs` LIR rows; one more, as a row leaves before the stack is cut to its limit.
        ghosts = STACK_NAMES * capacity_rows - most_lirs + 1
        nodes = _HEADS + capacity_rows + ghosts
        numbers = np.zeros(_NUMBERS, np.int64)
        numbers[_FRESH], numbers[_MOST_LIRS] = _HEADS + capacity_rows, most_lirs
        numbers[_MOST_NAMES] = STACK_NAMES * capacity_rows
        return LirsState(
            empty_rings(nodes, 1),
            empty_rings(nodes, _HEADS),
            zeros(nodes, np.uint64),
            zeros(nodes, np.uint8),
            zeros(bucket_count(ghosts), np.uint64),
            numbers,
        )

    def resized(self, capacity_rows: int) -> LirsState:
        """The same order of fewer or more slots; of gone rows the ones that left last."""
        new = self.make(capacity_rows)
        kept = _HEADS + min(self.capacity_rows, capacity_rows)
        new.names[:kept] = self.state.names[:kept]
        new_nodes = np.zeros(len(self.state.names), np.int32)
        new_nodes[_HEADS:kept] = np.arange(_HEADS, kept)
        _move(self.state, new, new_nodes)
        return new


@njit(forceinline=True)
def _put_on_stack(state, node):  # type: ignore[no-untyped-def]
    """A row was requested: it is on top of the stack now."""
    if state.marks[node] & _IN_STACK:
        cut(state.stack, node)
    else:
        state.marks[node] |= _IN_STACK
        state.numbers[_NAMES] += 1
    join(state.stack, _STACK, node)


@njit(forceinline=True)
def _leave_stack(state, node):  # type: ignore[no-untyped-def]
    """Take a node out of the stack; it is no LIR row any more."""
    cut(state.stack, node)
    state.marks[node] = 0
    state.numbers[_NAMES] -= 1


@njit(forceinline=True)
def _forget(state, node):  # type: ignore[no-untyped-def]
    """Take a gone row out of everything; its node is unused."""
    _leave_stack(state, node)
    cut(state.links, node)
    take_out(state.buckets, state.names[node] >> uint64(32), node)
    state.links[2 * node] = state.numbers[_UNUSED]
    state.numbers[_UNUSED] = node
    state.numbers[_GHOSTS] -= 1


@njit(forceinline=True)
def _unused_node(state):  # type: ignore[no-untyped-def]
    """A node for a gone row; the row that left first is forgotten when there is none left."""
    numbers = state.numbers
    if numbers[_UNUSED] == 0 and numbers[_FRESH] == len(state.names):
        _forget(state, np.int64(state.links[2 * _GONE + 1]))
    node = numbers[_UNUSED]
    if node != 0:
        numbers[_UNUSED] = state.links[2 * node]
    else:
        node = numbers[_FRESH]
        numbers[_FRESH] += 1
    return node


@njit(forceinline=True)
def _remember(state, name, before):  # type: ignore[no-untyped-def]
    """A gone row, the latest, right below a node of the stack."""
    node = _unused_node(state)
    state.names[node] = name
    put(state.buckets, name >> uint64(32), node)
    join(state.links, _GONE, node)
    join(state.stack, before, node)
    state.marks[node] = _IN_STACK
    state.numbers[_NAMES] += 1
    state.numbers[_GHOSTS] += 1


@njit(forceinline=True)
def _prune(state):  # type: ignore[no-untyped-def]
    """Take what lies below the lowest LIR row out of the stack."""
    if state.numbers[_LIRS] == 0:
        return
    first_ghost = len(state.names) - _ghost_nodes(state)
    node = np.int64(state.stack[2 * _STACK + 1])
    while state.marks[node] & _IS_LIR == 0:
        if node >= first_ghost:
            _forget(state, node)
        else:
            _leave_stack(state, node)
        node = np.int64(state.stack[2 * _STACK + 1])


@njit(forceinline=True)
def _ghost_nodes(state):  # type: ignore[no-untyped-def]
    """Nodes for gone rows."""
    return state.numbers[_MOST_NAMES] - state.numbers[_MOST_LIRS] + 1


@njit(forceinline=True)
def _limit_stack(state):  # type: ignore[no-untyped-def]
    """Forget the rows that left first while the stack holds too many names."""
    while state.numbers[_NAMES] > state.numbers[_MOST_NAMES] and state.numbers[_GHOSTS] > 0:
        _forget(state, np.int64(state.links[2 * _GONE + 1]))


@njit(forceinline=True)
def _lower_oldest(state):  # type: ignore[no-untyped-def]
    """The lowest LIR row becomes the newest of the queue."""
    node = np.int64(state.links[2 * _LIR + 1])
    cut(state.links, node)
    _leave_stack(state, node)
    join(state.links, _QUEUE, node)
    state.numbers[_LIRS] -= 1


@njit(forceinline=True)
def _raise(state, node):  # type: ignore[no-untyped-def]
    """The row on top of the stack, in no ring, becomes LIR, in the stead of the lowest one if there are enough."""
    numbers = state.numbers
    if numbers[_LIRS] + numbers[_LENT] >= numbers[_MOST_LIRS]:
        if numbers[_LENT] > 0:
            numbers[_LENT] -= 1
        else:
            _lower_oldest(state)
    state.marks[node] |= _IS_LIR
    join(state.links, _LIR, node)
    numbers[_LIRS] += 1
    _prune(state)


@njit(forceinline=True)
def _request(state, node):  # type: ignore[no-untyped-def]
    """One request of a row that is here."""
    seen_lately = state.marks[node] & _IN_STACK != 0 and state.numbers[_MOST_LIRS] > 0
    _put_on_stack(state, node)
    cut(state.links, node)
    if state.marks[node] & _IS_LIR:
        join(state.links, _LIR, node)
        _prune(state)
    elif seen_lately:
        _raise(state, node)
    else:
        join(state.links, _QUEUE, node)
        _limit_stack(state)


@njit(forceinline=True)
def _request_often(state, node, count):  # type: ignore[no-untyped-def]
    """So many requests: after two it is LIR and on top, and more change nothing."""
    for _ in range(min(count, 2)):
        _request(state, node)


def _hit(state, slot, count):  # type: ignore[no-untyped-def]
    _request_often(state, slot + _HEADS, count)
    return True


def _miss(state, table, id):  # type: ignore[no-untyped-def]
    name = name_of(table, id)
    node = probe(state.buckets, state.names, name >> uint64(32), name)
    if node < 0:
        return 0
    _forget(state, node)
    return _WAS_GONE


def _insert(state, slot, table, id, count, code):  # type: ignore[no-untyped-def]
    node, numbers = slot + _HEADS, state.numbers
    state.names[node] = name_of(table, id)
    _put_on_stack(state, node)
    if numbers[_LIRS] + numbers[_LENT] < numbers[_MOST_LIRS] or (code == _WAS_GONE and numbers[_MOST_LIRS] > 0):
        _raise(state, node)
    else:
        join(state.links, _QUEUE, node)
    _limit_stack(state)
    _request_often(state, node, count - 1)
    return True


def _remove(state, slot):  # type: ignore[no-untyped-def]
    node = slot + _HEADS
    was_lir = state.marks[node] & _IS_LIR
    cut(state.links, node)
    if state.marks[node] & _IN_STACK:
        _leave_stack(state, node)
    if was_lir:
        state.numbers[_LIRS] -= 1
        _prune(state)


def _ask(state, slots, i):  # type: ignore[no-untyped-def]
    ask_for_ring(state.links, _HEADS, slots, i)
    ask_for_ring(state.stack, _HEADS, slots, i)


def _victim(state, guard, cursor, code):  # type: ignore[no-untyped-def]
    """The oldest of the queue that may leave, else the lowest LIR row that may."""
    node = oldest_free(state.links, _QUEUE, _HEADS, guard, cursor, 0)
    if node != 0:
        cut(state.links, node)
        if state.marks[node] & _IN_STACK:
            _remember(state, state.names[node], node)
            _leave_stack(state, node)
        return node - _HEADS
    node = oldest_free(state.links, _LIR, _HEADS, guard, cursor, 1)
    if node != 0:
        cut(state.links, node)
        _leave_stack(state, node)
        state.numbers[_LIRS] -= 1
        state.numbers[_LENT] += 1
        _prune(state)
        return node - _HEADS
    return np.int64(-1)


@njit(cache=True)
def _move(old, new, new_nodes):  # type: ignore[no-untyped-def]
    """Rebuild all orders of `old` in the empty state `new`.

    Args:
        new_nodes: int32 (N of old,), the node of each slot's row in `new`, 0 for the rest; written: those of gone rows.
    """
    ghost = np.int64(old.links[2 * _GONE])
    for _ in range(min(old.numbers[_GHOSTS], _ghost_nodes(new))):
        new_nodes[ghost] = new.numbers[_FRESH]
        new.numbers[_FRESH] += 1
        ghost = np.int64(old.links[2 * ghost])
    _move_stack(old, new, new_nodes)
    for ring in (_LIR, _QUEUE, _GONE):
        node = np.int64(old.links[2 * ring + 1])
        while node != ring:
            if new_nodes[node] != 0:
                _enter(old, new, node, np.int64(new_nodes[node]), ring)
            node = np.int64(old.links[2 * node + 1])
    while new.numbers[_LIRS] > new.numbers[_MOST_LIRS]:
        _lower_oldest(new)
    new.numbers[_LENT] = min(old.numbers[_LENT], new.numbers[_MOST_LIRS] - new.numbers[_LIRS])
    _prune(new)
    _limit_stack(new)


@njit(forceinline=True)
def _move_stack(old, new, new_nodes):  # type: ignore[no-untyped-def]
    """What is known in `new` of the stack of `old`, in its order."""
    node = np.int64(old.stack[2 * _STACK + 1])
    while node != _STACK:
        if new_nodes[node] != 0:
            _put_on_stack(new, np.int64(new_nodes[node]))
        node = np.int64(old.stack[2 * node + 1])


@njit(forceinline=True)
def _enter(old, new, old_node, node, ring):  # type: ignore[no-untyped-def]
    """The newest of a ring of `new`."""
    join(new.links, ring, node)
    if ring == _LIR:
        new.marks[node] |= _IS_LIR
        new.numbers[_LIRS] += 1
    elif ring == _GONE:
        new.names[node] = old.names[old_node]
        put(new.buckets, new.names[node] >> uint64(32), node)
        new.numbers[_GHOSTS] += 1


implement(LirsState, miss=_miss, hit=_hit, insert=_insert, remove=_remove, victim=_victim, ask=_ask)
