"""A small GPT in the style of nanoGPT: fused projection, three ways to say causal, tied weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsify.ir import HeadLayout, MaskKind
from sparsify.passes.capture import capture
from sparsify.passes.detect import detect
from tests._util import facts

BLOCK, WIDTH, HEADS, WORDS = 64, 32, 4, 50


class SelfAttention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(BLOCK, BLOCK)).view(1, 1, BLOCK, BLOCK))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        q, k, v = (t.view(B, T, HEADS, C // HEADS).transpose(1, 2) for t in (q, k, v))
        y = self.attend(q, k, v, T).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)

    def attend(self, q, k, v, T):
        if self.kind == "flag":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.kind == "buffer":
            mask = self.bias[:, :, :T, :T] == 1
        elif self.kind == "arange":
            place = torch.arange(T, device=q.device)
            mask = place[:, None] >= place[None, :]
        elif self.kind == "window":
            mask = (self.bias[:, :, :T, :T] == 1) & (self.bias[:, :, :T, :T].triu(-9) == 1)
        elif self.kind == "manual":
            s = (q @ k.transpose(-2, -1)) * (1.0 / q.size(-1) ** 0.5)
            s = s.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            return F.softmax(s, dim=-1) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), SelfAttention(kind)
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + F.gelu(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList(Block(kind) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(x)


def ids(batch, length):
    return torch.arange(batch * length).view(batch, length) * 7 % WORDS


@pytest.mark.parametrize("kind", ["flag", "buffer", "arange", "manual"])
def test_all_layers_are_proved(kind):
    model = GPT(kind).eval()
    captured = capture(model, (ids(2, 12),))
    found = detect(captured)
    assert [site.fqn for site in found.sites] == ["h.0.attn", "h.1.attn"]
    for site in found.sites:
        assert site.heads == HeadLayout(HEADS, HEADS, WIDTH // HEADS, WIDTH // HEADS)
        assert site.mask.kind == MaskKind.CAUSAL and site.mask.padding is None
        assert site.stream.source.startswith("layer_norm")
    with torch.no_grad():
        got = facts.run(captured, found.sites, (ids(3, 21),))[0]
        assert torch.allclose(got, model(ids(3, 21)), atol=1e-5)


@pytest.mark.parametrize(("kind", "code"), [("window", "SLIDING_WINDOW")])
def test_twins_are_refused(kind, code):
    found = detect(capture(GPT(kind).eval(), (ids(2, 12),)))
    assert not found.sites and [r.code for r in found.refusals] == [code] * 2
