"""Comparisons of eight words at a time, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.cache.groups import GROUP, empty_words, equal_words, first_of, passed_words, tagged_words

TAGS = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF]
HALVES = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
GROUPS = 40


@njit
def masks(words, group, word, tag, groups, distance):
    return (
        empty_words(words, group),
        equal_words(words, group, word),
        tagged_words(words, group, tag),
        passed_words(words, group, groups, distance),
    )


@njit
def first(mask):
    return first_of(mask)


def mask_of(flags: NDArray[np.bool_]) -> int:
    return int(np.packbits(flags, bitorder="little")[0])


def some_words(seed: int) -> NDArray[np.uint64]:
    """Words of the halves that are special, and as many random ones; 8 bytes off any line."""
    random = np.random.default_rng(seed)
    words: NDArray[np.uint64] = zeros(GROUPS * GROUP + 1, np.uint64)[1:]
    words[:] = random.choice(np.array(TAGS, np.uint64), len(words)) << np.uint64(32)
    words |= random.choice(np.array(HALVES, np.uint64), len(words))
    words[::2] = random.integers(0, 2**64, len(words[::2]), np.uint64)
    words[random.integers(0, len(words), len(words) // 8)] = 0
    return words


@pytest.mark.parametrize("seed", range(5))
def test_masks_say_what_numpy_says(seed: int) -> None:
    words, groups = some_words(seed), GROUPS
    tags = words >> np.uint64(32)
    homes = ((tags * np.uint64(groups)) >> np.uint64(32)).astype(np.int64)
    for group in range(groups):
        here = slice(GROUP * group, GROUP * (group + 1))
        for i in range(GROUP):
            word, tag, distance = words[here][i], tags[here][(i + 1) % GROUP], (7 * i + group) % groups
            empty, equal, tagged, passed = masks(words, group, word, tag, groups, distance)
            assert empty == mask_of(words[here] == 0)
            assert equal == mask_of(words[here] == word)
            assert tagged == mask_of((tags[here] == tag) & (words[here] & np.uint64(0xFFFFFFFF) != 0))
            assert passed == mask_of((words[here] != 0) & ((group - homes[here]) % groups >= distance))


def test_homes_in_the_largest_tables_are_exact() -> None:
    """Seen from group 0, in a ring of 2^28 of them."""
    words, groups = zeros(GROUP, np.uint64), 2**28
    tags = [0, 15, 16, 2**31, 2**32 - 33, 2**32 - 17, 2**32 - 16]
    words[: len(tags)] = np.array(tags, np.uint64) << np.uint64(32) | np.uint64(1)
    distances = np.array([(-(tag * groups >> 32)) % groups for tag in tags])
    assert sorted(distances.tolist()) == [0, 0, 1, 2, 3, 2**27, 2**28 - 1]
    for distance in distances.tolist():
        passed = masks(words, 0, np.uint64(1), np.uint64(0), groups, distance)[3]
        assert passed == mask_of(np.append(distances >= distance, False))


def test_the_first_bit_of_a_mask() -> None:
    assert [first(mask) for mask in (1, 2, 3, 0x80, 0xC0, 0xFF)] == [0, 1, 0, 7, 6, 0]
