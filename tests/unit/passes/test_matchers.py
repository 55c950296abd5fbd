"""Attention in every form is found; what only looks like it is told apart."""

import pytest
import torch
import torch.nn.functional as F

from sparsify.passes.capture import capture
from sparsify.passes.detect import attention_nodes, detect
from tests._util.attention import Attention, code_of, judged, sdpa, site_of, tokens

SPELLINGS = {
    "keywords": lambda q, k, v: sdpa(query=q, key=k, value=v, is_causal=True),
    "all_positional": lambda q, k, v: sdpa(q, k, v, None, 0.0, True),
    "scale": lambda q, k, v: sdpa(q, k, v, None, 0.0, True, scale=0.05),
    "builtin": lambda q, k, v: torch._C._nn.scaled_dot_product_attention(q, k, v, is_causal=True),
    "aten": lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v, is_causal=True),
    "four_axes_of_one": lambda q, k, v: sdpa(q[:, :1], k[:, :1], v[:, :1], is_causal=True).expand(
        -1, 4, -1, -1
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_of_the_call(name):
    site = site_of(lambda self, q, k, v, x: SPELLINGS[name](q, k, v), tokens())
    assert site.pattern == "sdpa"
    assert site.scale == pytest.approx(0.05 if name == "scale" else 8**-0.5)


def test_active_dropout_is_refused():
    def attend(self, q, k, v, x):
        return sdpa(q, k, v, dropout_p=0.1, is_causal=True)

    assert code_of(attend, tokens()) == "DROPOUT"


def test_dropout_that_training_switches_is_off():
    def attend(self, q, k, v, x):
        return sdpa(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)

    model = Attention(attend).train()
    captured, found = judged(model, tokens())
    assert len(found.sites) == 1 and model.training
    assert any("training mode" in note for note in captured.notes)


def test_types():
    def cast(dtype):
        return lambda self, q, k, v, x: sdpa(*(t.to(dtype) for t in (q, k, v)), is_causal=True)

    assert site_of(cast(torch.float64), tokens()).heads.q_heads == 4
    _, found = judged(cast(torch.bfloat16), tokens())
    assert len(found.sites) == 1


def scores(q, k, mask=True):
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    n = s.shape[-1]
    return s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf")) if mask else s


DECOMPOSED = {
    "axis": (lambda q, k, v: scores(q, k, False).softmax(-2) @ v, "SOFTMAX_AXIS"),
    "axis_counted_from_the_front": (
        lambda q, k, v: scores(q, k, False).softmax(2) @ v,
        "SOFTMAX_AXIS",
    ),
    "softcap": (lambda q, k, v: (torch.tanh(scores(q, k, False)) * 5).softmax(-1) @ v, "SOFTCAP"),
    "sink": (
        lambda q, k, v: (
            F.pad(torch.cat([scores(q, k), q[..., :1]], -1).softmax(-1), (0, 0))[..., :-1] @ v
        ),
        "ATTENTION_SINK",
    ),
    "modified": (lambda q, k, v: (scores(q, k).softmax(-1) * 0.5) @ v, "WEIGHTS_MODIFIED"),
    "scaled_by_data": (
        lambda q, k, v: (scores(q, k) * v[..., :1]).softmax(-1) @ v,
        "SCALE_NOT_CONSTANT",
    ),
}


@pytest.mark.parametrize("name", [name for name in DECOMPOSED if name != "sink"])
def test_what_is_more_than_attention_is_refused(name):
    function, code = DECOMPOSED[name]
    assert code_of(lambda self, q, k, v, x: function(q, k, v), tokens()) == code


def test_weights_and_scores_that_are_used_elsewhere():
    class Observed(Attention):
        def forward(self, x):
            q, k, v = self.heads(x)
            s = scores(q, k)
            w = s.softmax(-1)
            return self.attend(w @ v, w, s)

    assert code_of(Observed(lambda out, w, s: (out, w)), tokens()) == "WEIGHTS_USED"
    assert code_of(Observed(lambda out, w, s: out + s.mean()), tokens()) == "SCORES_USED"


def test_a_sink_column():
    def attend(self, q, k, v, x):
        s = torch.cat([scores(q, k), self.wq.bias[:4].view(1, 4, 1, 1).expand(2, 4, 20, 1)], -1)
        return s.softmax(-1)[..., :-1] @ v

    assert code_of(attend, tokens()) == "ATTENTION_SINK"


class Lookalikes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(32, 5)
        self.memory = torch.nn.Parameter(torch.randn(7, 32))

    def forward(self, x):
        routed = self.gate(x).softmax(-1)
        looked_up = (x @ self.memory.t()).softmax(-1) @ self.memory
        classes = looked_up.mean(1).softmax(-1)
        return routed, looked_up, classes


def test_lookalikes_are_no_attention():
    _, found = judged(Lookalikes(), tokens())
    assert not found.sites and not found.refusals and not found.order
    assert [r.code for r in found.lookalikes] == ["NOT_ATTENTION"] * 3


def test_flex_attention_is_found():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def attend(self, q, k, v, x):
        return flex.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (i - j))

    assert code_of(attend, tokens(length=128)) == "FORM_UNSUPPORTED"


