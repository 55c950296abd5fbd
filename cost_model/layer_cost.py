"""What one attention layer costs in one call on one GPU, stage by stage.

Where every stage of a configuration is calibrated, a stage takes overhead + bound / efficiency,
with factors for waves and imbalance. Otherwise dense attention has a range of its bound, and a
sparse one a range of the speed-up over dense (`efficiencies`): public kernels differ so much that
no share of a bound could be promised for one of its stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sparsify.cost_model.calibration import Calibration, FamilyEfficiency
from sparsify.cost_model.configuration import DENSE, Configuration
from sparsify.cost_model.counts import StageCounts, counted, exact, values_of
from sparsify.cost_model.efficiencies import LAUNCH_US, share_of_bound, share_of_speedup
from sparsify.cost_model.hardware import Gpu
from sparsify.cost_model.roofline import (
    Binding,
    StageBound,
    slowdown,
    stage_bound,
)
from sparsify.cost_model.stages import (
    cache_write_bytes,
    index_cache_bytes,
    kv_cache_bytes,
    runs_sparse,
    stage_formulas,
)
from sparsify.cost_model.times import Source, TimeEstimate
from sparsify.cost_model.workload import BF16, AttentionShape, ElementBytes, Phase, Workload

__all__ = [
    "WORKSPACE_BYTES",
    "LayerCost",
    "StageCost",
    "layer_cost",
    "slowdown",
    "stage_efficiency",
]

# Kernels work in slices, so that their workspace stays below this.
WORKSPACE_BYTES = 2 << 30
# Families of stages that prepare an index.
PREPARING = ("gemm", "copy")


@dataclass(frozen=True)
class StageCost:
    """One stage: FLOP, bytes, time, and what limits it.

    `fixed_ms` is the part of the expected time that does not grow with the work.
    """

    name: str
    family: str
    flops: int
    dram_bytes: int
    l2_bytes: int
    workspace_bytes: int
    time: TimeEstimate
    binding: Binding
    fixed_ms: float


@dataclass(frozen=True)
class LayerCost:
    """One attention layer; caches are those of the layer at the end of the call, and
    `cache_write_bytes` what the call adds to them."""

    configuration: Configuration
    stages: tuple[StageCost, ...]
    kv_cache_bytes: int
    index_cache_bytes: int
    cache_write_bytes: int = 0

    @property
    def flops(self) -> int:
        """FLOP of all stages."""
        return sum(stage.flops for stage in self.stages)

    @property
    def dram_bytes(self) -> int:
        """Bytes that all stages move from and to device memory."""
        return sum(stage.dram_bytes for stage in self.stages)

    @property
    def workspace_bytes(self) -> int:
        """Memory that the call needs beside its inputs and outputs."""
        return min(max(stage.workspace_bytes for stage in self.stages), WORKSPACE_BYTES)

    @property
    def time(self) -> TimeEstimate:
        """Time of all stages, one after the other."""
        return TimeEstimate.total(stage.time for stage in self.stages)

    @property
    def fixed_ms(self) -> float:
        """The part of the expected time that a call of any length takes."""
        return sum(stage.fixed_ms for stage in self.stages)


@dataclass(frozen=True)
class _Call:
    """Everything that a stage's time depends on, beside the stage."""

    shape: AttentionShape
    workload: Workload
    configuration: Configuration
    gpu: Gpu
    element_bytes: ElementBytes
    calibration: Calibration | None
    efficiency_scale: float

    def efficiency(self, stage: StageCounts) -> FamilyEfficiency | None:
        if self.calibration is None:
            return None
        width = self.element_bytes.index if stage.on_index else self.element_bytes.key
        return stage_efficiency(
            self.calibration, stage.family, self.shape, self.configuration, width
        )


def stage_efficiency(
    calibration: Calibration,
    family: str,
    shape: AttentionShape,
    configuration: Configuration,
    n_bytes: float,
) -> FamilyEfficiency | None:
    """What was calibrated for a stage of `family` with elements of `n_bytes`, if anything was."""
    if n_bytes > 2:
        return None  # calibrations are of two-byte and one-byte elements
    return calibration.efficiency(
        family,
        group_size=shape.group_size,
        block_size=configuration.block_size,
        dtype="fp8" if n_bytes <= 1 else "bf16",
    )


