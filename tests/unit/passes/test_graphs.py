"""Small readings of nodes."""

import pytest
import sympy
import torch

from sparsify.passes.capture import capture
from sparsify.passes.graphs import argument, expression, module_path, op_name, shape_of, source_of
from tests._util.graphs import traced


def calls(captured):
    return [node for node in captured.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    "function",
    [lambda x: torch.transpose(x, 0, 1), lambda x: torch.transpose(x, dim0=0, dim1=1)],
)
def test_arguments_by_name_however_they_are_given(function):
    _, node = traced(function, torch.randn(2, 3))
    assert op_name(node) == "aten.transpose"
    assert (argument(node, "dim0"), argument(node, "dim1")) == (0, 1)
    assert argument(node, "no_such_argument", 7) == 7


def test_defaults_of_the_schema():
    _, node = traced(lambda x: x.softmax(-1), torch.randn(2, 3))
    assert argument(node, "dtype") is None
    _, node = traced(lambda x: x + x, torch.randn(2, 3))
    assert argument(node, "alpha") == 1


def test_shapes_are_expressions():
    _, node = traced(lambda x: torch.cat([x, x], 1)[:, 1:], torch.randn(2, 3))
    batch, length = shape_of(node)
    assert (
        batch.is_Symbol
        and length.free_symbols
        and length.subs(dict.fromkeys(length.free_symbols, 5)) == 9
    )


def test_numbers():
    assert expression(3) == 3 and expression(2.0) == 2 and expression(0.5) == 0.5
    assert expression(float("-inf")) == -sympy.oo
    assert expression(True) is sympy.true
    with pytest.raises(TypeError):
        expression(None)


def test_modules_that_are_called_again_keep_their_path():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])

        def forward(self, x):
            return self.layers[0](self.layers[0](x)) + 1

    nodes = calls(capture(Twice(), (torch.randn(2, 4),)))
    assert [module_path(n) for n in nodes if op_name(n) == "aten.linear"] == ["layers.0"] * 2
    assert module_path(nodes[-1]) == ""


def test_the_line_of_the_users_model():
    class Double(torch.nn.Module):
        def forward(self, x):
            return x * 2

    captured = capture(Double(), (torch.randn(2, 3),))
    node = calls(captured)[-1]
    path, line = source_of(node).split(":")
    assert path == "tests/unit/passes/test_graphs.py" and int(line) > 0
    assert source_of(captured.graph.find_nodes(op="placeholder")[0]) == ""
