"""A tier: a Directory that knows which row lies in which slot, and the slab of rows itself on one device.

Passive: it moves nothing by itself and knows no other tier (:mod:`tiered_emb.group` coordinates). One thread plans on
the Directory; row work may come from any thread as long as the slots it touches are pinned or planned.

A host slab is anonymous memory reserved for the largest capacity the tier may ever get; pages cost nothing until a row
is written, and are given back to the system when the tier shrinks. Weight and optimizer state lie in two arrays so that
a 64-float weight row covers whole cache lines.

Shapes: S slots, D dimension, K state width, N rows.
"""

from __future__ import annotations

import mmap
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from storage.memory import give_back, zeros
from tiered_emb import kernels
from tiered_emb.cache import Directory, room
from tiered_emb.cache.admission import admission_bytes, rule_of
from tiered_emb.cache.arrays import Arrays
from tiered_emb.cache.sizes import most_rows
from tiered_emb.metrics import RowCounters
from tiered_emb.plan import Ids, Rows, Slots, TableNumbers, Victims
from tiered_emb.staging import staging_bytes, staging_for

Flags: TypeAlias = NDArray[np.bool_]

FLOAT_BYTES = 4
ADMISSION = "admission."  # in front of the names of its arrays
_NOTHING_BESIDE: AbstractContextManager[None] = nullcontext()


class Slab:
    """Rows of one tier: ``weight`` (S, D) and ``state`` (S, K), float32, on one device."""

    def __init__(self, max_rows: int, dim: int, state_width: int, device: torch.device) -> None:
        self.device = device
        if device.type == "cpu":
            self._weight_map, self.weight = _reserve(max_rows, dim)
            self._state_map, self.state = _reserve(max_rows, state_width)
        else:
            self.weight = torch.empty((max_rows, dim), dtype=torch.float32, device=device)
            self.state = torch.empty((max_rows, state_width), dtype=torch.float32, device=device)

    def discard_from(self, slot: int) -> None:
        """Give the memory of slots ``slot`` and above back to the system (host slabs only)."""
        if self.device.type == "cpu":
            _discard(self._weight_map, slot * self.weight.shape[1] * FLOAT_BYTES)
            _discard(self._state_map, slot * self.state.shape[1] * FLOAT_BYTES)


