"""Sites replaced in the graph: layouts, ranks, grouped heads, results and what is left behind."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsify.errors import CaptureError
from sparsify.ir import site_key
from sparsify.passes.capture import capture
from sparsify.passes.detect import detect
from sparsify.passes.exported import moved
from sparsify.passes.graphs import op_name
from sparsify.passes.retune import is_site, retuned, site_of
from sparsify.passes.rewrite import rewrite
from sparsify.plans import LayerPlan, Plan

ALL = 10**6


class Model(nn.Module):
    """Projections around a piece of attention code."""

    def __init__(self, attend, kv_heads=4):
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.kv_heads = attend, kv_heads
        self.wq = nn.Linear(32, 32, bias=False)
        self.wk = nn.Linear(32, 8 * kv_heads, bias=False)
        self.wv = nn.Linear(32, 8 * kv_heads, bias=False)

    def forward(self, x, *inputs):
        q = self.wq(x).view(*x.shape[:2], 4, 8).transpose(1, 2)
        k, v = (
            w(x).view(*x.shape[:2], self.kv_heads, 8).transpose(1, 2) for w in (self.wk, self.wv)
        )
        return self.attend(q, k, v, *inputs)


def repeated(t, n):
    b, h, s, d = t.shape
    return t[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)


def viewed(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def bare(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def with_gradients(q, k, v):
    with torch.enable_grad():
        return bare(q, k, v) * 2


def flattened(q, k, v):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2


def by_einsum(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    n = q.shape[1]
    scores = torch.einsum("blhd,bmhd->bhlm", q, k) * 8**-0.5
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    return torch.einsum("bhlm,bmhd->blhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def grouped(q, k, v):
    return F.scaled_dot_product_attention(q, repeated(k, 2), repeated(v, 2), is_causal=True)


def interleaved(q, k, v):
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_flag(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def padded(q, k, v, mask):
    n = q.shape[2]
    seen = torch.ones(n, n, dtype=torch.bool).tril() & mask[:, None, None, :].bool()
    return F.scaled_dot_product_attention(q, k, v, seen)


def positioned(q, k, v):
    return bare(q, k, v) + torch.arange(q.shape[2])[:, None]


def plan_of(found, **changes):
    options = {"block_size": 4, "topk": ALL, **changes}
    layers = (LayerPlan(s.fqn, s.ordinal, "moba", "rewritten", "", **options) for s in found.sites)
    return Plan(tuple(layers))


def programs(model, *inputs, **changes):
    """The captured program and the rewritten one."""
    captured = capture(model, inputs)
    found = detect(captured)
    assert found.sites, [r.message for r in found.refusals]
    sites = {site_key(site.fqn, site.ordinal): site for site in found.sites}
    return captured, rewrite(captured, sites, plan_of(found, **changes))


def ops(program):
    return [node for node in program.graph.nodes if is_site(node)]


@pytest.mark.parametrize(
    ("attend", "kv_heads"),
    [
        (viewed, 4),
        (bare, 4),
        (with_gradients, 4),
        (flattened, 4),
        (by_einsum, 4),
        (grouped, 2),
        (interleaved, 2),
        (by_flag, 2),
    ],
)
def test_the_replacement_equals_the_model_in_its_own_layout(attend, kv_heads):
    model = Model(attend, kv_heads).eval()
    _, program = programs(model, torch.randn(2, 12, 32))
    for shape in ((2, 12, 32), (3, 21, 32)):
        x = torch.randn(shape)
        with torch.no_grad():
            wanted, got = model(x), program.module()(x)
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        assert torch.allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("attend", [grouped, interleaved, by_flag])
def test_keys_and_values_are_read_before_their_repetition(attend):
    _, program = programs(Model(attend, 2).eval(), torch.randn(2, 12, 32))
    (op,) = ops(program)
    assert [operand.meta["val"].shape[1] for operand in op.args[:3]] == [4, 2, 2]
    names = {op_name(node) for node in program.graph.nodes}
    assert not names & {"aten.expand", "aten.repeat_interleave", "aten.slice"}


def test_the_mask_goes_and_the_padding_stays():
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    captured, program = programs(Model(padded).eval(), torch.randn(2, 12, 32), mask)
    before = {op_name(node) for node in captured.graph.nodes}
    after = {op_name(node) for node in program.graph.nodes}
    assert "aten.tril" in before and not after & {"aten.tril", "aten.__and__", "aten.ones"}
    (op,) = ops(program)
    named = dict(zip([a.name for a in op.target._schema.arguments], op.args, strict=False))
    assert op_name(named["key_mask"]) == "aten.ne"


def test_a_result_that_is_an_output_keeps_its_place_in_the_signature():
    captured, program = programs(Model(bare).eval(), torch.randn(2, 12, 32))
    assert [s.kind for s in program.graph_signature.output_specs] == [
        s.kind for s in captured.program.graph_signature.output_specs
    ]
    (name,) = [spec.arg.name for spec in program.graph_signature.output_specs]
    assert name == program.graph.output_node().all_input_nodes[0].name


def test_the_captured_program_stays_as_it_was():
    model, x = Model(viewed).eval(), torch.randn(2, 12, 32)
    captured, program = programs(model, x, topk=1)
    with torch.no_grad():
        assert torch.equal(captured.program.module()(x), model(x))
        assert not torch.allclose(program.module()(x), model(x), atol=1e-3)


def test_a_plan_for_a_site_that_is_not_proved_is_refused():
    captured = capture(Model(viewed).eval(), (torch.randn(2, 12, 32),))
    found = detect(captured)
    with pytest.raises(CaptureError, match="not proved"):
        rewrite(captured, {}, plan_of(found))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda out: out.double(), "another shape or type"),
        (lambda out: out[:, :2], "another shape or type"),
        (lambda out: out.contiguous(), "lies in memory as"),
        (lambda out: out, None),
    ],
)
def test_a_replacement_that_does_not_fit_is_refused(change, said, monkeypatch):
    # laid out as the queries are, [B, L, H, D] in memory, like the operator's own result
    monkeypatch.setattr("sparsify.passes.rewrite.replacement", lambda *_: lambda q, k, v: change(q))
    model, x = Model(viewed).eval(), torch.randn(2, 12, 32)
    if said is None:
        programs(model, x)
        return
    with pytest.raises(CaptureError, match=said):
        programs(model, x)


def test_other_sizes_go_into_the_ops_of_their_sites():
    x = torch.randn(2, 24, 32)
    _, program = programs(Model(viewed).eval(), x, topk=1)
    (op,) = ops(program)
    layer = LayerPlan("", 0, "moba", "rewritten", "", block_size=8, topk=ALL, min_context=5)
    other = retuned(program, Plan((layer,)))
    (tuned,) = ops(other)
    assert site_of(tuned) == site_of(op) == "#0"
    assert (tuned.kwargs["block_size"], tuned.kwargs["topk"]) == (8, ALL)
    assert op.kwargs["topk"] == 1  # the other program is as it was
    with torch.no_grad():
        assert torch.allclose(other.module()(x), Model(viewed).eval()(x), atol=1e-5)


def test_a_program_moves_to_another_device():
    _, program = programs(Model(positioned).eval(), torch.randn(2, 12, 32))
    there = moved(program, torch.device("meta"))
    values = [node.meta.get("val") for node in there.graph.nodes]
    assert {v.device.type for v in values if isinstance(v, torch.Tensor)} == {"meta"}
    named = [node.kwargs["device"] for node in there.graph.nodes if "device" in node.kwargs]
    assert set(named) == {torch.device("meta")}