def test_attention_in_control_flow_is_found():
    def attend(self, q, k, v, x):
        return torch.cond(
            x.sum() > 0,
            lambda q, k, v: sdpa(q, k, v, is_causal=True),
            lambda q, k, v: sdpa(q, k, v),
            (q, k, v),
        )

    assert code_of(attend, tokens()) == "FORM_UNSUPPORTED"


@torch.library.custom_op("sparsify_tests::my_attention", mutates_args=())
def my_attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q + k


@my_attention.register_fake
def _(q, k):
    return torch.empty_like(q)


def test_custom_operators_called_attention_are_found():
    def attend(self, q, k, v, x):
        return my_attention(q, k)

    assert code_of(attend, tokens()) == "FORM_UNSUPPORTED"


def test_multi_head_attention_and_encoder_layers():
    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
            self.layers = torch.nn.TransformerEncoder(layer, 2)

        def forward(self, x):
            mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.layers(x, mask=mask, is_causal=True)

    _, found = judged(Encoder().eval(), tokens())
    assert [site.fqn for site in found.sites] == [f"layers.layers.{n}.self_attn" for n in (0, 1)]

    class Heads(torch.nn.Module):
        def __init__(self, weights):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(32, 4)
            self.weights = weights

        def forward(self, x):
            mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)
            return self.attention(x, x, x, attn_mask=mask, need_weights=self.weights)

    _, found = judged(Heads(False).eval(), tokens())
    assert found.sites[0].heads.q_heads == 4
    assert code_of(Heads(True).eval(), tokens()) == "WEIGHTS_USED"


def test_names_ordinals_and_order():
    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Attention(lambda self, q, k, v, x: sdpa(q, k, v, is_causal=True))
            self.other = Attention(lambda self, q, k, v, x: sdpa(q, k, v))

        def forward(self, x):
            return self.first(self.other(self.first(x)))

    captured = capture(Shared(), (tokens(),))
    found = detect(captured)
    assert found.order == ("first#0", "other#0", "first#1")
    assert [(s.fqn, s.ordinal) for s in found.sites] == [("first", 0), ("first", 1)]
    assert [(r.fqn, r.ordinal, r.code) for r in found.refusals] == [("other", 0, "NOT_CAUSAL")]
    nodes = attention_nodes(captured)
    assert list(nodes) == [("first", 0), ("other", 0), ("first", 1)]
    assert all(node.graph is captured.graph for node in nodes.values())
    assert detect(captured) == found
    assert all(site.source.startswith("tests/") for site in found.sites)


def test_a_graph_without_attention():
    _, found = judged(torch.nn.Linear(32, 32), tokens())
    assert found.sites == found.refusals == found.order == ()
