"""Requests one after the other through a Directory and its policy, in one kernel: what a trace is replayed with."""

from __future__ import annotations

import numpy as np
from numba import njit

from storage.row_log.raw import uncounted
from tiered_emb.cache.probing import (
    FREE_HEAD,
    FRESH,
    NO_SLOT,
    PROBE_AHEAD,
    ROWS,
    ask_for_home,
    probe,
    put,
    tag_of,
    take_out,
)
from tiered_emb.cache.verbs import CURSOR_FIELDS, hit, insert, miss, victim


@njit(forceinline=True)
def _free_slot(slot_ids, ledger):  # type: ignore[no-untyped-def]
    """A slot without a row, -1 if there is none; the ledger's count of rows is raised."""
    slot = ledger[FREE_HEAD]
    if slot != NO_SLOT:
        ledger[FREE_HEAD] = slot_ids[slot]
    elif ledger[FRESH] < len(slot_ids):
        slot = ledger[FRESH]
        ledger[FRESH] += 1
    else:
        return np.int64(-1)
    ledger[ROWS] += 1
    return slot


@njit(nogil=True, cache=True)
def replay(buckets, slot_tables, slot_ids, ledger, state, guard, cursor, tables, ids, missed, start):  # type: ignore[no-untyped-def]
    """Request rows from `start` on, each once; the position that waits for the policy to grow, or len(ids).

    A policy says that it must grow before it changes anything, and a row that it could not take is not in the table
    yet, so the request can be made again. `cursor` is the caller's, since Numba counts references to what is made here.
    """
    state, guard = uncounted(state), uncounted(guard)
    buckets, ledger = uncounted(buckets), uncounted(ledger)
    slot_tables, slot_ids = uncounted(slot_tables), uncounted(slot_ids)
    cursor, last = uncounted(cursor), len(ids) - 1
    for i in range(start, len(ids)):
        later = min(i + PROBE_AHEAD, last)
        ask_for_home(buckets, tag_of(tables[later], ids[later]))
        table, id = tables[i], ids[i]
        tag = tag_of(table, id)
        slot = probe(buckets, slot_ids, tag, id)
        missed[i] = slot < 0
        if slot >= 0:
            if not hit(state, slot, np.int64(1)):
                return i
            continue
        code = np.int64(miss(state, table, id))
        slot = _free_slot(slot_ids, ledger)
        if slot < 0:
            for field in range(CURSOR_FIELDS):  # not `cursor[:] = 0`, which is a call of memset
                cursor[field] = 0
            slot = victim(state, guard, cursor, code)
            take_out(buckets, tag_of(slot_tables[slot], slot_ids[slot]), slot)
        slot_tables[slot], slot_ids[slot] = table, id
        if not insert(state, slot, table, id, np.int64(1), code):
            slot_ids[slot] = ledger[FREE_HEAD]
            ledger[FREE_HEAD] = slot
            ledger[ROWS] -= 1
            return i
        put(buckets, tag, slot)
    return len(ids)
