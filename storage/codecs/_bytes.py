"""Numbers of two and four bytes at any byte of a row, for Numba kernels: columns lie back to back, on odd bytes too.

LLVM makes vector instructions of loops over these. Bytes are in the machine's order, which is little endian wherever
this runs (`storage.row_log` refuses others).

Numba's cache does not see edits of this file: after one, delete the `__pycache__` folders of its users.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _address(context: Any, builder: Any, signature: Any, args: Any, bits: int) -> Any:
    """Of byte args[2] of row args[1] of the array args[0], (N, B) uint8 in C order, as a pointer to so many bits."""
    struct = context.make_array(signature.args[0])(context, builder, args[0])
    indices = [args[1], args[2]]
    item = cgutils.get_item_pointer(context, builder, signature.args[0], struct, indices, wraparound=False)
    return builder.bitcast(item, ir.IntType(bits).as_pointer())


def _loader(number: Any) -> Any:
    def typed(typingctx: Any, rows: Any, n: Any, byte: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(_address(context, builder, signature, args, number.bitwidth), align=1)

        return number(rows, types.int64, types.int64), codegen

    return intrinsic(typed)


def _storer(number: Any) -> Any:
    def typed(typingctx: Any, rows: Any, n: Any, byte: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[3], _address(context, builder, signature, args, number.bitwidth), align=1)
            return context.get_dummy_value()

        return types.void(rows, types.int64, types.int64, number), codegen

    return intrinsic(typed)


load16, load32 = _loader(types.uint16), _loader(types.uint32)
"""The number at byte `byte` of row n of `rows`, (N, B) uint8: load16(rows, n, byte)."""

store16, store32 = _storer(types.uint16), _storer(types.uint32)
"""Write a number there: store16(rows, n, byte, value)."""
