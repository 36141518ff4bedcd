"""The hash table of a Directory: which slot holds the row (table, id), as Numba kernels on plain arrays.

Open addressing, linear probing. A bucket is one 64-bit word: a 32-bit tag above `slot + 1`; the word 0 is an empty
bucket, so a fresh table is untouched zero pages. Three properties carry the design:

- `tag = mix(id) ^ spread(table)` and `spread` is a bijection of 32-bit numbers. Two rows with equal ids and equal tags
  therefore have equal tables, and a probe is proved by the tag and `slot_ids[slot]` alone: one more cache line, not
  two.
- The bucket a row would like best, its home, is computed from the tag, so that rows are moved without a look at their
  ids. Words along a cluster are in order of their homes (Robin Hood hashing: Celis, Larson and Munro, FOCS 1985): a row
  that is absent is known to be so after as few buckets as one that is present. Deletion moves the rest of the cluster
  back by one and leaves no tombstone: a table that is never rebuilt probes after 10^9 evictions as when it was new.
- Homes use a multiply-shift range reduction (Lemire, "Fast random integer generation in an interval", 2019), so the
  number of buckets follows the capacity exactly instead of the next power of two.

`mix` is Pelle Evensen's moremur: ids that are consecutive, or multiples of 8, 2^20 or 2^32, spread like random ones.

`find_rows` keeps ids in flight in three stages: tag computed and bucket line asked for, bucket probed and the slot's id
asked for, id compared. The output array carries the tag and then the candidate slot between the stages.

Thread: whoever owns the Directory. Nothing here is safe against a second thread, and nothing allocates.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint32, uint64

from tiered_emb.prefetch import prefetch_item

# Positions of the `ledger`, the four counters that kernels keep for the Directory.
ROWS, FRESH, FREE_HEAD, PINNED = 0, 1, 2, 3
NO_SLOT = -1
# Ids between asking for a bucket's line and probing it, and between asking for a slot's id and comparing it.
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


@njit(forceinline=True)
def tag_of(table, id):  # type: ignore[no-untyped-def]
    """The 32-bit tag of a row, in a uint64."""
    return name_of(table, id) >> uint64(32)


@njit(forceinline=True)
def home_of(tag, buckets):  # type: ignore[no-untyped-def]
    """The bucket a tag would like best: floor(tag * buckets / 2^32)."""
    return np.int64((tag * uint64(len(buckets))) >> uint64(32))


@njit(forceinline=True)
def ask_for_buckets(buckets, tag, more):  # type: ignore[no-untyped-def]
    """Prefetch a tag's home and the bucket `more` (at most 8, a line of buckets) after it."""
    home = home_of(tag, buckets)
    prefetch_item(buckets, home)
    prefetch_item(buckets, home + more)


@njit(forceinline=True)
def _slot_in(word):  # type: ignore[no-untyped-def]
    """Slot held by a bucket's word; NO_SLOT for the empty word."""
    return np.int32(np.int64(word & uint64(_SLOT_BITS)) - 1)


@njit(forceinline=True)
def _travelled(buckets, word, bucket):  # type: ignore[no-untyped-def]
    """How far the word in `bucket` sits from its home."""
    distance = bucket - home_of(word >> uint64(32), buckets)
    return distance + len(buckets) if distance < 0 else distance


@njit(forceinline=True)
def _if_tagged(word, tag, otherwise):  # type: ignore[no-untyped-def]
    """`slot + 1` of a word with this tag (0 for the empty word), else `otherwise`; compiles to a conditional move."""
    return word & uint64(_SLOT_BITS) if word >> uint64(32) == tag else otherwise


@njit(forceinline=True)
def _candidate(buckets, tag):  # type: ignore[no-untyped-def]
    """Slot of a bucket with this tag, or NO_SLOT when no row of this tag is there.

    How far a probe has to go is a coin toss that no branch predictor calls. So the first four buckets are looked at
    without a branch, and one branch that is nearly always taken the same way asks whether they were enough: words are
    in order of their homes, so the fourth one alone tells whether the row could lie beyond it.
    """
    bucket = home_of(tag, buckets)
    if bucket + 4 > len(buckets):
        return _candidate_from(buckets, tag, bucket, 0)
    last = buckets[bucket + 3]
    found = _if_tagged(last, tag, uint64(0))
    found = _if_tagged(buckets[bucket + 2], tag, found)
    found = _if_tagged(buckets[bucket + 1], tag, found)
    found = _if_tagged(buckets[bucket], tag, found)
    if found == uint64(0) and last != uint64(0) and _travelled(buckets, last, bucket + 3) >= 3:
        return _candidate_from(buckets, tag, bucket + 4, 4)
    return np.int32(np.int64(found) - 1)


@njit(forceinline=True)
def _candidate_from(buckets, tag, bucket, distance):  # type: ignore[no-untyped-def]
    """The same from a bucket this far from the tag's home on, bucket by bucket."""
    while True:
        if bucket == len(buckets):
            bucket = 0
        word = buckets[bucket]
        if word >> uint64(32) == tag:
            return _slot_in(word)
        if word == uint64(0) or _travelled(buckets, word, bucket) < distance:
            return np.int32(NO_SLOT)
        distance += 1
        bucket += 1


