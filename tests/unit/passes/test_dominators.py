"""The hidden state: the last value through which all of q, k and v pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsify.passes.capture import capture
from sparsify.passes.dominators import Dataflow
from sparsify.passes.graphs import op_name
from sparsify.passes.matchers import sdpa as matcher
from tests._util.attention import sdpa, tokens


class Layer(nn.Module):
    """`project(self, y, x)` makes q, k and v of the normed y."""

    def __init__(self, project):
        super().__init__()
        self.project, self.norm = project, nn.LayerNorm(32)
        self.w, self.fused = nn.Linear(32, 32), nn.Linear(32, 96)

    def forward(self, x, *inputs):
        q, k, v = self.project(self, self.norm(x), x, *inputs)
        return sdpa(*(t.view(*t.shape[:2], 4, 8).transpose(1, 2) for t in (q, k, v)))


def hidden_of(project, *inputs):
    captured = capture(Layer(project).eval(), (tokens(), *inputs))
    flow = Dataflow(captured.graph, captured.inputs)
    call = matcher.read_call(next(n for n in captured.graph.nodes if matcher.is_anchor(n)))
    return flow, call, flow.common_source([operand.node for operand in call.operands])


NORMED = {
    "projections": lambda self, y, x: (self.w(y), self.w(y), self.w(y)),
    "split": lambda self, y, x: self.fused(y).split(32, -1),
    "chunk": lambda self, y, x: self.fused(y).chunk(3, -1),
    "slices": lambda self, y, x: [self.fused(y)[..., n : n + 32] for n in (0, 32, 64)],
    "unbind": lambda self, y, x: self.fused(y).view(*y.shape[:2], 3, 32).unbind(2),
    "flattened": lambda self, y, x: [
        t.view(x.shape) for t in self.fused(y.view(-1, 32)).split(32, -1)
    ],
    "index": lambda self, y, x: [
        self.fused(y).view(*y.shape[:2], 3, 32)[:, :, [n]].flatten(2) for n in range(3)
    ],
}


@pytest.mark.parametrize("name", NORMED)
def test_the_input_of_the_projection_is_the_hidden_state(name):
    _, _, hidden = hidden_of(NORMED[name])
    assert op_name(hidden) == "aten.layer_norm"


def test_an_earlier_value_when_one_of_them_skips_the_norm():
    _, _, hidden = hidden_of(lambda self, y, x: (self.w(y), self.w(y), self.w(x)))
    assert hidden.name == "x"


def test_a_projection_that_is_more_than_cut_up_is_the_hidden_state():
    def project(self, y, x):
        z = self.w(y)
        return F.relu(z), F.relu(z), torch.tanh(z)

    assert op_name(hidden_of(project)[2]) == "aten.linear"


def test_positions_do_not_count():
    def project(self, y, x, place):
        turned = self.w(y) + place[..., None]
        return turned, turned, self.w(y)

    flow, call, hidden = hidden_of(project, torch.arange(20).expand(2, 20).clone())
    assert op_name(hidden) == "aten.layer_norm"
    assert {node.name for node in flow.inputs_of(call.q.node)} == {"x", "inputs_0"}
    assert {node.name for node in flow.inputs_of(call.v.node)} == {"x"}


def test_sizes_and_masks_are_no_data():
    def project(self, y, x, other):
        q = self.w(y) + torch.arange(other.shape[1])[:, None] + torch.ones_like(other)
        mask = other.sum(-1)[:, None, None, :] > 0
        heads = [t.view(2, 20, 4, 8).transpose(1, 2) for t in (q, q, q)]
        q = sdpa(*heads, attn_mask=mask).transpose(1, 2).flatten(2)
        return q, q, q

    flow, call, _ = hidden_of(project, tokens(seed=1))
    assert {node.name for node in flow.inputs_of(call.q.node)} == {"x"}


def test_nothing_shared():
    _, _, hidden = hidden_of(lambda self, y, x, z: (y, z, z), tokens(seed=1))
    assert hidden is None
