"""Software prefetch from Numba: a hint to bring one array element's cache line near, which never reads or faults.

Probing a table larger than the caches costs a memory latency an id unless the lines of the next few ids are asked for
while the present one is worked on; the kernels of this package do that with `prefetch_item`.

Call it in straight-line code: in a helper that branches, or in one that Numba inlines itself (`inline="always"`), Numba
counts references to the arrays around the branch, with atomic instructions, and the loop is three to ten times slower.
Clamp the position instead of testing it, and let LLVM inline (`forceinline=True`).
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTE_POINTER = ir.IntType(8).as_pointer()
_INT32 = ir.IntType(32)
_READ, _KEEP_IN_ALL_CACHES, _DATA = 0, 3, 1


@intrinsic
def prefetch_item(typingctx, array, position):  # type: ignore[no-untyped-def]
    """Ask for the cache line of `array[position]` (1-D array, position not negative); any position is harmless."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        array_type = signature.args[0]
        data = context.make_array(array_type)(context, builder, args[0])
        address = cgutils.get_item_pointer(context, builder, array_type, data, [args[1]], wraparound=False)
        _emit_prefetch(builder, builder.bitcast(address, _BYTE_POINTER))
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


def _emit_prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Emit LLVM's prefetch intrinsic for one address."""
    signature = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _INT32, _INT32, _INT32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [address, *(ir.Constant(_INT32, flag) for flag in (_READ, _KEEP_IN_ALL_CACHES, _DATA))])
