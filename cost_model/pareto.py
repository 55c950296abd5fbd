"""The best plans of many layers: an exact Pareto front, layer by layer (multiple-choice knapsack).

Every layer takes one of its options. Time, loss and cache bytes add up over layers; workspace is
needed by one layer at a time, so the largest counts. Equal layers are given once, with their
number: what matters is how many of them take which option.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["EPSILON", "LARGE", "Group", "Option", "Point", "front", "undominated"]

# Choices of this module: a front beyond LARGE points is thinned so that no time is off by more than
# EPSILON of the whole; below that it is exact. Where memory binds, fronts are compared in four
# costs, pair by pair, so fewer points are kept.
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
            of its loss by `epsilon` of the fastest plan's time.
    """
    limit = memory_bytes if memory_bytes is not None and _binds(groups, memory_bytes) else None
    layers = sum(group.count for group in groups)
    fastest = sum(g.count * min((o.time_ms for o in g.options), default=0.0) for g in groups)
    thin = _Thinning(large, epsilon * fastest / max(layers, 1), limit)
    points: list[Point[_K]] = [Point(0.0, 0.0)]
    for group in groups:
        points = thin([_joined(a, b) for a in points for b in _group_front(group, thin)])
    return points


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

    def __call__(self, points: Iterable[Point[_K]]) -> list[Point[_K]]:
        limit = self.memory_bytes
        fitting = (p for p in points if limit is None or p.cache_bytes + p.workspace_bytes <= limit)
        kept = undominated(fitting, _costs_of, memory=limit is not None)
        large = self.large if limit is None else min(self.large, LARGE_IN_MEMORY)
        return list(self._thinned(kept)) if len(kept) > large else kept

    def _thinned(self, points: list[Point[_K]]) -> Iterator[Point[_K]]:
        """Of each step of time the plan with the least loss and that with the least memory."""
        buckets: dict[int, list[Point[_K]]] = {}
        for point in points:
            buckets.setdefault(int(point.time_ms / self.step_ms), []).append(point)
        for bucket in buckets.values():
            best = min(bucket, key=lambda p: p.loss)
            small = min(bucket, key=lambda p: p.cache_bytes + p.workspace_bytes)
            yield from (best,) if best is small or self.memory_bytes is None else (best, small)


def _costs_of(point: Point[_K]) -> Costs:
    return point.costs


def _joined(a: Point[_K], b: Point[_K]) -> Point[_K]:
    return Point(
        a.time_ms + b.time_ms,
        a.loss + b.loss,
        a.cache_bytes + b.cache_bytes,
        max(a.workspace_bytes, b.workspace_bytes),
        a.picks + b.picks,
    )


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
        by_picks = {(p := _multiset(options, counts)).picks: (p, counts) for counts in more}
        points = thin(point for point, _ in by_picks.values())
        found = {by_picks[point.picks][1] for point in points}
    return points


def _multiset(options: list[Option[_K]], counts: tuple[int, ...]) -> Point[_K]:
    taken = [(option, count) for option, count in zip(options, counts, strict=True) if count]
    return Point(
        sum(o.time_ms * n for o, n in taken),
        sum(o.loss * n for o, n in taken),
        sum(o.cache_bytes * n for o, n in taken),
        max((o.workspace_bytes for o, _ in taken), default=0),
        (tuple((o.key, n) for o, n in taken),),
    )
