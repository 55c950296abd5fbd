"""A plan with what it rests on: times per layer, the alternatives, and how firmly it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsify.cost_model.choosing import FrontPoint
from sparsify.cost_model.search import Candidate
from sparsify.cost_model.times import TimeEstimate
from sparsify.planning_target import Target
from sparsify.plans import LayerPlan, Plan

__all__ = ["Planned", "Row", "Scaled", "time_json"]


@dataclass(frozen=True)
class Row:
    """One layer of the plan with its expected times on one GPU; None where nothing is known."""

    layer: LayerPlan
    dense: TimeEstimate | None = None
    planned: TimeEstimate | None = None


@dataclass(frozen=True)
class Scaled:
    """How the plan fares when sparse kernels are `scale` times as efficient as expected."""

    scale: float
    planned_ms: float
    dense_ms: float
    choice: str


@dataclass(frozen=True)
class Planned:
    """A plan with what it rests on. Times are of everything, or, where the model beyond its
    attention is unknown (`whole` is False), of all attention."""

    plan: Plan
    target: Target
    rows: tuple[Row, ...]
    dense: TimeEstimate
    planned: TimeEstimate
    whole: bool
    attention_share: float
    front: tuple[FrontPoint, ...]
    sensitivity: tuple[Scaled, ...]
    refused: tuple[Candidate, ...]
    notes: tuple[str, ...]

    @property
    def speedup(self) -> float:
        """Expected time of dense over that of the plan."""
        return self.dense.expected_ms / self.planned.expected_ms

    def to_json(self) -> dict[str, Any]:
        """The document of `sparsify plan --json`."""
        return {
            "schema": 1,
            "plan": self.plan.to_json(),
            "layers": [_row_json(row) for row in self.rows],
            "front": [
                {"total_ms": p.total_ms, "score_recall_loss": p.loss, "layers": p.picks}
                for p in self.front
            ],
            "sensitivity": [
                {
                    "efficiency": s.scale,
                    "planned_ms": s.planned_ms,
                    "dense_ms": s.dense_ms,
                    "choice": s.choice,
                }
                for s in self.sensitivity
            ],
            "infeasible": [
                {"configuration": c.configuration.label, "reason": c.refused} for c in self.refused
            ],
        }


def _row_json(row: Row) -> dict[str, Any]:
    times = {"dense": row.dense, "planned": row.planned}
    return {"site": row.layer.key} | {
        f"{name}_ms": None if time is None else time_json(time) for name, time in times.items()
    }


def time_json(time: TimeEstimate) -> dict[str, Any]:
    """All its numbers, in milliseconds."""
    return {
        "bound": time.bound_ms,
        "low": time.low_ms,
        "expected": time.expected_ms,
        "high": time.high_ms,
        "source": time.source.value,
    }
