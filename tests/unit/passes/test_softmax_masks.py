"""Masks of attention that is written out: what hides keys in the scores, and what does not."""

import pytest
import torch
import torch.nn.functional as F

from sparsify.passes.capture import capture
from sparsify.passes.detect import detect
from tests._util.attention import Attention, code_of, judged, padding, site_of, tokens

INF = float("-inf")
LOWEST = torch.finfo(torch.float32).min


def upper(n, diagonal=1):
    return torch.ones(n, n, dtype=torch.bool).triu(diagonal)


def tril(n, diagonal=0):
    return torch.tril(torch.ones(n, n), diagonal)


def masked_in_place(s, n):
    s *= 1.0
    s.masked_fill_(upper(n), INF)
    return s


def by_positions(s, n):
    place = torch.arange(n)
    return torch.where(place[:, None] >= place[None, :], s, LOWEST)


MASKS = {
    "masked_fill": lambda s, n: s.masked_fill(upper(n), INF),
    "in_place": masked_in_place,
    "tril_is_zero": lambda s, n: s.masked_fill(tril(n) == 0, INF),
    "tril_below_half": lambda s, n: s.masked_fill(tril(n) < 0.5, -1e9),
    "added_triu": lambda s, n: s + torch.full((n, n), INF).triu(1),
    "added_from_the_left": lambda s, n: torch.full((n, n), INF).triu(1) + s,
    "added_lowest": lambda s, n: s + torch.full((n, n), LOWEST).triu(1),
    "subtracted": lambda s, n: s - (1.0 - tril(n)) * 1e9,
    "added_minus_1e4": lambda s, n: s + (1.0 - tril(n)) * -10000.0,
    "added_log": lambda s, n: s + tril(n).log(),
    "where": by_positions,
    "where_tensor": lambda s, n: torch.where(tril(n).bool(), s, torch.full_like(s, -1e4)),
    "where_hidden_first": lambda s, n: torch.where(upper(n), torch.tensor(INF), s),
    "multiplied_and_added": lambda s, n: s * tril(n) - 1e9 * (1 - tril(n)),
    "zeros_like": lambda s, n: s + torch.zeros_like(s).masked_fill(upper(n), INF),
    "filled_twice": lambda s, n: s.masked_fill(upper(n), -1e9).masked_fill(upper(n, 2), INF),
    "clamped_at_the_lowest": lambda s, n: s.masked_fill(upper(n), INF).clamp_min(LOWEST),
    "no_less_than_the_lowest": lambda s, n: torch.max(
        s + torch.full((n, n), LOWEST).triu(1), torch.tensor(LOWEST)
    ),
    "before_the_scale": lambda s, n: (s * 4).masked_fill(upper(n), -1e9) / 4,
}


def attending(mask):
    def attend(self, q, k, v, x, *inputs):
        s = q @ k.mT * 8**-0.5
        return mask(s, s.shape[-1], *inputs).softmax(-1) @ v

    return Attention(attend)


@pytest.mark.parametrize("name", MASKS)
def test_every_spelling_is_causal(name):
    site = site_of(attending(MASKS[name]), tokens())
    assert (site.mask.kind, site.mask.q_offset, site.mask.padding) == ("causal", 0, None)
    assert site.scale == pytest.approx(8**-0.5)
    finite = any(sign in name for sign in ("half", "subtracted", "1e4", "tensor", "multiplied"))
    told = any("no logit comes near" in note for note in site.mask.assumptions)
    assert told == (finite or name in ("filled_twice", "before_the_scale"))


