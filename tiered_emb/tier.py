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

from storage.codecs import Draws
from storage.memory import give_back, zeros
from tiered_emb import kernels
from tiered_emb.cache import Directory, room
from tiered_emb.cache.admission import admission_bytes, rule_of
from tiered_emb.cache.arrays import Arrays
from tiered_emb.cache.sizes import most_rows
from tiered_emb.metrics import RowCounters
from tiered_emb.plan import Ids, Rows, Slots, Steps, TableNumbers, Victims
from tiered_emb.row_form import RowForm
from tiered_emb.staging import sent, staging_bytes, staging_for

Flags: TypeAlias = NDArray[np.bool_]

FLOAT_BYTES = 4
ADMISSION = "admission."  # in front of the names of its arrays
_NO_STEP = np.uint32(0)
_NOTHING_BESIDE: AbstractContextManager[None] = nullcontext()


class Slab:
    """Rows that are worked on: ``weight`` (S, D) and ``state`` (S, K), float32, on one device.

    Attributes:
        rows: S.
        row_bytes: of one row, state included.
    """

    def __init__(self, max_rows: int, dim: int, state_width: int, device: torch.device) -> None:
        self.device = device
        self.rows, self.row_bytes = max_rows, (dim + state_width) * FLOAT_BYTES
        self._kernels = kernels.for_device(device)
        if device.type == "cpu":
            self._weight_map, weight = _reserve(max_rows * dim * FLOAT_BYTES)
            self._state_map, state = _reserve(max_rows * state_width * FLOAT_BYTES)
            self.weight = torch.from_numpy(weight.view(np.float32).reshape(max_rows, dim))
            self.state = torch.from_numpy(state.view(np.float32).reshape(max_rows, state_width))
        else:
            self.weight = torch.empty((max_rows, dim), dtype=torch.float32, device=device)
            self.state = torch.empty((max_rows, state_width), dtype=torch.float32, device=device)
        self._staging = staging_for(self.weight, self.state)

    @property
    def staging_bytes(self) -> int:
        """Host memory that rows on their way to the device take."""
        return staging_bytes(self.device, self.rows, self.row_bytes // FLOAT_BYTES)

    def working(self) -> AbstractContextManager[None]:
        """As `Tier.working`."""
        return _NOTHING_BESIDE if self._staging is None else self._staging.working()

    def read(self, slots: Slots, out: Rows) -> None:
        """As `Tier.read`."""
        if self._staging is not None:
            self._staging.read(slots, out, partial(self._kernels.read_rows, self.weight, self.state))
        elif len(slots):
            self._kernels.read_rows(self.weight, self.state, torch.from_numpy(slots), torch.from_numpy(out))

    def write(self, slots: Slots, rows: Rows, draws: Draws | None = None) -> None:
        """As `Tier.write`."""
        if self._staging is not None:
            self._staging.write(slots, rows, partial(self._kernels.write_rows, self.weight, self.state))
        elif len(slots):
            self._kernels.write_rows(self.weight, self.state, torch.from_numpy(slots), torch.from_numpy(rows))

    def discard_from(self, slot: int) -> None:
        """Give the memory of slots ``slot`` and above back to the system (host slabs only)."""
        if self.device.type == "cpu":
            _discard(self._weight_map, slot * self.weight.shape[1] * FLOAT_BYTES)
            _discard(self._state_map, slot * self.state.shape[1] * FLOAT_BYTES)


class PackedSlab:
    """Rows of a lower tier in host memory, packed as their codec packs them: (S, B) uint8.

    Attributes:
        rows: S.
        row_bytes: B.
        staging_bytes: 0, since nothing is staged.
    """

    staging_bytes = 0

    def __init__(self, max_rows: int, form: RowForm) -> None:
        self.device = torch.device("cpu")
        self.rows, self.row_bytes = max_rows, form.rest_bytes
        self._form = form
        self._map, packed = _reserve(max_rows * form.rest_bytes)
        self._packed = packed.reshape(max_rows, form.rest_bytes)

    def working(self) -> AbstractContextManager[None]:
        """As `Tier.working`."""
        return _NOTHING_BESIDE

    def read(self, slots: Slots, out: Rows) -> None:
        """As `Tier.read`."""
        self._form.unpack(self._packed[slots], out)

    def write(self, slots: Slots, rows: Rows, draws: Draws | None = None) -> None:
        """As `Tier.write`."""
        packed = np.empty((len(slots), self.row_bytes), np.uint8)
        self._form.pack(rows, packed, Draws.none(len(slots)) if draws is None else draws)
        self._packed[slots] = packed

    def discard_from(self, slot: int) -> None:
        """As `Slab.discard_from`."""
        _discard(self._map, slot * self.row_bytes)


def _reserve(size: int) -> tuple[mmap.mmap | None, NDArray[np.uint8]]:
    """So many bytes of private anonymous memory, in huge pages where the system grants them."""
    if size == 0:
        return None, np.empty(0, np.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and len(memory) >= 1 << 26:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, np.frombuffer(memory, np.uint8)


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
        kernels: that work on it.
        dirty: (S,) bool, rows that differ from the Store's.
        stored: (S,) bool, rows of which the Store is known to have a version.
        unsaved: (S,) bool, dirty rows that have not changed since a state was begun in the Store, and are still to be
            given to it (`tiered_emb.saving`).
        counters: rows that hit, missed, left and were written back, by table.
    """

    def __init__(
        self,
        name: str,
        directory: Directory,
        slab: Slab | PackedSlab,
        kind: Bookkeeping | None = None,
        *,
        counts_steps: bool = False,
    ) -> None:
        self.name = name
        self._kind = Bookkeeping(directory.policy_name) if kind is None else kind
        self.admission = rule_of(self._kind.admission, directory.capacity_rows)
        self.directory = directory
        self.slab = slab
        self.kernels = kernels.for_device(slab.device)
        self.dirty: NDArray[np.bool_] = zeros(slab.rows, np.bool_)
        self.stored: NDArray[np.bool_] = zeros(slab.rows, np.bool_)
        self.unsaved: NDArray[np.bool_] = zeros(slab.rows, np.bool_)
        self._steps: Steps | None = zeros(slab.rows, np.uint32) if counts_steps else None
        self.counters = RowCounters()

    @property
    def capacity_rows(self) -> int:
        """S: rows there is room for."""
        return self.directory.capacity_rows

    @property
    def directory_bytes(self) -> int:
        """Most host memory of the bookkeeping, its victims' arrays left out."""
        return self._kind.bytes_for(self.capacity_rows) + (0 if self._steps is None else 4 * self.capacity_rows)

    @property
    def slab_bytes(self) -> int:
        """Device memory of the rows."""
        return self.capacity_rows * self.slab.row_bytes

    @property
    def staging_bytes(self) -> int:
        """Host memory that rows on their way to the slab's device take."""
        return self.slab.staging_bytes

    def working(self) -> AbstractContextManager[None]:
        """For work on the slab in the caller's stream: after rows that moved before, before those that move later."""
        return self.slab.working()

    @property
    def worked_on(self) -> Slab:
        """The slab, of a top tier."""
        assert isinstance(self.slab, Slab), self.name
        return self.slab

    def count_step(self, slots: Slots, step: int) -> None:
        """Rows of ``slots`` (N,) are changed in this step."""
        if self._steps is not None:
            self._steps[slots] = max(1, step & 0xFFFFFFFF)

    def steps_of(self, slots: Slots) -> Steps:
        """(N,): in which step rows were changed last; 0 = it does not matter, since they are as they came."""
        return np.broadcast_to(_NO_STEP, len(slots)) if self._steps is None else self._steps[slots]

    def on_device(self, array: NDArray[Any] | torch.Tensor) -> torch.Tensor:
        """``array`` where the slab is; itself if that is the host. The host does not wait (`staging.sent`)."""
        return sent(array if isinstance(array, torch.Tensor) else torch.from_numpy(array), self.slab.device)

    def read(self, slots: Slots, out: Rows) -> None:
        """Copy the rows of ``slots`` (N,) to ``out`` (N, D + K)."""
        self.slab.read(slots, out)

    def write(self, slots: Slots, rows: Rows, draws: Draws | None = None) -> None:
        """Copy ``rows`` (N, D + K) to ``slots`` (N,); where they lie packed, rounded by ``draws``, or to nearest."""
        self.slab.write(slots, rows, draws)

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
        if self._steps is not None:
            self._steps[slots] = 0
        return victims

    def _leaving(self, slots: Slots, tables: TableNumbers, ids: Ids) -> Victims:
        """Rows (V,) that leave the tier, with no tier below to go to so far."""
        past = np.full(len(slots), -1, np.int32)
        marks = self.dirty[slots], self.stored[slots], self.unsaved[slots]
        return Victims(slots, tables, ids, *marks, self.steps_of(slots), past)

    def take_marks(self, slots: Slots, dirty: Flags, stored: Flags, unsaved: Flags, steps: Steps | None = None) -> None:
        """Rows that came from another tier, or (with ``steps``) another slot, are as they were there."""
        self.dirty[slots], self.stored[slots], self.unsaved[slots] = dirty, stored, unsaved
        if self._steps is not None and steps is not None:
            self._steps[slots] = steps

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
        if self._steps is not None:
            give_back(self._steps, self.capacity_rows)
