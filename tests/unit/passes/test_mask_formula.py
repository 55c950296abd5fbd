"""Decided meanings of visibility formulas against brute force."""

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsify.ir import MaskKind
from sparsify.passes.frame import Frame
from sparsify.passes.index_space import IndexSpace
from sparsify.passes.mask_formula import decide

LENGTH = sympy.Symbol("s9", integer=True, positive=True)
PAST = sympy.Symbol("s4", integer=True, positive=True)
SPACE = IndexSpace()
Q, K = SPACE.index("i", LENGTH), SPACE.index("j", LENGTH)
FRAME = Frame(None, SPACE, sympy.Integer(0), sympy.Integer(0), Q, K, (), sympy.Integer(1))
CAUSAL = sympy.Ge(Q - K, 0)


@pytest.mark.parametrize(
    ("formula", "kind", "offset", "window"),
    [
        (CAUSAL, MaskKind.CAUSAL, 0, None),
        (sympy.Not(sympy.Ge(K - Q - 1, 0)), MaskKind.CAUSAL, 0, None),
        (sympy.Ge(Q - K - 1, 0), MaskKind.CAUSAL, -1, None),
        (sympy.Ge(Q - K + 1, 0), MaskKind.CAUSAL, 1, None),
        (sympy.Ge(Q + PAST - K, 0), MaskKind.CAUSAL, PAST, None),
        (CAUSAL & sympy.Ge(K - Q + 7, 0), MaskKind.SLIDING, 0, 8),
        (CAUSAL & sympy.Ge(K - Q + 4095, 0), MaskKind.SLIDING, 0, 4096),
        (sympy.Ge(Q - K + PAST, 0) & sympy.Gt(K - Q - PAST + 8, 0), MaskKind.SLIDING, PAST, 8),
        (sympy.Eq(Q - K, 0), MaskKind.SLIDING, 0, 1),
        (sympy.true, MaskKind.FULL, None, None),
        (CAUSAL | sympy.Ge(K - Q, 0), MaskKind.FULL, None, None),
    ],
)
def test_meanings(formula, kind, offset, window):
    shape = decide(formula, FRAME, {})
    assert (shape.kind, shape.offset, shape.window) == (kind, offset, window)


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        (sympy.Ge(K - Q, 0), "future"),
        (sympy.false, "no key"),
        (CAUSAL & sympy.Ge(K - Q - 1, 0), "no key"),
        (sympy.Ne(Q - K, 3) & CAUSAL, "holes"),
    ],
)
def test_other_rules_are_told_in_words(formula, words):
    shape = decide(formula, FRAME, {})
    assert shape.kind is None and words in shape.text


@pytest.mark.parametrize(
    "formula",
    [
        CAUSAL | sympy.Ge(9 - K, 0),
        sympy.Ge(2 * Q - K, 0),
        sympy.Ge(Q + K, 5),
        CAUSAL & sympy.Eq(sympy.floor(Q / 8) - sympy.floor(K / 8), 0),
        sympy.Ge(Q - K + PAST, 0) & sympy.Ge(K - Q + 3, 0),
    ],
    ids=["prefix", "slope", "sum", "chunk", "two_offsets"],
)
def test_what_is_no_function_of_the_difference_is_not_decided(formula):
    assert decide(formula, FRAME, {}) is None


def test_conditions_on_sizes_are_decided_by_the_captured_ranges():
    formula = CAUSAL & sympy.Ge(128 - LENGTH, 0)
    assert decide(formula, FRAME, {"s9": (2, 128)}).kind == MaskKind.CAUSAL
    assert decide(formula, FRAME, {"s9": (2, None)}) is None
    assert decide(CAUSAL & sympy.Ge(LENGTH - 300, 0), FRAME, {"s9": (2, 128)}).text


atoms = st.builds(
    lambda sign, shift, relation: relation(sign * (Q - K) + shift, 0),
    st.sampled_from([1, -1]),
    st.integers(-3, 3),
    st.sampled_from([sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt, sympy.Eq, sympy.Ne]),
)
formulas = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds(sympy.And, inner, inner),
        st.builds(sympy.Or, inner, inner),
        st.builds(sympy.Not, inner),
    ),
    max_leaves=4,
)


@settings(max_examples=80, deadline=None)
@given(formulas)
def test_decisions_agree_with_brute_force(formula):
    shape = decide(formula, FRAME, {})
    assert shape is not None
    for i, j in [(8, j) for j in range(17)]:
        seen = bool(formula.subs({Q: i, K: j}))
        u = i - j
        if shape.kind == MaskKind.FULL:
            assert seen
        elif shape.kind == MaskKind.CAUSAL:
            assert seen == (u + shape.offset >= 0)
        elif shape.kind == MaskKind.SLIDING:
            assert seen == (0 <= u + shape.offset < shape.window)
        elif "no key" in shape.text:
            assert not seen
