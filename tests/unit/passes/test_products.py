"""Products in every spelling, against einsum; operands and constant factors behind them."""

import pytest
import torch

from sparsify.passes.aliases import changed_in_place
from sparsify.passes.index_expr import Evaluator
from sparsify.passes.index_space import IndexSpace
from sparsify.passes.matchers.operands import Tracer
from sparsify.passes.matchers.products import added, factors_of, read_product
from tests._util.graphs import traced

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.randn(*shape, generator=GENERATOR)


PRODUCTS = {
    "matmul": (lambda a, b: a @ b, (2, 3, 5, 4), (2, 3, 4, 6)),
    "broadcast": (lambda a, b: a @ b, (2, 3, 5, 4), (2, 1, 4, 6)),
    "bmm": (torch.bmm, (2, 5, 4), (2, 4, 6)),
    "mm": (torch.mm, (5, 4), (4, 6)),
    "einsum": (lambda a, b: torch.einsum("bhid,bjhd->bhij", a, b), (2, 3, 5, 4), (2, 6, 3, 4)),
    "einsum_moved": (
        lambda a, b: torch.einsum("bhid,bjhd->hjbi", a, b),
        (2, 3, 5, 4),
        (2, 6, 3, 4),
    ),
    "einsum_dots": (
        lambda a, b: torch.einsum("...id,...jd->...ij", a, b),
        (2, 3, 5, 4),
        (2, 3, 6, 4),
    ),
    "einsum_no_arrow": (lambda a, b: torch.einsum("id,jd", a, b), (5, 4), (6, 4)),
    "einsum_spaces": (
        lambda a, b: torch.einsum("b i d, b d j -> b j i", a, b),
        (2, 5, 4),
        (2, 4, 6),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_read_as_rows_times_rows(name):
    function, left_shape, right_shape = PRODUCTS[name]
    a, b = random(*left_shape), random(*right_shape)
    _, node = traced(function, a, b, static=True)
    product = read_product(node)
    left, right, out = a, b, function(a, b)
    assert factors_of(node) == [product.left.node, product.right.node]
    left, right, out = (
        t.permute(o.order)
        for t, o in ((left, product.left), (right, product.right), (out, product.out))
    )
    assert torch.allclose(left @ right.mT, out, atol=1e-5)
    swapped = product.swapped()
    assert swapped.left == product.right and swapped.out.shape[-1] == product.out.shape[-2]


OTHERS = {
    "vector": (lambda a, b: a @ b, (5, 4), (4,)),
    "three_and_two_axes": (lambda a, b: a @ b, (2, 5, 4), (4, 6)),
    "outer": (lambda a, b: torch.einsum("i,j->ij", a, b), (5,), (6,)),
    "elementwise": (lambda a, b: torch.einsum("bij,bij->bij", a, b), (2, 5, 4), (2, 5, 4)),
    "two_sums": (lambda a, b: torch.einsum("bide,bjde->bij", a, b), (2, 5, 4, 3), (2, 6, 4, 3)),
    "diagonal": (lambda a, b: torch.einsum("iid,jd->ij", a, b), (5, 5, 4), (6, 4)),
    "summed_batch": (lambda a, b: torch.einsum("bid,bjd->ij", a, b), (2, 5, 4), (2, 6, 4)),
    "lost_row": (lambda a, b: torch.einsum("bid,bjd->bj", a, b), (2, 5, 4), (2, 6, 4)),
    "one_key_head": (lambda a, b: torch.einsum("bhid,bjd->bhij", a, b), (2, 3, 5, 4), (2, 6, 4)),
    "grouped": (
        lambda a, b: torch.einsum("bgrid,bgjd->bgrij", a, b),
        (2, 3, 2, 5, 4),
        (2, 3, 6, 4),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_products_are_not_read(name):
    function, left_shape, right_shape = OTHERS[name]
    _, node = traced(function, random(*left_shape), random(*right_shape), static=True)
    assert read_product(node) is None


def test_what_a_product_adds():
    a, b, c = random(2, 5, 4), random(2, 4, 6), random(2, 5, 6)
    _, node = traced(
        lambda a, b, c: torch.baddbmm(c, a, b, beta=0.5, alpha=2), a, b, c, static=True
    )
    tensor, beta, alpha = added(node)
    assert (tensor.name, beta, alpha) == ("inputs_2", 0.5, 2)
    assert [factor.name for factor in factors_of(node)] == ["inputs_0", "inputs_1"]
    _, node = traced(torch.bmm, a, b, static=True)
    assert added(node) is None


def operand(function, *inputs, wanted=None, **buffers):
    """The operand behind the function's result, whose axes are canonical."""
    captured, node = traced(function, *inputs, static=True, **buffers)
    space = IndexSpace()
    index = tuple(space.index(f"x{a}", size) for a, size in enumerate(node.meta["val"].shape))
    tracer = Tracer(
        space, Evaluator(captured, space, changed_in_place(captured.graph)), torch.float32
    )
    found = tracer.operand(node, index, index)
    return None if found is None else (found[0].node.name, found[0].order, found[1])


def test_constant_factors_are_taken_out():
    x = random(2, 3, 4)
    assert operand(lambda x: x * 2.0, x) == ("inputs_0", (0, 1, 2), 2.0)
    assert operand(lambda x: (3 * x / 2).contiguous(), x) == ("inputs_0", (0, 1, 2), 1.5)
    assert operand(lambda x, c: x * c, x, c=torch.tensor([[0.5]])) == ("inputs_0", (0, 1, 2), 0.5)
    assert operand(lambda x: (x * 2).mT.mT * 4, x) == ("inputs_0", (0, 1, 2), 8.0)


def test_other_factors_stay():
    x = random(2, 3, 4)
    for function in (
        lambda x: x * -2.0,
        lambda x: x * torch.arange(1.0, 5.0),
        lambda x: x * x,
        lambda x: x + 2.0,
        lambda x: x * 0.0,
    ):
        name, order, factor = operand(function, x)
        assert name != "inputs_0" and factor == 1.0 and order == (0, 1, 2)


def test_axes_are_put_in_order():
    x = random(2, 3, 4)
    # behind the factor the first tensor in canonical layout is as good
    assert operand(lambda x: x.mT * 2.0, x) == ("m_t", (0, 1, 2), 2.0)
    assert operand(lambda x: (x * 2.0).mT, x) == ("inputs_0", (0, 2, 1), 2.0)
    assert operand(lambda x: (x * 2.0).permute(2, 0, 1), x) == ("inputs_0", (2, 0, 1), 2.0)


def test_parts_and_repetitions_are_not_the_operand():
    x = random(2, 4, 4)
    assert operand(lambda x: (x * 2.0)[:, 1:], x) == ("slice_1", (0, 1, 2), 1.0)
    assert operand(lambda x: (x * 2.0)[:, :3], x) == ("slice_1", (0, 1, 2), 1.0)
    assert operand(lambda x: (x * 2.0).repeat(1, 2, 1), x) == ("repeat", (0, 1, 2), 1.0)
    assert operand(lambda x: (x * 2.0).flip(1), x) == ("flip", (0, 1, 2), 1.0)


def test_a_change_in_place_is_not_gone_behind():
    def function(x):
        y = x * 2.0
        z = y.reshape(2, 12)  # a view that may be a copy: the write is not made functional
        z[:, 0].add_(1.0)
        return y * 4.0

    assert operand(function, random(2, 3, 4)) == ("mul", (0, 1, 2), 4.0)
