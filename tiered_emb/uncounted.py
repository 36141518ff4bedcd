"""Arrays without a count of references, for the loops of Numba kernels.

Where a helper that branches gets an array, Numba counts the array up and down again around the call: two atomic
operations, tens of nanoseconds in a loop that has five to spend. The arguments of a kernel belong to its caller, who
keeps them as long as the kernel runs, so nothing needs to be counted.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _strip(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    plain = context.make_array(kind)(context, builder, array)
    plain.meminfo = cgutils.get_null_value(plain.meminfo.type)
    plain.parent = cgutils.get_null_value(plain.parent.type)
    return plain._getvalue()


@intrinsic
def uncounted(typingctx: Any, value: Any) -> Any:
    """The same array, or tuple of arrays, which must outlive its use."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, result = signature.return_type, args[0]
        if isinstance(kind, types.Array):
            return _strip(context, builder, kind, result)
        for i, one in enumerate(kind.types):
            item = _strip(context, builder, one, builder.extract_value(result, i))
            result = builder.insert_value(result, item, i)
        return result

    return value(value), codegen
