"""Symbolic values of mask elements against the numbers that torch computes."""

import pytest
import torch

from sparsify.passes.index_expr import Evaluator
from tests._util.graphs import at, free_index, number, places, sizes_of, traced

T = torch
INF = float("inf")


def ones(n):
    return T.ones(n, n, dtype=T.bool)


def ar(n):
    return T.arange(n)


def packed(place):
    """Document numbers as transformers counts them from positions."""
    return (T.diff(place, prepend=place[:, :1] - 1, dim=-1) != 1).cumsum(-1)


# functions of n, written the ways people write masks
OF_LENGTH = {
    "tril": lambda n: ones(n).tril(),
    "tril_below": lambda n: ones(n).tril(-2),
    "triu_not": lambda n: ~ones(n).triu(1),
    "arange": lambda n: ar(n)[None] <= ar(n)[:, None],
    "arange_from": lambda n: T.arange(2, n + 2)[None] < T.arange(0, 2 * n, 2)[:, None],
    "window": lambda n: (ar(n)[:, None] >= ar(n)) & (ar(n)[:, None] - ar(n) < 3),
    "chunk": lambda n: (ar(n)[:, None] // 4 == ar(n) // 4) & (ar(n)[:, None] >= ar(n)),
    "remainder": lambda n: (ar(n)[:, None] % 3) != (ar(n) % 3),
    "div_floor": lambda n: T.div(ar(n), 3, rounding_mode="floor")[:, None] > ar(n),
    "prefix": lambda n: (ar(n)[:, None] >= ar(n)) | (ar(n) < 2),
    "xor": lambda n: ones(n).tril() ^ T.eye(n, dtype=T.bool),
    "logical": lambda n: T.logical_and(ones(n).tril(), T.logical_not(ones(n).tril(-3))),
    "full_inf": lambda n: T.full((n, n), -INF).triu(1),
    "masked_fill": lambda n: T.zeros(n, n).masked_fill(ones(n).triu(1), -INF),
    "where": lambda n: T.where(ones(n).tril(), 0.0, T.finfo(T.float32).min),
    "where_tensor": lambda n: T.where(ones(n).tril(), T.zeros(n, n), T.full((n, n), -1e9)),
    "one_minus": lambda n: (1.0 - ones(n).float().tril()) * -10000.0,
    "log": lambda n: T.log(ones(n).float().tril()),
    "minus_one_times": lambda n: (ones(n).float().tril() - 1.0) * 1e9,
    "sum_of_masks": lambda n: T.full((n, n), -1e9).triu(1) + T.full((n, n), -1e9).tril(-2),
    "rsub": lambda n: T.rsub(ones(n).tril().int(), 1) * -5,
    "clamp": lambda n: T.full((n, n), -INF).triu(1).clamp(min=-100.0),
    "minimum": lambda n: T.minimum(T.full((n, n), -3.0).triu(1), T.full((n, n), -2.0).tril()),
    "to_half": lambda n: T.full((n, n), -1e9).triu(1).half(),
    "to_bool": lambda n: ones(n).float().tril().bool(),
    "neg_abs": lambda n: -(ar(n)[:, None] - ar(n)).abs(),
    "stack": lambda n: T.stack([ones(n).tril(), ones(n).triu()]),
    "cat": lambda n: T.cat([T.ones(n, 2, dtype=T.bool), ones(n).tril()], 1),
    "cat_three": lambda n: T.cat([ar(n), ar(n) * 2, ar(n) + 1])[None],
    "cumsum": lambda n: T.ones(n, n, dtype=T.int64).cumsum(1) - T.ones(n, n).cumsum(0),
    "packed_default": lambda n: (
        T.diff(ar(n)[None], prepend=ar(n)[None, :1] - 1, dim=-1) != 1
    ).cumsum(-1),
    "packed_repeated": lambda n: packed(ar(n)[None].repeat(2, 1)),
    "select_scatter": lambda n: T.select_scatter(ones(n).tril(), T.ones(n, dtype=T.bool), 1, 0),
    "slice_scatter": lambda n: T.slice_scatter(ones(n).tril(), T.ones(n, 2, dtype=T.bool), 1, 1, 3),
    "indexed": lambda n: ones(n).tril()[ar(n)[:, None], ar(n)[None]],
    "indexed_rows": lambda n: ones(n).tril()[T.arange(1, n)],
    "new_ones": lambda n: ar(n).new_ones((), dtype=T.bool) & ones(n).tril(),
    "scalar_tensor": lambda n: T.where(ones(n).tril(), T.scalar_tensor(0.0), T.scalar_tensor(-INF)),
}
OF_PADDING = {
    "bool": lambda m: m.bool()[:, None] & ones(m.shape[1]).tril(),
    "equals": lambda m: (m == 1)[:, None, :] & ones(m.shape[1]).tril(),
    "inverted": lambda m: (m[:, None, :] == 0) | ones(m.shape[1]).triu(1),
    "float": lambda m: (
        (1.0 - m[:, None, :].float()) * -1e9 + T.full((m.shape[1],) * 2, -1e9).triu(1)
    ),
    "gathered": lambda m: m[T.arange(m.shape[0])[:, None, None], ar(m.shape[1])[None, None]],
    "documents": lambda m: m[:, :, None] == m[:, None, :],
    "cast": lambda m: m.to(T.float32)[:, None] * 2,
}


def check(function, inputs, argument, static):
    captured, node = traced(function, *inputs, static=static)
    space, index = free_index(node)
    evaluator = Evaluator(captured, space)
    value = evaluator.value(node, index)
    want = function(*argument)
    sizes = {} if static else sizes_of(captured, argument)
    tensors = dict(zip(captured.inputs, argument, strict=True))
    for place in places(want.shape):
        got = number(value, at(index, place, sizes), tensors)
        assert got == pytest.approx(want[place].item()), (place, value)
    return evaluator


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", OF_LENGTH)
def test_masks_of_the_length(name, static):
    def function(x):
        return OF_LENGTH[name](x.shape[1])

    other = 6 if static else 9  # a dynamic formula holds for another length as well
    evaluator = check(function, [T.zeros(2, 6)], [T.zeros(3, other)], static)
    assert not evaluator.leaves


@pytest.mark.parametrize("name", OF_PADDING)
def test_masks_of_the_padding(name):
    mask = T.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 1, 1]])
    evaluator = check(OF_PADDING[name], [mask], [mask[:, 1:]], static=False)
    (leaf,) = evaluator.leaves.values()
    assert leaf.kind == "input" and not leaf.trained


