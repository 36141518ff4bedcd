"""What a policy does for one row, and the kernels that do it for many.

A policy is a NamedTuple of arrays, its state, and a few functions on it that Numba compiles. `implement` ties the two
together: in a kernel a verb is looked up by the type of the state, when the kernel is compiled, so that one loop serves
all policies and the policy's code is inlined into it. A kernel is compiled once for each policy that uses it.

    miss(state, table, id) -> code          the row is absent and will be admitted; a policy that remembers rows which
                                            left (ghosts) looks it up and says what it found
    victim(state, guard, cursor, code)      the slot that leaves for such a row, taken out of the order; -1 if `guard`
        -> slot                             lets none leave. `cursor`, int64 (CURSOR_FIELDS,), is where the last
                                            search of this batch ended, all 0 at first
    insert(state, slot, table, id,          the row has a slot now, and was requested `count` times; False: nothing was
        count, code) -> done                done, the policy needs to grow
    hit(state, slot, count) -> done         the row in a slot was requested `count` times more; False as above
    remove(state, slot)                     the row left otherwise than as a victim, and is not remembered
    ask(state, slots, i)                    prefetch what slots behind slots[i] will need

Rules that the contract test holds every policy to: a slot that may not leave keeps its place; what is inserted is given
as a victim once; `count` hits at once are as many single ones, and for all but W-TinyLFU a row that is inserted with
`count` requests is inserted with one and hit by the others.

Thread: the Directory's owner. Nothing here knows of rows, devices or Stores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray

from storage.row_log.raw import uncounted

CURSOR_FIELDS = 4
ANYBODY = -1
_IN_LOOPS = {"forceinline": True}  # else the whole state is copied for each call


class Guard(NamedTuple):
    """Which slots may not leave.

    Attributes:
        pins: uint16 (S,), slots with pins stay; (0,) if there are none.
        owners: uint16 (S,), the table of each slot by position; (0,) if no table has a floor.
        rows: int64 (T,), rows that each table has here; (0,) as above.
        floors: int64 (T,), rows that it keeps; (0,) as above.
        only: int64 (1,), the one table whose rows may leave, or ANYBODY.
    """

    pins: NDArray[np.uint16]
    owners: NDArray[np.uint16]
    rows: NDArray[np.int64]
    floors: NDArray[np.int64]
    only: NDArray[np.int64]

    @classmethod
    def of_pins(cls, pins: NDArray[np.uint16]) -> Guard:
        """No table has a floor."""
        return cls(pins, np.zeros(0, np.uint16), np.zeros(0, np.int64), np.zeros(0, np.int64), np.array([ANYBODY]))


_FUNCTIONS: dict[str, dict[type, Callable[..., Any]]] = {
    verb: {} for verb in ("miss", "victim", "insert", "hit", "remove", "ask")
}


def implement(state: type, **verbs: Callable[..., Any]) -> None:
    """Say what verbs do for states of a type; `miss` and `ask` do nothing unless given. Parameters as above."""
    verbs.setdefault("miss", _no_ghost)
    verbs.setdefault("ask", _ask_nothing)
    assert verbs.keys() == _FUNCTIONS.keys(), f"{state.__name__} implements {sorted(verbs)}"
    for verb, function in verbs.items():
        _FUNCTIONS[verb][state] = function


def _no_ghost(state, table, id):  # type: ignore[no-untyped-def]
    return 0


def _ask_nothing(state, slots, i):  # type: ignore[no-untyped-def]
    pass


def _implemented(verb: str, state: Any) -> Callable[..., Any] | None:
    is_state = isinstance(state, types.NamedTuple | types.NamedUniTuple)
    return _FUNCTIONS[verb].get(state.instance_class) if is_state else None


def miss(state: Any, table: Any, id: Any) -> Any:
    """See the module's docstring."""
    raise NotImplementedError("for kernels")


def victim(state: Any, guard: Any, cursor: Any, code: Any) -> Any:
    """See the module's docstring."""
    raise NotImplementedError("for kernels")


def insert(state: Any, slot: Any, table: Any, id: Any, count: Any, code: Any) -> Any:
    """See the module's docstring."""
    raise NotImplementedError("for kernels")


def hit(state: Any, slot: Any, count: Any) -> Any:
    """See the module's docstring."""
    raise NotImplementedError("for kernels")


def remove(state: Any, slot: Any) -> Any:
    """See the module's docstring."""
    raise NotImplementedError("for kernels")


def ask(state: Any, slots: Any, i: Any) -> Any:
    """See the module's docstring."""
    raise NotImplementedError("for kernels")


