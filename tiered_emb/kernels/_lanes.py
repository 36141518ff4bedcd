"""Sums over the columns of a row in a fixed order that vector units can follow: eight lanes.

A plain left-to-right float32 sum is one long chain of dependent additions. Here lane l adds columns l, l + 8, l + 16,
... from zero, and the lanes are folded in halves: l + (l + 4), then l + (l + 2), then l + (l + 1). The order is part
of the definition of whatever uses it (row-wise Adagrad's mean square, the gradients of per-sample weights), so the
torch and the Numba form below agree to the bit on every device. Columns past the last multiple of eight count as
zeros.

Numba's cache does not see edits of this file: after one, delete the `__pycache__` folders of its users.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8


def lane_sum(terms: torch.Tensor) -> torch.Tensor:
    """Sum of each row of terms float32 (n, D) in lane order; float32 (n,), on the device of `terms`."""
    n, dim = terms.shape
    blocks = -(-dim // LANES)
    padded = torch.nn.functional.pad(terms, (0, blocks * LANES - dim)).view(n, blocks, LANES)
    lanes = terms.new_zeros((n, LANES))
    for block in range(blocks):
        lanes = lanes + padded[:, block]
    lanes = lanes[:, :4] + lanes[:, 4:]
    lanes = lanes[:, :2] + lanes[:, 2:]
    return lanes[:, 0] + lanes[:, 1]


@intrinsic
def lane_dot(typingctx: Any, a: Any, i: Any, b: Any, j: Any) -> Any:
    """Sum over d of a[i, d] * b[j, d] in lane order; a and b two-dimensional C-ordered float32 of the same width.

    Written in vector instructions of eight lanes, because Numba leaves eight running sums in Python as eight scalars.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = [_row(context, builder, signature.args[k], args[k], args[k + 1]) for k in (0, 2)]
        columns = _columns(context, builder, signature.args[0], args[0])
        return _fold(builder, _lanes_of_products(builder, rows, columns))

    return types.float32(a, types.int64, b, types.int64), codegen


def _row(context: Any, builder: Any, array_type: Any, array: Any, row: Any) -> Any:
    """Address of the first column of a row."""
    struct = context.make_array(array_type)(context, builder, array)
    zero = ir.Constant(row.type, 0)
    return cgutils.get_item_pointer(context, builder, array_type, struct, [row, zero], wraparound=False)


def _columns(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    struct = context.make_array(array_type)(context, builder, array)
    return cgutils.unpack_tuple(builder, struct.shape, 2)[1]


def _lanes_of_products(builder: Any, rows: list[Any], columns: Any) -> Any:
    """The eight sums: whole blocks of eight columns at once, the rest column by column."""
    vector, eight = ir.VectorType(ir.FloatType(), LANES), ir.Constant(columns.type, LANES)
    lanes = cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * LANES))
    whole = builder.sub(columns, builder.urem(columns, eight))
    with cgutils.for_range_slice(builder, ir.Constant(columns.type, 0), whole, eight) as (column, _):
        blocks = [builder.bitcast(builder.gep(row, [column]), vector.as_pointer()) for row in rows]
        product = builder.fmul(*(builder.load(block, align=4) for block in blocks))
        builder.store(builder.fadd(builder.load(lanes), product), lanes)
    with cgutils.for_range_slice(builder, whole, columns, ir.Constant(columns.type, 1)) as (column, _):
        product = builder.fmul(*(builder.load(builder.gep(row, [column])) for row in rows))
        sums, lane = builder.load(lanes), builder.sub(column, whole)
        total = builder.fadd(builder.extract_element(sums, lane), product)
        builder.store(builder.insert_element(sums, total, lane), lanes)
    return builder.load(lanes)


def _fold(builder: Any, lanes: Any) -> Any:
    """Halve the lanes until one is left."""
    while lanes.type.count > 1:
        half = lanes.type.count // 2
        low, high = (
            builder.shuffle_vector(lanes, lanes, ir.Constant(ir.VectorType(ir.IntType(32), half), list(part)))
            for part in (range(half), range(half, 2 * half))
        )
        lanes = builder.fadd(low, high)
    return builder.extract_element(lanes, ir.Constant(ir.IntType(32), 0))
