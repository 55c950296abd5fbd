"""Float32 index queries against keys of 16 bits: sums of terms in the keys' dtype."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from sparsify.kernels import reference
from sparsify.kernels.gaps import msa_gaps
from sparsify.kernels.layout import Layout
from sparsify.kernels.select import msa_scores, msa_tiles
from sparsify.kernels.select.query_terms import row_terms, sum_of_products
from tests._util.index_lists import Keys, assert_choice, by_last_bits, chosen, index_of, inputs

NAN, INF = math.nan, math.inf
LOCAL = ("inside", "union")
LARGEST = torch.finfo(torch.float32).max


def halves(**sizes):
    """Queries in float32, keys in float16 (bfloat16 is wrong in the interpreter)."""
    x = inputs(**sizes)
    return Keys(x.iq, x.ik.half())


def check(x, block, topk, local="inside", **options):
    got = chosen(x, block, topk, local, **options)
    assert_choice(got, x, block, topk, local, layout=options.get("layout"), differing=0.02)
    return got


@triton.jit
def terms_kernel(q_ptr, out_ptr, M: tl.constexpr, D: tl.constexpr, TERMS: tl.constexpr):
    """Terms of rows, widened."""
    at_MD = tl.arange(0, M)[:, None] * D + tl.arange(0, D)[None, :]
    terms = row_terms(tl.load(q_ptr + at_MD), TERMS)
    for i in tl.static_range(TERMS):
        tl.store(out_ptr + i * M * D + at_MD, terms[i].to(tl.float32))


@triton.jit
def products_kernel(q_ptr, k_ptr, out_ptr, D: tl.constexpr):
    """Sums of products of 16 queries and 16 keys."""
    at_ND = tl.arange(0, 16)[:, None] * D + tl.arange(0, D)[None, :]
    terms = row_terms(tl.load(q_ptr + at_ND), 2)
    x_NN = sum_of_products(terms, tl.trans(tl.load(k_ptr + at_ND)), 2)
    tl.store(out_ptr + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :], x_NN)


def terms_of(q_MD, terms):
    out = torch.full((terms, *q_MD.shape), NAN)
    terms_kernel[(1,)](q_MD, out, *q_MD.shape, terms)
    return out


def rows(low=-20, high=20):
    """Random numbers of many sizes."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(low, high, (16, 32), generator=generator).float().exp2()
    return torch.randn(16, 32, generator=generator) * sizes


def test_three_terms_of_bfloat16_are_the_number():
    q = rows(-60, 100)
    q[0, :3] = torch.tensor([LARGEST, -LARGEST, 2.0**-103])
    terms = terms_of(q, 3)
    assert torch.equal(terms.double().sum(0), q.double())
    assert torch.equal(terms, terms.bfloat16().float())
    assert not torch.equal(terms[:2].double().sum(0), q.double())


@pytest.mark.parametrize("scale", [1.0, 2.0**100, 2.0**-100])
def test_two_terms_of_float16_are_the_number_but_for_its_last_bit(scale):
    q = rows() * scale
    q[0, 0], q[1] = scale * 2.0**-120, 0.0  # nothing, beside the others of its row
    terms = terms_of(q, 2).double()
    largest = q.double().abs().amax(1, keepdim=True)
    power = (2.0**14 / largest.log2().floor().exp2()).nan_to_num(posinf=1.0)
    lost = (terms.sum(0) / power - q.double()).abs()
    bound = 2.0**-23 * q.double().abs() + 2.0**-39 * largest
    assert bool((lost <= bound).all())
    assert not bool(((terms[0] / power - q.double()).abs() <= bound).all())


@pytest.mark.parametrize("terms", [2, 3])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_is_in_the_first_term(value, terms):
    q = rows()
    q[2, 5] = value
    found = terms_of(q, terms)
    assert torch.equal(found[0, 2, 5].nan_to_num(7.0), torch.tensor(value).nan_to_num(7.0))
    assert bool((found[1:, 2, 5] == 0).all()) and bool(found[1:].isfinite().all())
    rest = torch.arange(32) != 5
    q[2, 5] = 0.0
    assert torch.equal(found[:, 2, rest], terms_of(q, terms)[:, 2, rest])


def test_infinite_keys_give_infinite_products():
    q, k = rows(), rows(-3, 3).half()
    k[3, 7], k[4, 7], k[5, 7] = INF, -INF, NAN
    q[2, 7], q[6, 7] = 0.0, 1.0  # of one term alone
    out = torch.empty(16, 16)
    products_kernel[(1,)](q, k, out, 32)
    wanted = q.double() @ k.double().T
    for column in (3, 4, 5):
        assert torch.equal(
            out[:, column].nan_to_num(7.0), wanted[:, column].float().nan_to_num(7.0)
        )
    assert bool(out[:, 6:].isfinite().all())


@pytest.mark.parametrize(
    ("block", "keys", "shared", "local"),
    [
        (16, 200, False, "inside"),
        (24, 200, True, "union"),
        (128, 600, False, "union"),
        (200, 700, True, "inside"),
    ],
)
def test_choices_are_the_reference_s(block, keys, shared, local):
    """Several blocks of a tile, one, and several tiles of a block; few rows, and many."""
    check(halves(queries=21, keys=keys, shared=shared), block, 3, local)
    check(halves(queries=90, keys=keys, shared=shared), block, 3, local)


@pytest.mark.parametrize("size", [8, 80, 256])
def test_index_sizes(size):
    check(halves(queries=5, keys=70, size=size), 8, 3)


