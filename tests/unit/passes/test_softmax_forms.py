"""Attention written out: every spelling of products, scale and layout gives the same facts."""

import math

import pytest
import torch
import torch.nn.functional as F

from sparsify.ir import HeadLayout
from tests._util.attention import Attention, code_of, judged, site_of, tokens

INF = float("-inf")


def upper(n):
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def hidden(s):
    return s.masked_fill(upper(s.shape[-1]), INF)


def weights(q, k, scale=8**-0.5):
    return hidden(q @ k.transpose(-1, -2) * scale).softmax(-1)


def einsum_over_heads_last(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    s = torch.einsum("blhd,bshd->bhls", q, k) * 8**-0.5
    return torch.einsum("bhls,bshd->blhd", hidden(s).softmax(-1), v).transpose(1, 2)


def einsum_with_heads_first(q, k, v):
    s = torch.einsum("bhid,bhjd->hbij", q, k) * 8**-0.5
    return torch.einsum("hbij,bhjd->bhid", hidden(s).softmax(-1), v)


def einsum_with_keys_in_front(q, k, v):
    s = torch.einsum("bhid,bhjd->bhji", q, k) * 8**-0.5
    w = s.masked_fill(upper(s.shape[-1]).T, INF).softmax(-2)
    return torch.einsum("bhji,bhjd->bhid", w, v)


def flattened(q, k, v):
    b, h, n, d = q.shape
    q, k, v = (t.reshape(b * h, n, d) for t in (q, k, v))
    s = torch.bmm(q, k.transpose(1, 2)) * d**-0.5
    return torch.bmm(hidden(s).softmax(-1), v).view(b, h, n, d)


def masked_in_four_axes(q, k, v):
    b, h, n, d = q.shape
    q, k, v = (t.reshape(b * h, n, d) for t in (q, k, v))
    s = hidden(torch.bmm(q * d**-0.5, k.transpose(1, 2)).view(b, h, n, n)).view(b * h, n, n)
    return torch.bmm(s.softmax(-1), v).view(b, h, n, d)


def softmax_in_four_axes(q, k, v):
    b, h, n, d = q.shape
    q, k, v = (t.reshape(b * h, n, d) for t in (q, k, v))
    s = hidden(torch.bmm(q * d**-0.5, k.transpose(1, 2)).view(b, h, n, n)).softmax(-1)
    return torch.bmm(s.view(b * h, n, n), v).view(b, h, n, d)


def added_by_baddbmm(q, k, v):
    b, h, n, d = q.shape
    q, k, v = (t.reshape(b * h, n, d) for t in (q, k, v))
    bias = torch.full((n, n), INF).triu(1).expand(b * h, n, n)
    s = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=d**-0.5)
    return torch.bmm(s.softmax(-1), v).view(b, h, n, d)


def ignored_by_baddbmm(q, k, v):
    b, h, n, d = q.shape
    q, k, v = (t.reshape(b * h, n, d) for t in (q, k, v))
    empty = torch.empty(b * h, n, n)
    s = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0, alpha=d**-0.5)
    return torch.bmm(hidden(s).softmax(-1), v).view(b, h, n, d)


def both_transposed(q, k, v):
    s = (k @ q.transpose(-1, -2)) * 8**-0.5
    w = s.masked_fill(upper(s.shape[-1]).T, INF).softmax(-2)
    return (v.transpose(-1, -2) @ w).transpose(-1, -2)