@overload(miss, jit_options=_IN_LOOPS)
def _miss(state, table, id):  # type: ignore[no-untyped-def]
    return _implemented("miss", state)


@overload(victim, jit_options=_IN_LOOPS)
def _victim(state, guard, cursor, code):  # type: ignore[no-untyped-def]
    return _implemented("victim", state)


@overload(insert, jit_options=_IN_LOOPS)
def _insert(state, slot, table, id, count, code):  # type: ignore[no-untyped-def]
    return _implemented("insert", state)


@overload(hit, jit_options=_IN_LOOPS)
def _hit(state, slot, count):  # type: ignore[no-untyped-def]
    return _implemented("hit", state)


@overload(remove, jit_options=_IN_LOOPS)
def _remove(state, slot):  # type: ignore[no-untyped-def]
    return _implemented("remove", state)


@overload(ask, jit_options=_IN_LOOPS)
def _ask(state, slots, i):  # type: ignore[no-untyped-def]
    return _implemented("ask", state)


@njit(forceinline=True)
def may_leave(guard, slot):  # type: ignore[no-untyped-def]
    """Whether a slot may be a victim."""
    free = len(guard.pins) == 0 or guard.pins[slot] == 0
    if free and len(guard.floors):
        owner = guard.owners[slot]
        free = guard.rows[owner] > guard.floors[owner] if guard.only[0] == ANYBODY else owner == guard.only[0]
    return free


@njit(nogil=True, cache=True)
def hit_all(state, slots, counts, start):  # type: ignore[no-untyped-def]
    """`hit` for slots from `start` on; the position that was not done, or len(slots)."""
    state, slots = uncounted(state), uncounted(slots)
    for i in range(start, len(slots)):
        ask(state, slots, i)
        if not hit(state, np.int64(slots[i]), np.int64(counts[i])):
            return i
    return len(slots)


@njit(nogil=True, cache=True)
def insert_all(state, slots, tables, ids, counts, codes, start):  # type: ignore[no-untyped-def]
    """`insert` for rows from `start` on; the position that was not done, or len(slots)."""
    state = uncounted(state)
    for i in range(start, len(slots)):
        code = np.int64(codes[i]) if len(codes) else np.int64(0)
        if not insert(state, np.int64(slots[i]), tables[i], ids[i], np.int64(counts[i]), code):
            return i
    return len(slots)


@njit(nogil=True, cache=True)
def remove_all(state, slots):  # type: ignore[no-untyped-def]
    """`remove` for every slot."""
    state, slots = uncounted(state), uncounted(slots)
    for i in range(len(slots)):
        ask(state, slots, i)
        remove(state, np.int64(slots[i]))


@njit(nogil=True, cache=True)
def make_room(state, guard, cursor, tables, ids, free, codes, out):  # type: ignore[no-untyped-def]
    """`miss` for every row (N,), and a `victim` for each beyond the first `free`; how many there were.

    Args:
        codes: int8 (N,), what `miss` said, for `insert`; (0,) if it never says anything.
        out: int32, at least N - free victims.
    """
    state, guard, cursor = uncounted(state), uncounted(guard), uncounted(cursor)
    cursor[:] = 0
    taken = 0
    for i in range(len(ids)):
        code = np.int64(miss(state, tables[i], ids[i]))
        if len(codes):
            codes[i] = code
        if i >= free:
            slot = _take(state, guard, cursor, code)
            if slot < 0:
                return taken
            out[taken] = slot
            taken += 1
    return taken


@njit(nogil=True, cache=True)
def miss_all(state, tables, ids, codes):  # type: ignore[no-untyped-def]
    """`miss` for every row (N,)."""
    state = uncounted(state)
    for i in range(len(codes)):
        codes[i] = miss(state, tables[i], ids[i])


@njit(nogil=True, cache=True)
def take_victims(state, guard, cursor, codes, out):  # type: ignore[no-untyped-def]
    """Fill `out` with victims for rows of which `miss` said `codes`; how many there were.

    A table above a quota that was lowered gives up more rows than come, and nothing was said for those.
    """
    state, guard, cursor = uncounted(state), uncounted(guard), uncounted(cursor)
    cursor[:] = 0
    for i in range(len(out)):
        slot = _take(state, guard, cursor, np.int64(codes[i]) if i < len(codes) else np.int64(0))
        if slot < 0:
            return i
        out[i] = slot
    return len(out)


@njit(forceinline=True)
def _take(state, guard, cursor, code):  # type: ignore[no-untyped-def]
    slot = victim(state, guard, cursor, code)
    if slot >= 0 and len(guard.floors):
        guard.rows[guard.owners[slot]] -= 1
    return slot
