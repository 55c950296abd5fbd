"""Formulas for stored tables and masks, and tables that have none."""

import pytest
import torch

from sparsify.passes.constants import formula_of
from sparsify.passes.index_space import IndexSpace
from sparsify.passes.index_values import Values
from tests._util.graphs import at, number, places

ONES = torch.ones(7, 7, dtype=torch.bool)
FORMULAS = {
    "tril": ONES.tril(),
    "tril_4d": ONES.tril()[None, None],
    "tril_float": ONES.tril().float(),
    "inf": torch.full((7, 7), float("-inf")).triu(1),
    "window": ONES.tril() & ONES.triu(-2),
    "wide": ONES[:4].tril(3),
    "constant": torch.full((3, 5), 2.5),
    "positions": torch.arange(9) * 3 + 1,
    "positions_2d": torch.arange(9)[None],
    "decreasing": torch.arange(9, 0, -1),
    "step": torch.arange(9) >= 4,
    "rows_only": (torch.arange(7) >= 3)[:, None].expand(7, 7),
}
NONE = {
    "random": torch.randn(7, 7),
    "prefix": ONES.tril() | (torch.arange(7) < 3),
    "chunk": ONES.tril() & (torch.arange(7)[:, None] // 3 == torch.arange(7) // 3),
    "per_head": torch.stack([ONES.tril(), ONES.tril() & ONES.triu(-1)]),
    "random_line": torch.tensor([0, 3, 1, 4, 1, 5, 9, 2]),
    "empty": torch.zeros(0, 3),
}


def indexed(tensor):
    space = IndexSpace()
    import sympy

    index = tuple(space.index(f"x{k}", sympy.Integer(n)) for k, n in enumerate(tensor.shape))
    return formula_of(tensor, index, Values(space)), index


@pytest.mark.parametrize("name", FORMULAS)
def test_the_formula_gives_every_value(name):
    tensor = FORMULAS[name]
    value, index = indexed(tensor)
    assert value is not None
    for place in places(tensor.shape):
        assert number(value, at(index, place)) == tensor[place].item()


@pytest.mark.parametrize("name", NONE)
def test_other_values_have_no_formula(name):
    assert indexed(NONE[name])[0] is None


def test_one_wrong_element_is_enough():
    mask = ONES.tril()
    mask[5, 1] = False
    assert indexed(mask)[0] is None
