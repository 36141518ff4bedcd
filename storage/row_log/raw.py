"""Memory by address for Numba kernels: loads, stores, copies and prefetches.

Segments lie in LMDB's memory map and in write buffers, so the kernels that read them work on addresses (uint64), not on
arrays. Nothing here checks an address: the caller owns the bytes it names. Loads and stores need no alignment and are
little endian, the byte order of the format (`docs/formats.md`); `storage.lmdb_store` refuses big-endian machines.

`madvise` and `mincore` are libc's, called without the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

_BYTES = ir.IntType(8).as_pointer()
_I1, _I32, _I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)

madvise = types.ExternalFunction("madvise", types.int32(types.uint64, types.uint64, types.int32))
mincore = types.ExternalFunction("mincore", types.int32(types.uint64, types.uint64, types.uint64))


def _loader(bits: int) -> Any:
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
            number = builder.load(pointer)
            number.align = 1
            return number if bits == 64 else builder.zext(number, _I64)

        return types.uint64(types.uint64), codegen

    return intrinsic(load)


def _storer(bits: int) -> Any:
    def store(typingctx: Any, address: Any, number: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
            narrow = args[1] if bits == 64 else builder.trunc(args[1], ir.IntType(bits))
            builder.store(narrow, pointer).align = 1
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64), codegen

    return intrinsic(store)


load8, load16, load32, load64 = (_loader(bits) for bits in (8, 16, 32, 64))
store8, store32, store64 = (_storer(bits) for bits in (8, 32, 64))


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy `count` (int64) bytes between places that do not overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _BYTES, _I64, _I1])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.memcpy.p0.p0.i64")
        pointers = [builder.inttoptr(address, _BYTES) for address in args[:2]]
        builder.call(function, [*pointers, args[2], ir.Constant(_I1, 0)])
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.int64), codegen


def _prefetcher(locality: int) -> Any:
    def prefetch(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            hints = [ir.Constant(_I32, hint) for hint in (0, locality, 1)]  # for reading; data
            builder.call(function, [builder.inttoptr(args[0], _BYTES), *hints])
            return context.get_dummy_value()

        return types.void(types.uint64), codegen

    return intrinsic(prefetch)


# Ask for the cache line at an address; any address will do, nothing is read. The second brings it to the second cache
# only, which can wait for more lines at a time.
prefetch, prefetch_far = _prefetcher(3), _prefetcher(2)


def _plain(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    array = context.make_array(kind)(context, builder, value)
    array.meminfo = cgutils.get_null_value(array.meminfo.type)
    array.parent = cgutils.get_null_value(array.parent.type)
    return array._getvalue()


@intrinsic
def uncounted(typingctx: Any, value: Any) -> Any:
    """The same array, or tuple of arrays, which must outlive its use, without Numba's count of references to it.

    In a loop with branches Numba counts an array up and down again whenever a helper gets it: two atomic operations,
    which cost as much as a probe of the index. Kernels whose arguments belong to the caller need none of that.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, result = signature.return_type, args[0]
        if isinstance(kind, types.Array):
            return _plain(context, builder, kind, result)
        for i, one in enumerate(kind.types):
            item = _plain(context, builder, one, builder.extract_value(result, i))
            result = builder.insert_value(result, item, i)
        return result

    return value(value), codegen


def row_step(rows: NDArray[np.uint8]) -> np.uint64:
    """Bytes from one row of an array to the next, as kernels add them to addresses (negative ones wrap around)."""
    return np.uint64(rows.strides[0] % (1 << 64))


class _Memory:
    """What numpy makes an array of (the array interface, version 3)."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}


def bytes_at(address: int, size: int) -> NDArray[np.uint8]:
    """Memory as an array that cannot be written; the caller sees to it that it stays mapped."""
    return np.asarray(_Memory(address, size))