@pytest.mark.parametrize(
    "function",
    [lambda x: x.sort(1)[0], lambda x: x.cumsum(1), lambda x: x[x > 0], lambda x: x.log()],
    ids=["sort", "cumsum", "boolean_index", "log"],
)
def test_what_has_no_rule_becomes_a_function_of_its_index(function):
    captured, node = traced(function, T.rand(3, 4) + 1, static=True)
    space, index = free_index(node)
    evaluator = Evaluator(captured, space)
    value = evaluator.value(node, index)
    assert tuple(value.args) == index
    assert evaluator.leaves[value.func.__name__].kind == "op"
    assert evaluator.leaves[value.func.__name__].inputs == captured.inputs


def test_parameters_are_never_read_by_value():
    class Bias(T.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = T.nn.Parameter(T.full((4, 4), -INF).triu(1))

        def forward(self, x):
            return self.bias + 0.0

    from sparsify.passes.capture import capture

    captured = capture(Bias(), (T.zeros(2, 2),))
    node = captured.graph.output_node().all_input_nodes[0]
    space, index = free_index(node)
    evaluator = Evaluator(captured, space)
    evaluator.value(node, index)
    assert [leaf.trained for leaf in evaluator.leaves.values()] == [True]


def test_active_dropout_is_not_looked_through():
    def function(x):
        return T.nn.functional.dropout(T.ones(4, 4), 0.5, True)

    captured, node = traced(function, T.zeros(2, 2))
    space, index = free_index(node)
    evaluator = Evaluator(captured, space)
    evaluator.value(node, index)
    assert evaluator.leaves