def layer_cost(
    shape: AttentionShape,
    workload: Workload,
    configuration: Configuration,
    gpu: Gpu,
    *,
    element_bytes: ElementBytes = BF16,
    hidden_size: int | None = None,
    calibration: Calibration | None = None,
    efficiency_scale: float = 1.0,
) -> LayerCost:
    """Cost of `configuration` for one layer.

    Args:
        hidden_size: adds the projections of a learned indexer.
        calibration: measured efficiencies of this GPU.
        efficiency_scale: makes the sparse kernels so many times as efficient, never beyond their
            bound; for questions of sensitivity. Dense attention is left alone.
    """
    values = values_of(shape, workload, configuration, element_bytes, hidden_size)
    counts = [counted(f, values) for f in stage_formulas(configuration, workload)]
    counts = [stage for stage in counts if stage.flops or stage.dram_bytes]
    scale = efficiency_scale if runs_sparse(configuration, workload) else 1.0
    call = _Call(shape, workload, configuration, gpu, element_bytes, calibration, scale)
    bounds = [stage_bound(stage, gpu, element_bytes) for stage in counts]
    times = _times(call, counts, bounds)
    return LayerCost(
        configuration,
        tuple(
            _stage_cost(stage, bound, time, call.efficiency(stage))
            for stage, bound, time in zip(counts, bounds, times, strict=True)
        ),
        math.ceil(exact(kv_cache_bytes(), values)),
        math.ceil(exact(index_cache_bytes(configuration), values)),
        math.ceil(exact(cache_write_bytes(configuration), values)),
    )


def _stage_cost(
    stage: StageCounts, bound: StageBound, time: TimeEstimate, entry: FamilyEfficiency | None
) -> StageCost:
    launch_ms = _launch_ms([stage])
    known = entry if time.source is Source.CALIBRATED else None
    return StageCost(
        stage.name,
        stage.family,
        stage.flops,
        stage.dram_bytes,
        stage.l2_bytes,
        stage.workspace_bytes,
        time,
        "launch" if launch_ms > bound.ms else bound.binding,
        launch_ms if known is None else known.overhead_us / 1e3,
    )


def _times(call: _Call, counts: list[StageCounts], bounds: list[StageBound]) -> list[TimeEstimate]:
    known = [call.efficiency(stage) for stage in counts]
    if all(known):
        pairs = zip(counts, bounds, known, strict=True)
        times = [_calibrated(call, stage, bound, entry) for stage, bound, entry in pairs if entry]
        return _no_gain_from_nothing(call, times)
    if not runs_sparse(call.configuration, call.workload):
        return [
            _calibrated(call, stage, bound, entry) if entry else _dense_range(stage, bound)
            for stage, bound, entry in zip(counts, bounds, known, strict=True)
        ]
    return _sparse_range(call, counts, bounds)


def _no_gain_from_nothing(call: _Call, times: list[TimeEstimate]) -> list[TimeEstimate]:
    """Where every block is kept, the call is dense: it takes no less than dense attention, however
    little the kernels that it would start otherwise cost in all."""
    configuration, workload = call.configuration, call.workload
    if not runs_sparse(configuration, workload):
        return times
    if workload.context_tokens > configuration.budget_tokens:
        return times
    dense_ms = _dense_of(call).cost.time.expected_ms
    factor = max(dense_ms / sum(time.expected_ms for time in times), 1.0)
    return [
        replace(
            time,
            low_ms=time.low_ms * factor,
            expected_ms=time.expected_ms * factor,
            high_ms=time.high_ms * factor,
        )
        for time in times
    ]


def _calibrated(
    call: _Call, stage: StageCounts, bound: StageBound, entry: FamilyEfficiency
) -> TimeEstimate:
    fixed_ms = entry.overhead_us / 1e3
    efficiency = min(entry.efficiency * call.efficiency_scale, max(1.0, entry.efficiency))
    work_ms = bound.kernel_ms * slowdown(stage, call.gpu) / efficiency
    expected = fixed_ms + work_ms
    least = min(bound.ms, expected)
    return TimeEstimate(
        least,
        max(expected * (1 - entry.error), least),
        expected,
        expected * (1 + entry.error),
        Source.CALIBRATED,
    )