FORMS = {
    "matmul": lambda q, k, v: weights(q, k) @ v,
    "torch_matmul": lambda q, k, v: torch.matmul(
        hidden(torch.matmul(q, k.mT) / 8**0.5).softmax(3), v
    ),
    "keys_by_queries": lambda q, k, v: (
        hidden((k @ q.transpose(-1, -2)).transpose(-1, -2) * 8**-0.5).softmax(-1) @ v
    ),
    "both_transposed": both_transposed,
    "permuted_keys": lambda q, k, v: (
        hidden(q @ k.permute(0, 1, 3, 2).contiguous() * 8**-0.5).softmax(-1) @ v
    ),
    "contiguous_weights": lambda q, k, v: (
        weights(q, k).contiguous().view(2, 4, -1, q.shape[2]).expand(2, -1, -1, -1) @ v
    ),
    "einsum": lambda q, k, v: torch.einsum(
        "bhij,bhjd->bhid", hidden(torch.einsum("bhid,bhjd->bhij", q, k) * 8**-0.5).softmax(-1), v
    ),
    "einsum_with_dots": lambda q, k, v: torch.einsum(
        "...ij,...jd->...id",
        hidden(torch.einsum("...id,...jd->...ij", q, k) * 8**-0.5).softmax(-1),
        v,
    ),
    "einsum_over_heads_last": einsum_over_heads_last,
    "einsum_with_heads_first": einsum_with_heads_first,
    "einsum_with_keys_in_front": einsum_with_keys_in_front,
    "flattened": flattened,
    "masked_in_four_axes": masked_in_four_axes,
    "softmax_in_four_axes": softmax_in_four_axes,
    "added_by_baddbmm": added_by_baddbmm,
    "ignored_by_baddbmm": ignored_by_baddbmm,
    "dropout_that_is_off": lambda q, k, v: F.dropout(weights(q, k), 0.1, False) @ v,
    "softmax_in_float64": lambda q, k, v: (
        hidden(q @ k.mT * 8**-0.5).softmax(-1, torch.float64).to(q.dtype) @ v
    ),
    "scores_in_float64": lambda q, k, v: (
        hidden((q @ k.mT).double() * 8**-0.5).softmax(-1).type_as(v) @ v
    ),
    "products_in_float64": lambda q, k, v: (
        hidden(q.double() @ k.double().mT * 8**-0.5).softmax(-1) @ v.double()
    ).float(),
    "scores_from_float64": lambda q, k, v: (
        hidden((q.double() * 8**-0.5) @ k.double().mT).softmax(-1).float() @ v
    ),
    "aten_softmax": lambda q, k, v: (
        torch.ops.aten._softmax(hidden(q @ k.mT * 8**-0.5), -1, False) @ v
    ),
    "safe_softmax": lambda q, k, v: (
        torch.ops.aten._safe_softmax(hidden(q @ k.mT * 8**-0.5), -1) @ v
    ),
}
SCALES = {
    "on_queries": lambda q, k, c: (q * c) @ k.mT,
    "on_keys": lambda q, k, c: q @ (k * c).mT,
    "on_transposed_keys": lambda q, k, c: q @ (k.mT * c),
    "on_both": lambda q, k, c: (q * math.sqrt(c)) @ (k.mT * math.sqrt(c)),
    "divided_queries": lambda q, k, c: (q / (1 / c)) @ k.mT,
    "on_scores": lambda q, k, c: q @ k.mT * c,
    "from_the_left": lambda q, k, c: c * (q @ k.mT),
    "divided_scores": lambda q, k, c: (q @ k.mT) / (1 / c),
    "everywhere": lambda q, k, c: ((q * 2) @ (k / 4).mT) * c / 0.5,
    "a_tensor": lambda q, k, c: q @ k.mT * torch.tensor(c),
    "a_full_tensor": lambda q, k, c: (q @ k.mT) / torch.full([], 1 / c),
    "a_root": lambda q, k, c: (q @ k.mT) / torch.sqrt(torch.tensor(1 / c**2)),
    "a_power": lambda q, k, c: (q @ k.mT) * torch.full([], 1 / c**2) ** -0.5,
    "a_tensor_on_queries": lambda q, k, c: (q * torch.tensor(c)) @ k.mT,
}


def attending(form, **sizes):
    return Attention(lambda self, q, k, v, x: form(q, k, v), **sizes)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_facts(name):
    site = site_of(attending(FORMS[name]), tokens())
    assert site.heads == HeadLayout(4, 4, 8, 8)
    assert site.scale == pytest.approx(8**-0.5)
    assert (site.mask.kind, site.mask.padding, site.mask.q_offset) == ("causal", None, 0)
    assert not site.stream.assumptions and site.stream.source == "x"
    wanted = "einsum" if "einsum" in name else "baddbmm" if "baddbmm" in name else "softmax"
    assert site.pattern == wanted


@pytest.mark.parametrize("name", SCALES)
def test_the_scale_is_the_one_in_force_wherever_it_stands(name):
    def form(q, k, v):
        return hidden(SCALES[name](q, k, 0.3)).softmax(-1) @ v

    assert site_of(attending(form), tokens()).scale == pytest.approx(0.3)


