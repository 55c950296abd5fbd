"""One token stream: what keeps positions apart, and twins that mix them."""

import pytest
import torch
import torch.nn.functional as F

from sparsify.ir import Phase
from tests._util.attention import Attention, code_of, judged, sdpa, site_of, tokens


def changed(change_k=lambda k: k, change_v=lambda v: v):
    def attend(self, q, k, v, x):
        return sdpa(q, change_k(k), change_v(v), is_causal=True)

    return attend


KEPT = {
    "plain": changed(),
    "norm": changed(lambda k: F.normalize(k, dim=-1)),
    "layer_norm": changed(lambda k: F.layer_norm(k, (8,))),
    "rms": changed(lambda k: k * torch.rsqrt(k.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "softmax_of_features": changed(lambda k: k.softmax(-1)),
    "features_mixed": changed(lambda k: k.flip(-1)),
    "position_bias": changed(lambda k: k + torch.arange(k.shape[2])[:, None]),
    "kernel_of_one": changed(
        lambda k: (
            F.conv1d(k.flatten(0, 1).transpose(1, 2), torch.ones(8, 8, 1))
            .transpose(1, 2)
            .view(k.shape)
        )
    ),
}
MIXED = {
    "flip": changed(lambda k: k.flip(2)),
    "roll_of_values": changed(change_v=lambda v: v.roll(1, 2)),
    "cumsum": changed(lambda k: k.cumsum(2)),
    "centred": changed(lambda k: k - k.mean(2, keepdim=True)),
    "normed_over_time": changed(lambda k: F.normalize(k, dim=2)),
    "shifted": changed(lambda k: torch.cat([torch.zeros_like(k[:, :, :1]), k[:, :, :-1]], 2)),
    "padded": changed(lambda k: F.pad(k, (0, 0, 1, 0))[:, :, :-1]),
    "permuted": changed(lambda k: k[:, :, torch.randperm(20)]),
    "sorted": changed(lambda k: k.sort(2)[0]),
    "convolution": changed(
        lambda k: (
            F.conv1d(k.flatten(0, 1).transpose(1, 2), torch.ones(8, 8, 3), padding=1)
            .transpose(1, 2)
            .view(k.shape)
        )
    ),
    "of_another_row": changed(lambda k: k[:1].expand_as(k)),
    "other_rows": changed(lambda k: k.flip(0)),
    "repeated_over_time": changed(lambda k: k.repeat_interleave(2, 2)[:, :, : k.shape[2]]),
    "first_half_twice": changed(lambda k: torch.cat([k[:, :, :10], k[:, :, :10]], 2)),
}


@pytest.mark.parametrize("name", KEPT)
def test_position_by_position(name):
    stream = site_of(KEPT[name], tokens()).stream
    assert stream.source == "x" and not stream.cached and not stream.assumptions


@pytest.mark.parametrize("name", MIXED)
def test_mixed_positions_are_refused(name):
    assert code_of(MIXED[name], tokens()) == "NOT_SELF_ATTENTION"


def test_a_square_head_does_not_pass_for_its_transpose():
    twin = changed(lambda k: k.transpose(-1, -2))
    assert code_of(twin, tokens(length=8)) == "NOT_SELF_ATTENTION"


def test_windows_made_by_reshape_are_refused():
    class Windows(Attention):
        def forward(self, x):
            q, k, v = self.heads(x.view(-1, 5, x.shape[2]))
            return sdpa(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)

    assert code_of(Windows(None), tokens()) == "NOT_SELF_ATTENTION"


def past(length=7, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 4, length, 8, generator=generator)


def cached(mask, order=(0, 1), change=lambda t: t):
    def attend(self, q, k, v, x, past_k, past_v):
        k, v = ([p, t] for p, t in ((past_k, k), (past_v, v)))
        k, v = (change(torch.cat([pair[o] for o in order], 2)) for pair in (k, v))
        rows, keys = q.shape[2], k.shape[2]
        if mask is None:
            return sdpa(q, k, v)
        return sdpa(
            q, k, v, attn_mask=torch.ones(rows, keys, dtype=torch.bool).tril(mask(rows, keys))
        )

    return attend


def aligned(rows, keys):
    return keys - rows


def test_decode_and_chunks_after_a_cache():
    step = site_of(cached(None), tokens(length=1), past(), past(seed=4))
    assert (step.phase, step.stream.cached, step.q_len) == (Phase.DECODE, True, 1)
    chunk = site_of(cached(aligned), tokens(length=5), past(), past(seed=4))
    assert (chunk.phase, chunk.stream.cached) == (Phase.CHUNKED_PREFILL, True)
    assert chunk.kv_len == f"{chunk.q_len} + {chunk.mask.q_offset}"


@pytest.mark.parametrize(
    ("twin", "length", "code"),
    [
        (cached(None), 5, "NOT_CAUSAL"),
        (cached(lambda r, k: 0), 5, "MASK_UPPER_LEFT"),
        (cached(lambda r, k: k - r + 1), 5, "MASK_UNSUPPORTED"),
        (cached(None, order=(1, 0)), 1, "NOT_SELF_ATTENTION"),
        (cached(aligned, order=(0, 0)), 5, "ROWS_WITHOUT_KEYS"),
        (cached(None, change=lambda t: t.flip(2)), 1, "NOT_SELF_ATTENTION"),
    ],
    ids=["no_mask", "upper_left", "one_ahead", "own_first", "cache_only", "reversed"],
)
def test_twins_of_cached_attention(twin, length, code):
    assert code_of(twin, tokens(length=length), past(), past(seed=4)) == code


def test_the_own_key_of_a_step_must_be_the_querys_token():
    def step(which):
        def attend(self, q, k, v, x, past_k, past_v):
            k, v = (t[:, :, which] for t in (k, v))
            k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
            return sdpa(q[:, :, -1:], k, v)

        return attend

    inputs = tokens(), past(), past(seed=4)
    assert site_of(step(slice(-1, None)), *inputs).phase == Phase.DECODE
    assert code_of(step(slice(0, 1)), *inputs) == "NOT_SELF_ATTENTION"


def test_the_last_query_alone_and_the_first():
    def rows(which):
        return lambda self, q, k, v, x: sdpa(q[:, :, which], k, v)

    site = site_of(rows(slice(-1, None)), tokens())
    assert site.phase == Phase.DECODE and not site.stream.cached
    assert code_of(rows(slice(0, 1)), tokens()) == "NOT_SELF_ATTENTION"


def test_learned_keys_before_the_tokens_are_refused():
    def attend(self, q, k, v, x):
        prefix = self.wq.weight[:4, :8].expand(x.shape[0], 4, 4, 8)
        k, v = torch.cat([prefix, k], 2), torch.cat([prefix, v], 2)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(4)
        return sdpa(q, k, v, attn_mask=mask)

    assert code_of(attend, tokens()) == "NOT_SELF_ATTENTION"


def two_sources(self, q, k, v, x, y):
    other = self.heads(y)
    return sdpa(q, other[1], other[2], is_causal=True)


def test_keys_from_another_input_are_cross_attention():
    assert code_of(two_sources, tokens(), tokens(seed=1)) == "CROSS_ATTENTION"


def test_a_second_input_by_row_is_an_assumption():
    def attend(self, q, k, v, x, y):
        return sdpa(q, k + y[:, None, :, :8], v, is_causal=True)

    def turned(self, q, k, v, x, y):
        return sdpa(q, k + y.flip(1)[:, None, :, :8], v, is_causal=True)

    stream = site_of(attend, tokens(), tokens(seed=1)).stream
    assert stream.assumptions == ("inputs_0 holds one row for every token of the stream",)
    assert code_of(turned, tokens(), tokens(seed=1)) == "NOT_SELF_ATTENTION"


def test_positions_may_be_counted_from_the_padding_mask():
    def attend(self, q, k, v, x, mask):
        place = (mask.cumsum(1) - 1)[:, None, :, None]
        return sdpa(q + place, k + place, v, is_causal=True)

    def twin(self, q, k, v, x, mask):
        return sdpa(q, k + mask.flip(1)[:, None, :, None], v, is_causal=True)

    mask = torch.ones(2, 20, dtype=torch.int64)
    assert site_of(attend, tokens(), mask).stream.source == "x"
    assert code_of(twin, tokens(), mask) == "NOT_SELF_ATTENTION"


def test_attention_on_attention():
    def causal(self, q, k, v, x):
        out = sdpa(q, k, v, is_causal=True)
        return sdpa(out, k, out, is_causal=True)

    def bidirectional(self, q, k, v, x):
        out = sdpa(q, k, v)
        return sdpa(out, k, out, is_causal=True)

    _, found = judged(causal, tokens())
    assert len(found.sites) == 2
    _, found = judged(bidirectional, tokens())
    assert [r.code for r in found.refusals] == ["NOT_CAUSAL", "NOT_SELF_ATTENTION"]


def test_an_input_changed_between_queries_and_keys():
    class Changed(Attention):
        def forward(self, x):
            q = self.heads(x)[0]
            x.add_(1.0)
            _, k, v = self.heads(x)
            return sdpa(q, k, v, is_causal=True)

    assert code_of(Changed(None), tokens()) == "NOT_SELF_ATTENTION"


@pytest.mark.parametrize("name", ["keys", "query"])
def test_parameters_as_queries_or_memory(name):
    def attend(self, q, k, v, x):
        memory = self.wq.weight[:, :8].expand(x.shape[0], 4, 32, 8)
        if name == "keys":
            mask = torch.ones(q.shape[2], 32, dtype=torch.bool).tril()
            return sdpa(q, memory, memory, attn_mask=mask)
        return sdpa(memory[:, :, :1], k, v)

    assert code_of(attend, tokens(length=32)) == "NOT_SELF_ATTENTION"


class Rows(Attention):
    """Attention along axis 0 or axis 1 of x `[n, m, width]`."""

    def __init__(self, axis):
        super().__init__(None)
        self.axis = axis

    def forward(self, x):
        q, k, v = (w(x) for w in (self.wq, self.wk, self.wv))
        if self.axis == 0:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        out = sdpa(q, k, v, is_causal=True)
        return out.transpose(0, 1) if self.axis == 0 else out


def test_tokens_along_axis_0_are_an_assumption():
    # a sequence-first model and attention between the rows of a batch have the same graph
    assert site_of(Rows(0), tokens()).stream.assumptions == ("axis 0 of x counts the tokens",)
    assert site_of(Rows(1), tokens()).stream.assumptions == ()