def _dense_range(stage: StageCounts, bound: StageBound) -> TimeEstimate:
    share = share_of_bound(stage.family)
    launch_ms = _launch_ms([stage])
    return TimeEstimate(
        bound.ms,
        bound.ms / share.high + launch_ms,
        bound.ms / share.middle + launch_ms,
        bound.ms / share.low + launch_ms,
        Source.BOUND,
    )


def _launch_ms(stages: Iterable[StageCounts]) -> float:
    return sum(stage.launches for stage in stages) * LAUNCH_US / 1e3


def _sparse_range(
    call: _Call, counts: list[StageCounts], bounds: list[StageBound]
) -> list[TimeEstimate]:
    """The range of the speed-up, spread over the stages as their bounds are.

    Products and copies that only prepare the index are no part of the ratio that the range is a
    share of; they have the ranges of such kernels, but are no nearer to their bounds than dense
    attention is to its own: the ratio of bounds is not promised to be beaten.
    """
    plain = [stage.family in PREPARING for stage in counts]
    main = [stage for stage, is_plain in zip(counts, plain, strict=True) if not is_plain]
    main_ms = sum(b.ms for b, is_plain in zip(bounds, plain, strict=True) if not is_plain)
    dense = _dense_of(call)
    work = _sparse_work(call, dense, main, main_ms)

    def time(stage: StageCounts, bound: StageBound, is_plain: bool) -> TimeEstimate:
        launch_ms = _launch_ms([stage])
        if is_plain:
            return _slowed(_dense_range(stage, bound), bound.ms * dense.slowness + launch_ms)
        low, expected, high = (bound.ms / main_ms * ms + launch_ms for ms in work)
        return TimeEstimate(bound.ms, low, expected, high, Source.BOUND)

    return [time(*each) for each in zip(counts, bounds, plain, strict=True)]


def _slowed(time: TimeEstimate, least_ms: float) -> TimeEstimate:
    """That time, but not shorter than `least_ms`."""
    return TimeEstimate(
        time.bound_ms,
        max(time.low_ms, least_ms),
        max(time.expected_ms, least_ms),
        max(time.high_ms, least_ms),
        time.source,
    )


@dataclass(frozen=True, slots=True)
class _Dense:
    """Dense attention in the same call: what sparse attention is faster than."""

    cost: LayerCost
    work_ms: float
    fixed_ms: float

    @property
    def slowness(self) -> float:
        """How many times its bound it takes, fixed time left out."""
        return self.work_ms / self.cost.time.bound_ms


def _dense_of(call: _Call) -> _Dense:
    """Its expected time in two parts; of the fixed one, what goes beyond plain launches."""
    cost = layer_cost(
        call.shape,
        call.workload,
        DENSE,
        call.gpu,
        element_bytes=call.element_bytes,
        calibration=call.calibration,
    )
    work_ms = max(cost.time.expected_ms - cost.fixed_ms, cost.time.bound_ms)
    launched_ms = len(cost.stages) * LAUNCH_US / 1e3
    return _Dense(cost, work_ms, max(cost.fixed_ms - launched_ms, 0.0))


def _sparse_work(
    call: _Call, dense: _Dense, stages: list[StageCounts], bound_ms: float
) -> tuple[float, float, float]:
    """Shortest, expected and longest time of the sparse stages, launches left out; never shorter
    than the ratio of the bounds allows.

    The fixed time of a dense call does not shrink with the work: sparse ones have it, too.
    """
    share = share_of_speedup(call.configuration, call.workload.phase)
    if call.workload.phase is Phase.DECODE:
        ratio = dense.cost.dram_bytes / sum(stage.dram_bytes for stage in stages)
    else:
        ratio = dense.cost.flops / sum(stage.flops for stage in stages)
    most = dense.cost.time.bound_ms / bound_ms
    high, middle, low = (
        dense.fixed_ms + dense.work_ms / min(part * ratio * call.efficiency_scale, most)
        for part in (share.low, share.middle, share.high)
    )
    return low, middle, high
