"""The hash table of a Directory: which slot holds the row (table, id), as Numba kernels on plain arrays.

Open addressing in groups. A bucket is one 64-bit word: a 32-bit tag above `slot + 1`; the word 0 is an empty bucket, so
a fresh table is untouched zero pages. Eight buckets are a group, one cache line, compared as one vector
(`tiered_emb.cache.groups`). Four properties carry the design:

- `tag = mix(id) ^ spread(table)` and `spread` is a bijection of 32-bit numbers. Two rows with equal ids and equal tags
  therefore have equal tables, and a probe is proved by the tag and `slot_ids[slot]` alone: one more cache line, not
  two.
- A row lives in the first group, from its home on around the ring, that had an empty bucket when it came; within a
  group there is no order. A look-up ends at the first group with an empty bucket, mostly the home, and what is done
  there is straight-line code. With the loops of linear probing, whose branches nobody can foresee, a replay under LRU
  takes 1.6 times as long.
- The home is computed from the tag, so that rows are moved without a look at their ids. When a full group loses a row,
  one that had to go past it comes back, and so on for the bucket which that one leaves. How many rows each group holds,
  and how far all of them together are from home, then depends only on which rows are there, not on what was there
  before: no tombstones, and after 10^9 evictions a table that is never rebuilt probes as when it was new.
- Homes use a multiply-shift range reduction (Lemire, "Fast random integer generation in an interval", 2019), so the
  number of groups follows the capacity instead of the next power of two.

Groups that overflow are those of F14 (Bronson and Shi, "Open-sourcing F14 for faster, more memory-efficient hash
tables", 2019), which counts in each group the rows that went past it and so can leave them there; comparing a group at
once is from Swiss tables (Kulukundis, CppCon 2017). At our load of 10/17 one group in eight is full, and 2% of the
rows live outside their home.

`mix` is Pelle Evensen's moremur: ids that are consecutive, or multiples of 8, 2^20 or 2^32, spread like random ones.

`find_rows` keeps ids in flight in three stages: tag computed and its home asked for, home probed and the slot's id
asked for, id compared. The output array carries the tag and then the candidate slot between the stages.

Thread: whoever owns the Directory. Nothing here is safe against a second thread, and nothing allocates.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint32, uint64

from storage.row_log.raw import uncounted
from tiered_emb.cache.groups import GROUP, empty_words, equal_words, first_of, passed_words, tagged_words
from tiered_emb.intrinsics import prefetch_item

# Positions of the `ledger`, the four counters that kernels keep for the Directory.
ROWS, FRESH, FREE_HEAD, PINNED = 0, 1, 2, 3
NO_SLOT = -1
# Ids between asking for a group's line and probing it, and between asking for a slot's id and comparing it.
PROBE_AHEAD, COMPARE_AHEAD = 24, 16
MAX_PINS = 0xFFFF

_MOREMUR_1, _MOREMUR_2 = 0x3C79AC492BA7B653, 0x1C69B3F74AC4AE35
_SPREAD = 0x9E3779B1
_SLOT_BITS = 0xFFFFFFFF


@njit(forceinline=True)
def name_of(table, id):  # type: ignore[no-untyped-def]
    """A row as 64 mixed bits, its tag the upper half: for what remembers rows that it does not hold.

    Rows of one table never share a name, as the id is mixed by a bijection; two of different tables do for one pair in
    2^64. Only the upper half is mixed well.
    """
    x = uint64(id)
    x ^= x >> uint64(27)
    x *= uint64(_MOREMUR_1)
    x ^= x >> uint64(33)
    x *= uint64(_MOREMUR_2)
    return x ^ ((uint64(table) * uint64(_SPREAD)) << uint64(32))


def bucket_count(rows: int) -> int:
    """Buckets of 8 bytes for so many rows: whole groups, at a load of at most 10/17."""
    return GROUP * max(1, -(-rows * 17 // (10 * GROUP)))


@njit(forceinline=True)
def tag_of(table, id):  # type: ignore[no-untyped-def]
    """The 32-bit tag of a row, in a uint64."""
    return name_of(table, id) >> uint64(32)


@njit(forceinline=True)
def home_of(tag, buckets):  # type: ignore[no-untyped-def]
    """The group a tag would like best: floor(tag * groups / 2^32)."""
    return np.int64((tag * uint64(len(buckets) // GROUP)) >> uint64(32))


@njit(forceinline=True)
def ask_for_home(buckets, tag):  # type: ignore[no-untyped-def]
    """Prefetch a tag's home: one cache line in tables large enough to have pages of their own."""
    prefetch_item(buckets, home_of(tag, buckets) * GROUP)


