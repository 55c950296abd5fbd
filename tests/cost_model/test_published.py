"""The figures of the papers, from the formulas; every value is exact."""

import dataclasses

import pytest
import sympy
from sympy import Rational

from sparsify.cost_model import counts_training, published
from sparsify.cost_model import symbols as s
from sparsify.cost_model.pairs import ALIGNED, LEADING
from sparsify.pair_counts import attended_pairs, dense_pairs

M3 = {
    s.QUERY_HEADS: 64,
    s.KV_HEADS: 4,
    s.INDEX_QUERY_HEADS: 4,
    s.HEAD_DIM: 128,
    s.VALUE_DIM: 128,
    s.INDEX_DIM: 128,
    s.BLOCK_TOKENS: 128,
    s.TOPK_BLOCKS: 16,
}
LLAMA_8B = M3 | {s.QUERY_HEADS: 32, s.KV_HEADS: 8, s.INDEX_QUERY_HEADS: 8}
BF16 = {s.KEY_BYTES: 2, s.VALUE_BYTES: 2, s.INDEX_BYTES: 2, s.INDEX_KEY_HEADS: 1}


def at(formula, values, **more):
    return formula.subs(values | {getattr(s, name): value for name, value in more.items()})


def moba(block, topk):
    return {s.BLOCK_TOKENS: block, s.TOPK_BLOCKS: topk, s.READ_BLOCKS: topk}


@pytest.mark.parametrize(
    ("tokens", "ratio"),
    [
        (2**20, Rational(256, 9)),
        (2**15, Rational(32, 5)),
        (2**17, 16),
        (2**19, Rational(128, 5)),
        (10**6, Rational(32 * 10**6, 10**6 + 131072)),
    ],
)
def test_msa_flop_ratio_of_the_paper(tokens, ratio):
    assert at(published.flop_ratio("msa"), M3, CONTEXT_TOKENS=tokens) == ratio


def test_another_index_dim_gives_another_ratio():
    narrow = at(published.flop_ratio("msa"), M3 | {s.INDEX_DIM: 64}, CONTEXT_TOKENS=2**20)
    assert narrow == Rational(256, 5)


def test_flops_break_even_at_131072_over_31_tokens():
    found = published.flop_crossover("msa").subs(M3)
    assert found == Rational(131072, 31)
    assert at(published.flop_ratio("msa"), M3, CONTEXT_TOKENS=found) == 1


def test_break_even_of_exact_pairs_is_shorter():
    """2,419 with N^2/2 dense pairs, as the papers count them; 2,414 counted one by one."""
    mixed = dataclasses.replace(ALIGNED, dense=LEADING.dense)
    for pairs, tokens in ((mixed, 2419), (ALIGNED, 2415)):
        ratio = published.flop_ratio("msa", pairs).subs(M3)
        assert int(sympy.nsolve(ratio - 1, s.CONTEXT_TOKENS, 2500)) == tokens
    index, attention = 2 * 4 * 128, 2 * 64 * 256

    def pays(tokens):
        dense = dense_pairs(tokens, tokens)
        return (
            index * dense + attention * attended_pairs(tokens, tokens, 128, 16) < attention * dense
        )

    assert (pays(2413), pays(2414)) == (False, True)


@pytest.mark.parametrize(("model", "limit"), [(M3, 32), (LLAMA_8B, 8)])
def test_msa_flop_ratio_is_limited_by_the_group(model, limit):
    assert published.flop_limit("msa").subs(model) == limit
    ratio = published.flop_ratio("msa").subs(model)
    assert sympy.limit(ratio, s.CONTEXT_TOKENS, sympy.oo) == limit


def test_moba_gate_costs_a_block_mean_per_block():
    share = 1 / published.flop_limit("moba")
    assert share.subs({s.HEAD_DIM: 128, s.VALUE_DIM: 128, s.BLOCK_TOKENS: 512}) == Rational(1, 1024)


@pytest.mark.parametrize(
    ("tokens", "block", "topk", "sparsity", "causal"),
    [
        (2**13, 512, 3, 0.8125, 3.458),
        (2**15, 512, 3, 0.953125, 13.040),
        (2**20, 4096, 12, 0.953125, 11.386),
        (2**17, 4096, 12, 0.625, 1.695),
    ],
)
def test_moba_sparsity_and_causal_ratio(tokens, block, topk, sparsity, causal):
    values = moba(block, topk) | {s.CONTEXT_TOKENS: tokens}
    assert float(published.moba_sparsity().subs(values)) == sparsity
    ratio = (ALIGNED.dense / ALIGNED.attended).subs(values)
    assert float(ratio) == pytest.approx(causal, abs=5e-4)


