"""The stages of every method: exact numbers, parts that sum up, what grows with what."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsify.cost_model import symbols as s
from sparsify.cost_model.configuration import DENSE, PUBLISHED, Configuration
from sparsify.cost_model.counts import counted, exact, values_of
from sparsify.cost_model.counts_moba import read_in_decode
from sparsify.cost_model.pairs import ALIGNED, EXACT
from sparsify.cost_model.stages import (
    cache_write_bytes,
    index_cache_bytes,
    kv_cache_bytes,
    stage_formulas,
)
from sparsify.cost_model.workload import AttentionShape, ElementBytes, Phase, Workload
from sparsify.pair_counts import attended_pairs, dense_pairs

M3 = AttentionShape(64, 4, 128, 128)
BF16 = ElementBytes()


def stages(configuration, workload, shape=M3, element_bytes=BF16, hidden_size=6144):
    values = values_of(shape, workload, configuration, element_bytes, hidden_size)
    return {f.name: counted(f, values) for f in stage_formulas(configuration, workload)}


def flops(configuration, workload, **options):
    return sum(stage.flops for stage in stages(configuration, workload, **options).values())


def prefill(tokens, batch=1, prefix=0):
    return Workload(Phase.PREFILL, batch, tokens, prefix)


sizes = st.integers(1, 90)


@given(sizes, st.integers(0, 90), st.integers(1, 20), st.integers(1, 9))
def test_exact_pairs_equal_counting_one_by_one(new, prefix, block, read):
    values = {
        s.NEW_TOKENS: new,
        s.PREFIX_TOKENS: prefix,
        s.BLOCK_TOKENS: block,
        s.READ_BLOCKS: read,
    }
    positions = range(prefix, prefix + new)
    attended = sum(min(read - 1, p // block) * block + p % block + 1 for p in positions)
    assert exact(EXACT.dense, values) == sum(p + 1 for p in positions)
    assert exact(EXACT.attended, values) == attended
    assert exact(EXACT.past_blocks, values) == sum(p // block for p in positions)
    assert exact(EXACT.visible_blocks, values) == sum(p // block + 1 for p in positions)


@given(st.integers(1, 64), st.integers(1, 12), st.integers(1, 12))
def test_aligned_pairs_are_exact_for_whole_blocks(n, block, read):
    tokens = n * block
    values = {s.CONTEXT_TOKENS: tokens, s.BLOCK_TOKENS: block, s.READ_BLOCKS: read}
    if n >= read:
        assert exact(ALIGNED.attended, values) == attended_pairs(tokens, tokens, block, read)
    assert exact(ALIGNED.dense, values) == dense_pairs(tokens, tokens)


def test_numbers_beyond_floats_are_exact():
    odd = 2**20 - 1
    pairs = dense_pairs(odd, odd)
    assert flops(DENSE, prefill(odd)) == 2 * 64 * 256 * pairs
    assert 2 * 64 * 256 * pairs > 2**53


@pytest.mark.parametrize("chunk", [1, 300, 2048])
@pytest.mark.parametrize("configuration", (DENSE, *PUBLISHED), ids=lambda c: c.label)
def test_flops_of_chunks_sum_to_those_of_the_whole(configuration, chunk):
    whole = 9000
    starts = range(0, whole, chunk) if chunk > 1 else range(whole - 50, whole)
    parts = sum(
        flops(configuration, prefill(min(chunk, whole - start), prefix=start)) for start in starts
    )
    first = starts[0]
    expected = flops(configuration, prefill(whole))
    if first:
        expected -= flops(configuration, prefill(first))
    assert parts == expected


@pytest.mark.parametrize("configuration", (DENSE, *PUBLISHED), ids=lambda c: c.label)
@pytest.mark.parametrize("phase", Phase)
def test_everything_grows_with_context_and_batch(configuration, phase):
    """Contexts of whole blocks: within its own block, a decode step reads a sawtooth."""

    def total(context, batch):
        found = stages(configuration, Workload.of(phase, context, batch)).values()
        return sum(f.flops for f in found), sum(f.dram_bytes for f in found)

    sizes = [total(context, 1) for context in (1, 4096, 8192, 40_960, 409_600)]
    assert sizes == sorted(sizes)
    assert len({flop for flop, _ in sizes}) == len(sizes) or phase is Phase.DECODE
    assert total(5000, 3)[0] == 3 * total(5000, 1)[0]


@pytest.mark.parametrize("method", ["moba", "msa"])
def test_attention_grows_with_topk_and_with_the_budget(method):
    def attention(block, topk):
        indexer = "proxy" if method == "msa" else None
        configuration = Configuration(method, block, topk, indexer)
        return stages(configuration, prefill(50_000))["attention"].flops

    assert attention(128, 4) < attention(128, 8) < attention(128, 16)
    assert attention(128, 8) < attention(256, 8)


def test_topk_of_all_blocks_computes_the_dense_pairs():
    configuration = Configuration("moba", 100, 10)
    dense = flops(DENSE, prefill(1000))
    assert stages(configuration, prefill(1000))["attention"].flops == dense
    assert stages(configuration, prefill(1001))["attention"].flops < flops(DENSE, prefill(1001))


def test_value_size_counts_apart():
    wide = AttentionShape(128, 1, 576, 512)
    assert flops(DENSE, prefill(100), shape=wide) == 2 * 128 * (576 + 512) * 5050


def test_bytes_follow_each_tensor():
    narrow = dataclasses.replace(BF16, key=1, value=1)
    step = Workload.of(Phase.DECODE, 2**17)
    full = stages(DENSE, step)["attention"].dram_bytes
    queries = 64 * (128 + 128) * 2
    assert full == 4 * 256 * 2 * 2**17 + queries
    assert stages(DENSE, step, element_bytes=narrow)["attention"].dram_bytes == (
        4 * 256 * 2**17 + queries
    )


def test_float8_index_halves_the_index_cache_and_no_proxy_has_one():
    learned = PUBLISHED[-1]
    step = Workload.of(Phase.DECODE, 2**20)

    def cache(configuration, element_bytes):
        values = values_of(M3, step, configuration, element_bytes)
        kv = exact(kv_cache_bytes(), values)
        return exact(index_cache_bytes(configuration), values) / kv

    assert cache(learned, BF16) == 0.125
    assert cache(learned, dataclasses.replace(BF16, index=1)) == 0.0625
    assert cache(Configuration("msa", 128, 16, "proxy"), BF16) == 0


def test_paper_workspace_of_a_whole_prefill():
    found = stages(PUBLISHED[-1], prefill(2**20))["attention"]
    log_sum_exp = 4 * 16 * 64 * 2**20
    assert found.workspace_bytes - log_sum_exp == 2 * 16 * 2**20 * 64 * 128
    assert (found.workspace_bytes - log_sum_exp) / 1e9 == pytest.approx(274.9, abs=0.05)


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 16))
def test_union_of_a_group_lies_between_topk_and_its_sum(blocks, topk, group):
    topk = min(topk, blocks)
    values = {
        s.NEW_TOKENS: 1,
        s.PREFIX_TOKENS: blocks * 64 - 1,
        s.BLOCK_TOKENS: 64,
        s.TOPK_BLOCKS: topk,
        s.QUERY_HEADS: group,
        s.KV_HEADS: 1,
    }
    read = exact(read_in_decode(), values)
    assert topk <= read <= min(blocks, group * topk)


def test_dense_decode_of_a_sparse_method_is_dense():
    step = Workload.of(Phase.DECODE, 2**17)
    assert stages(PUBLISHED[2], step) == stages(DENSE, step)
    sparse = dataclasses.replace(PUBLISHED[2], decode="sparse")
    assert stages(sparse, step) != stages(DENSE, step)


def test_union_reads_one_block_more():
    inside = Configuration("msa", 128, 16, "proxy")
    union = dataclasses.replace(inside, local="union")
    seventeen = Configuration("msa", 128, 17, "proxy")
    found = [stages(c, prefill(50_000))["attention"].flops for c in (inside, union, seventeen)]
    assert found[0] < found[1] == found[2]


def test_training_adds_the_backward_pass_and_the_index_loss():
    learned, proxy = PUBLISHED[-1], PUBLISHED[-2]
    step = Workload.of(Phase.TRAINING, 8192)
    assert "index loss" in stages(learned, step)
    assert "index loss" not in stages(proxy, step)
    dense = stages(DENSE, step)
    assert dense["backward"].flops == 2.5 * dense["attention"].flops
    pairs = attended_pairs(8192, 8192, 128, 16)
    assert stages(learned, step)["index loss"].flops == 2 * (128 * 64 + 3 * 128 * 4) * pairs


def test_few_queries_run_query_by_query():
    few, many = prefill(32, prefix=2**17), prefill(33, prefix=2**17)
    assert "combine" not in stages(PUBLISHED[-1], few)
    pairs = attended_pairs(32, 2**17 + 32, 128, 16)
    assert stages(PUBLISHED[-1], few)["attention"].l2_bytes == pairs * 4 * 256 * 2
    assert "combine" in stages(PUBLISHED[-1], many)


def test_scores_of_few_queries_are_shared_out_by_keys():
    rows = 512 * 4 // 128
    long, short = prefill(512, prefix=2**17 - 512), prefill(512, prefix=1024)
    assert stages(PUBLISHED[-1], long)["index scores"].tiles == rows * 2**17 // (16 * 128)
    assert stages(PUBLISHED[-1], short)["index scores"].tiles == rows


@pytest.mark.parametrize("configuration", (DENSE, *PUBLISHED), ids=lambda c: c.label)
def test_chunks_write_the_caches_once(configuration):
    def caches(workload, formula):
        return exact(formula, values_of(M3, workload, configuration, BF16))

    whole = prefill(5000)
    held = kv_cache_bytes() + index_cache_bytes(configuration)
    written = cache_write_bytes(configuration)
    chunks = [prefill(1700), prefill(1700, prefix=1700), prefill(1600, prefix=3400)]
    assert sum(caches(chunk, written) for chunk in chunks) == caches(whole, held)


@pytest.mark.parametrize("configuration", PUBLISHED, ids=lambda c: c.label)
def test_with_the_own_block_alone_nothing_is_chosen(configuration):
    alone = dataclasses.replace(configuration, topk=1)
    assert stages(alone, prefill(5000)).keys() == {"attention", "combine"}
    assert len(stages(configuration, prefill(5000))) > 2
