"""Candidates of a layer: what is legal, what pays, and which comes first without measurements."""

import pytest

from sparsify.cost_model.configuration import DENSE, Configuration
from sparsify.cost_model.search import (
    LEAST_BUDGET_TOKENS,
    NEAR_FASTEST,
    best_in_order,
    candidates,
    examine,
    grid,
    obstacles,
    quality_order,
)
from sparsify.cost_model.situation import Situation
from sparsify.cost_model.workload import AttentionShape, Phase, Workload
from tests._util.plan_gpus import make_gpu

SHAPE = AttentionShape(32, 8, 128, 128)
MOBA = Configuration("moba", 128, 16)


def situation(context=131_072, phase=Phase.PREFILL, **changes):
    return Situation(make_gpu(), Workload.of(phase, context), **changes)


@pytest.mark.parametrize(
    ("configuration", "shape", "context", "reason"),
    [
        (Configuration("moba", 64, 7), SHAPE, 131_072, "it reads 448 tokens, fewer than 512"),
        (MOBA, SHAPE, 4096, "it reads 2,048 of 4,096 tokens"),
        (MOBA, AttentionShape(8, 8, 8, 128), 131_072, "head size 8 is outside 16..256"),
        (MOBA, AttentionShape(8, 8, 128, 512), 131_072, "value size 512 is outside 16..256"),
        (Configuration("msa", 16, 64, "proxy"), SHAPE, 131_072, "MSA block 16 is outside 32..256"),
        (Configuration("msa", 512, 8, "proxy"), SHAPE, 131_072, "MSA block 512 is outside"),
        (
            Configuration("msa", 128, 16, "learned", 16),
            SHAPE,
            131_072,
            "index size 16 is outside 32..256",
        ),
    ],
)
def test_every_obstacle_has_a_reason(configuration, shape, context, reason):
    (found,) = obstacles(configuration, shape, context)
    assert found.startswith(reason)


@pytest.mark.parametrize(
    ("configuration", "shape", "context"),
    [
        (Configuration("moba", 64, 8), SHAPE, 131_072),
        (MOBA, SHAPE, 4097),
        (MOBA, AttentionShape(8, 8, 16, 256), 131_072),
        (Configuration("msa", 32, 64, "proxy"), SHAPE, 131_072),
        (Configuration("msa", 256, 8, "learned", 32), SHAPE, 131_072),
        (Configuration("moba", 4096, 4), SHAPE, 131_072),  # MoBA's blocks may be larger
    ],
)
def test_what_is_legal_has_none(configuration, shape, context):
    assert obstacles(configuration, shape, context) == []


def test_several_obstacles_are_all_named():
    found = obstacles(Configuration("msa", 16, 2, "proxy"), AttentionShape(1, 1, 8, 8), 64)
    assert len(found) == 5


def test_the_grid_needs_no_training_and_repeats_nothing():
    found = list(grid())
    assert len(found) == len(set(found)) <= 60
    assert not any(c.needs_training for c in found) and DENSE not in found
    assert all(c.decode == "sparse" for c in found)


def test_candidates_are_costed_or_refused():
    found = candidates(SHAPE, situation())
    assert [c.configuration for c in found] == list(grid())
    assert any(c.usable for c in found) and not all(c.usable for c in found)
    dense_ms = situation().cost(SHAPE, DENSE).time.expected_ms
    for candidate in found:
        if candidate.usable:
            assert candidate.expected_ms < dense_ms
            assert 1 <= candidate.threshold_tokens <= 131_072


def test_nothing_pays_at_a_short_context():
    found = candidates(SHAPE, situation(2048))
    assert not any(c.usable for c in found)
    slower = [c.refused for c in found if c.refused.startswith("dense is faster below")]
    assert slower and all("on Round-100 (at 2,048 tokens" in text for text in slower)


def test_the_threshold_is_where_sparse_begins_to_be_faster():
    found = examine(MOBA, SHAPE, situation())
    at = found.threshold_tokens
    for tokens, faster in ((at, True), (at - 1, False)):
        here = situation(tokens)
        sparse = here.cost(SHAPE, MOBA).time.expected_ms
        assert (sparse < here.cost(SHAPE, DENSE).time.expected_ms) == faster
    assert examine(MOBA, SHAPE, situation(at)).usable
    assert not examine(MOBA, SHAPE, situation(at - 1)).usable


def test_dense_decode_is_no_candidate_of_decode():
    stays = Configuration("moba", 128, 16, decode="dense")
    assert not examine(stays, SHAPE, situation(phase=Phase.DECODE)).usable
    assert examine(MOBA, SHAPE, situation(phase=Phase.DECODE)).usable


def test_what_does_not_fit_beside_the_model_says_so():
    found = candidates(SHAPE, situation(), free_bytes=1e6, tried=[MOBA])
    assert "GB are free" in found[0].refused
    assert candidates(SHAPE, situation(), free_bytes=1e12, tried=[MOBA])[0].usable


def test_quality_is_an_order_by_tokens_then_by_block():
    sizes = [(1024, 4), (128, 16), (64, 8), (512, 4)]
    found = sorted((Configuration("moba", *pair) for pair in sizes), key=quality_order)
    assert [(c.block_size, c.topk) for c in found] == [(64, 8), (512, 4), (128, 16), (1024, 4)]


FAST, FINE, SLOW, SMALL = (
    Configuration("moba", 512, 4),
    Configuration("moba", 128, 16),
    Configuration("moba", 1024, 32),
    Configuration("moba", 64, 8),
)


def test_near_the_fastest_the_better_ordered_wins():
    assert best_in_order({FAST: 100.0, FINE: 100.0 * NEAR_FASTEST, SLOW: 200.0}) == FINE
    assert best_in_order({FAST: 100.0, FINE: 100.1 * NEAR_FASTEST, SLOW: 200.0}) == FAST


def test_small_budgets_do_not_take_part():
    assert SMALL.block_size * SMALL.topk < LEAST_BUDGET_TOKENS
    assert best_in_order({SMALL: 1.0, SLOW: 200.0}) == SLOW
    assert best_in_order({SMALL: 1.0}) is None
    assert best_in_order({}) is None


def test_a_limit_on_the_time_is_kept_where_it_can_be():
    totals = {FAST: 100.0, FINE: 105.0}
    assert best_in_order(totals, most_ms=104.0) == FAST
    assert best_in_order(totals, most_ms=106.0) == FINE
    assert best_in_order(totals, most_ms=50.0) == FAST
