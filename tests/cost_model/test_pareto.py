"""The Pareto front of many layers against trying everything."""

import itertools
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from sparsify.cost_model.pareto import Group, Option, Point, front, undominated

numbers = st.integers(0, 6)
costs = st.lists(st.tuples(*[numbers] * 4), min_size=1, max_size=3)
options = costs.map(lambda rows: tuple(Option(key, *row) for key, row in enumerate(rows)))
group = st.builds(Group, options, st.integers(1, 3))


def everything(groups):
    """Costs of every plan, one layer at a time."""
    layers = [g.options for g in groups for _ in range(g.count)]
    for picks in itertools.product(*layers):
        yield (
            sum(o.time_ms for o in picks),
            sum(o.loss for o in picks),
            sum(o.cache_bytes for o in picks),
            max((o.workspace_bytes for o in picks), default=0),
        )


def dominated(one, others, places):
    return any(
        all(other[i] <= one[i] for i in places) and any(other[i] < one[i] for i in places)
        for other in others
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(group, min_size=1, max_size=3))
def test_the_front_of_time_and_loss_is_exact(groups):
    plans = {plan[:2] for plan in everything(groups)}
    wanted = {p for p in plans if not dominated(p, plans, (0, 1))}
    assert {(p.time_ms, p.loss) for p in front(groups)} == wanted


@settings(max_examples=150, deadline=None)
@given(st.lists(group, min_size=1, max_size=3), st.integers(0, 20))
def test_the_front_within_a_memory_is_exact(groups, memory):
    fitting = {plan for plan in everything(groups) if plan[2] + plan[3] <= memory}
    wanted = {p[:2] for p in fitting if not dominated(p, fitting, (0, 1))}
    found = {(p.time_ms, p.loss) for p in front(groups, memory_bytes=memory)}
    assert wanted <= found
    assert found <= {p[:2] for p in fitting}


@settings(max_examples=60, deadline=None)
@given(st.lists(group, min_size=1, max_size=3))
def test_picks_add_up_to_the_costs(groups):
    for point in front(groups):
        assert len(point.picks) == len(groups)
        for picks, g in zip(point.picks, groups, strict=True):
            assert sum(count for _, count in picks) == g.count
            assert {key for key, _ in picks} <= {o.key for o in g.options}


def test_nothing_fits():
    assert front([Group((Option("a", 1, 1, cache_bytes=5),))], memory_bytes=4) == []
    assert len(front([Group((Option("a", 1, 1, cache_bytes=5),))], memory_bytes=5)) == 1


def test_no_layers_at_all():
    assert front([]) == [Point(0, 0)]


def test_a_dominated_option_is_never_taken():
    good, bad = Option("good", 1.0, 1.0), Option("bad", 1.0, 1.5)
    (point,) = front([Group((bad, good), 4)])
    assert point.picks == ((("good", 4),),)


def test_equal_options_stay_once():
    twins = [Option("a", 1.0, 1.0), Option("b", 1.0, 1.0)]
    assert undominated(twins, lambda o: o.costs) == twins[:1]


def test_a_large_front_is_thinned_within_the_promised_error():
    groups = [
        Group(
            tuple(
                Option((layer, k), 10.0 / (k + 1) + 0.013 * layer * k, 0.11 * k**1.5 + layer * k)
                for k in range(5)
            )
        )
        for layer in range(9)
    ]
    exact, thin = front(groups, large=10**9), front(groups, large=30, epsilon=1e-2)
    assert len(thin) < len(exact)
    slack = 1e-2 * min(p.time_ms for p in exact)
    for point in exact:
        assert any(p.loss <= point.loss + 1e-9 and p.time_ms <= point.time_ms + slack for p in thin)


def test_many_equal_layers_are_quick():
    options = tuple(Option(k, 100.0 / (k + 1), 0.01 * k * k, 0, 0) for k in range(10))
    begun = time.perf_counter()
    points = front([Group(options, 32)])
    assert time.perf_counter() - begun < 5
    assert len(points) > 100
