"""Masks through attention: what is proved, and twins that differ by one fact and are refused."""

import pytest
import torch

from sparsify.ir import MaskKind
from tests._util.attention import (
    Attention,
    code_of,
    judged,
    masked,
    padding,
    sdpa,
    site_of,
    tokens,
)

T = torch
INF = float("inf")


def ones(n):
    return T.ones(n, n, dtype=T.bool)


def ar(n):
    return T.arange(n)


def below(n):
    return ar(n)[:, None] - ar(n)


CAUSAL = {
    "tril": lambda n: ones(n).tril(),
    "not_triu": lambda n: ~ones(n).triu(1),
    "arange": lambda n: ar(n)[None] <= ar(n)[:, None],
    "float_inf": lambda n: T.full((n, n), -INF).triu(1),
    "masked_fill_in_place": lambda n: T.zeros(n, n).masked_fill_(ones(n).triu(1), -INF),
    "finfo": lambda n: T.where(ones(n).tril(), 0.0, T.finfo(T.float32).min),
    "four_axes": lambda n: ones(n).tril()[None, None],
    "no_real_prefix": lambda n: (below(n) >= 0) | (ar(n) < 0),
}
SOFT = {
    "minus_1e9": lambda n: (1.0 - ones(n).float().tril()) * -1e9,
    "minus_1e4": lambda n: T.zeros(n, n).masked_fill(ones(n).triu(1), -1e4),
}
REFUSED = {
    "tril_one_less": (lambda n: ones(n).tril(-1), "MASK_UNSUPPORTED"),
    "tril_one_more": (lambda n: ones(n).tril(1), "MASK_UNSUPPORTED"),
    "window": (lambda n: (below(n) >= 0) & (below(n) < 4), "SLIDING_WINDOW"),
    "window_longer_than_the_example": (
        lambda n: (below(n) >= 0) & (below(n) < 700),
        "SLIDING_WINDOW",
    ),
    "prefix": (lambda n: (below(n) >= 0) | (ar(n) < 3), "MASK_UNSUPPORTED"),
    "chunk": (
        lambda n: (below(n) >= 0) & (ar(n)[:, None] // 8 == ar(n) // 8),
        "MASK_UNSUPPORTED",
    ),
    "chunk_longer_than_the_example": (
        lambda n: (below(n) >= 0) & (ar(n)[:, None] // 300 == ar(n) // 300),
        "MASK_UNSUPPORTED",
    ),
    "anti_causal": (lambda n: ones(n).triu(), "MASK_UNSUPPORTED"),
    "full": (lambda n: ones(n), "NOT_CAUSAL"),
    "nothing": (lambda n: ~ones(n), "MASK_UNSUPPORTED"),
    "zero_and_one": (lambda n: ones(n).tril().float(), "LOGIT_BIAS"),
    "distance": (lambda n: -below(n).abs().float(), "LOGIT_BIAS"),
    "fill_of_30": (lambda n: T.zeros(n, n).masked_fill(ones(n).triu(1), -30.0), "FILL_NOT_MASKING"),
    "random": (lambda n: T.rand(n, n) > 0.5, "MASK_UNSUPPORTED"),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_masks_are_proved(name):
    site = site_of(masked(CAUSAL[name]), tokens())
    assert site.mask.kind == MaskKind.CAUSAL
    assert (site.mask.q_offset, site.mask.padding, site.mask.window) == (0, None, None)
    assert not site.mask.assumptions and site.mask.evidence


@pytest.mark.parametrize("name", SOFT)
def test_finite_fills_are_an_assumption(name):
    site = site_of(masked(SOFT[name]), tokens())
    assert any("hides a key" in text for text in site.mask.assumptions)


@pytest.mark.parametrize("name", REFUSED)
def test_other_masks_are_refused(name):
    make, code = REFUSED[name]
    assert code_of(masked(make), tokens()) == code


def causal(n):
    return ones(n).tril()[None, None]


PADDED = {
    "bool": lambda n, m: causal(n) & m.bool()[:, None, None],
    "equals_one": lambda n, m: causal(n) & (m == 1)[:, None, None],
    "positive": lambda n, m: causal(n) & (m > 0)[:, None, None],
    "float": lambda n, m: T.full((n, n), -INF).triu(1) + (1 - m[:, None, None].float()) * -1e30,
    "filled": lambda n, m: T.zeros(m.shape[0], 1, n, n).masked_fill(
        ~(causal(n) & m.bool()[:, None, None]), T.finfo(T.float32).min
    ),
    "gathered": lambda n, m: (
        causal(n) & m.bool()[ar(m.shape[0])[:, None, None, None], ar(n)[None, None, None]]
    ),
}
NOT_PADDED = {
    "inverted": (lambda n, m: causal(n) & (m == 0)[:, None, None], "PADDING_UNPROVED"),
    "or": (lambda n, m: causal(n) | m.bool()[:, None, None], "PADDING_UNPROVED"),
    "or_self": (
        lambda n, m: (causal(n) & m.bool()[:, None, None]) | T.eye(n, dtype=T.bool),
        "PADDING_UNPROVED",
    ),
    "of_queries": (lambda n, m: causal(n) & m.bool()[:, None, :, None], "PADDING_UNPROVED"),
    "shifted": (lambda n, m: causal(n) & m.roll(1, 1).bool()[:, None, None], "PADDING_UNPROVED"),
    "of_other_rows": (lambda n, m: causal(n) & m.flip(0).bool()[:, None, None], "PADDING_UNPROVED"),
    "alone": (lambda n, m: m.bool()[:, None, None], "NOT_CAUSAL"),
    "sorted": (lambda n, m: causal(n) & m.sort(1)[0].bool()[:, None, None], "MASK_UNPROVED"),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_is_proved(name):
    site = site_of(masked(PADDED[name]), tokens(), padding())
    assert site.mask.padding == "inputs_0"
    assert site.mask.kind == MaskKind.CAUSAL


@pytest.mark.parametrize("name", NOT_PADDED)
def test_other_uses_of_a_padding_input_are_refused(name):
    make, code = NOT_PADDED[name]
    assert code_of(masked(make), tokens(), padding()) == code


def test_any_number_but_zero_shows_a_key_only_where_the_mask_says_so():
    exact = site_of(masked(PADDED["bool"]), tokens(), padding())
    equals = site_of(masked(PADDED["equals_one"]), tokens(), padding())
    assert not exact.mask.assumptions
    assert equals.mask.assumptions == ("inputs_0 holds only 0 and 1",)


def test_a_mask_given_by_the_user_is_not_known():
    assert code_of(masked(lambda n, m: m), tokens(), ones(20).tril()) == "MASK_UNPROVED"


def test_a_parameter_is_a_bias_even_if_it_looks_causal():
    class Bias(Attention):
        def __init__(self):
            super().__init__(lambda self, q, k, v, x: sdpa(q, k, v, attn_mask=self.bias))
            self.bias = T.nn.Parameter(T.full((20, 20), -INF).triu(1))

    assert code_of(Bias(), tokens()) == "LOGIT_BIAS"


@pytest.mark.parametrize("rows", [20, 64])
def test_a_buffer_is_proved_by_its_values(rows):
    class Buffer(Attention):
        def __init__(self, keep):
            super().__init__(lambda self, q, k, v, x: sdpa(q, k, v, attn_mask=self.cut(q)))
            self.register_buffer("keep", keep)

        def cut(self, q):
            return self.keep[:, :, : q.shape[2], : q.shape[2]]

    keep = T.ones(rows, rows, dtype=T.bool).tril()[None, None]
    assert site_of(Buffer(keep), tokens()).mask.kind == MaskKind.CAUSAL
    twin = keep.clone()
    twin[0, 0, 7, 3] = False
    assert code_of(Buffer(twin), tokens()) == "MASK_UNSUPPORTED"
    heads = keep.expand(1, 4, -1, -1).clone()
    heads[0, 2] = heads[0, 2].triu(-2)
    assert code_of(Buffer(heads), tokens()) == "MASK_UNSUPPORTED"


def test_a_buffer_that_the_model_writes_to_is_not_read():
    class Written(Attention):
        def __init__(self):
            super().__init__(self.step)
            self.register_buffer("keep", ones(20).tril())

        @staticmethod
        def step(self, q, k, v, x):
            self.keep[:, :2] = True
            return sdpa(q, k, v, attn_mask=self.keep)

    assert code_of(Written(), tokens()) == "MASK_UNSUPPORTED"


def test_is_causal_needs_equal_lengths():
    def flag(self, q, k, v, x):
        return sdpa(q, k, v, is_causal=True)

    def short(self, q, k, v, x):
        return sdpa(q[:, :, -5:], k, v, is_causal=True)

    assert site_of(flag, tokens()).mask.evidence == "is_causal=True"
    assert code_of(short, tokens()) == "MASK_UPPER_LEFT"


def test_an_upper_left_mask_is_named():
    def short(self, q, k, v, x):
        mask = T.ones(5, k.shape[2], dtype=T.bool).tril()
        return sdpa(q[:, :, -5:], k, v, attn_mask=mask)

    def aligned(self, q, k, v, x):
        mask = T.ones(5, k.shape[2], dtype=T.bool).tril(k.shape[2] - 5)
        return sdpa(q[:, :, -5:], k, v, attn_mask=mask)

    assert code_of(short, tokens()) == "MASK_UPPER_LEFT"
    site = site_of(aligned, tokens())
    assert site.mask.q_offset == f"{site.kv_len} - 5"


def test_what_the_capture_fixed_is_an_assumption():
    def branch(self, q, k, v, x):
        return sdpa(q, k, v, is_causal=True) if x.shape[1] > 8 else sdpa(q, k, v)

    class Flagged(Attention):
        def forward(self, x, causal=False):
            return self.attend(self, *self.heads(x), causal)

    site = site_of(branch, tokens())
    assert site.mask.assumptions == ("the number of queries is at least 9, as captured",)
    flagged = Flagged(lambda self, q, k, v, causal: sdpa(q, k, v, is_causal=causal))
    _, found = judged(flagged, tokens(), True)
    assert found.sites[0].mask.assumptions == ("causal is True, as captured",)


def test_flattened_heads_keep_their_rows_of_the_padding():
    def flat(tile):
        def attend(self, q, k, v, x, m):
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            n = q.shape[1]
            rows = m.repeat(4, 1) if tile else m.repeat_interleave(4, 0)
            out = sdpa(q, k, v, attn_mask=ones(n).tril() & rows.bool()[:, None])
            return out.view(x.shape[0], 4, n, 8)

        return attend

    assert site_of(flat(tile=False), tokens(3), padding(3)[:3]).mask.padding == "inputs_0"
    assert code_of(flat(tile=True), tokens(3), padding(3)) == "PADDING_UNPROVED"