@njit(forceinline=True)
def _after(buckets, group):  # type: ignore[no-untyped-def]
    """The next group of the ring."""
    return group + 1 if (group + 1) * GROUP < len(buckets) else 0


@njit(forceinline=True)
def _slot_in(buckets, group, mask):  # type: ignore[no-untyped-def]
    """The slot that the first word of a mask, not 0, holds."""
    word = buckets[group * GROUP + first_of(mask)]
    return np.int64(word & uint64(_SLOT_BITS)) - 1


@njit(forceinline=True)
def probe(buckets, slot_ids, tag, id):  # type: ignore[no-untyped-def]
    """Slot of the row, or NO_SLOT."""
    group = home_of(tag, buckets)
    while True:
        tagged = tagged_words(buckets, group, tag)
        while tagged != 0:
            slot = _slot_in(buckets, group, tagged)
            if slot_ids[slot] == id:
                return slot
            tagged &= tagged - 1  # the row only shares the tag: one look-up in 2^32 / rows
        if empty_words(buckets, group) != 0:
            return np.int64(NO_SLOT)
        group = _after(buckets, group)


@njit(forceinline=True)
def _candidate(buckets, tag):  # type: ignore[no-untyped-def]
    """A slot whose row has this tag, the first on its way, or NO_SLOT when there is none."""
    group = home_of(tag, buckets)
    while True:
        tagged = tagged_words(buckets, group, tag)
        if tagged != 0:
            return _slot_in(buckets, group, tagged)
        if empty_words(buckets, group) != 0:
            return np.int64(NO_SLOT)
        group = _after(buckets, group)


@njit(nogil=True, cache=True)
def find_rows(buckets, slot_ids, tables, ids, slots):  # type: ignore[no-untyped-def]
    """Write the slot of each row (NO_SLOT where absent) and return how many were found."""
    n, found = len(ids), 0
    for i in range(n + PROBE_AHEAD + COMPARE_AHEAD):
        if i < n:
            tag = tag_of(tables[i], ids[i])
            ask_for_home(buckets, tag)
            slots[i] = np.int32(uint32(tag))
        j = i - PROBE_AHEAD
        if 0 <= j < n:
            tag = uint64(uint32(slots[j]))
            slot = _candidate(buckets, tag)
            if slot >= 0:
                prefetch_item(slot_ids, slot)
            slots[j] = slot
        k = j - COMPARE_AHEAD
        if 0 <= k < n and slots[k] >= 0:
            if slot_ids[slots[k]] != ids[k]:  # two rows share a tag: one lookup in 2^32 / rows
                slots[k] = probe(buckets, slot_ids, tag_of(tables[k], ids[k]), ids[k])
            if slots[k] >= 0:
                found += 1
    return found


@njit(forceinline=True)
def put(buckets, tag, slot):  # type: ignore[no-untyped-def]
    """Enter a row that is absent, into the first group with an empty word."""
    group = home_of(tag, buckets)
    empty = empty_words(buckets, group)
    while empty == 0:
        group = _after(buckets, group)
        empty = empty_words(buckets, group)
    buckets[group * GROUP + first_of(empty)] = (tag << uint64(32)) | uint64(slot + 1)