@pytest.mark.parametrize(
    ("tokens", "ratio"),
    [(2**15, 5.33), (2**17, 7.11), (2**18, 7.53), (2**19, 7.76), (2**20, 7.877)],
)
def test_msa_decode_byte_ratio(tokens, ratio):
    found = at(published.decode_byte_ratio(), M3 | BF16, CONTEXT_TOKENS=tokens)
    assert float(found) == pytest.approx(ratio, abs=0.005)


def test_decode_ratio_of_a_million_tokens_is_exact():
    found = at(published.decode_byte_ratio(), M3 | BF16, CONTEXT_TOKENS=2**20)
    assert found == Rational(512, 65) and round(float(found), 3) == 7.877


def test_decode_limit_is_eight_and_sixteen_in_float8():
    def limit(index_bytes):
        ratio = published.decode_byte_ratio().subs(M3 | BF16 | {s.INDEX_BYTES: index_bytes})
        return sympy.limit(ratio, s.CONTEXT_TOKENS, sympy.oo)

    assert (limit(2), limit(1)) == (8, 16)


@pytest.mark.parametrize(("kv_heads", "share"), [(4, Rational(1, 8)), (8, Rational(1, 16))])
def test_index_cache_is_an_eighth_of_four_kv_heads(kv_heads, share):
    assert published.index_cache_share().subs(M3 | BF16 | {s.KV_HEADS: kv_heads}) == share


def test_kv_outer_intensity_of_the_paper():
    assert float(published.kv_outer_intensity().subs(M3)) == pytest.approx(83.6, abs=0.05)


@pytest.mark.parametrize(
    ("tokens", "read"), [(2**13, 2048), (2**14, 2560), (2**15, 3584), (2**16, 5632)]
)
def test_nsa_reads_these_tokens(tokens, read):
    assert published.nsa_decode_tokens().subs(s.CONTEXT_TOKENS, tokens) == read


def test_backward_is_two_and_a_half_forwards_for_equal_head_sizes():
    pairs = sympy.Symbol("pairs", positive=True)
    forward = 2 * s.BATCH_SEQUENCES * s.QUERY_HEADS * (s.HEAD_DIM + s.VALUE_DIM) * pairs
    ratio = sympy.cancel(counts_training.backward_flops(pairs) / forward)
    assert ratio.subs(s.VALUE_DIM, s.HEAD_DIM) == Rational(5, 2)
    assert ratio.subs({s.VALUE_DIM: 512, s.HEAD_DIM: 576}) != Rational(5, 2)


@pytest.mark.parametrize(
    ("block", "topk", "tokens"),
    [(512, 3, 3075), (128, 8, 2056), (4096, 12, 98316)],
)
def test_moba_flop_crossover(block, topk, tokens):
    found = published.flop_crossover("moba").subs(moba(block, topk) | M3 | moba(block, topk))
    assert int(found) == tokens


@pytest.mark.parametrize(
    ("rho_m", "rho_i", "tokens"),
    [
        (1, 1, 4228),
        (6.74, 3.8, 31.3e3),
        (7.24, 3.9, 33.7e3),
        (14.2, 6.5, 72.8e3),
        (4.29, 1.8, 18.6e3),
        (3.04, 1.8, 13.2e3),
    ],
)
def test_crossover_with_measured_rates(rho_m, rho_i, tokens):
    rates = {
        published.EFFICIENCY_RATIO_ATTENTION: rho_m,
        published.EFFICIENCY_RATIO_INDEX: rho_i,
    }
    found = published.crossover("msa").subs(M3).subs(rates)
    assert float(found) == pytest.approx(tokens, rel=0.01)


def test_a_slow_index_never_pays():
    slow = {published.EFFICIENCY_RATIO_ATTENTION: 1, published.EFFICIENCY_RATIO_INDEX: 9}
    assert published.crossover("msa").subs(LLAMA_8B).subs(slow) < 0


def test_ratios_can_be_differentiated():
    slope = sympy.diff(published.flop_ratio("msa").subs(M3), s.CONTEXT_TOKENS)
    assert slope.subs(s.CONTEXT_TOKENS, 2**17) > 0
    assert LEADING.dense.diff(s.CONTEXT_TOKENS) == s.CONTEXT_TOKENS