def test_a_stored_scale_counts_and_a_learned_one_does_not():
    class Stored(Attention):
        def __init__(self, kind):
            super().__init__(lambda self, q, k, v, x: hidden(q @ k.mT * self.c).softmax(-1) @ v)
            value = torch.tensor(0.2)
            if kind is torch.nn.Parameter:
                self.c = torch.nn.Parameter(value)
            else:
                self.register_buffer("c", value)

    assert site_of(Stored(None), tokens()).scale == pytest.approx(0.2)
    assert code_of(Stored(torch.nn.Parameter), tokens()) == "SCALE_NOT_CONSTANT"


BAD_SCALES = {
    "of_a_position": (
        lambda q, k, v, x: q @ k.mT * torch.arange(1, q.shape[2] + 1).view(-1, 1),
        "SCALE_NOT_CONSTANT",
    ),
    "of_the_length": (lambda q, k, v, x: q @ k.mT * q.shape[2], "SCALE_NOT_CONSTANT"),
    "of_a_head": (
        lambda q, k, v, x: q @ k.mT * torch.arange(1.0, 5.0).view(4, 1, 1),
        "SCALE_NOT_CONSTANT",
    ),
    "of_data": (lambda q, k, v, x: q @ k.mT * v[..., :1], "SCALE_NOT_CONSTANT"),
    "negative": (lambda q, k, v, x: q @ k.mT * -0.3, "SCORES_MODIFIED"),
}


@pytest.mark.parametrize("name", BAD_SCALES)
def test_scales_that_are_no_positive_number(name):
    scores, code = BAD_SCALES[name]

    def attend(self, q, k, v, x):
        return hidden(scores(q, k, v, x)).softmax(-1) @ v

    assert code_of(attend, tokens()) == code


def test_a_sign_stays_with_the_queries():
    def form(q, k, v):
        return hidden((q * -0.3) @ k.mT).softmax(-1) @ v

    assert site_of(attending(form), tokens()).scale == 1.0


GROUPED = {
    "repeat_interleave": lambda t: t.repeat_interleave(2, 1),
    "expand": lambda t: t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(t.shape[0], 4, -1, 8),
}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_heads(name):
    def form(q, k, v):
        return weights(q, GROUPED[name](k)) @ GROUPED[name](v)

    assert site_of(attending(form, hkv=2), tokens()).heads == HeadLayout(4, 2, 8, 8)


def test_tiled_heads_are_not_grouped():
    def form(q, k, v):
        return weights(q, k.repeat(1, 2, 1, 1)) @ v.repeat(1, 2, 1, 1)

    assert site_of(attending(form, hkv=2), tokens()).heads == HeadLayout(4, 4, 8, 8)


def test_one_key_head_is_broadcast():
    site = site_of(attending(lambda q, k, v: weights(q, k) @ v, hkv=1), tokens())
    assert site.heads == HeadLayout(4, 1, 8, 8)


def test_values_of_another_size():
    site = site_of(attending(lambda q, k, v: weights(q, k) @ v, dv=5), tokens())
    assert site.heads == HeadLayout(4, 4, 8, 5)


def test_two_axes():
    class Flat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(32, 48)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            s = hidden(torch.mm(q, k.t()) * 0.25)
            return torch.mm(s.softmax(-1), v)

    x = tokens()[0]
    site = site_of(Flat(), x)
    assert site.heads == HeadLayout(1, 1, 16, 16) and site.scale == 0.25
    assert site.stream.assumptions == ("axis 0 of x counts the tokens",)


def test_one_tensor_for_queries_and_keys():
    assert site_of(attending(lambda q, k, v: weights(k, k) @ v), tokens()).scale
    assert site_of(attending(lambda q, k, v: weights(k, k) @ k), tokens()).scale


def five_axes(q, k, v):
    b, _, n, d = q.shape
    w = weights(q.view(b, 2, 2, n, d), k[:, :, None])
    return (w @ v[:, :, None]).reshape(b, 4, n, d)


def one_key_head_without_an_axis(q, k, v):
    w = hidden(torch.einsum("bhid,bjd->bhij", q, k[:, 0])).softmax(-1)
    return torch.einsum("bhij,bjd->bhid", w, v[:, 0])


