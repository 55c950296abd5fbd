"""Who shares memory with whom, held against the memory itself."""

import pytest
import torch

from sparsify.passes.aliases import base_of, changed_in_place, is_certain_view, written
from tests._util.graphs import traced

SHARED = {
    "view": lambda y: y.view(-1),
    "transpose": lambda y: y.t(),
    "slice": lambda y: y[1:],
    "select": lambda y: y[0],
    "expand": lambda y: y[None].expand(3, -1, -1),
    "split": lambda y: y.split(2)[1],
    "reshape": lambda y: y.reshape(-1),
    "unsqueeze": lambda y: y.unsqueeze(0),
    "chain": lambda y: y.t().unsqueeze(0)[0, 1:],
}
OWN = {
    "add": lambda y: y + 1,
    "clone": lambda y: y.clone(),
    "cat": lambda y: torch.cat([y, y]),
    "cast": lambda y: y.double() + 0,
}


@pytest.mark.parametrize("name", [*SHARED, *OWN])
def test_memory(name):
    function = SHARED.get(name) or OWN[name]
    captured, node = traced(lambda x: function(x * 2), torch.randn(4, 4), static=True)
    product = next(n for n in captured.graph.nodes if n.name.startswith("mul"))
    y = torch.randn(4, 4)
    shares = function(y).untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    assert (base_of(node) is product) == (name in SHARED)
    assert shares == (name in SHARED)


def test_only_views_that_never_copy_are_certain():
    _, node = traced(lambda x: (x * 2).t(), torch.randn(4, 4))
    assert is_certain_view(node)
    _, node = traced(lambda x: (x * 2).reshape(-1), torch.randn(4, 4))
    assert not is_certain_view(node)


def test_writes_touch_all_views_of_the_memory():
    def function(x):
        y = x * 2
        row, other = y[0], x + 1
        row.zero_()
        return y + other

    captured, _ = traced(function, torch.randn(4, 4), static=True)
    (write,) = [n for n in captured.graph.nodes if written(n) is not None]
    touched = {n.name for n in changed_in_place(captured.graph)}
    assert written(write).name == "select"
    assert {"mul", "select"} <= touched and not touched & {"add", "inputs_0"}