@pytest.mark.parametrize("scale", [1e-30, 1e9, 1e30])
def test_queries_beyond_the_range_of_float16(scale):
    x = halves(queries=9, keys=70, shared=False)
    plain = chosen(x, 8, 3)
    assert torch.equal(check(Keys(x.iq * 2.0 ** round(math.log2(scale)), x.ik), 8, 3), plain)


def test_what_is_lost_beside_a_huge_number_is_in_the_bound_of_the_gap():
    """Float16 holds less than float32 of a row with one huge number, here against keys of 0."""
    x = halves(queries=19, keys=140, shared=False)
    x.iq[..., 0], x.ik[..., 0] = 2.0**37, 0.0
    sizes = {"block_size": 8, "topk": 5}
    differs = (chosen(x, 8, 5) != reference.msa_select(*x, Layout(), **sizes)).any(-1)
    assert bool(differs.any()) and bool(msa_gaps(*x, **sizes).close()[differs].all())
    wide = msa_gaps(x.iq, x.ik.float(), **sizes).close()
    assert not bool(wide[differs].all())


@pytest.mark.parametrize("local", LOCAL)
def test_the_last_bits_of_a_query_count(local):
    x, coarse = by_last_bits(torch.float16)
    got = chosen(x, 2, 4, local)
    assert torch.equal(got, reference.msa_select(*x, Layout(), block_size=2, topk=4, local=local))
    sizes = {"block_size": 2, "topk": 4, "local": local}
    assert not torch.equal(got, reference.msa_select(*coarse, Layout(), **sizes))


@triton.jit
def without_the_last(q_MD, TERMS: tl.constexpr):
    """Terms, of which the last is left out."""
    high, low = row_terms(q_MD, TERMS)
    return high, low * 0.0


def test_without_the_last_term_the_choice_is_another(monkeypatch):
    x, _ = by_last_bits(torch.float16)
    whole = chosen(x, 2, 4)
    monkeypatch.setattr(msa_scores, "row_terms", without_the_last)
    assert not torch.equal(chosen(x, 2, 4), whole)


LAYOUTS = {
    "lengths": {"kv_len": [30, 43], "q_start": [3, 40], "block_origin": [2, 0]},
    "holes": {"key_mask": [[s % 9 < 4 for s in range(43)], [False] * 43]},
    "documents": {"cu_seqlens_q": [0, 3, 3, 11], "cu_seqlens_k": [0, 17, 20, 43]},
}


@pytest.mark.parametrize(
    ("name", "local"), [("lengths", "union"), ("holes", "union"), ("documents", "inside")]
)
def test_layouts(name, local):
    layout = Layout(**{n: torch.tensor(x) for n, x in LAYOUTS[name].items()})
    batch = 1 if name == "documents" else 2
    check(halves(batch=batch, queries=11, keys=43, shared=False), 2, 3, local, layout=layout)


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_key_or_a_query_that_is_not_finite(value, local):
    x = halves(queries=12, keys=37)
    x.ik[0, 0, 9, 3] = value
    check(x, 4, 3, local)
    check(x, 4, 10, local)
    x.iq[0, 1, 5, 2] = value
    check(x, 4, 3, local)


def test_later_keys_have_no_effect():
    x = halves(keys=40)
    before = chosen(x, 4, 3)
    x.ik[:, :, 22:] = NAN
    assert torch.equal(before[:, :, :22], chosen(x, 4, 3)[:, :, :22])


@pytest.mark.parametrize("local", LOCAL)
def test_slices_and_chunks_are_parts_of_the_whole(local):
    x = halves(batch=2, groups=3, shared=False, queries=70, keys=90)
    index, _ = index_of(x, 4, 3, local)
    whole = index.all_rows().flatten(0, 1)
    for group, groups, first, count in [(0, 6, 0, 70), (0, 3, 5, 20), (5, 1, 69, 1)]:
        rows_of, _ = index.rows(group, groups, first, count)
        assert torch.equal(rows_of, whole[group : group + groups, first : first + count])
    small, _ = index_of(x, 4, 3, local, workspace_bytes=1)
    assert torch.equal(small.all_rows().flatten(0, 1), whole)
    last = Keys(x.iq[:, :, 60:], x.ik)
    assert torch.equal(chosen(last, 4, 3, local), chosen(x, 4, 3, local)[:, :, 60:])


@pytest.mark.parametrize(
    ("query", "key", "terms"),
    [
        (torch.float32, torch.float16, 2),
        (torch.float32, torch.bfloat16, 3),
        (torch.float16, torch.bfloat16, 3),
        (torch.bfloat16, torch.float16, 2),
        (torch.float16, torch.float16, 1),
        (torch.float32, torch.float32, 1),
        (torch.bfloat16, torch.float32, 1),
        (torch.float32, torch.float8_e4m3fn, 1),
        (torch.float8_e4m3fn, torch.float16, 1),
    ],
)
def test_keys_of_16_bits_are_taken_as_they_are(query, key, terms):
    x = inputs(queries=9, keys=60)
    index, _ = index_of(Keys(x.iq.to(query), x.ik.to(key)), 8, 3)
    assert index.terms == msa_tiles.terms_of(index.iq, index.ik) == terms
    assert index.ik.dtype == (key if key.itemsize == 2 else torch.float32)


def test_queries_of_another_dtype_of_16_bits():
    x = halves(queries=9, keys=60)
    check(Keys(x.iq.bfloat16(), x.ik), 8, 3)