def _reserve(rows: int, width: int) -> tuple[mmap.mmap | None, torch.Tensor]:
    """(rows, width) float32 in private anonymous memory, in huge pages where the system grants them."""
    if rows * width == 0:
        return None, torch.from_numpy(np.empty((rows, width), np.float32))
    memory = mmap.mmap(-1, rows * width * FLOAT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and len(memory) >= 1 << 26:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, torch.frombuffer(memory, dtype=torch.float32).view(rows, width)


def _discard(memory: mmap.mmap | None, first_byte: int) -> None:
    start = -(-first_byte // mmap.PAGESIZE) * mmap.PAGESIZE
    if memory is not None and start < len(memory):
        memory.madvise(mmap.MADV_DONTNEED, start, len(memory) - start)


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """What a tier knows of its rows, and the host memory that takes.

    Attributes:
        policy: which rows leave first, by name.
        shares: tables that may have a floor or a quota.
        admission: which rows come in from above: see `tiered_emb.cache.admission.rule_of`.
    """

    policy: str
    shares: int = 0
    admission: str = "always"

    def bytes_for(self, rows: int) -> int:
        """Most bytes for so many slots, what `Tier` keeps of each included, victims' arrays left out."""
        return Directory.bytes_for(rows, self.policy, self.shares) + admission_bytes(self.admission, rows) + 3 * rows

    def capacity_for(self, budget_bytes: int, row_bytes: int) -> int:
        """Most slots, 0 included, that fit in a budget with their rows."""
        return most_rows(budget_bytes, row_bytes, lambda rows: rows * row_bytes + self.bytes_for(rows))


class Tier:
    """One Directory and one slab.

    Attributes:
        name: "hbm" or "ddr".
        directory: which (table, id) lies in which slot.
        admission: which of the rows that come down from a tier above may come in.
        slab: the rows.
        dirty: (S,) bool, rows that differ from the Store's.
        stored: (S,) bool, rows of which the Store is known to have a version.
        unsaved: (S,) bool, dirty rows that have not changed since a state was begun in the Store, and are still to be
            given to it (`tiered_emb.saving`).
        counters: rows that hit, missed, left and were written back, by table.
    """

    def __init__(self, name: str, directory: Directory, slab: Slab, kind: Bookkeeping | None = None) -> None:
        self.name = name
        self._kind = Bookkeeping(directory.policy_name) if kind is None else kind
        self.admission = rule_of(self._kind.admission, directory.capacity_rows)
        self.directory = directory
        self.slab = slab
        self.kernels = kernels.for_device(slab.device)
        self._staging = staging_for(slab.weight, slab.state)
        self.dirty: NDArray[np.bool_] = zeros(slab.weight.shape[0], np.bool_)
        self.stored: NDArray[np.bool_] = zeros(slab.weight.shape[0], np.bool_)
        self.unsaved: NDArray[np.bool_] = zeros(slab.weight.shape[0], np.bool_)
        self.counters = RowCounters()

    @property
    def capacity_rows(self) -> int:
        """S: rows there is room for."""
        return self.directory.capacity_rows

    @property
    def directory_bytes(self) -> int:
        """Most host memory of the bookkeeping, its victims' arrays left out."""
        return self._kind.bytes_for(self.capacity_rows)

    @property
    def slab_bytes(self) -> int:
        """Device memory of the rows."""
        return self.capacity_rows * row_bytes(self.slab)

    @property
    def staging_bytes(self) -> int:
        """Host memory that rows on their way to the slab's device take."""
        return staging_bytes(self.slab.device, self.slab.weight.shape[0], row_bytes(self.slab) // FLOAT_BYTES)

    def working(self) -> AbstractContextManager[None]:
        """For work on the slab in the caller's stream: after rows that moved before, before those that move later."""
        return _NOTHING_BESIDE if self._staging is None else self._staging.working()

    def on_device(self, array: NDArray[Any] | torch.Tensor) -> torch.Tensor:
        """``array`` where the slab is; itself if that is the host."""
        tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
        return tensor.to(self.slab.device)

    def read(self, slots: Slots, out: Rows) -> None:
        """Copy the rows of ``slots`` (N,) to ``out`` (N, D + K)."""
        slab = self.slab
        if self._staging is not None:
            self._staging.read(slots, out, partial(self.kernels.read_rows, slab.weight, slab.state))
        elif len(slots):
            self.kernels.read_rows(slab.weight, slab.state, torch.from_numpy(slots), torch.from_numpy(out))

    def write(self, slots: Slots, rows: Rows) -> None:
        """Copy ``rows`` (N, D + K) to ``slots`` (N,)."""
        slab = self.slab
        if self._staging is not None:
            self._staging.write(slots, rows, partial(self.kernels.write_rows, slab.weight, slab.state))
        elif len(slots):
            self.kernels.write_rows(slab.weight, slab.state, torch.from_numpy(slots), torch.from_numpy(rows))

    def admit(self, tables: TableNumbers, ids: Ids, counts: NDArray[np.int32], slots: Slots) -> Victims:
        """Give each absent row (N,) a slot, written to ``slots`` (N,), clean and not known to be stored; the rows that
        leave for it.

        Requires: the Directory has room for them.
        """
        admission = self.directory.admit(tables, ids, counts, slots)
        gone = admission.victim_slots.copy()  # the Directory's own arrays last until its next admission
        victims = self._leaving(gone, admission.victim_tables.copy(), admission.victim_ids.copy())
        self.counters.add("evictions", victims.tables)
        self.counters.add("rows", tables)
        self.counters.add("rows", victims.tables, -1)
        self.dirty[gone] = self.dirty[slots] = False  # a row at its quota leaves its slot free
        self.unsaved[gone] = self.unsaved[slots] = False
        self.stored[slots] = False
        return victims

    def _leaving(self, slots: Slots, tables: TableNumbers, ids: Ids) -> Victims:
        """Rows (V,) that leave the tier, with no tier below to go to so far."""
        past = np.full(len(slots), -1, np.int32)
        return Victims(slots, tables, ids, self.dirty[slots], self.stored[slots], self.unsaved[slots], past)

    def take_marks(self, slots: Slots, dirty: Flags, stored: Flags, unsaved: Flags) -> None:
        """Rows that came from another tier, or another slot, are as they were there."""
        self.dirty[slots], self.stored[slots], self.unsaved[slots] = dirty, stored, unsaved

    def lets_in(self, tables: TableNumbers, ids: Ids) -> NDArray[np.bool_]:
        """Which of absent rows (N,) that come down, oldest first, may come in; the rule of admission counts all."""
        allowed = np.empty(len(ids), np.bool_)
        self.admission.admits(tables, ids, np.ones(len(ids), np.int32), allowed)
        coming = np.flatnonzero(allowed)
        allowed[coming] = room.fitting(self.directory, tables[coming])
        return allowed

    def remove(self, slots: Slots) -> None:
        """Free unpinned slots (N,), whose rows go elsewhere or are forgotten."""
        self.counters.add("rows", self.directory.slot_tables[slots], -1)
        self.directory.remove(slots)
        self.dirty[slots] = self.unsaved[slots] = False

    def forget(self) -> None:
        """Be empty: every row, pin and count of the policy goes, and no row is written."""
        slots = self.directory.occupied()
        self.counters.add("rows", self.directory.slot_tables[slots], -1)
        self.dirty[slots] = self.stored[slots] = self.unsaved[slots] = False
        self.directory.clear()
        self.admission = rule_of(self._kind.admission, self.capacity_rows)

    def save(self) -> Arrays:
        """What :meth:`load` needs, by name: which rows there are, what the policy and the rule of admission know."""
        admission = {ADMISSION + name: array for name, array in self.admission.save().items()}
        return self.directory.save() | admission

    def load(self, saved: Arrays) -> Slots:
        """Name the rows that another tier of this capacity, policy and admission held when it was saved, clean and not
        known to be stored; their slots (N,), for the caller to fill.

        Requires: the tier is empty, and every table of the rows is counted here.
        Raises ValueError, with nothing changed, for what :meth:`save` did not give for such a tier.
        """
        rule = rule_of(self._kind.admission, self.capacity_rows)
        rule.load({name.removeprefix(ADMISSION): saved[name] for name in saved if name.startswith(ADMISSION)})
        self.directory.load({name: saved[name] for name in saved if not name.startswith(ADMISSION)})
        self.admission = rule
        slots = self.directory.occupied()
        self.counters.add("rows", self.directory.slot_tables[slots])
        return slots

    def shrink(self, capacity_rows: int) -> Victims:
        """Drop to ``capacity_rows``; the rows that had to leave, still in the slab until :meth:`discard`. Those that
        floors keep are among them.

        Requires: no slot at or above ``capacity_rows`` is pinned.
        """
        gone = self.directory.resize(capacity_rows)
        self.counters.add("evictions", gone.tables)
        self.counters.add("rows", gone.tables, -1)
        self.admission.resize(capacity_rows)
        victims = self._leaving(gone.slots, gone.tables, gone.ids)
        for marks in self.dirty, self.unsaved:  # in place: whoever trains may be marking rows of pinned slots
            marks[capacity_rows:] = False
        return victims

    def discard(self) -> None:
        """Give back the memory above the capacity."""
        self.slab.discard_from(self.capacity_rows)
        give_back(self.dirty, self.capacity_rows)
        give_back(self.stored, self.capacity_rows)
        give_back(self.unsaved, self.capacity_rows)


def row_bytes(slab: Slab) -> int:
    """Bytes of one row, state included."""
    return (slab.weight.shape[1] + slab.state.shape[1]) * FLOAT_BYTES
