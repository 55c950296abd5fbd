"""Closed forms of the pair counts against counting one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsify.pair_counts import attended_pairs, dense_pairs, gate_pairs


def positions(q_len, kv_len, q_offset):
    start = kv_len - q_len if q_offset is None else q_offset
    return [start + i for i in range(q_len) if start + i >= 0]


def slow_attended(q_len, kv_len, block, topk, q_offset=None):
    return sum(
        min(topk - 1, p // block) * block + p % block + 1
        for p in positions(q_len, kv_len, q_offset)
    )


lengths = st.integers(0, 70)


@given(lengths, lengths)
def test_dense_pairs_count_visible_keys(q_len, kv_len):
    expected = sum(p + 1 for p in positions(q_len, kv_len, None))
    assert dense_pairs(q_len, kv_len) == expected


@given(lengths, lengths, st.integers(1, 80), st.integers(1, 90))
def test_attended_pairs_equal_the_sum(q_len, kv_len, block, topk):
    assert attended_pairs(q_len, kv_len, block, topk) == slow_attended(q_len, kv_len, block, topk)


@given(lengths, lengths, st.integers(1, 80))
def test_gate_pairs_equal_the_sum(q_len, kv_len, block):
    assert gate_pairs(q_len, kv_len, block) == sum(
        p // block for p in positions(q_len, kv_len, None)
    )


@pytest.mark.parametrize("arguments", [(-1, 4, 2), (4, -1, 2), (4, 4, 0), (4, 4, 2, 1)])
def test_impossible_gates(arguments):
    with pytest.raises(ValueError):
        gate_pairs(*arguments)


@given(lengths, st.integers(0, 70), st.integers(0, 70), st.integers(1, 9), st.integers(1, 9))
def test_offsets_place_the_queries(q_len, more, offset, block, topk):
    kv_len = offset + q_len + more
    expected = slow_attended(q_len, kv_len, block, topk, offset)
    assert attended_pairs(q_len, kv_len, block, topk, offset) == expected
    assert dense_pairs(q_len, kv_len, offset) == sum(
        p + 1 for p in positions(q_len, kv_len, offset)
    )


@given(lengths, st.integers(1, 80), st.integers(1, 90))
def test_enough_blocks_are_dense_and_one_block_is_diagonal(length, block, topk):
    dense = dense_pairs(length, length)
    assert attended_pairs(length, length, block, topk) <= dense
    assert attended_pairs(length, length, block, 10**6) == dense
    diagonal = sum(p % block + 1 for p in range(length))
    assert attended_pairs(length, length, block, 1) == diagonal


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 12))
def test_decode_steps_add_up_to_the_prefill(length, block, topk):
    steps = sum(attended_pairs(1, n, block, topk) for n in range(1, length + 1))
    assert steps == attended_pairs(length, length, block, topk)


def test_large_sizes_are_exact_and_quick():
    n = 1 << 40
    assert dense_pairs(n, n) == n * (n + 1) // 2
    assert attended_pairs(n, n, 4096, 12) == slow_form(n, 4096, 12)


def slow_form(n, block, topk):
    blocks = n // block
    past = sum(min(topk - 1, c) for c in range(topk)) + (blocks - topk) * (topk - 1)
    return past * block * block + blocks * block * (block + 1) // 2


def test_ratio_of_the_moba_report():
    # 32K tokens, block 512, top-k 3: "95.31% sparsity" is 13 times fewer causal pairs, not 21.
    ratio = dense_pairs(32_768, 32_768) / attended_pairs(32_768, 32_768, 512, 3)
    assert ratio == pytest.approx(13.04, abs=0.01)


@pytest.mark.parametrize(
    "arguments", [(-1, 4, 2, 2), (4, -1, 2, 2), (4, 4, 0, 2), (4, 4, 2, 0), (4, 4, 2, 2, 1)]
)
def test_impossible_arguments(arguments):
    with pytest.raises(ValueError):
        attended_pairs(*arguments)
