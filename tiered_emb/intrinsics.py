"""Software prefetch for Numba kernels: the one thing they need that Python cannot say.

Row work on tables larger than the caches waits for memory; asking for a row some iterations before it is used hides
most of that wait. A prefetch is a hint: it never faults, reads nothing and changes no result, whatever the address.

Call it in straight-line code: in a helper that branches, or in one that Numba inlines itself (`inline="always"`), Numba
may count references to the arrays around the branch, with atomic instructions, and the loop is three to ten times
slower. Clamp the position instead of testing it, and let LLVM inline (`forceinline=True`).

Numba's cache does not see edits of this file: after one, delete the `__pycache__` folders of the kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTE_POINTER = ir.IntType(8).as_pointer()
_I32 = ir.IntType(32)
_LINE = 16  # float32 numbers a cache line
_FOR_READING, _KEEP_IN_ALL_CACHES, _DATA_CACHE = 0, 3, 1


def _prefetch(context: Any, builder: Any, array_type: Any, array: Any, indices: list[Any]) -> Any:
    struct = context.make_array(array_type)(context, builder, array)
    item = cgutils.get_item_pointer(context, builder, array_type, struct, indices, wraparound=False)
    return _prefetch_at(context, builder, builder.bitcast(item, _BYTE_POINTER))


def _prefetch_at(context: Any, builder: Any, pointer: Any) -> Any:
    signature = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    hints = [ir.Constant(_I32, hint) for hint in (_FOR_READING, _KEEP_IN_ALL_CACHES, _DATA_CACHE)]
    builder.call(function, [pointer, *hints])
    return context.get_dummy_value()


@intrinsic
def prefetch_item(typingctx: Any, array: Any, i: Any) -> Any:
    """Ask for the cache line of array[i], a one-dimensional array; any i that is not negative is harmless."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _prefetch(context, builder, signature.args[0], args[0], [args[1]])

    return types.void(array, types.int64), codegen


@intrinsic
def prefetch2(typingctx: Any, array: Any, i: Any, j: Any) -> Any:
    """Ask for the cache line of array[i, j], a two-dimensional array."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _prefetch(context, builder, signature.args[0], args[0], [args[1], args[2]])

    return types.void(array, types.int64, types.int64), codegen


@njit(inline="always")
def prefetch_row(rows: Any, row: Any) -> None:
    """Ask for every cache line of rows[row], a two-dimensional float32 array."""
    for column in range(0, rows.shape[1], _LINE):
        prefetch2(rows, row, column)


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@njit(forceinline=True)
def floats_at(address: Any, count: Any) -> Any:
    """`count` float32 numbers at an address, as an array; the caller sees to it that they stay there."""
    return carray(_pointer(address), (count,), np.float32)


@intrinsic
def _prefetch_address(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _prefetch_at(context, builder, builder.inttoptr(args[0], _BYTE_POINTER))

    return types.void(types.int64), codegen


@njit(inline="always")
def prefetch_bytes(address: Any, count: Any) -> None:
    """Ask for every cache line of `count` bytes at an address."""
    for byte in range(0, count, 4 * _LINE):
        _prefetch_address(address + byte)
