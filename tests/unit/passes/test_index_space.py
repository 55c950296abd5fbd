"""Index arithmetic against numbers."""

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsify.passes.index_space import IndexSpace

SIZE = sympy.Symbol("s7", integer=True, positive=True)


def test_flattened_heads_come_apart():
    space = IndexSpace()
    h, d = space.index("h", sympy.Integer(4)), space.index("d", sympy.Integer(16))
    assert space.divmod(16 * h + d, sympy.Integer(16)) == (h, d)


def test_one_more_feature_than_the_head_holds_does_not_come_apart():
    space = IndexSpace()
    h, d = space.index("h", sympy.Integer(4)), space.index("d", sympy.Integer(17))
    quotient, rest = space.divmod(16 * h + d, sympy.Integer(16))
    assert quotient != h and rest != d


def test_symbolic_sizes_come_apart():
    space = IndexSpace()
    b, i = space.index("b", sympy.Symbol("s1", integer=True, positive=True)), space.index("i", SIZE)
    assert space.divmod(b * SIZE + i, SIZE) == (b, i)


def test_quotient_and_remainder_join_again():
    space = IndexSpace()
    n = space.index("n", 12 * SIZE)
    quotient, rest = space.divmod(n, sympy.Integer(12))
    assert space.tidy(12 * quotient + rest) == n
    assert space.tidy(11 * quotient + rest) != n


def test_a_single_value_is_the_number_zero():
    assert IndexSpace().index("b", sympy.Integer(1)) == 0


def test_bounds():
    space = IndexSpace()
    i, j = space.index("i", SIZE), space.index("j", sympy.Integer(5))
    assert space.upper(2 * i - 3 * j + 1) == 2 * SIZE - 1
    assert space.lower(2 * i - 3 * j + 1) == -11
    assert space.upper(sympy.Function("data")(i)) is None
    assert space.upper(sympy.floor(i / 4)) is not None


def test_covers_whole_axes_only():
    space = IndexSpace()
    i = space.index("i", SIZE)
    past = space.upto("past", SIZE, i)
    assert space.covers(i, SIZE)
    assert not space.covers(i, SIZE + 1)
    assert not space.covers(past, SIZE)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    factors=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    constant=st.integers(0, 9),
    n=st.integers(1, 9),
    data=st.data(),
)
def test_division_is_exact(sizes, factors, constant, n, data):
    space = IndexSpace()
    symbols = [space.index(f"x{k}", sympy.Integer(size)) for k, size in enumerate(sizes)]
    expr = sum((f * s for f, s in zip(factors, symbols, strict=False)), sympy.Integer(constant))
    quotient, rest = space.divmod(expr, sympy.Integer(n))
    low, high = space.lower(expr), space.upper(expr)
    for _ in range(8):
        values = {
            s: data.draw(st.integers(0, size - 1))
            for s, size in zip(symbols, sizes, strict=True)
            if s.is_Symbol
        }
        whole = int(expr.subs(values))
        assert (int(quotient.subs(values)), int(rest.subs(values))) == divmod(whole, n)
        assert low <= whole <= high


@pytest.mark.parametrize("inner", [2, 3, 5])
def test_floors_nest(inner):
    space = IndexSpace()
    n = space.index("n", SIZE)
    once = space.divmod(n, sympy.Integer(inner))[0]
    assert space.divmod(once, sympy.Integer(4))[0] == sympy.floor(n / (4 * inner))
