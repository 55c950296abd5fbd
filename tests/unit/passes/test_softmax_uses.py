"""What a written-out attention must not be: observed, changed, rounded, or part of more."""

import pytest
import torch
import torch.nn.functional as F

from sparsify.passes.capture import capture
from sparsify.passes.detect import attention_calls, attention_nodes, detect
from tests._util.attention import Attention, judged, site_of, tokens

INF = float("-inf")


def scores(q, k):
    s = q @ k.mT * 8**-0.5
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), INF)


def with_baddbmm(beta, alpha):
    def form(q, k, v):
        b, h, n, d = q.shape
        q, k, v = (t.reshape(b * h, n, d) for t in (q, k, v))
        out = torch.baddbmm(v, scores(q, k).softmax(-1), v, beta=beta, alpha=alpha)
        return out.view(b, h, n, d)

    return form


def changed_queries(q, k, v):
    q = q * 8**-0.5
    q[..., :4] *= 2
    s = q @ k.mT
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), INF).softmax(-1) @ v


REFUSED = {
    "halved": (lambda q, k, v: (scores(q, k).softmax(-1) * 0.5) @ v, "WEIGHTS_MODIFIED"),
    "masked_afterwards": (
        lambda q, k, v: scores(q, k).softmax(-1).masked_fill(v[:, :, :1, :1] > 0, 0.0) @ v,
        "WEIGHTS_MODIFIED",
    ),
    "cut_off": (
        lambda q, k, v: scores(q, k).softmax(-1)[..., :5] @ v[:, :, :5],
        "WEIGHTS_MODIFIED",
    ),
    "whole_numbers": (
        lambda q, k, v: scores(q, k).softmax(-1).to(torch.int32).to(q) @ v,
        "WEIGHTS_MODIFIED",
    ),
    "rounded_weights": (
        lambda q, k, v: scores(q, k).softmax(-1).to(torch.bfloat16).to(q) @ v,
        "WEIGHTS_MODIFIED",
    ),
    "rounded_scores": (
        lambda q, k, v: scores(q, k).to(torch.float8_e4m3fn).to(q).softmax(-1) @ v,
        "SCORES_MODIFIED",
    ),
    "softmax_in_bfloat16": (
        lambda q, k, v: scores(q, k).to(torch.bfloat16).softmax(-1).to(q) @ v,
        "SCORES_MODIFIED",
    ),
    "dropout": (
        lambda q, k, v: F.dropout(scores(q, k).softmax(-1), 0.1, True) @ v,
        "DROPOUT",
    ),
    "added_to_values": (with_baddbmm(1, 1), "FORM_UNSUPPORTED"),
    "doubled_values": (with_baddbmm(0, 2), "FORM_UNSUPPORTED"),
    "cut_off_scores": (
        lambda q, k, v: scores(q, torch.cat([k, k], 2))[..., : k.shape[2]].softmax(-1) @ v,
        "SCORES_MODIFIED",
    ),
    "two_products": (
        lambda q, k, v: (scores(q, k) + q @ v.mT).softmax(-1) @ v,
        "SCORES_MODIFIED",
    ),
    "scores_put_together": (
        lambda q, k, v: torch.cat([scores(q, k), q @ v.mT], -1).softmax(-1) @ torch.cat([v, v], 2),
        "SCORES_MODIFIED",
    ),
    "two_softmaxes": (
        lambda q, k, v: (scores(q, k).softmax(-1) - 0.1 * scores(k, q).softmax(-1)) @ v,
        "WEIGHTS_MODIFIED",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_more_than_attention_is_refused(name):
    form, code = REFUSED[name]
    _, found = judged(lambda self, q, k, v, x: form(q, k, v), tokens())
    assert not found.sites and {refusal.code for refusal in found.refusals} == {code}


def test_twins_that_are_plain_attention():
    for form in (lambda q, k, v: scores(q, k).softmax(-1) @ v, with_baddbmm(0, 1)):
        assert site_of(lambda self, q, k, v, x, form=form: form(q, k, v), tokens())


def test_queries_that_are_changed_in_place_are_taken_as_they_are_then():
    site = site_of(lambda self, q, k, v, x: changed_queries(q, k, v), tokens())
    assert site.scale == 1.0


class Observed(Attention):
    def forward(self, x):
        q, k, v = self.heads(x)
        s = scores(q, k)
        w = s.softmax(-1)
        return self.attend(w @ v, w, s)


@pytest.mark.parametrize(
    ("observe", "code"),
    [
        (lambda out, w, s: (out, w), "WEIGHTS_USED"),
        (lambda out, w, s: (out, w.view(2, 4, 20, 20)), "WEIGHTS_USED"),
        (lambda out, w, s: out + w.amax(), "WEIGHTS_USED"),
        (lambda out, w, s: out + (w @ w).sum(), "WEIGHTS_USED"),
        (lambda out, w, s: (out, w.topk(3).values), "WEIGHTS_USED"),
        (lambda out, w, s: (out, w.split(10, -1)[0]), "WEIGHTS_USED"),
        (lambda out, w, s: (out, w.max(-1).indices), "WEIGHTS_USED"),
        (
            lambda out, w, s: (out, torch.cond(out.sum() > 0, torch.sin, torch.cos, (w,))),
            "WEIGHTS_USED",
        ),
        (lambda out, w, s: (out, s), "SCORES_USED"),
        (lambda out, w, s: (out, s.max(-1).values), "SCORES_USED"),
        (lambda out, w, s: (out, s.unbind(1)[0]), "SCORES_USED"),
        (lambda out, w, s: out + s[..., 0].sum(), "SCORES_USED"),
        (lambda out, w, s: out + s.softmax(-2).sum(), "SCORES_USED"),
    ],
)
def test_weights_and_scores_that_are_used_elsewhere(observe, code):
    _, found = judged(Observed(observe), tokens())
    assert not found.sites and found.refusals[0].code == code


def test_sizes_of_scores_are_not_uses():
    model = Observed(lambda out, w, s: out + torch.zeros_like(s).sum() + s.shape[-1])
    assert site_of(model, tokens())


def test_uses_that_lead_to_no_result_are_none():
    def observe(out, w, s):
        w.mean(1), s.topk(3), w.clamp(0.1).log()
        return out

    assert site_of(Observed(observe), tokens())


@pytest.mark.parametrize("mask", [torch.bool, torch.float32])
def test_multi_head_attention_that_computes_weights(mask):
    class Heads(torch.nn.Module):
        def __init__(self, wanted):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)
            self.wanted = wanted

        def forward(self, x):
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            if mask is not torch.bool:
                hidden = torch.zeros(hidden.shape).masked_fill(hidden, INF)
            out, weights = self.attention(x, x, x, attn_mask=hidden)
            return (out, weights) if self.wanted else out

    site = site_of(Heads(False).eval(), tokens())
    assert site.pattern == "baddbmm" and site.heads.q_heads == 4
    assert site.scale == pytest.approx(8**-0.5)
    _, found = judged(Heads(True).eval(), tokens())
    assert [r.code for r in found.refusals] == ["WEIGHTS_USED"]


def test_observed_attention_is_no_step_for_the_layers_behind_it():
    class Twice(torch.nn.Module):
        def __init__(self, observe):
            super().__init__()
            self.first, self.second = Observed(observe), Attention(None)

        def forward(self, x):
            q, k, v = self.second.heads(x)
            k = k + self.first(x).view(2, 20, 4, 8).transpose(1, 2)
            return scores(q, k).softmax(-1) @ v

    _, found = judged(Twice(lambda out, w, s: out.transpose(1, 2).flatten(2)), tokens())
    assert len(found.sites) == 2
    _, found = judged(Twice(lambda out, w, s: out.transpose(1, 2).flatten(2) + w.amax()), tokens())
    assert [r.code for r in found.refusals] == ["WEIGHTS_USED", "NOT_SELF_ATTENTION"]


def test_calls_and_nodes_name_what_a_rewrite_replaces():
    captured = capture(
        Attention(lambda self, q, k, v, x: scores(q, k).softmax(-1) @ v), (tokens(),)
    )
    found = detect(captured)
    nodes, calls = attention_nodes(captured), attention_calls(captured)
    assert list(nodes) == list(calls) == [(s.fqn, s.ordinal) for s in found.sites]
    (call,) = calls.values()
    assert nodes[found.sites[0].fqn, 0] is call.out.node
    assert call.out.node.name.startswith("matmul") and call.mask is None
    assert not call.out.permuted and call.k.shape[-1] == 8 and call.scale == 1.0


def test_refused_forms_have_a_node_and_no_call():
    captured = capture(
        Attention(lambda self, q, k, v, x: (scores(q, k).softmax(-1) * 0.5) @ v), (tokens(),)
    )
    assert len(attention_nodes(captured)) == 1 and not attention_calls(captured)


def test_the_name_is_that_of_the_module_that_multiplies_the_values():
    class Named(Attention):
        def __init__(self):
            super().__init__(None)
            self.softmax, self.drop = torch.nn.Softmax(-1), torch.nn.Dropout(0.1)

        def forward(self, x):
            q, k, v = self.heads(x)
            return self.drop(self.softmax(scores(q, k))) @ v

    model = torch.nn.Sequential(Named())
    assert site_of(model, tokens()).fqn == "0"


def test_attention_over_the_rows_of_a_batch_is_an_assumption():
    class OverBatch(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(32, 96)

        def forward(self, x):
            q, k, v = (t.transpose(0, 1) for t in self.qkv(x).chunk(3, -1))
            return (scores(q, k).softmax(-1) @ v).transpose(0, 1)

    site = site_of(OverBatch(), tokens())
    assert "axis 0 of x counts the tokens" in site.stream.assumptions
    plain = site_of(lambda self, q, k, v, x: scores(q, k).softmax(-1) @ v, tokens())
    assert not plain.stream.assumptions