def grouped_scores(q, k, v):  # neighbouring heads share their weights
    w = weights(q[:, ::2], k[:, ::2]).repeat_interleave(2, 1)
    return w @ v


def keys_for_all_flattened_heads(q, k, v):
    b, h, n, d = q.shape
    w = weights(q.reshape(b * h, n, d), k[:1, 0])
    return torch.bmm(w, v.reshape(b * h, n, d)).view(b, h, n, d)


UNREAD = [five_axes, one_key_head_without_an_axis, grouped_scores, keys_for_all_flattened_heads]


@pytest.mark.parametrize("form", UNREAD)
def test_forms_that_are_not_read_are_refused_by_name(form):
    model = attending(form, hkv=2 if form is five_axes else 4)
    assert code_of(model, tokens()) == "FORM_UNSUPPORTED"


def one_query_for_all_rows(factor):
    def form(q, k, v):
        q = (q[:, :, :1] * factor).expand(-1, -1, k.shape[2], -1)
        return weights(q, k) @ v

    return form


def test_a_query_repeated_for_all_rows_is_no_decode_step():
    # row i must stand for token i; going behind the expansion would make it one row
    for factor in (1.0, 0.5, -1.0):
        code = code_of(attending(one_query_for_all_rows(factor)), tokens())
        assert code in ("CROSS_ATTENTION", "NOT_SELF_ATTENTION")


def test_factors_in_front_of_an_expansion_over_heads():
    def form(q, k, v):
        k = (k * 0.5).expand(-1, 4, -1, -1)
        return weights(q, k) @ v.expand(-1, 4, -1, -1)

    site = site_of(attending(form, hkv=1), tokens())
    assert site.heads == HeadLayout(4, 1, 8, 8) and site.scale == pytest.approx(0.5 * 8**-0.5)


def upcast(q, k, v):
    b, h, n, d = q.shape
    empty = torch.empty(b * h, n, n)
    s = torch.baddbmm(
        empty, q.reshape(b * h, n, d), k.mT.reshape(b * h, d, n), beta=0, alpha=d**-0.5
    )
    return hidden(s.view(b, h, n, n)).softmax(-1) @ v


def test_scores_of_flattened_heads_before_values_of_four_axes():
    site = site_of(attending(upcast), tokens())
    assert (site.pattern, site.scale) == ("baddbmm", pytest.approx(8**-0.5))
    assert site.heads == HeadLayout(4, 4, 8, 8)


OTHER_AXES = {
    "over_rows": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "over_heads": lambda q, k, v: (q @ k.mT).softmax(1) @ v,
    "weights_transposed": lambda q, k, v: weights(q, k).mT @ v,
}


@pytest.mark.parametrize("name", OTHER_AXES)
def test_the_softmax_must_run_over_the_keys(name):
    assert code_of(attending(OTHER_AXES[name]), tokens()) == "SOFTMAX_AXIS"


def test_queries_multiplied_with_features_are_no_scores_of_positions():
    def form(q, k, v):  # the keys are not transposed: features attend to features
        s = q.transpose(-1, -2) @ k
        return (s.softmax(-1) @ v.transpose(-1, -2)).transpose(-1, -2)

    assert code_of(attending(form), tokens()) == "SOFTMAX_AXIS"


def test_layers_see_the_attention_before_them_as_one_step():
    class Twice(torch.nn.Module):
        def __init__(self, first):
            super().__init__()
            self.first = Attention(lambda self, q, k, v, x: first(q, k, v))
            self.second = Attention(lambda self, q, k, v, x: weights(q, k) @ v)

        def forward(self, x):
            q, k, v = self.second.heads(x)
            k = k + self.first(x).view(*x.shape[:2], 4, 8).transpose(1, 2)
            return self.second.attend(self.second, q, k, v, x)

    for name in ("matmul", "both_transposed", "einsum_over_heads_last", "softmax_in_four_axes"):
        _, found = judged(Twice(FORMS[name]), tokens())
        assert [s.fqn for s in found.sites] == ["first", ""], name
    # twin: the first sees the future, so the keys of the second hold later tokens
    _, found = judged(Twice(lambda q, k, v: (q @ k.mT).softmax(-1) @ v), tokens())
    assert [(r.fqn, r.code) for r in found.refusals] == [
        ("first", "NOT_CAUSAL"),
        ("", "NOT_SELF_ATTENTION"),
    ]
