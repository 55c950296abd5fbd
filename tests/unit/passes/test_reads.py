"""What an element reads, against the derivatives of the function: nothing may be missed."""

import pytest
import sympy
import torch
import torch.nn.functional as F

from sparsify.passes.context import Context
from sparsify.passes.dominators import Dataflow
from tests._util.graphs import at, free_index, places, traced

WEIGHT = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

# functions of x [2, 3, 6] whose reads are exactly what the derivatives show, and others
EXACT = {
    "arithmetic": lambda x: x * 2 + x.tanh(),
    "linear": lambda x: F.linear(x, WEIGHT.to(x)),
    "matmul": lambda x: x @ WEIGHT.to(x),
    "matrix_from_the_left": lambda x: WEIGHT[:3, :3].to(x) @ x,
    "vector_from_the_left": lambda x: WEIGHT[0, :3].to(x) @ x,
    "addmm": lambda x: torch.addmm(x.new_ones(6), x.reshape(-1, 6), WEIGHT.to(x)),
    "softmax": lambda x: x.softmax(-1),
    "softmax_over_positions": lambda x: x.softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "rms_norm": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "mean_without_axis": lambda x: x - x.mean(1)[:, None],
    "stack": lambda x: torch.stack([x, 2 * x], 1),
    "flip": lambda x: x.flip(1),
    "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)),
    "vector_product": lambda x: x @ x[0, 0],
    "where": lambda x: torch.where(x > 0, x, 2 * x),
    "index": lambda x: x[:, :, [0, 2, 4]],
    "index_from_the_end": lambda x: x[:, :, [-2]],
}
COVERED = {
    "rotary": lambda x: torch.cat([-x[..., 3:], x[..., :3]], -1) + x,
    "shift": lambda x: torch.cat([x[:, :1], x[:, :-1]], 1),
    "slice_scatter": lambda x: torch.slice_scatter(x, 2 * x[..., :2], 2, 1, 3),
    "cumsum": lambda x: x.cumsum(1),
    "group_norm": lambda x: F.group_norm(x.transpose(1, 2), 2).transpose(1, 2),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "attention_full": lambda x: F.scaled_dot_product_attention(x, x, 2 * x),
    "attention_heads": lambda x: F.scaled_dot_product_attention(
        x.view(2, 3, 3, 2).transpose(1, 2),
        x[..., :2].view(2, 3, 1, 2).transpose(1, 2),
        x[..., 2:4].view(2, 3, 1, 2).transpose(1, 2),
        enable_gqa=True,
    ),
}


def reads_of(function, x):
    captured, node = traced(function, x, static=True)
    context = Context(captured, Dataflow(captured.graph, captured.inputs))
    space, index = free_index(node)
    reader = context.reader(space)
    reads = [read for read in reader.leaves(node, index) if read.node.name in captured.inputs]
    return space, index, reads


def covered(reads, space, numbers, shape):
    """All elements of x that the reads stand for."""
    found = set()
    for read in reads:
        entries = [entry.subs(numbers) for entry in read.index]
        free = sorted(set().union(*(e.free_symbols for e in entries)), key=str)
        for values in places([int(space.sizes[symbol]) for symbol in free]):
            known = dict(zip(free, values, strict=True))
            bounds = {s: space.bounds[s].subs(numbers) for s in free if s in space.bounds}
            if all(known[s] <= bound for s, bound in bounds.items()):
                found.add(tuple(int(entry.subs(known)) for entry in entries))
    inside = {
        place for place in found if all(0 <= n < s for n, s in zip(place, shape, strict=True))
    }
    return inside


@pytest.mark.parametrize("name", [*EXACT, *COVERED])
def test_no_dependency_is_missed(name):
    function = EXACT.get(name) or COVERED[name]
    x = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    space, index, reads = reads_of(function, x)
    jacobian = torch.autograd.functional.jacobian(function, x)
    for place in list(places(function(x).shape))[::5]:
        true = {tuple(p) for p in (jacobian[place].abs() > 1e-12).nonzero().tolist()}
        claimed = covered(reads, space, at(index, place), x.shape)
        assert true <= claimed
        if name in EXACT:
            assert true == claimed


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sort(1)[0],
        lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1],
        lambda x: x[:, torch.tensor([2, 0, 1])],
        lambda x: x[:, x.argmax(1)[0, :3]],
        lambda x: torch.fft.fft(x, dim=1).real,
        lambda x: F.conv1d(x.transpose(1, 2), torch.ones(6, 6, 3), padding=1).transpose(1, 2),
    ],
    ids=["sort", "pad", "permuted", "by_data", "fft", "convolution"],
)
def test_what_has_no_rule_is_named_or_read_as_a_whole(function):
    _, index, reads = reads_of(function, torch.randn(2, 3, 6))
    assert not any(read.index[1:2] == (index[1],) for read in reads)


def test_a_value_changed_in_place_is_not_read():
    def function(x):
        y = x + 1
        z = y.transpose(0, 1)
        z[0] = 0.0
        return y * 2

    captured, node = traced(function, torch.randn(2, 3, 6), static=True)
    flow = Dataflow(captured.graph, captured.inputs)
    add = next(n for n in captured.graph.nodes if n.name.startswith("add"))
    reader = Context(captured, flow, frozen=frozenset({add})).reader(free_index(node)[0])
    reads = reader.leaves(node, free_index(node)[1])
    assert [read.unread for read in reads] == ["aten.add (changed in place)"]


def test_a_causal_attention_reads_the_past_only():
    def function(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    captured, node = traced(function, torch.randn(2, 3, 6), static=True)
    flow = Dataflow(captured.graph, captured.inputs)
    space, index = free_index(node)
    reads = Context(captured, flow, causal={node}).reader(space).leaves(node, index)
    positions = {read.index[1] for read in reads}
    assert index[1] in positions
    assert all(p == index[1] or space.bounds[p] == index[1] for p in positions)
    assert all(isinstance(p, sympy.Symbol) for p in positions)
