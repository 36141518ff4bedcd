"""Eight words of a hash table at a time: comparisons of a whole cache line, for Numba kernels.

A group is eight 64-bit words side by side, 64 bytes. Each function here but the last compares all eight at once and
returns a mask: bit i says whether it is true of word i. A loop would find the word after a number of steps that no
branch predictor foresees, at some 20 cycles a wrong guess; this is one load, one comparison and, with `first_of`, one
count of zeros. The idea is that of Google's Swiss tables (Kulukundis, "Designing a fast, efficient, cache-friendly hash
table, step by step", CppCon 2017) and Facebook's F14 (Bronson and Shi, 2019), which compare a byte of each key so.

Numba has no vectors, so the comparisons are written in LLVM's language, which has: LLVM makes of them what the
machine's processor can, one instruction with AVX-512, a few with AVX2 or NEON. The words need be aligned as words only:
a group that lies in two cache lines costs the second one.

Nothing here checks a group's number. Numba's cache does not see edits of this file: after one, delete the `__pycache__`
folders of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

GROUP = 8  # words

_Value: TypeAlias = Any  # llvmlite is untyped
_I1, _I8, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
_WORDS = ir.VectorType(_I64, GROUP)
_LOW_HALF = 0xFFFFFFFF


def _all(value: int) -> ir.Constant:
    return ir.Constant(_WORDS, [ir.Constant(_I64, value)] * GROUP)


def _spread(builder: _Value, word: _Value) -> _Value:
    """Eight times the same word."""
    first = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, GROUP), [ir.Constant(_I32, 0)] * GROUP))


def _load(context: _Value, builder: _Value, kind: _Value, array: _Value, group: _Value) -> _Value:
    """The words of a group of an array of 64-bit words."""
    start = builder.gep(context.make_array(kind)(context, builder, array).data, [builder.mul(group, group.type(GROUP))])
    words = builder.load(builder.bitcast(start, _WORDS.as_pointer()))
    words.align = 8
    return words


def _comparing(compare: Callable[..., _Value]) -> Callable[..., _Value]:
    """Code of an intrinsic: what `compare`, (builder, words, numbers) -> eight flags, says of a group and numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = _load(context, builder, signature.args[0], *args[:2])
        return builder.zext(builder.bitcast(compare(builder, words, *args[2:]), _I8), _I64)

    return codegen


def _is_empty(builder: _Value, words: _Value) -> _Value:
    return builder.icmp_unsigned("==", words, _all(0))


def _is_word(builder: _Value, words: _Value, word: _Value) -> _Value:
    return builder.icmp_unsigned("==", words, _spread(builder, word))


def _has_tag(builder: _Value, words: _Value, tag: _Value) -> _Value:
    """tag * 2^32 < word < (tag + 1) * 2^32, in one comparison: the empty word, which is 0, has no tag, not even 0."""
    least = builder.add(builder.shl(tag, _I64(32)), _I64(1))
    return builder.icmp_unsigned("<", builder.sub(words, _spread(builder, least)), _all(_LOW_HALF))


def _has_home_before(builder: _Value, words: _Value, groups: _Value, group: _Value, distance: _Value) -> _Value:
    """Not empty, and `group` is `distance` or more groups behind the home, in the ring."""
    b = builder
    factor = _spread(b, b.and_(groups, _I64(_LOW_HALF)))  # known to be short: no product of 64-bit numbers is needed
    behind = b.sub(_spread(b, group), b.lshr(b.mul(b.lshr(words, _all(32)), factor), _all(32)))
    behind = b.select(b.icmp_signed("<", behind, _all(0)), b.add(behind, factor), behind)
    return b.and_(b.icmp_signed(">=", behind, _spread(b, distance)), b.not_(_is_empty(b, words)))


@intrinsic
def empty_words(typingctx: Any, words: Any, group: Any) -> Any:
    """Which words of a group are 0."""
    return types.int64(words, types.int64), _comparing(_is_empty)


@intrinsic
def equal_words(typingctx: Any, words: Any, group: Any, word: Any) -> Any:
    """Which words of a group equal `word`."""
    return types.int64(words, types.int64, types.uint64), _comparing(_is_word)


@intrinsic
def tagged_words(typingctx: Any, words: Any, group: Any, tag: Any) -> Any:
    """Which words of a group have `tag` (below 2^32) for their upper half, and a lower half that is not 0."""
    return types.int64(words, types.int64, types.uint64), _comparing(_has_tag)


@intrinsic
def passed_words(typingctx: Any, words: Any, group: Any, groups: Any, distance: Any) -> Any:
    """Which words of a group, not empty, have a home `distance` or more groups before it, in a ring of `groups`.

    The home of a word is floor(its upper half * groups / 2^32); `groups` is below 2^32.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, group, groups, distance = args
        again = array, group, groups, group, distance
        return _comparing(_has_home_before)(context, builder, signature, again)

    return types.int64(words, *[types.int64] * 3), codegen


@intrinsic
def first_of(typingctx: Any, mask: Any) -> Any:
    """The position of the lowest bit of a mask that is not 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], _I1(1))

    return types.int64(types.int64), codegen
