"""Packed documents through attention: what is proved, and twins that differ by one fact."""

import pytest
import torch

from sparsify.ir import MaskKind
from tests._util.attention import Attention, code_of, judged, masked, padding, site_of, tokens

T = torch
LENGTH = 20


def causal(n):
    return T.ones(n, n, dtype=T.bool).tril()


def same(d):
    return (d[:, :, None] == d[:, None, :])[:, None]


def numbers(dtype=T.int64):
    """Documents of 7, 1 and 12 tokens, and of 15 and 5."""
    rows = [[4] * 7 + [0] + [9] * 12, [2] * 15 + [1] * 5]
    return T.tensor(rows).to(dtype)


def positions(dtype=T.int64):
    rows = [[*range(7), 0, *range(12)], [*range(15), *range(5)]]
    return T.tensor(rows).to(dtype)


def borders(p):
    """Document numbers as transformers counts them from positions."""
    return (T.diff(p, prepend=p[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def rising(p):
    return (p[:, :, None] >= p[:, None, :])[:, None]


BY_INPUT = {
    "equal": lambda n, d: causal(n) & same(d),
    "not_unequal": lambda n, d: ~(~causal(n) | ~same(d)),
    "difference": lambda n, d: causal(n) & (d[:, :, None] - d[:, None] == 0)[:, None],
    "filled": lambda n, d: T.where(causal(n) & same(d), 0.0, -T.inf),
}
BY_COUNT = {
    "transformers": lambda n, p: rising(p) & same(borders(p)),
    "diagonal": lambda n, p: causal(n) & same(borders(p)),
    "separator": lambda n, p: causal(n) & same((p == 0).cumsum(-1)),
    "as_integers": lambda n, p: causal(n) & same((p == 0).int().cumsum(1)),
}


@pytest.mark.parametrize("name", BY_INPUT)
def test_a_table_of_document_numbers_is_proved(name):
    site = site_of(masked(BY_INPUT[name]), tokens(), numbers())
    assert site.mask.kind == MaskKind.DOCUMENT
    assert (site.mask.documents, site.mask.padding, site.mask.q_offset) == ("inputs_0", None, 0)
    (assumption,) = site.mask.assumptions
    assert assumption == "equal numbers in inputs_0 stand next to each other in their row"


@pytest.mark.parametrize("name", BY_COUNT)
def test_a_count_of_borders_is_proved_and_assumes_nothing(name):
    captured, found = judged(masked(BY_COUNT[name]), tokens(), positions())
    site = site_of(masked(BY_COUNT[name]), tokens(), positions())
    assert site.mask.kind == MaskKind.DOCUMENT and not site.mask.assumptions
    (table,) = (n for n in captured.graph.nodes if n.name == found.sites[0].mask.documents)
    assert "cumsum" in str(table.target) and len(table.meta["val"].shape) == 2


@pytest.mark.parametrize("dtype", [T.int32, T.uint8])
def test_any_whole_numbers_will_do(dtype):
    site = site_of(masked(BY_INPUT["equal"]), tokens(), numbers(dtype))
    assert site.mask.documents == "inputs_0"


def test_numbers_without_a_batch_are_refused():
    make = masked(lambda n, d: causal(n) & same(d[None]))
    assert code_of(make, tokens(), numbers()[0]) == "MASK_UNSUPPORTED"


def test_documents_and_padding():
    make = masked(lambda n, d, m: causal(n) & same(d) & m.bool()[:, None, None])
    site = site_of(make, tokens(), numbers(), padding())
    assert (site.mask.documents, site.mask.padding) == ("inputs_0", "inputs_1")


def test_number_0_as_padding():
    site = site_of(
        masked(lambda n, d: causal(n) & same(d) & (d != 0)[:, None, None]), tokens(), numbers()
    )
    assert (site.mask.documents, site.mask.padding) == ("inputs_0", "inputs_0")


@pytest.mark.parametrize(
    "make",
    [
        lambda n, d: causal(n) & same(d) & (d > 0)[:, None, None],
        lambda n, d: causal(n) & same(d) & (d > 0)[:, None, :, None],
        lambda n, d: causal(n) & same(d) & ~(d < 1)[:, None, None],
    ],
)
def test_numbers_above_0_as_real_tokens_assume_that_none_is_negative(make):
    site = site_of(masked(make), tokens(), numbers())
    assert site.mask.padding == "inputs_0"
    assert "inputs_0 holds no negative number" in site.mask.assumptions


def shifted(d):
    return T.cat([d[:, :1], d[:, :-1]], 1)


NOT_BY_INPUT = {
    "unequal": (lambda n, d: causal(n) & ~same(d), "MASK_UNSUPPORTED"),
    "smaller": (
        lambda n, d: causal(n) & (d[:, :, None] >= d[:, None])[:, None],
        "MASK_UNSUPPORTED",
    ),
    "or": (lambda n, d: causal(n) | same(d), "MASK_UNSUPPORTED"),
    "or_in_documents": (
        lambda n, d: causal(n) & (same(d) | (T.arange(n) < 2)),
        "MASK_UNSUPPORTED",
    ),
    "both_ways": (lambda n, d: same(d).expand(-1, -1, n, n), "NOT_CAUSAL"),
    "future": (lambda n, d: T.ones(n, n, dtype=T.bool).triu() & same(d), "MASK_UNSUPPORTED"),
    "window": (
        lambda n, d: causal(n) & ~causal(n).tril(-4) & same(d),
        "SLIDING_WINDOW",
    ),
    "before": (lambda n, d: causal(n).tril(-1) & same(d), "MASK_UNSUPPORTED"),
    "next_key": (
        lambda n, d: causal(n) & (d[:, :, None] == d.roll(1, 1)[:, None])[:, None],
        "MASK_UNSUPPORTED",
    ),
    "shifted_key": (
        lambda n, d: causal(n) & (d[:, :, None] == shifted(d)[:, None])[:, None],
        "MASK_UNSUPPORTED",
    ),
    "other_row": (
        lambda n, d: causal(n) & (d[:, :, None] == d.flip(0)[:, None])[:, None],
        "MASK_UNSUPPORTED",
    ),
    "both_at_the_key": (
        lambda n, d: causal(n) & (d[:, None, None] == (d + 1)[:, None, None]),
        "MASK_UNSUPPORTED",
    ),
    "one_apart": (
        lambda n, d: causal(n) & (d[:, :, None] == d[:, None] + 1)[:, None],
        "MASK_UNSUPPORTED",
    ),
    "first_row_for_all": (lambda n, d: causal(n) & same(d[:1]), "MASK_UNSUPPORTED"),
    "more_numbers_than_tokens": (
        lambda n, d: causal(n) & same(d[T.arange(d.shape[0])[:, None], T.arange(n)]),
        "MASK_UNSUPPORTED",
    ),
    "shown_by_number": (
        lambda n, d: causal(n) & same(d) & (d > 1)[:, None, None],
        "PADDING_UNPROVED",
    ),
    "hidden_by_number": (
        lambda n, d: causal(n) & same(d) & (d < 3)[:, None, None],
        "PADDING_UNPROVED",
    ),
}
NOT_BY_COUNT = {
    "positions_without_a_count": (lambda n, p: rising(p), "MASK_UNSUPPORTED"),
    "count_of_other_borders": (
        lambda n, p: rising(p) & same((p == 0).cumsum(-1)),
        "MASK_UNSUPPORTED",
    ),
    "falling_positions": (
        lambda n, p: rising(p) & same((T.diff(p, prepend=p[:, :1] + 1, dim=-1) != -1).cumsum(-1)),
        "MASK_UNSUPPORTED",
    ),
    "count_of_numbers": (lambda n, p: causal(n) & same(p.cumsum(-1)), "MASK_UNSUPPORTED"),
    "count_down_the_batch": (
        lambda n, p: causal(n) & same((p == 0).cumsum(0)),
        "MASK_UNSUPPORTED",
    ),
    "count_in_few_bits": (
        lambda n, p: causal(n) & same((p == 0).cumsum(-1, dtype=T.int8)),
        "MASK_UNSUPPORTED",
    ),
}


@pytest.mark.parametrize("name", NOT_BY_INPUT)
def test_other_uses_of_a_table_are_refused(name):
    make, code = NOT_BY_INPUT[name]
    assert code_of(masked(make), tokens(), numbers()) == code


@pytest.mark.parametrize("name", NOT_BY_COUNT)
def test_other_counts_are_refused(name):
    make, code = NOT_BY_COUNT[name]
    assert code_of(masked(make), tokens(), positions()) == code


def test_floats_are_no_document_numbers():
    assert code_of(masked(BY_INPUT["equal"]), tokens(), numbers().float()) == "MASK_UNSUPPORTED"


@pytest.mark.parametrize("dtype", [T.float16, T.bfloat16, T.float32, T.int8, T.int32])
def test_numbers_that_may_collide_in_another_type_are_refused(dtype):
    make = masked(lambda n, d: causal(n) & same(d.to(dtype)))
    assert code_of(make, tokens(), numbers()) == "MASK_UNSUPPORTED"
    wider = masked(lambda n, d: causal(n) & same(d.long()))
    assert site_of(wider, tokens(), numbers(T.int32)).mask.documents == "inputs_0"


def test_counts_and_positions_that_may_collide_in_another_type_are_refused():
    count = masked(lambda n, p: rising(p) & same(borders(p).to(T.float16)))
    place = masked(lambda n, p: rising(p.to(T.float16)) & same(borders(p)))
    wide = masked(lambda n, p: rising(p.float()) & same(borders(p)))
    assert code_of(count, tokens(), positions()) == "MASK_UNSUPPORTED"
    assert code_of(place, tokens(), positions()) == "MASK_UNSUPPORTED"
    assert site_of(wide, tokens(), positions()).mask.kind == MaskKind.DOCUMENT


def test_two_tables_are_no_documents():
    make = masked(lambda n, d, e: causal(n) & (d[:, :, None] == e[:, None])[:, None])
    assert code_of(make, tokens(), numbers(), numbers()) == "MASK_UNSUPPORTED"


def test_two_kinds_of_documents_are_refused():
    make = masked(lambda n, d, e: causal(n) & same(d) & same(e))
    assert code_of(make, tokens(), numbers(), numbers()) == "MASK_UNSUPPORTED"


def test_a_table_behind_parameters_is_refused():
    def attend(self, q, k, v, x):
        d = (self.wq(x)[..., 0] > 0).cumsum(-1)
        return T.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=causal(x.shape[1]) & same(d)
        )

    assert code_of(attend, tokens()) == "MASK_UNPROVED"


def test_a_table_that_the_model_writes_to_is_not_read():
    def make(n, d):
        mask = causal(n) & same(d)
        d[:, 3] = 1
        return mask

    assert code_of(masked(make), tokens(), numbers()).startswith("MASK_")


def test_documents_before_a_cache_are_refused():
    def attend(self, q, k, v, x, d):
        mask = causal(x.shape[1])[-5:] & same(d)[:, :, -5:]
        return T.nn.functional.scaled_dot_product_attention(q[:, :, -5:], k, v, attn_mask=mask)

    assert code_of(attend, tokens(), numbers()).startswith("MASK_")


def test_documents_reach_the_json_form():
    site = site_of(masked(BY_INPUT["equal"]), tokens(), numbers())
    assert site.to_json()["mask"]["documents"] == "inputs_0"
    assert site.to_json()["mask"]["kind"] == "document"
    plain = site_of(masked(lambda n: causal(n)), tokens())
    assert plain.to_json()["mask"]["documents"] is None


def test_the_second_layer_builds_on_the_first():
    class Two(T.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (Attention(masked(BY_INPUT["equal"])) for _ in range(2))

        def forward(self, x, d):
            return self.two(self.one(x, d), d)

    _, found = judged(Two(), tokens(), numbers())
    assert [site.mask.documents for site in found.sites] == ["d", "d"]


def written_out(make):
    """Attention as separate products and softmax, with the scores hidden by `make`."""

    def attend(self, q, k, v, x, d):
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        return scores.masked_fill(~make(x.shape[1], d), -T.inf).softmax(-1) @ v

    return attend


@pytest.mark.parametrize(
    ("make", "given"), [(BY_INPUT["equal"], numbers), (BY_COUNT["transformers"], positions)]
)
def test_documents_in_written_out_attention(make, given):
    site = site_of(written_out(make), tokens(), given())
    assert site.pattern == "softmax" and site.mask.kind == MaskKind.DOCUMENT
    assert (site.mask.documents == "inputs_0") == (given is numbers)


def test_documents_in_written_out_attention_have_twins():
    for name in ("unequal", "or", "shifted_key"):
        make, code = NOT_BY_INPUT[name]
        assert code_of(written_out(make), tokens(), numbers()) == code
