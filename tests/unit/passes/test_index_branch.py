"""Where a graph turns q, and what an index branch adds to a program."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsify.errors import CaptureError
from sparsify.passes.capture import capture
from sparsify.passes.detect import attention_calls, detect
from sparsify.passes.index_branch import IndexBranch, rotary_tables
from sparsify.passes.retune import is_site
from sparsify.passes.rewrite import rewrite
from sparsify.plans import LayerPlan, Plan


class Attention(nn.Module):
    """One head of 8 channels; `turn` makes of q or k and the angles what attention reads."""

    def __init__(self, turn):
        super().__init__()
        self.turn = turn
        self.norm, self.qkv = nn.RMSNorm(8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        q, k, v = (p(x)[:, None] for p in self.qkv)
        angles = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
        angles = torch.cat([angles, angles], -1)
        q, k = self.turn(q, angles), self.turn(k, angles)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


def half(x):
    return torch.cat([-x[..., 4:], x[..., :4]], -1)


def plain(x, angles):
    return x * angles.cos() + half(x) * angles.sin()


def scaled(x, angles):
    cos, sin = ((table * 1.5).to(x.dtype)[None, None] for table in (angles.cos(), angles.sin()))
    return x * cos + half(x) * sin


def twice(x, angles):
    return plain(plain(x, angles), angles * 2)


def found(turn):
    captured = capture(Attention(turn), (torch.randn(2, 20, 8),))
    (site,) = detect(captured).sites
    call = attention_calls(captured)[site.fqn, site.ordinal]
    hidden = next(n for n in captured.graph.nodes if n.name == site.stream.source)
    return captured, site, rotary_tables(call.q.node, hidden)


def test_tables_are_the_cosines_and_sines_that_q_is_multiplied_by():
    _, _, (cos, sin) = found(plain)
    assert [str(t.target) for t in (cos, sin)] == ["aten.cos.default", "aten.sin.default"]


def test_tables_are_taken_as_they_are_scaled_and_before_their_axes_change():
    _, _, (cos, sin) = found(scaled)
    assert str(cos.target) != "aten.cos.default" and cos.meta["val"].dim() == 2
    assert all(str(t.all_input_nodes[0].target).startswith("aten.") for t in (cos, sin))


def test_what_does_not_turn_has_none():
    assert found(lambda x, angles: x * 0.5)[2] is None
    assert found(lambda x, angles: x * x.cos())[2] is None  # of the hidden state, not of positions


def test_several_tables_are_refused():
    with pytest.raises(CaptureError, match="2 tables of cosines"):
        found(twice)


def branch(size=8, turns=True):
    weight = nn.Parameter(torch.randn(4, 8))

    def run(hidden, *rest):
        return F.linear(hidden, rest[-1])[:, None]

    return IndexBranch({"indexer.w": weight}, run, run, size, 4, turns)


def planned(captured, site, made, **options):
    sizes = dict(block_size=4, topk=2, indexer="learned", index_dim=4)
    plan = Plan((LayerPlan(site.fqn, 0, "msa", "rewritten", "by rule", **sizes),))
    return rewrite(captured, {f"{site.fqn}#0": site}, plan, {f"{site.fqn}#0": made}, **options)


def test_weights_become_parameters_and_index_keys_a_further_result():
    captured, site, _ = found(plain)
    made = branch()
    alone = planned(captured, site, made)
    assert alone.state_dict["indexer.w"] is made.weights["indexer.w"]
    assert "indexer.w" in alone.graph_signature.parameters
    assert len(alone.graph_signature.user_outputs) == 1
    (node,) = (n for n in alone.graph.nodes if is_site(n))
    assert [tuple(n.meta["val"].shape)[1::2] for n in node.args[3:5]] == [(1, 4), (1, 4)]
    giving = planned(captured, site, made, gives_keys=True)
    assert len(giving.graph_signature.user_outputs) == 2
    assert giving.call_spec.out_spec.num_leaves == 2
    assert "indexer.w" not in captured.program.state_dict


def test_another_hidden_state_or_missing_tables_are_refused():
    captured, site, _ = found(plain)
    with pytest.raises(CaptureError, match="hidden states"):
        planned(captured, site, branch(size=16))
    still, its_site, _ = found(lambda x, angles: x * 0.5)
    assert planned(still, its_site, branch(turns=False))
    with pytest.raises(CaptureError, match="no rotary tables"):
        planned(still, its_site, branch())
