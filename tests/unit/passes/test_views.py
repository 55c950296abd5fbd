"""Index maps of views against the views themselves, element by element."""

import pytest
import torch

from sparsify.passes.graphs import op_name
from sparsify.passes.views import view_source
from tests._util.graphs import at, free_index, places, sizes_of, traced

VIEWS = {
    "transpose": lambda x: x.transpose(0, 2),
    "transpose_negative": lambda x: x.transpose(-1, -2),
    "mT": lambda x: x.mT,
    "permute": lambda x: x.permute(2, 0, 1),
    "movedim": lambda x: x.movedim(0, 2),
    "movedim_many": lambda x: x.movedim((0, 2), (1, 0)),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "view": lambda x: x.view(x.shape[0], x.shape[1], 2, 3),
    "view_merge": lambda x: x.view(-1, 6),
    "reshape_after_transpose": lambda x: x.transpose(0, 1).reshape(x.shape[1], -1),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(-1, (3, 2)),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[:, :, None].squeeze(2),
    "expand": lambda x: x[:, None].expand(-1, 3, -1, -1),
    "slice": lambda x: x[:, 1:, 2:5],
    "slice_negative": lambda x: x[..., -2:],
    "slice_step": lambda x: x[..., 1::2],
    "select": lambda x: x.select(2, 4),
    "select_negative": lambda x: x[:, -1],
    "narrow": lambda x: x.narrow(2, 1, 3),
    "chunk": lambda x: x.chunk(3, -1)[1],
    "split": lambda x: x.split([1, 4, 1], -1)[1],
    "tensor_split": lambda x: x.tensor_split(2, -1)[1],
    "unbind": lambda x: x.unbind(2)[3],
    "repeat": lambda x: x.repeat(1, 2, 1),
    "repeat_more_axes": lambda x: x.repeat(2, 1, 1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 2),
    "roll_two": lambda x: x.roll((1, -2), (1, 2)),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "clone": lambda x: x.clone(),
    "cast": lambda x: x.double(),
    "fused_heads": lambda x: x.view(x.shape[0], x.shape[1], 3, 1, 2).permute(2, 0, 3, 1, 4)[1],
    "repeat_kv": lambda x: x[:, :, None].expand(-1, -1, 2, -1).reshape(x.shape[0], -1, 6),
}


def trace_back(node, index, space):
    while node.op != "placeholder":
        step = view_source(node, index, space)
        assert step is not None, op_name(node)
        node, index = step
    return index


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", VIEWS)
def test_every_element_is_found_where_it_is(name, static):
    x = torch.arange(4 * 5 * 6.0).reshape(4, 5, 6)
    captured, node = traced(VIEWS[name], x, static=static)
    space, index = free_index(node)
    source = trace_back(node, index, space)
    sizes, out = sizes_of(captured, [x]), VIEWS[name](x)
    for place in places(out.shape):
        numbers = at(index, place, sizes)
        found = tuple(int(entry.subs(numbers)) for entry in source)
        assert out[place] == x[found], (place, found)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: torch.nn.functional.dropout(x, 0.5, True),
        lambda x: x.repeat_interleave(torch.tensor([1, 2, 1, 1]), 0),
        lambda x: x.sum(0),
    ],
    ids=["arithmetic", "active_dropout", "ragged_repeat", "sum"],
)
def test_other_operators_are_no_views(function):
    _, node = traced(function, torch.randn(4, 5, 6), static=True)
    space, index = free_index(node)
    assert view_source(node, index, space) is None
