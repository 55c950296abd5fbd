"""Head counts, and the order in which query heads share keys and values."""

import pytest
import torch

from sparsify.ir import HeadLayout
from tests._util.attention import Attention, code_of, sdpa, site_of, tokens


def layer(expand_k, expand_v=None, **sizes):
    def attend(self, q, k, v, x):
        return sdpa(q, expand_k(k), (expand_v or expand_k)(v), is_causal=True)

    return Attention(attend, **{"hq": 6, "hkv": 2, **sizes})


def interleaved(t):
    return t.repeat_interleave(3, 1)


def expanded(t):
    b, h, n, d = t.shape
    return t[:, :, None].expand(b, h, 3, n, d).reshape(b, h * 3, n, d)


def tiled(t):
    return t.repeat(1, 3, 1, 1)


def tiled_by_expand(t):
    b, h, n, d = t.shape
    return t[:, None].expand(b, 3, h, n, d).reshape(b, h * 3, n, d)


@pytest.mark.parametrize("expand", [interleaved, expanded])
def test_repeated_heads_are_groups(expand):
    assert site_of(layer(expand), tokens()).heads == HeadLayout(6, 2, 8, 8)


@pytest.mark.parametrize("expand", [tiled, tiled_by_expand])
def test_tiled_heads_are_no_groups(expand):
    assert site_of(layer(expand), tokens()).heads == HeadLayout(6, 6, 8, 8)


def test_both_k_and_v_must_be_grouped():
    assert site_of(layer(interleaved, tiled), tokens()).heads.kv_heads == 6
    assert site_of(layer(tiled, interleaved), tokens()).heads.kv_heads == 6


@pytest.mark.parametrize(("hq", "hkv"), [(4, 2), (6, 2), (7, 1), (8, 1), (14, 2), (4, 4)])
def test_enable_gqa(hq, hkv):
    model = Attention(
        lambda self, q, k, v, x: sdpa(q, k, v, is_causal=True, enable_gqa=hq != hkv), hq, hkv
    )
    assert site_of(model, tokens()).heads == HeadLayout(hq, hkv, 8, 8)


def test_one_key_head_is_broadcast():
    assert site_of(layer(lambda t: t, hkv=1), tokens()).heads == HeadLayout(6, 1, 8, 8)


def test_rotary_behind_the_expansion_does_not_hide_the_groups():
    def turn(t):
        half = t.shape[-1] // 2
        turned = torch.cat([-t[..., half:], t[..., :half]], -1)
        angle = torch.arange(t.shape[-2])[:, None] * torch.ones(t.shape[-1])
        return t * angle.cos() + turned * angle.sin()

    assert site_of(layer(lambda t: turn(expanded(t)), expanded), tokens()).heads.kv_heads == 2


def test_a_bias_per_head_behind_the_expansion_ends_the_groups():
    def shifted(t):
        return expanded(t) + torch.arange(6.0)[:, None, None]

    assert site_of(layer(shifted, expanded), tokens()).heads.kv_heads == 6


def test_heads_from_two_tensors_are_no_group():
    def joined(t):
        return torch.cat([t[:, :1].expand(-1, 3, -1, -1), t[:, 1:].expand(-1, 3, -1, -1)], 1)

    assert site_of(layer(joined), tokens()).heads.kv_heads == 6


def test_value_size_and_scale_come_from_the_graph():
    model = Attention(lambda self, q, k, v, x: sdpa(q, k, v, is_causal=True), hq=2, d=24, dv=16)
    site = site_of(model, tokens())
    assert site.heads == HeadLayout(2, 2, 24, 16)
    assert site.scale == pytest.approx(24**-0.5)


@pytest.mark.parametrize("heads", [1, 4])
def test_flattened_heads_are_taken_apart(heads):
    def attend(self, q, k, v, x):
        flat = [t.reshape(-1, *t.shape[2:]) for t in (q, k, v)]
        return sdpa(*flat, is_causal=True).view(q.shape)

    assert site_of(Attention(attend, hq=heads), tokens()).heads.q_heads == heads


def test_flattened_heads_of_two_orders_stay_together():
    """Heads before the batch: b and h cannot be told apart by division, so there is one head."""

    def attend(self, q, k, v, x):
        flat = [t.transpose(0, 1).reshape(-1, *t.shape[2:]) for t in (q, k, v)]
        return sdpa(*flat, is_causal=True).view(4, -1, *q.shape[2:]).transpose(0, 1)

    captured_heads = site_of(Attention(attend), tokens(), check=False).heads.q_heads
    assert captured_heads == 1


def test_tokens_without_a_batch():
    class Packed(Attention):
        def forward(self, x):
            q, k, v = (t[0] for t in self.heads(x[None]))
            return sdpa(q, k, v, is_causal=True)

    assert site_of(Packed(None), tokens()[0]).heads.q_heads == 4


def test_attention_over_the_heads_is_refused():
    def attend(self, q, k, v, x):
        return sdpa(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).flatten(2)

    assert code_of(attend, tokens()) == "SOFTMAX_AXIS"


def test_queries_broadcast_over_the_batch_are_refused():
    def attend(self, q, k, v, x):
        return sdpa(q[:1], k, v, is_causal=True)

    assert code_of(attend, tokens()) == "FORM_UNSUPPORTED"
