"""In-place operators written as functional ones, with the same numbers; unclear ones stay."""

import pytest
import torch

from sparsify.passes.aliases import changed_in_place, written
from sparsify.passes.inplace import make_functional
from sparsify.passes.invariants import check
from tests._util import facts
from tests._util.graphs import traced


def fill(x):
    y = x * 2
    y.masked_fill_(y > 0, -1.0)
    return y + 1


def result_used(x):
    y = x * 2
    z = y.add_(1.0)
    return y + z


def older_view(x):
    y = x * 2
    view = y.transpose(0, 1)
    y.mul_(3.0)
    return view + y.transpose(0, 1)


def view_written(x):
    y = x * 2
    y[0] = 5.0
    y[:, 1:3] = 7.0
    return y + 0


def view_of_view_written(x):
    y = x * 2
    y[1][2] = 9.0
    return y.sum() + y


def written_view_read_later(x):
    y = x * 2
    row = y[0]
    row.add_(1.0)
    return y + row


def transposed_and_only_reader(x):
    y = (x * 2).transpose(0, 1)
    y.add_(1.0)
    return y * 1


def twice(x):
    y = x * 2
    y.add_(1.0)
    y.mul_(y)
    return y


def scores(x):
    s = x @ x.transpose(0, 1)
    s *= 0.5
    s += torch.full((4, 4), float("-inf")).triu_(1)
    return s.softmax(-1)


SAFE = [
    fill,
    result_used,
    older_view,
    view_written,
    view_of_view_written,
    written_view_read_later,
    transposed_and_only_reader,
    twice,
    scores,
]


def through_transpose(x):
    y = x * 2
    y.transpose(0, 1)[0] = 0.0
    return y + 1


def through_reshape(x):
    y = x * 2
    view = y.reshape(-1)
    y.add_(1.0)
    return view + 1


def promoted(x):
    y = (x * 2).to(torch.float16)
    y.add_(x)
    return y * 2


def of_an_input(x):
    x.add_(1.0)
    return x * 2


UNSAFE = [through_transpose, through_reshape, of_an_input]


def example():
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("function", [*SAFE, promoted], ids=lambda f: f.__name__)
def test_the_numbers_stay(function):
    captured, _ = traced(function, example(), static=True)
    wanted = facts.original(captured, (example(),))
    _, modified = make_functional(captured.graph)
    check(captured.graph)
    captured.graph_module.recompile()
    got = facts.original(captured, (example(),))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert torch.equal(got[0], function(example()))
    if function is not promoted:  # a half-precision sum would round otherwise
        assert modified and not any(written(node) for node in captured.graph.nodes)


@pytest.mark.parametrize("function", UNSAFE, ids=lambda f: f.__name__)
def test_unclear_writes_stay_and_are_known(function):
    captured, _ = traced(function, example(), static=True)
    make_functional(captured.graph)
    left = [node for node in captured.graph.nodes if written(node)]
    assert left
    assert written(left[0]) in changed_in_place(captured.graph)
    assert torch.equal(facts.original(captured, (example(),))[0], function(example()))


def test_a_result_keeps_its_name_and_the_program_runs():
    captured, node = traced(twice, example(), static=True)
    name = node.name
    make_functional(captured.graph)
    captured.graph_module.recompile()
    assert [n.name for n in captured.graph.output_node().all_input_nodes] == [name]
    assert torch.equal(captured.program.module()(example()), twice(example()))
