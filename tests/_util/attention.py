"""A self-attention layer to change one fact of at a time, and its judgement."""

import torch
import torch.nn.functional as F

from sparsify.passes.capture import capture
from sparsify.passes.detect import detect
from tests._util import facts

sdpa = F.scaled_dot_product_attention
ATOL = 2e-6


class Attention(torch.nn.Module):
    """Projections and head split; `attend(self, q, k, v, x, *inputs)` is given."""

    def __init__(self, attend, hq=4, hkv=None, d=8, dv=None, dim=32):
        super().__init__()
        self.attend, self.hq, self.hkv, self.d, self.dv = attend, hq, hkv or hq, d, dv or d
        torch.manual_seed(0)
        self.wq = torch.nn.Linear(dim, hq * d)
        self.wk = torch.nn.Linear(dim, self.hkv * d)
        self.wv = torch.nn.Linear(dim, self.hkv * self.dv)

    def heads(self, x):
        q, k, v = (w(x) for w in (self.wq, self.wk, self.wv))
        split = [(q, self.hq, self.d), (k, self.hkv, self.d), (v, self.hkv, self.dv)]
        return [t.view(*x.shape[:2], h, d).transpose(1, 2) for t, h, d in split]

    def forward(self, x, *inputs):
        out = self.attend(self, *self.heads(x), x, *inputs)
        return out.transpose(1, 2).flatten(2) if out.dim() == 4 else out


def tokens(batch=2, length=20, dim=32, seed=0):
    return torch.randn(batch, length, dim, generator=torch.Generator().manual_seed(seed))


def padding(batch=2, length=20):
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, :3] = 0
    mask[1, -4:] = 0
    return mask


def judged(model, *inputs, dynamic=None):
    """The captured model and what was found in it."""
    if not isinstance(model, torch.nn.Module):
        model = Attention(model)
    captured = capture(model, inputs, dynamic=dynamic)
    return captured, detect(captured)


def site_of(model, *inputs, check=True):
    """The one proved site; its facts are recomputed by numbers."""
    captured, found = judged(model, *inputs)
    assert not found.refusals, found.refusals
    (site,) = found.sites
    if check:
        got = facts.run(captured, found.sites, inputs)[0]
        wanted = facts.original(captured, inputs)[0]
        if site.mask.padding is not None:  # rows of padding hold whatever the fill gives them
            real = dict(zip(captured.inputs, inputs, strict=True))[site.mask.padding].bool()
            got, wanted = got[real], wanted[real]
        assert torch.allclose(got, wanted, atol=ATOL)
    return site


def code_of(model, *inputs):
    """The code of the one refusal, which must carry evidence."""
    _, found = judged(model, *inputs)
    assert not found.sites
    (refusal,) = found.refusals
    assert refusal.message and refusal.evidence
    return refusal.code


def masked(make):
    """Attention with the mask that `make(length, *inputs)` builds."""

    def attend(self, q, k, v, x, *inputs):
        return sdpa(q, k, v, attn_mask=make(q.shape[2], *inputs))

    return attend