OTHERS = {
    "one_key_more": (lambda s, n: s.masked_fill(upper(n, 2), INF), "MASK_UNSUPPORTED"),
    "one_key_less": (lambda s, n: s.masked_fill(upper(n, 0), INF), "MASK_UNSUPPORTED"),
    "window": (
        lambda s, n: s.masked_fill(upper(n) | ~upper(n, -3), INF),
        "SLIDING_WINDOW",
    ),
    "long_window": (
        lambda s, n: s.masked_fill(upper(n) | ~upper(n, -300), INF),
        "SLIDING_WINDOW",
    ),
    "the_future": (lambda s, n: s.masked_fill(~upper(n, 0), INF), "MASK_UNSUPPORTED"),
    "none": (lambda s, n: s, "NOT_CAUSAL"),
    "fill_of_zero": (lambda s, n: s * tril(n), "FILL_NOT_MASKING"),
    "fill_of_minus_30": (lambda s, n: s.masked_fill(upper(n), -30.0), "FILL_NOT_MASKING"),
    "added_minus_30": (lambda s, n: s + (1 - tril(n)) * -30.0, "FILL_NOT_MASKING"),
    "fill_that_is_scaled_away": (
        lambda s, n: s.masked_fill(upper(n), -1e4) * 0.1,
        "FILL_NOT_MASKING",
    ),
    "fill_of_infinity": (lambda s, n: s.masked_fill(upper(n), -INF), "FILL_NOT_MASKING"),
    "added_to_visible_keys": (lambda s, n: s + tril(n) * 2.0, "LOGIT_BIAS"),
    "a_constant_bias": (lambda s, n: s.masked_fill(upper(n), INF) + 1.0, "LOGIT_BIAS"),
    "alibi": (
        lambda s, n: (
            s.masked_fill(upper(n), INF) - 0.1 * (torch.arange(n).view(-1, 1) - torch.arange(n))
        ),
        "LOGIT_BIAS",
    ),
    "mask_of_sums": (lambda s, n: s.masked_fill(s.sum(-1, True) > 0, INF), "SCORES_USED"),
    "mask_of_scores": (
        lambda s, n: s.masked_fill(upper(n), INF).masked_fill(s < 0.1, INF),
        "SCORES_MODIFIED",
    ),
    "clamped": (lambda s, n: s.masked_fill(upper(n), INF).clamp(-50, 50), "SCORES_MODIFIED"),
    "capped": (lambda s, n: (s / 5).tanh().mul(5).masked_fill(upper(n), INF), "SOFTCAP"),
    "no_less_than_minus_50": (
        lambda s, n: torch.maximum(s.masked_fill(upper(n), INF), torch.tensor(-50.0)),
        "SCORES_MODIFIED",
    ),
    "largest_of_neighbours": (
        lambda s, n: torch.maximum(s, s * 0.5).masked_fill(upper(n), INF),
        "SCORES_MODIFIED",
    ),
    "rectified": (lambda s, n: s.relu().masked_fill(upper(n), INF), "SCORES_MODIFIED"),
    "squared": (lambda s, n: (s * s).masked_fill(upper(n), INF), "SCORES_MODIFIED"),
    "doubled_where_near": (
        lambda s, n: torch.where(upper(n, -2), s * 2, s).masked_fill(upper(n), INF),
        "SCALE_NOT_CONSTANT",
    ),
    "rolled": (lambda s, n: s.roll(1, -1).masked_fill(upper(n), INF), "SCORES_MODIFIED"),
    "flipped": (lambda s, n: s.flip(-1).masked_fill(upper(n), INF), "SCORES_MODIFIED"),
    "transposed": (lambda s, n: s.mT.masked_fill(upper(n), INF), None),
    "heads_flipped": (lambda s, n: s.flip(1).masked_fill(upper(n), INF), "FORM_UNSUPPORTED"),
    "mean_taken_off": (
        lambda s, n: (s - s.mean(1, True)).masked_fill(upper(n), INF),
        "SCORES_USED",
    ),
    "dropout_on_scores": (
        lambda s, n: F.dropout(s, 0.1, True).masked_fill(upper(n), INF),
        "DROPOUT",
    ),
    "talking_heads": (
        lambda s, n: (s + s[:, :1]).masked_fill(upper(n), INF),
        "SCORES_MODIFIED",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_one_fact_changed_is_refused(name):
    mask, code = OTHERS[name]
    if code is None:  # (q k^T)^T is k q^T: attention of the keys, still plain
        assert site_of(attending(mask), tokens()).scale
    else:
        assert code_of(attending(mask), tokens()) == code


PADDED = {
    "added_lowest": lambda s, n, pad: (
        s.masked_fill(upper(n), INF) + (1.0 - pad[:, None, None].to(s.dtype)) * LOWEST
    ),
    "filled": lambda s, n, pad: s.masked_fill(upper(n) | (pad[:, None, None] == 0), -1e9),
    "where": lambda s, n, pad: torch.where(tril(n).bool() & pad[:, None, None].bool(), s, INF),
    "one_after_the_other": lambda s, n, pad: s.masked_fill(upper(n), -1e9).masked_fill(
        ~pad[:, None, None].bool(), -1e9
    ),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding(name):
    site = site_of(attending(PADDED[name]), tokens(), padding())
    assert (site.mask.kind, site.mask.padding) == ("causal", "inputs_0")


BADLY_PADDED = {
    "shown": (
        lambda s, n, pad: s.masked_fill(upper(n) & (pad[:, None, None] == 0), -1e9),
        "PADDING_UNPROVED",
    ),
    "added_one": (
        lambda s, n, pad: s.masked_fill(upper(n), INF) + pad[:, None, None].to(s.dtype),
        "LOGIT_BIAS",
    ),
    "of_queries": (
        lambda s, n, pad: s.masked_fill(upper(n) | (pad[:, None, :, None] == 0), -1e9),
        "PADDING_UNPROVED",
    ),
    "multiplied": (
        lambda s, n, pad: s.masked_fill(upper(n), INF) * pad[:, None, None],
        "SCALE_NOT_CONSTANT",
    ),
}


@pytest.mark.parametrize("name", BADLY_PADDED)
def test_padding_that_does_not_hide(name):
    mask, code = BADLY_PADDED[name]
    assert code_of(attending(mask), tokens(), padding()) == code


def test_learned_and_stored_biases():
    class Biased(Attention):
        def __init__(self, trained):
            super().__init__(
                lambda self, q, k, v, x: (
                    (q @ k.mT + self.bias[:, : q.shape[2], : q.shape[2]]).softmax(-1).matmul(v)
                )
            )
            bias = torch.randn(4, 64, 64) + torch.full((64, 64), INF).triu(1)
            if trained:
                self.bias = torch.nn.Parameter(bias)
            else:
                self.register_buffer("bias", bias)

    assert code_of(Biased(True), tokens()) == "LOGIT_BIAS"
    assert code_of(Biased(False), tokens()) == "LOGIT_BIAS"


def test_a_mask_of_four_axes_as_input_is_not_known():
    mask = torch.zeros(2, 1, 20, 20)
    assert code_of(attending(lambda s, n, m: s + m), tokens(), mask) == "MASK_UNPROVED"


def test_more_queries_than_keys_leave_rows_without_keys():
    class Shorter(Attention):
        def forward(self, x):
            q, k, v = self.heads(x)
            k, v = k[:, :, 4:], v[:, :, 4:]
            s = q @ k.mT
            mask = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2])
            return s.masked_fill(mask, -1e9).softmax(-1) @ v

    _, found = judged(Shorter(None), tokens())
    assert [r.code for r in found.refusals] == ["ROWS_WITHOUT_KEYS"]


class Cached(Attention):
    """New tokens after a cache; `diagonal` is where the hidden keys begin."""

    def __init__(self, aligned=True):
        super().__init__(None)
        self.aligned = aligned

    def forward(self, x, pk, pv):
        q, k, v = self.heads(x)
        k, v = torch.cat([pk, k], 2), torch.cat([pv, v], 2)
        s = q @ k.mT * 8**-0.5
        first = k.shape[2] - q.shape[2] if self.aligned else 0
        rows = torch.arange(q.shape[2])[:, None] + first
        return s.masked_fill(torch.arange(k.shape[2]) > rows, INF).softmax(-1) @ v


def test_a_chunk_after_a_cache():
    past = torch.randn(2, 4, 7, 8)
    site = site_of(Cached(), tokens(), past, past.clone())
    assert site.phase == "chunked_prefill" and site.stream.cached
    assert code_of(Cached(False), tokens(), past, past.clone()) == "MASK_UPPER_LEFT"


def test_one_query_over_a_cache():
    def step(self, q, k, v, x, pk, pv):
        k, v = torch.cat([pk, k], 2), torch.cat([pv, v], 2)
        return (q @ k.mT).softmax(-1) @ v

    past = torch.randn(2, 4, 7, 8)
    site = site_of(Attention(step), tokens(length=1), past, past.clone())
    assert site.phase == "decode" and site.scale == 1.0


def test_inputs_taken_at_their_word():
    class Bare(torch.nn.Module):
        def forward(self, q, k, v):
            s = (q @ k.mT) * 0.5
            return s.masked_fill(upper(s.shape[-1]), INF).softmax(-1) @ v

    q, k, v = (torch.randn(2, 4, 20, 8) for _ in range(3))
    (site,) = detect(capture(Bare(), (q, k, v))).sites
    assert site.scale == 0.5 and site.stream.source is None and site.stream.assumptions
