"""What each layer gets, with measured losses and without."""

import itertools

import pytest

from sparsify.cost_model.choosing import Layer, choose
from sparsify.cost_model.configuration import DENSE, Configuration
from sparsify.cost_model.search import NEAR_FASTEST, candidates
from sparsify.cost_model.situation import Situation
from sparsify.cost_model.workload import AttentionShape, Phase, Workload
from tests._util.plan_gpus import make_gpu

SHAPE, SMALL_SHAPE = AttentionShape(32, 8, 128, 128), AttentionShape(4, 4, 8, 8)
TRIED = [
    Configuration("moba", 512, 4),
    Configuration("moba", 128, 16),
    Configuration("moba", 64, 8),
]
SITUATION = Situation(make_gpu(), Workload.of(Phase.PREFILL, 131_072))


def known(shapes=(SHAPE,)):
    return {shape: candidates(shape, SITUATION, tried=TRIED) for shape in shapes}


def time_of(configuration, shape=SHAPE):
    return SITUATION.cost(shape, configuration).time.expected_ms


def layers(losses, count=3):
    return [Layer(f"l{i}", SHAPE, None if losses is None else losses[i]) for i in range(count)]


def chosen(found, *, other_ms=0.0, shapes=(SHAPE,), **options):
    return choose(found, known(shapes), SITUATION, other_ms=other_ms, **options)


def test_without_measurements_all_layers_get_one_configuration():
    found = chosen(layers(None))
    assert len(set(found.picks.values())) == 1 and found.picks["l0"] in TRIED[:2]
    assert all(point.loss is None for point in found.front)
    assert found.front[-1].picks == "dense"


def test_shapes_that_kernels_do_not_take_stay_dense():
    mixed = [Layer("big", SHAPE), Layer("small", SMALL_SHAPE)]
    found = chosen(mixed, shapes=(SHAPE, SMALL_SHAPE))
    assert found.picks["big"].sparse and found.picks["small"] == DENSE


def test_the_share_of_everything_decides_what_is_near():
    # so much else is computed that every configuration is near the fastest: the best order wins
    found = chosen(layers(None), other_ms=1e6)
    assert set(found.picks.values()) == {Configuration("moba", 128, 16)}


LOSSES = [
    dict(zip(TRIED, (0.30, 0.10, 0.50), strict=True)),
    dict(zip(TRIED, (0.20, 0.15, 0.40), strict=True)),
    dict(zip(TRIED, (0.05, 0.04, 0.45), strict=True)),
]


def brute_force(keeps):
    """The fastest of all plans that `keeps` accepts: time, picks."""
    plans = itertools.product([DENSE, *TRIED], repeat=3)
    kept = [picks for picks in plans if keeps(picks)]
    return min(sum(time_of(c) for c in picks) for picks in kept)


@pytest.mark.parametrize("least", [0.55, 0.7, 0.8, 0.87, 0.9, 0.95])
def test_the_budget_is_kept_at_the_least_time(least):
    def keeps(picks):
        recalls = [1 - LOSSES[i][c] for i, c in enumerate(picks) if c.sparse]
        return not recalls or sum(recalls) / len(recalls) >= least - 1e-12

    found = chosen(layers(LOSSES), least_recall=least)
    picks = tuple(found.picks[f"l{i}"] for i in range(3))
    assert keeps(picks) and found.kept
    assert sum(map(time_of, picks)) == pytest.approx(brute_force(keeps), rel=1e-9)


def test_a_budget_that_nothing_keeps():
    found = chosen(layers(LOSSES), least_recall=0.99)
    assert not found.kept and set(found.picks.values()) == {DENSE}
    assert found.best_recall == pytest.approx(0.96)


def test_near_the_fastest_the_least_loss_is_taken():
    found = chosen(layers(LOSSES), other_ms=1e6)
    # everything is near: what loses least is dense
    assert set(found.picks.values()) == {DENSE}
    found = chosen(layers(LOSSES))
    total = sum(time_of(c) for c in found.picks.values())
    assert total <= found.fastest_ms * NEAR_FASTEST * (1 + 1e-9)


def test_what_was_not_measured_is_not_taken():
    only = [{TRIED[0]: 0.1}] * 3
    assert set(chosen(layers(only)).picks.values()) == {TRIED[0]}
    assert set(chosen(layers([{}] * 3)).picks.values()) == {DENSE}


def test_the_front_trades_time_for_loss():
    points = chosen(layers(LOSSES)).front
    assert [p.total_ms for p in points] == sorted(p.total_ms for p in points)
    assert points[-1].picks == "3 x dense" and points[-1].loss == 0
