"""Which configuration each layer gets where the policy leaves it to the cost model.

With measured losses: the exact front over all layers, and of it the fastest plan that keeps the
quality asked for, or else, of the plans within 10 % of the fastest, the one that loses least.
Without: one configuration for all layers, by `search.best_in_order`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsify.cost_model.configuration import DENSE, Configuration
from sparsify.cost_model.pareto import EPSILON, Group, Option, Point, front
from sparsify.cost_model.search import (
    Candidate,
    best_in_order,
    limit_ms,
    may_be_chosen,
    quality_order,
)
from sparsify.cost_model.situation import Situation
from sparsify.cost_model.workload import AttentionShape

__all__ = ["Choice", "FrontPoint", "Layer", "choose"]

# Sums of floats that are equal on paper.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer to choose for, as one GPU holds it.

    `losses` are measured: 1 - score recall of each configuration; those not in it are not taken.
    None: nothing was measured at all.
    """

    key: str
    shape: AttentionShape
    losses: Mapping[Configuration, float] | None = None


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """An undominated plan: its expected time with everything else, the mean loss of its sparse
    layers (None where quality is only ordered), and what it consists of."""

    total_ms: float
    loss: float | None
    picks: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The configuration of every layer, by key; DENSE where nothing serves.

    `fastest_ms` is the expected time of the fastest plan that may be chosen. `kept` says whether
    the quality asked for was kept; `best_recall` what the best sparse layer keeps.
    """

    picks: dict[str, Configuration]
    front: tuple[FrontPoint, ...]
    fastest_ms: float
    kept: bool = True
    best_recall: float | None = None


Candidates = Mapping[AttentionShape, Sequence[Candidate]]


def choose(
    layers: Sequence[Layer],
    candidates: Candidates,
    situation: Situation,
    *,
    other_ms: float,
    most_ms: float | None = None,
    free_bytes: float | None = None,
    least_recall: float | None = None,
    epsilon: float = EPSILON,
) -> Choice:
    """The configurations for `layers`.

    Args:
        candidates: of every shape among the layers.
        other_ms: expected time of everything else, for shares of the whole.
        most_ms: total time that must not be exceeded, if any plan keeps it.
        free_bytes: memory for caches and workspace of these layers.
        least_recall: mean score recall that the sparse layers must keep; needs losses.
        epsilon: how exact large fronts are, see `pareto.front`.
    """
    dense_ms = {shape: situation.cost(shape, DENSE).time.expected_ms for shape in candidates}
    task = _Task(layers, candidates, dense_ms, other_ms, most_ms, free_bytes, epsilon)
    if any(layer.losses is not None for layer in layers):
        return _by_loss(task, least_recall)
    return _by_order(task)


@dataclass(frozen=True, slots=True)
class _Task:
    layers: Sequence[Layer]
    candidates: Candidates
    dense_ms: Mapping[AttentionShape, float]
    other_ms: float
    most_ms: float | None
    free_bytes: float | None
    epsilon: float

    def front(self, groups: Sequence[Group[Configuration]]) -> list[Point[Configuration]]:
        """The front of these layers."""
        return front(groups, memory_bytes=self.free_bytes, epsilon=self.epsilon)

    def usable(self, shape: AttentionShape) -> dict[Configuration, Candidate]:
        return {c.configuration: c for c in self.candidates[shape] if c.usable}


def _by_order(task: _Task) -> Choice:
    """One configuration for all layers that can have it."""
    by_shape = {shape: task.usable(shape) for shape in task.candidates}
    every = dict.fromkeys(c for usable in by_shape.values() for c in usable)
    counts = Counter(layer.shape for layer in task.layers)

    def total(configuration: Configuration) -> float:
        times = (
            by_shape[shape][configuration].expected_ms * count
            if configuration in by_shape[shape]
            else task.dense_ms[shape] * count
            for shape, count in counts.items()
        )
        return task.other_ms + sum(times)

    totals = {c: total(c) for c in every if _fits(c, by_shape, counts, task.free_bytes)}
    dense = task.other_ms + sum(task.dense_ms[shape] * n for shape, n in counts.items())
    best = best_in_order(totals, most_ms=task.most_ms)
    fastest = min((*(totals[c] for c in totals if may_be_chosen(c)), dense))
    picks = {
        layer.key: best if best is not None and best in by_shape[layer.shape] else DENSE
        for layer in task.layers
    }
    return Choice(picks, _ordered_front(totals, dense), fastest)


def _fits(
    configuration: Configuration,
    by_shape: Mapping[AttentionShape, Mapping[Configuration, Candidate]],
    counts: Mapping[AttentionShape, int],
    free_bytes: float | None,
) -> bool:
    """Whether the caches of all layers and the largest workspace fit."""
    if free_bytes is None:
        return True
    costs = [
        (found.cost, counts[shape])
        for shape, usable in by_shape.items()
        if (found := usable.get(configuration)) is not None and found.cost is not None
    ]
    caches = sum(cost.index_cache_bytes * count for cost, count in costs)
    return caches + max((cost.workspace_bytes for cost, _ in costs), default=0) <= free_bytes


def _ordered_front(totals: Mapping[Configuration, float], dense: float) -> tuple[FrontPoint, ...]:
    """Configurations that no faster one precedes in the order of quality, then dense."""
    found: list[FrontPoint] = []
    best: tuple[int, int] | None = None
    for configuration, total in sorted(totals.items(), key=lambda item: item[1]):
        order = quality_order(configuration)
        if total < dense and (best is None or order > best):
            best = order
            found.append(FrontPoint(total, None, configuration.label))
    return (*found, FrontPoint(dense, None, DENSE.label))


def _by_loss(task: _Task, least_recall: float | None) -> Choice:
    """The fastest plan that keeps `least_recall`, or the one that loses least near the fastest."""
    keys, groups = _groups(task, 0.0)
    points = task.front(groups)
    fastest = task.other_ms + min((p.time_ms for p in points), default=0.0)
    shown = tuple(_front_point(point, task.other_ms) for point in points)
    losses = [loss for layer in task.layers for loss in (layer.losses or {}).values()]
    best = 1 - min(losses) if losses else None
    if least_recall is None:
        limit = limit_ms(fastest, task.most_ms) - task.other_ms
        near = [p for p in points if p.time_ms <= limit * (1 + ROUNDING)]
        return Choice(_spread(min(near, key=lambda p: p.loss), keys), shown, fastest, True, best)
    # Recall is a mean over the sparse layers: each adds what it loses beyond the budget.
    _, groups = _groups(task, 1 - least_recall)
    keeping = [p for p in task.front(groups) if p.loss <= ROUNDING]
    first = min(keeping, key=lambda p: p.time_ms)
    found = _spread(first, keys)
    kept = any(c.sparse for c in found.values()) or not any(task.usable(s) for s in task.candidates)
    return Choice(found, shown, task.other_ms + first.time_ms, kept, best)


Keys = list[list[str]]


def _groups(task: _Task, allowance: float) -> tuple[Keys, list[Group[Configuration]]]:
    """Layers with equal options together: their keys, and what they may take."""
    found: dict[tuple[Option[Configuration], ...], list[str]] = {}
    for layer in task.layers:
        found.setdefault(_options(task, layer, allowance), []).append(layer.key)
    return list(found.values()), [Group(options, len(keys)) for options, keys in found.items()]


def _options(task: _Task, layer: Layer, allowance: float) -> tuple[Option[Configuration], ...]:
    dense = Option(DENSE, task.dense_ms[layer.shape], 0.0)
    losses = layer.losses or {}
    return (
        dense,
        *(
            Option(
                configuration,
                candidate.expected_ms,
                losses[configuration] - allowance,
                candidate.cost.index_cache_bytes,
                candidate.cost.workspace_bytes,
            )
            for configuration, candidate in task.usable(layer.shape).items()
            if configuration in losses and candidate.cost is not None
        ),
    )


def _spread(point: Point[Configuration], keys: Keys) -> dict[str, Configuration]:
    """Which layer takes what: of equal layers the first ones the first option."""
    found: dict[str, Configuration] = {}
    for names, picks in zip(keys, point.picks, strict=True):
        taken = [configuration for configuration, count in picks for _ in range(count)]
        found |= dict(zip(names, taken, strict=True))
    return found


def _front_point(point: Point[Configuration], other_ms: float) -> FrontPoint:
    counts: Counter[Configuration] = Counter()
    for picks in point.picks:
        counts.update(dict(picks))
    sparse = sum(count for configuration, count in counts.items() if configuration.sparse)
    text = ", ".join(f"{count} x {c.label}" for c, count in counts.most_common())
    return FrontPoint(other_ms + point.time_ms, point.loss / sparse if sparse else 0.0, text)
