"""The best plans of many layers: an exact Pareto front, layer by layer (multiple-choice knapsack).

Every layer takes one of its options. Time, loss and cache bytes add up over layers; workspace is
needed by one layer at a time, so the largest counts. Equal layers are given once, with their
number: what matters is how many of them take which option.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, TypeVar

__all__ = ["EPSILON", "LARGE", "Group", "Option", "Point", "front", "undominated"]

# Choices of this module: a front beyond LARGE points is thinned so that no time is off by more than
# EPSILON of the whole; below that it is exact. Where memory binds, fronts are compared in four
# costs, pair by pair: beyond LARGE_IN_MEMORY points about so many are kept, without such a promise.
EPSILON = 1e-3
LARGE = 1024
LARGE_IN_MEMORY = 256

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")
Costs = tuple[float, float, float, float]
"""Time, loss, cache bytes, workspace bytes."""


@dataclass(frozen=True, slots=True)
class Option(Generic[_K]):
    """One way to compute one layer."""

    key: _K
    time_ms: float
    loss: float
    cache_bytes: float = 0
    workspace_bytes: float = 0

    @property
    def costs(self) -> Costs:
        """What options are compared by."""
        return self.time_ms, self.loss, self.cache_bytes, self.workspace_bytes


@dataclass(frozen=True, slots=True)
class Group(Generic[_K]):
    """`count` equal layers with the same options, each under a key of its own."""

    options: tuple[Option[_K], ...]
    count: int = 1


@dataclass(frozen=True, slots=True)
class Point(Generic[_K]):
    """One plan: `picks` says for each group how many of its layers take which key."""

    time_ms: float
    loss: float
    cache_bytes: float = 0
    workspace_bytes: float = 0
    picks: tuple[tuple[tuple[_K, int], ...], ...] = ()

    @property
    def costs(self) -> Costs:
        """What plans are compared by."""
        return self.time_ms, self.loss, self.cache_bytes, self.workspace_bytes


def undominated(
    items: Iterable[_T], costs: Callable[[_T], Costs], *, memory: bool = True
) -> list[_T]:
    """Those that no other equals or beats in every cost, by rising time.

    Of several with the same costs the first stays. Without `memory` only time and loss count.
    """
    ordered = sorted(items, key=costs)  # a later one is never faster
    return _by_all(ordered, costs) if memory else _by_loss(ordered, costs)


def _by_loss(ordered: list[_T], costs: Callable[[_T], Costs]) -> list[_T]:
    kept: list[_T] = []
    least = float("inf")
    for item in ordered:
        loss = costs(item)[1]
        if loss < least or not kept:
            kept.append(item)
            least = loss
    return kept


def _by_all(ordered: list[_T], costs: Callable[[_T], Costs]) -> list[_T]:
    kept: list[_T] = []
    rivals: list[tuple[float, float, float]] = []
    for item in ordered:
        _, loss, cache, workspace = costs(item)
        if not any(a <= loss and b <= cache and c <= workspace for a, b, c in rivals):
            kept.append(item)
            rivals.append((loss, cache, workspace))
    return kept


def front(
    groups: Sequence[Group[_K]],
    *,
    memory_bytes: float | None = None,
    large: int = LARGE,
    epsilon: float = EPSILON,
) -> list[Point[_K]]:
    """All undominated plans, by rising time; empty when none fits into the memory.

    Args:
        memory_bytes: what caches and the largest workspace may take together.
        large, epsilon: a front of more points is thinned; then a plan may be slower than the best
            of its loss by `epsilon` of the fastest plan's time (by more where memory binds).
    """
    limit = memory_bytes if memory_bytes is not None and _binds(groups, memory_bytes) else None
    layers = sum(group.count for group in groups)
    fastest = sum(g.count * min((o.time_ms for o in g.options), default=0.0) for g in groups)
    thin = _Thinning(large, epsilon * fastest / max(layers, 1), limit)
    plans: list[_Plan] = [((0.0, 0.0, 0.0, 0.0), None)]
    for group in groups:
        own = [(point.costs, point.picks[0]) for point in _group_front(group, thin)]
        plans = thin([_joined(plan, costs, picks) for plan in plans for costs, picks in own])
    return [Point(*costs, picks=_picks(taken)) for costs, taken in plans]


_Plan = tuple[Costs, Any]
"""Costs, and what was taken: (what was taken before, picks of the last group), or None."""


def _joined(plan: _Plan, costs: Costs, picks: Any) -> _Plan:
    (time_a, loss_a, cache_a, work_a), before = plan
    time_b, loss_b, cache_b, work_b = costs
    total = (time_a + time_b, loss_a + loss_b, cache_a + cache_b, max(work_a, work_b))
    return total, (before, picks)


def _picks(taken: Any) -> tuple[Any, ...]:
    found = []
    while taken is not None:
        taken, picks = taken
        found.append(picks)
    return tuple(reversed(found))


def _binds(groups: Sequence[Group[_K]], memory_bytes: float) -> bool:
    """Whether the hungriest plan would not fit."""
    options = [o for group in groups for o in group.options]
    cache = sum(g.count * max((o.cache_bytes for o in g.options), default=0) for g in groups)
    return cache + max((o.workspace_bytes for o in options), default=0) > memory_bytes


@dataclass(frozen=True, slots=True)
class _Thinning:
    """What is kept of a set of plans."""

    large: int
    step_ms: float
    memory_bytes: float | None

    def __call__(self, plans: Iterable[_Plan]) -> list[_Plan]:
        limit = self.memory_bytes
        if limit is not None:
            plans = [plan for plan in plans if plan[0][2] + plan[0][3] <= limit]
        kept = undominated(plans, itemgetter(0), memory=limit is not None)
        large = self.large if limit is None else min(self.large, LARGE_IN_MEMORY)
        return list(self._thinned(kept)) if len(kept) > large else kept

    def _thinned(self, plans: list[_Plan]) -> Iterator[_Plan]:
        """Of each step of time the plan with the least loss and that with the least memory."""
        step_ms = self.step_ms
        if self.memory_bytes is not None:
            step_ms = max(step_ms, (plans[-1][0][0] - plans[0][0][0]) / LARGE_IN_MEMORY)
        buckets: dict[int, list[_Plan]] = {}
        for plan in plans:
            buckets.setdefault(int(plan[0][0] / step_ms), []).append(plan)
        for bucket in buckets.values():
            best = min(bucket, key=lambda plan: plan[0][1])
            small = min(bucket, key=lambda plan: plan[0][2] + plan[0][3])
            yield from (best,) if best is small or self.memory_bytes is None else (best, small)


def _group_front(group: Group[_K], thin: _Thinning) -> list[Point[_K]]:
    """The front of equal layers alone.

    Plans are multisets of options with costs summed in one order, so that permutations are equal
    to the last bit.
    """
    options = undominated(group.options, lambda o: o.costs, memory=thin.memory_bytes is not None)
    found = {(0,) * len(options)}
    points: list[Point[_K]] = [_multiset(options, (0,) * len(options))]
    for _ in range(group.count):
        more = {
            (*counts[:at], counts[at] + 1, *counts[at + 1 :])
            for counts in found
            for at in range(len(options))
        }
        plans = [(point.costs, (point, counts)) for point, counts in _points(options, more)]
        kept = [taken for _, taken in thin(plans)]
        points = [point for point, _ in kept]
        found = {counts for _, counts in kept}
    return points


def _points(
    options: list[Option[_K]], every: Iterable[tuple[int, ...]]
) -> Iterator[tuple[Point[_K], tuple[int, ...]]]:
    for counts in sorted(every):
        yield _multiset(options, counts), counts


def _multiset(options: list[Option[_K]], counts: tuple[int, ...]) -> Point[_K]:
    taken = [(option, count) for option, count in zip(options, counts, strict=True) if count]
    return Point(
        sum(o.time_ms * n for o, n in taken),
        sum(o.loss * n for o, n in taken),
        sum(o.cache_bytes * n for o, n in taken),
        max((o.workspace_bytes for o, _ in taken), default=0),
        (tuple((o.key, n) for o, n in taken),),
    )
