"""What an estimate says, as data and as JSON (schema 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.model_cost import MemoryNeed
from sparsify.cost_model.times import TimeEstimate

__all__ = [
    "SCHEMA",
    "AttentionCost",
    "EndToEnd",
    "Estimate",
    "Row",
    "SensitivityRow",
    "Speedup",
    "StageSum",
    "best_row",
]

SCHEMA = 1


def _times(time: TimeEstimate) -> dict[str, Any]:
    return {
        "ms": time.ms,
        "low_ms": time.low_ms,
        "high_ms": time.high_ms,
        "source": time.source.value,
    }


@dataclass(frozen=True, slots=True)
class StageSum:
    """One stage, summed over all layers that run it; `binding` is what limits it."""

    name: str
    family: str
    flops: int
    dram_bytes: float
    time: TimeEstimate
    binding: str

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return {
            "name": self.name,
            "family": self.family,
            "flops": self.flops,
            "bytes": self.dram_bytes,
            **_times(self.time),
            "binding": self.binding,
        }


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Attention of the whole model in one call, on one GPU; layers kept dense included."""

    flops: int
    dram_bytes: float
    time: TimeEstimate
    stages: tuple[StageSum, ...]

    def to_json(self, *, stages: bool) -> dict[str, Any]:
        """All fields; `stages` when they are wanted."""
        found = {"flops": self.flops, "bytes": self.dram_bytes, **_times(self.time)}
        if stages:
            found["stages"] = [stage.to_json() for stage in self.stages]
        return found


@dataclass(frozen=True, slots=True)
class Speedup:
    """Dense over sparse attention: by FLOPs, by bounds, and as expected with its range.

    `bound` is the ratio of the bounds; where that is below 1, the fixed time of a dense call is
    added to both of them.
    Neither `expected` nor `high` is above `bound` or above what the method can gain at all.
    """

    flops: float
    bound: float
    expected: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """All fields."""
        return {
            "flops": self.flops,
            "bound": self.bound,
            "expected": self.expected,
            "low": self.low,
            "high": self.high,
        }


@dataclass(frozen=True, slots=True)
class EndToEnd:
    """Amdahl's law: `attention_share` of the dense model gains, the rest stays.

    `low` and `high` also hold what is not known of that share; `bound` is what the bound of
    attention's speed-up makes of the whole where the share is largest.
    """

    attention_share: float
    speedup: float
    low: float
    high: float
    bound: float

    @classmethod
    def of(cls, attention: TimeEstimate, rest: TimeEstimate, gain: Speedup) -> EndToEnd:
        """The gain of a whole model whose dense call takes `attention` and `rest`."""
        share = _share(attention.expected_ms, rest.expected_ms)
        least = _share(attention.low_ms, rest.high_ms)
        most = _share(attention.high_ms, rest.low_ms)

        def worst(speedup: float) -> float:
            return _whole(least if speedup > 1 else most, speedup)

        def best(speedup: float) -> float:
            return _whole(most if speedup > 1 else least, speedup)

        return cls(
            share,
            _whole(share, gain.expected),
            worst(gain.low),
            best(gain.high),
            best(gain.bound),
        )

    def to_json(self) -> dict[str, float]:
        """What schema 1 has of it."""
        return {
            "attention_share": self.attention_share,
            "speedup": self.speedup,
            "low": self.low,
            "high": self.high,
        }


def _share(part_ms: float, rest_ms: float) -> float:
    return part_ms / (part_ms + rest_ms)


def _whole(share: float, speedup: float) -> float:
    return 1 / ((1 - share) + share / speedup)


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration at one context; `configuration` is that of most sparse layers, `label`
    names all of them.

    `layers` counts layers by what becomes of them: sparse, dense, sliding, recurrent,
    feed_forward. `crossover_tokens` is the context from which sparse attention is expected to be
    faster, None if it never is.
    """

    context_tokens: int
    phase: str
    batch: int
    configuration: Configuration
    label: str
    needs_training: bool
    dense: AttentionCost
    sparse: AttentionCost
    speedup: Speedup
    end_to_end: EndToEnd
    dense_memory: MemoryNeed
    memory: MemoryNeed
    gpu_memory_bytes: float
    layers: dict[str, int]
    crossover_tokens: int | None

    @property
    def fits(self) -> bool:
        """Whether the GPU's memory holds what is counted."""
        return self.memory.total_bytes <= self.gpu_memory_bytes

    def to_json(self) -> dict[str, Any]:
        """The row of schema 1."""
        chosen = self.configuration
        return {
            "context": self.context_tokens,
            "phase": self.phase,
            "batch": self.batch,
            "method": chosen.method,
            "block_size": chosen.block_size or None,
            "topk": chosen.topk or None,
            "indexer": chosen.indexer,
            "label": self.label,
            "needs_training": self.needs_training,
            "dense": self.dense.to_json(stages=False),
            "sparse": self.sparse.to_json(stages=True),
            "speedup": self.speedup.to_json(),
            "end_to_end": self.end_to_end.to_json(),
            "memory": self._memory(self.memory),
            "dense_memory": self._memory(self.dense_memory),
            "layers": dict(self.layers),
            "crossover_tokens": self.crossover_tokens,
        }

    def _memory(self, need: MemoryNeed) -> dict[str, Any]:
        return {
            "weights_bytes": need.weights_bytes,
            "kv_cache_bytes": need.kv_cache_bytes,
            "index_cache_bytes": need.index_cache_bytes,
            "workspace_bytes": need.workspace_bytes,
            "total_bytes": need.total_bytes,
            "gpu_bytes": self.gpu_memory_bytes,
            "fits": need.total_bytes <= self.gpu_memory_bytes,
        }


def best_row(rows: Sequence[Row]) -> Row:
    """The fastest configuration at the longest context, of which the verdict speaks."""
    longest = max(row.context_tokens for row in rows)
    at_longest = [row for row in rows if row.context_tokens == longest]
    return max(at_longest, key=lambda row: row.end_to_end.speedup)


@dataclass(frozen=True, slots=True)
class SensitivityRow:
    """Who is fastest at a context if the sparse kernels are `scale` times as efficient."""

    context_tokens: int
    scale: float
    winner: str
    speedup: float

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return {
            "context": self.context_tokens,
            "scale": self.scale,
            "winner": self.winner,
            "speedup": self.speedup,
        }


@dataclass(frozen=True)
class Estimate:
    """The rows of an estimate and what is to be said of them.

    `crossover_tokens` is that of the configuration which `verdict` speaks of.
    """

    model: str
    gpu: str
    rows: tuple[Row, ...]
    crossover_tokens: int | None
    verdict: str
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    sensitivity: tuple[SensitivityRow, ...]
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """The document of `estimate --json` (schema 1). Times in ms, sizes in bytes, per GPU."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "gpu": self.gpu,
            "rows": [row.to_json() for row in self.rows],
            "crossover_tokens": self.crossover_tokens,
            "verdict": self.verdict,
            "assumptions": list(self.assumptions),
            "warnings": list(self.warnings),
            "sensitivity": [row.to_json() for row in self.sensitivity],
            "versions": dict(self.versions),
        }
