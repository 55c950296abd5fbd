"""One model on one GPU: its costs with and without sparse attention, and the rows of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sparsify.cost_model.calibration import Calibration
from sparsify.cost_model.configuration import DENSE, Configuration
from sparsify.cost_model.hardware import Gpu
from sparsify.cost_model.limits import speedup_limit
from sparsify.cost_model.model_cost import ModelCost, model_cost
from sparsify.cost_model.model_shape import LayerShape, ModelShape
from sparsify.cost_model.situation import Situation
from sparsify.cost_model.workload import ElementBytes, Phase, Workload
from sparsify.estimate_report import AttentionCost, EndToEnd, Row, Speedup, StageSum
from sparsify.estimate_schemes import Scheme

__all__ = ["Study"]


@dataclass(frozen=True)
class Study:
    """One model on one GPU in one phase."""

    model: ModelShape
    gpu: Gpu
    phase: Phase
    batch: int
    degree: int
    element_bytes: ElementBytes
    calibration: Calibration | None

    @cached_property
    def _costs(self) -> dict[Any, ModelCost]:
        return {}

    def call(self, context: int) -> Workload:
        """The call at that context."""
        return Workload.of(self.phase, context, self.batch)

    def cost(self, context: int, scheme: Scheme | None, scale: float = 1.0) -> ModelCost:
        """The model at that context; dense without a scheme."""
        key = (context, id(scheme) if scheme else None, scale)
        if key not in self._costs:
            self._costs[key] = model_cost(
                self.model,
                self.call(context),
                DENSE if scheme is None else scheme.at(self.call(context)),
                self.gpu,
                element_bytes=self.element_bytes,
                calibration=self.calibration,
                tensor_parallel=self.degree,
                efficiency_scale=scale,
            )
        return self._costs[key]

    def row(self, context: int, scheme: Scheme, crossover: int | None) -> Row:
        """Dense against the scheme."""
        dense, sparse = self.cost(context, None), self.cost(context, scheme)
        gain = _speedup(dense, sparse, self._limit(scheme))
        return Row(
            context,
            self.phase.value,
            self.batch,
            scheme.main,
            scheme.label,
            scheme.needs_training,
            _attention(dense),
            _attention(sparse),
            gain,
            EndToEnd.of(dense.attention, dense.linear + dense.communication, gain),
            dense.memory,
            sparse.memory,
            self.gpu.memory_bytes,
            self._counts(scheme.at(self.call(context))),
            crossover,
        )

    def crossover(self, scheme: Scheme) -> int | None:
        """The context from which every sparse layer is faster than dense; None if one never is."""
        layers = dict.fromkeys(
            (layer.attention, scheme.by_name[layer.name])
            for layer in scheme.sparse_layers(self.model)
        )
        situation = Situation(
            self.gpu,
            self.call(1),  # the context is what is looked for
            self.calibration,
            self.element_bytes,
            self.model.hidden_size,
        )
        found = [
            situation.threshold_tokens(shape.sharded(self.degree), configuration)
            for shape, configuration in layers
            if shape is not None
        ]
        known = [tokens for tokens in found if tokens is not None]
        if not known or len(known) < len(found):
            return None
        least = min(scheme.min_context.values(), default=0)
        return max(*known, least) if least else max(known)

    def _limit(self, scheme: Scheme) -> float:
        limits = [
            self._layer_limit(layer, scheme.by_name[layer.name])
            for layer in scheme.sparse_layers(self.model)
        ]
        return max(limits, default=math.inf)

    def _layer_limit(self, layer: LayerShape, configuration: Configuration) -> float:
        assert layer.attention is not None
        shape = layer.attention.sharded(self.degree)
        return speedup_limit(configuration, shape, self.phase, self.gpu, self.element_bytes)

    def _counts(self, sparse: Mapping[str, Configuration]) -> dict[str, int]:
        """Layers by what becomes of them."""
        full = self.model.count("attention")
        return {
            "sparse": len(sparse),
            "dense": full - len(sparse),
            "sliding": self.model.count("sliding"),
            "recurrent": self.model.count("recurrent"),
            "feed_forward": self.model.count("feed_forward"),
        }


def _speedup(dense: ModelCost, sparse: ModelCost, limit: float) -> Speedup:
    """Ratios of attention, never above the bound or what the method can gain at all.

    Only what is sparse has a range here: layers that stay dense take equally long on both sides.
    """
    base, changed = dense.attention, sparse.sparse_attention
    kept_ms = sparse.attention.expected_ms - changed.expected_ms
    bound = base.bound_ms / sparse.attention.bound_ms
    if bound < 1:  # what is lost counts for less beside the fixed time of both
        fixed_ms = dense.attention_fixed_ms
        bound = (fixed_ms + base.bound_ms) / (fixed_ms + sparse.attention.bound_ms)
    most = min(bound, limit)

    def gain(changed_ms: float) -> float:
        return min(base.expected_ms / (kept_ms + changed_ms), most)

    flops = dense.attention_flops / sparse.attention_flops
    times = (changed.expected_ms, changed.high_ms, changed.low_ms)
    return Speedup(flops, bound, *(gain(ms) for ms in times))


def _attention(cost: ModelCost) -> AttentionCost:
    stages: dict[tuple[str, str], StageSum] = {}
    for layer, count in cost.distinct_layers():
        for stage in layer.attention.stages if layer.attention else ():
            key = (stage.name, stage.family)
            one = StageSum(
                stage.name,
                stage.family,
                stage.flops * count,
                stage.dram_bytes * count,
                stage.time * count,
                stage.binding,
            )
            stages[key] = _sum(stages[key], one) if key in stages else one
    return AttentionCost(
        cost.attention_flops, cost.attention_bytes, cost.attention, tuple(stages.values())
    )


def _sum(one: StageSum, other: StageSum) -> StageSum:
    """Both; what limits the longer of them counts."""
    longer = max(one, other, key=lambda stage: stage.time.expected_ms)
    return replace(
        one,
        flops=one.flops + other.flops,
        dram_bytes=one.dram_bytes + other.dram_bytes,
        time=one.time + other.time,
        binding=longer.binding,
    )