@njit(forceinline=True)
def take_out(buckets, tag, slot):  # type: ignore[no-untyped-def]
    """Remove the row in `slot`; False when the table does not hold that slot (then nothing changes)."""
    word, group = (tag << uint64(32)) | uint64(slot + 1), home_of(tag, buckets)
    held, empty = equal_words(buckets, group, word), empty_words(buckets, group)
    while held == 0:
        if empty != 0:
            return False
        group = _after(buckets, group)
        held, empty = equal_words(buckets, group, word), empty_words(buckets, group)
    hole = group * GROUP + first_of(held)
    buckets[hole] = uint64(0)
    if empty == 0:
        _fill(buckets, hole)
    return True


@njit(forceinline=True)
def _fill(buckets, hole):  # type: ignore[no-untyped-def]
    """Fill an empty bucket of a group that was full with a row that had to go past it, if there is one."""
    group, distance = hole // GROUP, 0
    while True:
        group = _after(buckets, group)
        distance += 1
        empty, passed = empty_words(buckets, group), passed_words(buckets, group, len(buckets) // GROUP, distance)
        if passed != 0:
            bucket = group * GROUP + first_of(passed)
            buckets[hole], buckets[bucket] = buckets[bucket], uint64(0)
            hole, distance = bucket, 0
        if empty != 0:  # no row went past this group
            return


@njit(forceinline=True)
def _ask_for_row(buckets, slot_tables, slot_ids, slots, i):  # type: ignore[no-untyped-def]
    """Two-stage prefetch for removing slots[i + ...]: the row's name first, then its home.

    No branch: Numba would count references to the arrays around one, at 30 ns a call (so clamp, do not test).
    """
    later = slots[min(i + PROBE_AHEAD, len(slots) - 1)]
    prefetch_item(slot_ids, later)
    prefetch_item(slot_tables, later)
    soon = slots[min(i + PROBE_AHEAD // 2, len(slots) - 1)]
    ask_for_home(buckets, tag_of(slot_tables[soon], slot_ids[soon]))


@njit(nogil=True, cache=True)
def evict_rows(buckets, slot_tables, slot_ids, slots, tables, ids):  # type: ignore[no-untyped-def]
    """Take the rows of `slots` out of the table and write their names; returns how many were really there."""
    buckets, slots = uncounted(buckets), uncounted(slots)
    slot_tables, slot_ids = uncounted(slot_tables), uncounted(slot_ids)
    for i in range(len(slots)):
        _ask_for_row(buckets, slot_tables, slot_ids, slots, i)
        slot = slots[i]
        tables[i], ids[i] = slot_tables[slot], slot_ids[slot]
        if not take_out(buckets, tag_of(tables[i], ids[i]), slot):
            return i
    return len(slots)


@njit(nogil=True, cache=True)
def place_rows(buckets, slot_tables, slot_ids, ledger, freed, tables, ids, slots):  # type: ignore[no-untyped-def]
    """Give each row a slot: freed ones of earlier removals, then never used ones, then those of `freed` in order."""
    free, fresh, used = ledger[FREE_HEAD], ledger[FRESH], 0
    for i in range(len(ids)):
        later = min(i + PROBE_AHEAD, len(ids) - 1)
        ask_for_home(buckets, tag_of(tables[later], ids[later]))
        if free != NO_SLOT:
            slot = free
            free = slot_ids[slot]
        elif fresh < len(slot_ids):
            slot = fresh
            fresh += 1
        else:
            slot = np.int64(freed[used])
            used += 1
        slot_tables[slot], slot_ids[slot], slots[i] = tables[i], ids[i], slot
        put(buckets, tag_of(tables[i], ids[i]), slot)
    ledger[FREE_HEAD], ledger[FRESH] = free, fresh
    ledger[ROWS] += len(ids) - len(freed)


@njit(nogil=True, cache=True)
def free_slots(slot_ids, ledger, slots):  # type: ignore[no-untyped-def]
    """Chain slots that lost their rows into the free list, which runs through `slot_ids`."""
    for i in range(len(slots)):
        slot_ids[slots[i]] = ledger[FREE_HEAD]
        ledger[FREE_HEAD] = slots[i]
    ledger[ROWS] -= len(slots)


@njit(nogil=True, cache=True)
def list_occupied(buckets, marks, slots):  # type: ignore[no-untyped-def]
    """Write the slots that hold a row, ascending; `marks` (S,) comes in False."""
    for bucket in range(len(buckets)):
        if buckets[bucket] != uint64(0):
            marks[np.int64(buckets[bucket] & uint64(_SLOT_BITS)) - 1] = True
    listed = 0
    for slot in range(len(marks)):
        if marks[slot]:
            slots[listed] = slot
            listed += 1


@njit(nogil=True, cache=True)
def list_free(slot_ids, ledger, slots):  # type: ignore[no-untyped-def]
    """Write the free slots below the first that was never used, in the order in which they will be."""
    slot = ledger[FREE_HEAD]
    for i in range(len(slots)):
        slots[i] = slot
        slot = slot_ids[slot]


@njit(nogil=True, cache=True)
def chain_free(slot_ids, ledger, slots, fresh):  # type: ignore[no-untyped-def]
    """Make slots, which hold no row, the free ones in this order; those from `fresh` on were never used."""
    ledger[FRESH], ledger[FREE_HEAD] = fresh, NO_SLOT
    for i in range(len(slots) - 1, -1, -1):
        slot_ids[slots[i]] = ledger[FREE_HEAD]
        ledger[FREE_HEAD] = slots[i]


@njit(nogil=True, cache=True)
def enter_rows(buckets, slot_tables, slot_ids, ledger, slots):  # type: ignore[no-untyped-def]
    """Enter the rows that `slots` (ascending) hold into an empty table; the slots between them become free ones."""
    fresh = 0
    ledger[ROWS], ledger[FREE_HEAD] = len(slots), NO_SLOT
    for i in range(len(slots)):
        if i + PROBE_AHEAD < len(slots):
            later = slots[i + PROBE_AHEAD]
            ask_for_home(buckets, tag_of(slot_tables[later], slot_ids[later]))
        slot = slots[i]
        while fresh < slot:
            slot_ids[fresh] = ledger[FREE_HEAD]
            ledger[FREE_HEAD] = fresh
            fresh += 1
        fresh = slot + 1
        put(buckets, tag_of(slot_tables[slot], slot_ids[slot]), slot)
    ledger[FRESH] = fresh


@njit(nogil=True, cache=True)
def pin_slots(pins, ledger, slots, owners, pinned):  # type: ignore[no-untyped-def]
    """Pin each slot once more; returns the position whose count is full, or len(slots).

    `owners` uint16 (S,) and `pinned` int64 (T,) say whose each slot is and how many of theirs have pins; (0,) if nobody
    asks.
    """
    for i in range(len(slots)):
        if i + PROBE_AHEAD < len(slots):
            prefetch_item(pins, slots[i + PROBE_AHEAD])
        count = pins[slots[i]]
        if count == MAX_PINS:
            return i
        if count == 0:
            ledger[PINNED] += 1
            if len(owners):
                pinned[owners[slots[i]]] += 1
        pins[slots[i]] = count + 1
    return len(slots)


@njit(nogil=True, cache=True)
def unpin_slots(pins, ledger, slots, owners, pinned):  # type: ignore[no-untyped-def]
    """Undo one pin of each slot; returns the position that was not pinned, or len(slots)."""
    for i in range(len(slots)):
        if i + PROBE_AHEAD < len(slots):
            prefetch_item(pins, slots[i + PROBE_AHEAD])
        count = pins[slots[i]]
        if count == 0:
            return i
        if count == 1:
            ledger[PINNED] -= 1
            if len(owners):
                pinned[owners[slots[i]]] -= 1
        pins[slots[i]] = count - 1
    return len(slots)
