"""XXH3 with 64 bits, of more than 240 bytes: the checksum of wide rows, in vector instructions.

Yann Collet's hash (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md), seeded, to the bit. Eight lanes
take in 64 bytes at a time, a stripe; no multiplication waits for the one before it, as all do in XXH64. So the
processor is soon done with a row and reads the next one meanwhile.

Numba has no vectors, so the loop is written in LLVM's language, which has: LLVM makes of it what the machine's
processor can, AVX-512 or plain words. In the loop the seed's part of the secret is one addition: the seeded secret is
the secret with the seed added to its words of even number and taken off the odd ones, and a stripe's key is eight words
of it, one further at each stripe.

What it does not do: up to 240 bytes XXH3 is three other functions, which are not here.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LONG_BYTES = 241  # the least count
PRIMES = (  # of XXH64 too
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)

_Value: TypeAlias = Any  # llvmlite is untyped
_LANES, _STRIPE_BYTES, _BLOCK_STRIPES = 8, 64, 16
_SCRAMBLE_AT, _LAST_AT, _MERGE_AT = 128, 121, 11  # bytes of the secret that are the keys of these steps
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_WORDS = [int.from_bytes(_SECRET[at : at + 8], "little") for at in range(0, len(_SECRET), 8)]
_P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_LANES_AT_FIRST = (_P32[2], *PRIMES[:4], _P32[1], PRIMES[4], _P32[0])
_AVALANCHE = 0x165667919E3779F9

_I32, _I64, _I128 = ir.IntType(32), ir.IntType(64), ir.IntType(128)
_VECTOR = ir.VectorType(_I64, _LANES)


def _number(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _vector(values: list[int] | tuple[int, ...]) -> ir.Constant:
    return ir.Constant(_VECTOR, [_number(value) for value in values])


def _all(value: int) -> ir.Constant:
    return _vector([value] * _LANES)


def _order(lanes: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I32, _LANES), [ir.Constant(_I32, lane) for lane in lanes])


def _load(builder: _Value, address: _Value) -> _Value:
    vector = builder.load(builder.inttoptr(address, _VECTOR.as_pointer()))
    vector.align = 1
    return vector


class _Steps:
    """The steps of the hash, written where a builder stands; `seed` is an i64.

    Attributes:
        signed: what the seed adds to eight words of the secret, the first of which is even, or odd.
    """

    def __init__(self, builder: _Value, seed: _Value) -> None:
        self._builder = builder
        seeds = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), seed, ir.Constant(_I32, 0))
        seeds = builder.shuffle_vector(seeds, seeds, _order([0] * _LANES))
        negative = builder.sub(_all(0), seeds)
        even = [lane + _LANES * (lane % 2) for lane in range(_LANES)]  # of both vectors, one after the other
        odd = [lane + _LANES * (1 - lane % 2) for lane in range(_LANES)]
        self.signed = [builder.shuffle_vector(seeds, negative, _order(lanes)) for lanes in (even, odd)]

    def key(self, at: int) -> _Value:
        """64 bytes of the seeded secret from byte `at` on."""
        b, (first, rest) = self._builder, divmod(at, 8)
        if not rest:
            return self._words(first)
        low, high = b.lshr(self._words(first), _all(8 * rest)), b.shl(self._words(first + 1), _all(64 - 8 * rest))
        return b.or_(low, high)

    def _words(self, first: int) -> _Value:
        """Eight words of the seeded secret."""
        return self._builder.add(_vector(_WORDS[first : first + _LANES]), self.signed[first % 2])

    def take_in(self, lanes: _Value, address: _Value, key: _Value) -> _Value:
        """Lanes and a stripe: each word is added to the lane beside its own, and a product of its halves to its own."""
        b, stripe = self._builder, _load(self._builder, address)
        beside = b.shuffle_vector(stripe, stripe, _order([lane ^ 1 for lane in range(_LANES)]))
        keyed = b.xor(stripe, key)
        product = b.mul(b.and_(keyed, _all(0xFFFFFFFF)), b.lshr(keyed, _all(32)))
        return b.add(b.add(lanes, beside), product)

    def scramble(self, lanes: _Value) -> _Value:
        """Mix each lane within itself."""
        b = self._builder
        return b.mul(b.xor(b.xor(lanes, b.lshr(lanes, _all(47))), self.key(_SCRAMBLE_AT)), _all(_P32[0]))

    def merge(self, lanes: _Value, count: _Value) -> _Value:
        """The hash (i64): both halves of the product of each two lanes, added up and mixed."""
        b = self._builder
        keyed, h = b.xor(lanes, self.key(_MERGE_AT)), b.mul(count, _number(PRIMES[0]))
        for lane in range(0, _LANES, 2):
            pair = [b.zext(b.extract_element(keyed, ir.Constant(_I32, one)), _I128) for one in (lane, lane + 1)]
            product = b.mul(*pair)
            high = b.trunc(b.lshr(product, ir.Constant(_I128, 64)), _I64)
            h = b.add(h, b.xor(b.trunc(product, _I64), high))
        h = b.mul(b.xor(h, b.lshr(h, _number(37))), _number(_AVALANCHE))
        return b.xor(h, b.lshr(h, _number(32)))


def _take_in_all(b: _Value, steps: _Steps, address: _Value, stripes: _Value) -> _Value:
    """The lanes after so many (i64) stripes; the builder stands behind the loop then.

    ::

        while at < stripes: take in; after each 16th: scramble; the seed's signs change places
    """
    words = ir.Constant(ir.ArrayType(_I64, len(_WORDS)), [_number(word) for word in _WORDS])
    secret = b.ptrtoint(cgutils.global_constant(b.module, "xxh3_secret", words), _I64)
    before = b.block
    head, body, scrambling, after, behind = (
        b.append_basic_block(name) for name in ("head", "stripe", "scramble", "next", "behind")
    )
    b.branch(head)
    b.position_at_end(head)
    at, lanes, signs, others = b.phi(_I64), b.phi(_VECTOR), b.phi(_VECTOR), b.phi(_VECTOR)
    b.cbranch(b.icmp_unsigned("<", at, stripes), body, behind)
    b.position_at_end(body)
    in_block = b.and_(at, _number(_BLOCK_STRIPES - 1))
    key = b.add(_load(b, b.add(secret, b.shl(in_block, _number(3)))), signs)
    taken = steps.take_in(lanes, b.add(address, b.mul(at, _number(_STRIPE_BYTES))), key)
    b.cbranch(b.icmp_unsigned("==", in_block, _number(_BLOCK_STRIPES - 1)), scrambling, after)
    b.position_at_end(scrambling)
    scrambled = steps.scramble(taken)
    b.branch(after)
    b.position_at_end(after)
    mixed, following = b.phi(_VECTOR), b.add(at, _number(1))
    b.branch(head)
    for phi, first, then in (
        (at, _number(0), following),
        (lanes, _vector(_LANES_AT_FIRST), mixed),
        (signs, steps.signed[0], others),
        (others, steps.signed[1], signs),
    ):
        phi.add_incoming(first, before)
        phi.add_incoming(then, after)
    mixed.add_incoming(taken, body)
    mixed.add_incoming(scrambled, scrambling)
    b.position_at_end(behind)
    return lanes


@intrinsic
def _hash(typingctx: Any, address: Any, count: Any, seed: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, count, seed = args
        steps = _Steps(builder, seed)
        stripes = builder.udiv(builder.sub(count, _number(1)), _number(_STRIPE_BYTES))
        lanes = _take_in_all(builder, steps, address, stripes)
        last = builder.sub(builder.add(address, count), _number(_STRIPE_BYTES))  # may overlap the one before
        return steps.merge(steps.take_in(lanes, last, steps.key(_LAST_AT)), count)

    return types.uint64(types.uint64, types.uint64, types.uint64), codegen


@njit(nogil=True, cache=True)
def xxh3(address: Any, count: Any, seed: Any) -> Any:
    """XXH3 (64 bits) of `count` bytes at `address`, `LONG_BYTES` at least; all three are uint64.

    A function of its own, since a kernel that has it inlined takes a second longer to compile.
    """
    return _hash(address, count, seed)