@njit(forceinline=True)
def probe(buckets, slot_ids, tag, id):  # type: ignore[no-untyped-def]
    """Slot of the row, or NO_SLOT: the complete probe, which goes on past rows that only share the tag."""
    bucket, distance = home_of(tag, buckets), 0
    while True:
        word = buckets[bucket]
        if word == uint64(0) or _travelled(buckets, word, bucket) < distance:
            return np.int32(NO_SLOT)
        if word >> uint64(32) == tag and slot_ids[_slot_in(word)] == id:
            return _slot_in(word)
        distance += 1
        bucket += 1
        if bucket == len(buckets):
            bucket = 0


@njit(nogil=True, cache=True)
def find_rows(buckets, slot_ids, tables, ids, slots):  # type: ignore[no-untyped-def]
    """Write the slot of each row (NO_SLOT where absent) and return how many were found."""
    n, found = len(ids), 0
    for i in range(n + PROBE_AHEAD + COMPARE_AHEAD):
        if i < n:
            tag = tag_of(tables[i], ids[i])
            ask_for_buckets(buckets, tag, 3)
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
def locate(buckets, slot_ids, tag, id):  # type: ignore[no-untyped-def]
    """Slot of the row, or NO_SLOT: what `probe` finds, mostly without a branch that cannot be foreseen."""
    slot = _candidate(buckets, tag)
    if slot >= 0 and slot_ids[slot] != id:
        slot = probe(buckets, slot_ids, tag, id)
    return slot


@njit(forceinline=True)
def _stays(buckets, bucket, distance):  # type: ignore[no-untyped-def]
    """1 if a newcomer this far from home passes the word in a bucket, 0 if it takes the bucket."""
    word = buckets[bucket]
    return np.int64(word != uint64(0)) & np.int64(_travelled(buckets, word, bucket) >= distance)


@njit(forceinline=True)
def _place_of(buckets, home):  # type: ignore[no-untyped-def]
    """The bucket that a newcomer takes; the first four are looked at without a branch, as in `_candidate`."""
    bucket, distance = home, 0
    if home + 4 <= len(buckets):
        first = _stays(buckets, home, 0)
        second = first & _stays(buckets, home + 1, 1)
        third = second & _stays(buckets, home + 2, 2)
        if not third & _stays(buckets, home + 3, 3):
            return home + first + second + third
        bucket, distance = home + 4, 4
    while True:
        if bucket == len(buckets):
            bucket = 0
        if not _stays(buckets, bucket, distance):
            return bucket
        distance += 1
        bucket += 1


@njit(forceinline=True)
def put(buckets, tag, slot):  # type: ignore[no-untyped-def]
    """Enter a row that is absent, behind those of its home; the rest of the cluster moves on by one bucket."""
    bucket, carried = _place_of(buckets, home_of(tag, buckets)), (tag << uint64(32)) | uint64(slot + 1)
    while carried != uint64(0):
        if bucket == len(buckets):
            bucket = 0
        buckets[bucket], carried = carried, buckets[bucket]
        bucket += 1


@njit(forceinline=True)
def take_out(buckets, tag, slot):  # type: ignore[no-untyped-def]
    """Remove the row in `slot`; False when the table does not hold that slot (then nothing changes)."""
    wanted, hole = (tag << uint64(32)) | uint64(slot + 1), home_of(tag, buckets)
    while buckets[hole] != wanted:
        if buckets[hole] == uint64(0):
            return False
        hole += 1
        if hole == len(buckets):
            hole = 0
    while True:
        bucket = hole + 1
        if bucket == len(buckets):
            bucket = 0
        word = buckets[bucket]
        if word == uint64(0) or _travelled(buckets, word, bucket) == 0:
            buckets[hole] = uint64(0)
            return True
        buckets[hole] = word
        hole = bucket


@njit(forceinline=True)
def _ask_for_row(buckets, slot_tables, slot_ids, slots, i):  # type: ignore[no-untyped-def]
    """Two-stage prefetch for removing slots[i + ...]: the row's name first, then its buckets.

    No branch: Numba would count references to the arrays around one, at 30 ns a call (so clamp, do not test).
    """
    later = slots[min(i + PROBE_AHEAD, len(slots) - 1)]
    prefetch_item(slot_ids, later)
    prefetch_item(slot_tables, later)
    soon = slots[min(i + PROBE_AHEAD // 2, len(slots) - 1)]
    ask_for_buckets(buckets, tag_of(slot_tables[soon], slot_ids[soon]), 7)


@njit(nogil=True, cache=True)
def evict_rows(buckets, slot_tables, slot_ids, slots, tables, ids):  # type: ignore[no-untyped-def]
    """Take the rows of `slots` out of the table and write their names; returns how many were really there."""
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
        ask_for_buckets(buckets, tag_of(tables[later], ids[later]), 7)
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
            marks[_slot_in(buckets[bucket])] = True
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
            ask_for_buckets(buckets, tag_of(slot_tables[later], slot_ids[later]), 7)
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
