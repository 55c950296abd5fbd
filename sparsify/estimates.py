"""Dense against sparse attention of a whole model, without loading it and without torch.

`estimate` reads a config, costs every context with and without sparse attention, and says in one
sentence what to expect of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sparsify.cost_model.calibration import Calibration, load_calibration, packaged_calibration
from sparsify.cost_model.configuration import DENSE, Configuration
from sparsify.cost_model.hardware import Gpu, load_gpu
from sparsify.cost_model.layer_cost import crossover_tokens
from sparsify.cost_model.limits import speedup_limit
from sparsify.cost_model.model_cost import ModelCost, model_cost
from sparsify.cost_model.model_shape import LayerShape, ModelShape
from sparsify.cost_model.workload import ElementBytes, Phase, Workload
from sparsify.errors import UsageError
from sparsify.estimate_report import (
    AttentionCost,
    EndToEnd,
    Estimate,
    Row,
    SensitivityRow,
    Speedup,
    StageSum,
)
from sparsify.estimate_schemes import Scheme, schemes_of
from sparsify.model_files import read_model
from sparsify.plans import Plan
from sparsify.policy import Policy
from sparsify.verdicts import assumptions_of, verdict_on, warnings_of
from sparsify.versions import package_versions

__all__ = ["CONTEXTS", "MOST_BATCH", "MOST_GPUS", "MOST_TOKENS", "SCALES", "estimate"]

CONTEXTS = (32_768, 131_072, 1_048_576)
MOST_TOKENS, MOST_BATCH, MOST_GPUS = 1 << 30, 1 << 20, 1 << 10
# How far off the efficiency of sparse kernels is tried.
SCALES = (0.5, 1.0, 2.0)
# What every estimate rests on; the link only counts between GPUs.
USED_FIGURES = ("bf16_dense_tflops", "memory_bandwidth_gbs", "memory_gb")
LINK = "nvlink_gbs_total_bidirectional"
L2 = "l2_bandwidth_gbs"

Source = ModelShape | str | Path | Mapping[str, Any]


def estimate(
    model: Source,
    policy: Policy | Plan | Configuration | Sequence[Configuration] | None = None,
    *,
    gpu: str | Gpu = "h200",
    context: int | Sequence[int] = CONTEXTS,
    batch: int = 1,
    phase: str = "prefill",
    tensor_parallel: int = 1,
    index_bytes: float | None = None,
    element_bytes: ElementBytes | None = None,
    calibration: Calibration | str | Path | None = None,
) -> Estimate:
    """Estimate what a policy makes of a model's speed and memory on a GPU.

    Args:
        model: a shape, or what `model_files.read_model` reads.
        policy: also a plan or configurations; by default the published configurations.
        gpu: a name (`sparsify gpus`), or a file with the figures of one.
        context: tokens of a sequence: one or several numbers.
        batch: sequences at a time.
        phase: "prefill", "decode" (one step at the end of the context) or "training".
        tensor_parallel: GPUs that share every layer; the numbers are those of each.
        index_bytes: bytes of an element of the learned index keys, instead of `element_bytes`'.
        element_bytes: bytes of elements of caches; by default bfloat16's two.
        calibration: measured efficiencies, or the file that holds them; by default those that
            come with this package for that GPU, if any.

    Raises:
        UsageError: something is missing or makes no sense.
        UnknownGpuError: no figures are known for the GPU.
        NothingToDoError: the model has no full attention.
    """
    if not isinstance(model, ModelShape | str | Path | Mapping):
        raise UsageError(
            f"model is a {type(model).__name__}; it must be a path, an id or the fields of a "
            "config.",
            "sparsify.estimate takes modules, too.",
        )
    shape = model if isinstance(model, ModelShape) else read_model(model)
    device = gpu if isinstance(gpu, Gpu) else load_gpu(str(gpu))
    contexts = _contexts(context)
    sizes = element_bytes or ElementBytes()
    if index_bytes is not None:
        sizes = replace(sizes, index=_index_bytes(index_bytes))
    _check_count("The batch", batch, MOST_BATCH)
    _check_count("tensor_parallel", tensor_parallel, MOST_GPUS)
    study = _Study(
        shape,
        device,
        _phase(phase),
        batch,
        tensor_parallel,
        sizes,
        _calibration(calibration, device),
    )
    return _estimate(study, schemes_of(shape, policy), contexts)


def _contexts(context: int | Sequence[int]) -> tuple[int, ...]:
    given = (context,) if isinstance(context, int) else tuple(context)
    if not given:
        raise UsageError("No context is given; expected one or several numbers of tokens.")
    for size in given:
        _check_count("The context", size, MOST_TOKENS)
    return tuple(dict.fromkeys(given))


def _check_count(what: str, value: Any, most: int) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if not is_count or not 1 <= value <= most:
        raise UsageError(f"{what} is {value!r:.40}; expected a whole number from 1 to {most:,}.")


def _index_bytes(value: float) -> float:
    if not 0 < value <= 8:
        raise UsageError(f"index_bytes is {value!r:.40}; expected a number above 0 and up to 8.")
    return value


def _phase(name: str) -> Phase:
    try:
        return Phase(name)
    except ValueError:
        known = ", ".join(phase.value for phase in Phase)
        raise UsageError(f"The phase is {name!r:.40}; use one of {known}.") from None


def _calibration(given: Calibration | str | Path | None, gpu: Gpu) -> Calibration | None:
    if isinstance(given, Calibration):
        return given
    return packaged_calibration(gpu) if given is None else load_calibration(given, gpu)


@dataclass(frozen=True)
class _Study:
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
            _attention(dense),
            _attention(sparse),
            gain,
            EndToEnd.of(dense.attention, dense.linear + dense.communication, gain),
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
        found = [
            crossover_tokens(
                shape.sharded(self.degree),
                configuration,
                self.gpu,
                phase=self.phase,
                batch=self.batch,
                element_bytes=self.element_bytes,
                hidden_size=self.model.hidden_size,
                calibration=self.calibration,
            )
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


def _estimate(study: _Study, schemes: Sequence[Scheme], contexts: Sequence[int]) -> Estimate:
    crossovers = [study.crossover(scheme) for scheme in schemes]
    rows = tuple(
        study.row(context, scheme, crossover)
        for context in contexts
        for scheme, crossover in zip(schemes, crossovers, strict=True)
    )
    longest = max(contexts)
    at_longest = [row for row in rows if row.context_tokens == longest]
    best = max(at_longest, key=lambda row: row.end_to_end.speedup)
    sensitivity = tuple(_sensitivity(study, schemes, contexts))
    said = study.cost(longest, None).warnings
    warnings = warnings_of(study.model, rows, sensitivity, study.gpu, _unverified(study))
    return Estimate(
        study.model.name,
        study.gpu.name,
        rows,
        best.crossover_tokens,
        verdict_on(best, study.gpu, len(schemes)),
        tuple(dict.fromkeys(assumptions_of(study.model, rows, study.degree))),
        (*warnings, *said),
        sensitivity,
        package_versions(),
    )


def _unverified(study: _Study) -> list[str]:
    used = (*USED_FIGURES, L2, *((LINK,) if study.degree > 1 else ()))
    return [name for name in used if name in study.gpu.unverified]


def _sensitivity(
    study: _Study, schemes: Sequence[Scheme], contexts: Iterable[int]
) -> Iterable[SensitivityRow]:
    for context in contexts:
        dense_ms = study.cost(context, None).total.expected_ms
        for scale in SCALES:
            times = {"dense": dense_ms}
            for scheme in schemes:
                ms = study.cost(context, scheme, scale).total.expected_ms
                times[scheme.main.label] = min(ms, times.get(scheme.main.label, ms))
            winner = min(times, key=times.__getitem__)
            yield SensitivityRow(context, scale, winner, dense_ms / times[winner])


def _speedup(dense: ModelCost, sparse: ModelCost, limit: float) -> Speedup:
    """Ratios of attention, never above the bound or what the method can gain at all.

    Only what is sparse has a range here: layers that stay dense take equally long on both sides.
    """
    base, changed = dense.attention, sparse.sparse_attention
    kept_ms = sparse.attention.expected_ms - changed.expected_ms
    bound = base.bound_ms / sparse.attention.bound_ms
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
