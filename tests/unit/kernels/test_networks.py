"""The sorting networks of the gate, with plain numbers in the place of tensors.

By the 0-1 principle, a network of comparisons that sorts (or merges) all zeros and ones does so for
any values.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "kernels" / "select" / "networks.py"


class Language:
    """The two operations that a network needs."""

    maximum, minimum, constexpr = max, min, int


@pytest.fixture(scope="module")
def networks():
    """The module's functions as plain Python."""
    text = SOURCE.read_text().replace("@triton.jit", "")
    text = text.replace("import triton.language as tl", "").replace("import triton", "")
    names = {"tl": Language, "__name__": "networks"}
    exec(compile(text, str(SOURCE), "exec"), names)
    return names


def bits(count):
    return itertools.product((0, 1), repeat=count)


def falling(count):
    """All sorted sequences of zeros and ones."""
    return [[1] * ones + [0] * (count - ones) for ones in range(count + 1)]


def largest(values, count):
    return sorted(values, reverse=True)[:count]


def test_four_values_are_sorted(networks):
    for x in bits(4):
        assert list(networks["_sorted4"](*x)) == largest(x, 4)


def test_bitonic_fours_are_sorted(networks):
    rising_falling = [x for x in bits(4) if sum(a != b for a, b in itertools.pairwise(x)) <= 2]
    assert len(rising_falling) == 14
    for x in rising_falling:
        assert list(networks["_unbitonic4"](*x)) == largest(x, 4)


@pytest.mark.parametrize(
    ("name", "length", "kept"), [("_largest4", 4, 4), ("_merged8", 4, 8), ("_largest8", 8, 8)]
)
def test_sorted_lists_are_merged(networks, name, length, kept):
    for a, b in itertools.product(falling(length), repeat=2):
        assert list(networks[name](a, b)) == largest(a + b, kept)


def test_lists_keep_the_largest_of_all_that_came(networks):
    pick = random.Random(0)
    for _ in range(200):
        best, every = (-1,) * 4, []
        for _ in range(6):
            x = [pick.randrange(30) for _ in range(4)]
            every += x
            best = networks["keep_largest"](best, x)
        assert list(best) == largest(every, 4)


def test_a_network_without_a_comparison_is_seen(networks):
    """The test itself: a broken network fails it."""
    broken = dict(networks)
    text = SOURCE.read_text()
    body = text[text.index("def _sorted4") : text.index("@triton.jit\ndef _unbitonic4")]
    exec(body.replace("    b, c = _ordered(b, c)\n", "", 1), broken)
    assert any(list(broken["_sorted4"](*x)) != largest(x, 4) for x in bits(4))
