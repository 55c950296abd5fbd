"""What one planning looks up: sites with their shares, times, candidates, and the choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sparsify import planner
from sparsify.cost_model.choosing import Choice, Layer, choose
from sparsify.cost_model.configuration import DENSE, Configuration
from sparsify.cost_model.pareto import EPSILON
from sparsify.cost_model.search import Candidate, candidates, examine
from sparsify.cost_model.times import TimeEstimate
from sparsify.cost_model.workload import AttentionShape
from sparsify.ir import AttentionSite, HeadLayout, Refusal, site_key
from sparsify.planning_target import Target
from sparsify.plans import LayerPlan
from sparsify.policy import MSA, Auto, Dense, MoBA, Policy

__all__ = ["ConfigSite", "Found", "Losses", "OpenSite", "Work"]

# Enough to see whether a choice stands.
COARSE = 0.03

Losses = Mapping[str, Mapping[Configuration, float]]
"""Measured 1 - score recall, by site key and configuration."""


@dataclass(frozen=True, slots=True)
class ConfigSite:
    """Attention that a config names; nothing is proved of it."""

    fqn: str
    heads: HeadLayout
    ordinal: int = 0


Found = AttentionSite | Refusal | ConfigSite


@dataclass(frozen=True, slots=True)
class OpenSite:
    """A site that may become sparse: its share on one GPU and what the policy wants there."""

    key: str
    item: Any
    shape: AttentionShape
    method: MoBA | MSA | Auto
    because: str


@dataclass(frozen=True)
class Work:
    """What one planning looks up, each once."""

    policy: Policy
    found: tuple[Found, ...]
    target: Target
    losses: Losses | None = None
    min_speedup: float | None = None

    @property
    def least_recall(self) -> float | None:
        """The quality that the policy asks for."""
        return None if self.policy.quality is None else self.policy.quality.min_score_recall

    @cached_property
    def choices(self) -> list[planner.Choice]:
        """What the policy says of each attention, and why."""
        choices = planner.apply_rules(self.policy, self.found)
        if self.policy.on_unproved == "error":
            planner.refuse_unproved(self.found, choices)
        return choices

    @cached_property
    def shapes(self) -> dict[str, AttentionShape]:
        """What one GPU holds of each proved attention."""
        return {
            site_key(item.fqn, item.ordinal): self.target.shape(item.heads)
            for item in self.found
            if not isinstance(item, Refusal)
        }

    @cached_property
    def open_sites(self) -> list[OpenSite]:
        """The sites that may become sparse."""
        found = []
        for item, (method, because) in zip(self.found, self.choices, strict=True):
            key = site_key(item.fqn, item.ordinal)
            if key in self.shapes and not isinstance(method, Dense):
                found.append(OpenSite(key, item, self.shapes[key], method, because))
        return found

    @cached_property
    def autos(self) -> list[OpenSite]:
        """Those that are left to the cost model."""
        return [site for site in self.open_sites if isinstance(site.method, Auto)]

    @cached_property
    def free_bytes(self) -> float | None:
        """Memory for what sparse attention adds; None where the model is not known."""
        return self.target.free_bytes()

    @cached_property
    def dense_times(self) -> dict[AttentionShape, TimeEstimate]:
        """Of one layer."""
        situation = self.target.situation
        return {shape: situation.cost(shape, DENSE).time for shape in self.shapes.values()}

    @cached_property
    def attention(self) -> TimeEstimate:
        """All proved attention, dense."""
        return TimeEstimate.total(self.dense_times[shape] for shape in self.shapes.values())

    @cached_property
    def dense(self) -> TimeEstimate:
        """Everything, dense; without a known model all proved attention."""
        cost = self.target.cost()
        return self.attention if cost is None else cost.total

    @cached_property
    def rest(self) -> TimeEstimate:
        """Everything beside the proved attention."""
        a, b = self.dense, self.attention

        def left(of: Callable[[TimeEstimate], float]) -> float:
            return max(of(a) - of(b), 0.0)

        return TimeEstimate(
            left(lambda t: t.bound_ms),
            left(lambda t: t.low_ms),
            left(lambda t: t.expected_ms),
            left(lambda t: t.high_ms),
            a.source,
        )

    def time_of(self, layer: LayerPlan, shape: AttentionShape, scale: float = 1.0) -> TimeEstimate:
        """One planned layer in this call."""
        workload = self.target.workload
        if not layer.sparse or workload.context_tokens < layer.min_context:
            return self.dense_times[shape]
        return self.target.situation.scaled(scale).cost(shape, Configuration.of(layer)).time

    def candidate(self, shape: AttentionShape, configuration: Configuration) -> Candidate:
        """What is known of a configuration there."""
        return next(c for c in self.candidates[shape] if c.configuration == configuration)

    @property
    def gpu_name(self) -> str:
        """The GPU, for sentences."""
        return self.target.gpu.name

    @cached_property
    def candidates(self) -> dict[AttentionShape, list[Candidate]]:
        """For every shape that is left to the cost model."""
        situation, free = self.target.situation, self.free_bytes
        shapes = dict.fromkeys(site.shape for site in self.autos)
        return {shape: candidates(shape, situation, free_bytes=free) for shape in shapes}

    @cached_property
    def fixed(self) -> dict[str, Candidate]:
        """What the policy itself names, by site key."""
        seen: dict[tuple[AttentionShape, Configuration], Candidate] = {}
        found = {}
        for site in self.open_sites:
            if isinstance(site.method, Auto):
                continue
            pair = (site.shape, Configuration.of(site.method))
            if pair not in seen:
                seen[pair] = examine(pair[1], pair[0], self.target.situation)
            found[site.key] = seen[pair]
        return found

    def other_ms(self, scale: float = 1.0) -> float:
        """Expected time of all that `Auto` does not decide on."""
        auto = sum(self.dense_times[site.shape].expected_ms for site in self.autos)
        saved = 0.0
        for site in self.open_sites:
            if site.key in self.fixed and self.fixed[site.key].usable:
                saved += self._saved_ms(site, scale)
        return self.dense.expected_ms - auto - saved

    def fixed_saves(self, scale: float) -> bool:
        """Whether what the policy names is faster than dense, all its layers together."""
        fixed = (site for site in self.open_sites if site.key in self.fixed)
        return sum(self._saved_ms(site, scale) for site in fixed) > 0

    def _saved_ms(self, site: OpenSite, scale: float) -> float:
        """What the policy's own configuration saves there; below 0 where it is slower."""
        configuration = self.fixed[site.key].configuration
        cost = self.target.situation.scaled(scale).cost(site.shape, configuration)
        return self.dense_times[site.shape].expected_ms - cost.time.expected_ms

    def choice(self, scale: float = 1.0) -> Choice | None:
        """What the cost model chooses, if sparse kernels are so many times as efficient."""
        if not self.autos:
            return None
        most = self.dense.expected_ms / self.min_speedup if self.min_speedup else None
        return choose(
            [
                Layer(
                    site.key,
                    site.shape,
                    None if self.losses is None else self.losses.get(site.key, {}),
                )
                for site in self.autos
            ],
            self.scaled_candidates(scale),
            self.target.situation,
            other_ms=self.other_ms(scale),
            most_ms=most,
            free_bytes=self.free_bytes,
            least_recall=self.least_recall,
            epsilon=EPSILON if scale == 1.0 else COARSE,
        )

    def scaled_candidates(self, scale: float) -> dict[AttentionShape, list[Candidate]]:
        """The legal candidates at another efficiency, those slower than dense refused."""
        if scale == 1.0:
            return self.candidates
        situation = self.target.situation.scaled(scale)
        found = {}
        for shape, known in self.candidates.items():
            dense_ms = self.dense_times[shape].expected_ms
            found[shape] = [
                replace(
                    candidate,
                    cost=(cost := situation.cost(shape, candidate.configuration)),
                    refused="" if cost.time.expected_ms < dense_ms else "dense is faster",
                )
                for candidate in known
                if candidate.cost is not None
            ]
        return found
