"""Why a layer costs what it does: formulas, the numbers put in, what binds, and the sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from sparsify.cost_model.configuration import DENSE, Configuration
from sparsify.cost_model.counts import StageFormula, exact, values_of
from sparsify.cost_model.efficiencies import SCALES, share_of_bound, share_of_speedup
from sparsify.cost_model.hardware import UNITS, Gpu
from sparsify.cost_model.layer_cost import LayerCost, StageCost, stage_efficiency
from sparsify.cost_model.pairs import ALIGNED, EXACT, Pairs
from sparsify.cost_model.situation import Situation
from sparsify.cost_model.stages import runs_sparse, stage_formulas
from sparsify.cost_model.times import Source, TimeEstimate
from sparsify.cost_model.workload import AttentionShape, Phase, Workload

__all__ = ["Explanation", "LayerCall", "PairsLine", "Sensitivity", "StageLine", "explain_layer"]

# Pairs stand for themselves in the formulas of stages: written out exactly they fill pages.
NAMED = Pairs(
    sympy.Symbol("dense_pairs", positive=True),
    sympy.Symbol("attended_pairs", positive=True),
    sympy.Symbol("past_block_pairs", nonnegative=True),
)


@dataclass(frozen=True)
class LayerCall:
    """One attention layer in one call on one GPU."""

    shape: AttentionShape
    configuration: Configuration
    situation: Situation

    @property
    def workload(self) -> Workload:
        """The call."""
        return self.situation.workload

    @property
    def gpu(self) -> Gpu:
        """Where it runs."""
        return self.situation.gpu


@dataclass(frozen=True)
class PairsLine:
    """A count of pairs of one query head and sequence; `formula` is empty where none is short."""

    name: str
    means: str
    formula: str
    value: int


@dataclass(frozen=True)
class StageLine:
    """One stage: its formulas, its numbers, its part of the expected time, and what it rests on."""

    name: str
    flops_formula: str
    dram_formula: str
    cost: StageCost
    share: float
    basis: str


@dataclass(frozen=True)
class Sensitivity:
    """The layer with sparse kernels so many times as efficient as expected."""

    scale: float
    time: TimeEstimate
    speedup: float
    crossover_tokens: int | None


@dataclass(frozen=True)
class Explanation:
    """Everything behind the time of one layer."""

    call: LayerCall
    symbols: dict[str, float]
    pairs: tuple[PairsLine, ...]
    stages: tuple[StageLine, ...]
    figures: tuple[tuple[str, float, str, str], ...]
    sensitivity: tuple[Sensitivity, ...]

    def to_json(self) -> dict[str, Any]:
        """Formulas as text that sympy reads, numbers with their units in the names."""
        return {
            "configuration": self.call.configuration.label,
            "context_tokens": self.call.workload.context_tokens,
            "symbols": self.symbols,
            "pairs": [{"name": p.name, "formula": p.formula, "value": p.value} for p in self.pairs],
            "stages": [_stage_json(stage) for stage in self.stages],
            "gpu_figures": [
                {"name": name, "value": value, "unit": unit, "source": source}
                for name, value, unit, source in self.figures
            ],
            "sensitivity": [_sensitivity_json(line) for line in self.sensitivity],
        }


def explain_layer(call: LayerCall) -> Explanation:
    """The explanation of one layer with its configuration."""
    situation = call.situation
    cost = situation.cost(call.shape, call.configuration)
    values = values_of(
        call.shape,
        call.workload,
        call.configuration,
        situation.element_bytes,
        situation.hidden_size,
    )
    formulas = stage_formulas(call.configuration, call.workload, NAMED)
    by_name = {formula.name: formula for formula in formulas}
    total = cost.time.expected_ms
    stages = tuple(_stage(call, stage, by_name[stage.name], total) for stage in cost.stages)
    used = {s for f in formulas for e in (f.flops, f.dram_bytes) for s in e.free_symbols}
    pairs = tuple(line for line in _pairs(call, values) if _named(line.name) in used)
    names = {str(s) for s in used}
    names |= {str(s) for line in pairs for s in sympy.sympify(line.formula or 0).free_symbols}
    shown = {str(s): _plain(values[s]) for s in sorted(values, key=str) if str(s) in names}
    return Explanation(call, shown, pairs, stages, _figures(call, cost), _sensitivity(call))


def _named(name: str) -> sympy.Symbol:
    return getattr(NAMED, {"past_block_pairs": "past_blocks"}.get(name, name.split("_")[0]))


def _stage(call: LayerCall, cost: StageCost, formula: StageFormula, total: float) -> StageLine:
    share = cost.time.expected_ms / total if total else 0.0
    flops, dram = str(formula.flops), str(formula.dram_bytes)
    return StageLine(cost.name, flops, dram, cost, share, _basis(call, cost, formula))


def _basis(call: LayerCall, cost: StageCost, formula: StageFormula) -> str:
    """Where the efficiency of a stage comes from."""
    calibration, elements = call.situation.calibration, call.situation.element_bytes
    if cost.time.source is Source.CALIBRATED and calibration is not None:
        width = elements.index if formula.on_index else elements.key
        entry = stage_efficiency(calibration, cost.family, call.shape, call.configuration, width)
        if entry is not None:
            kernel = f"{entry.kernel}, " if entry.kernel else ""
            return (
                f"calibrated: {kernel}{entry.efficiency:.2f} of the bound and "
                f"{entry.overhead_us:.0f} us, {entry.points} points, mean error {entry.error:.0%}"
            )
    if not runs_sparse(call.configuration, call.workload):
        share = share_of_bound(cost.family)
        return f"range {share.low:g}-{share.high:g} of the bound: {share.source}"
    share = share_of_speedup(call.configuration, call.workload.phase)
    what = "bytes" if call.workload.phase is Phase.DECODE else "FLOPs"
    return f"range {share.low:g}-{share.high:g} of the ratio of {what}: {share.source}"


def _pairs(call: LayerCall, values: dict[Any, Any]) -> list[PairsLine]:
    """Exact numbers; a formula goes with them where it gives the same."""
    shown = EXACT if call.workload.prefix_tokens else ALIGNED

    def line(name: str, means: str, formula: sympy.Expr, of: sympy.Expr) -> PairsLine:
        number = exact(of, values)
        readable = formula.is_rational_function() or name == "dense_pairs"
        text = str(formula) if readable and exact(formula, values) == number else ""
        return PairsLine(name, means, text, int(number))

    return [
        line("dense_pairs", "all visible keys", shown.dense, EXACT.dense),
        line("attended_pairs", "keys of the blocks read", shown.attended, EXACT.attended),
        line("past_block_pairs", "complete past blocks", shown.past_blocks, EXACT.past_blocks),
    ]


def _figures(call: LayerCall, cost: LayerCost) -> tuple[tuple[str, float, str, str], ...]:
    """Figures of the GPU that the bounds are made of."""
    elements, gpu = call.situation.element_bytes, call.gpu
    names = ["bf16_dense_tflops", "memory_bandwidth_gbs"]
    if min(elements.query, elements.key, elements.value, elements.index) <= 1:
        names.append("fp8_dense_tflops")
    if any(stage.l2_bytes for stage in cost.stages):
        names.append("l2_bandwidth_gbs")
    known = {name: gpu.figures[name] for name in names if name in gpu.figures}
    return tuple(
        (name, f.value, UNITS[name], f.source if f.verified else f"unverified: {f.source}")
        for name, f in known.items()
    )


def _sensitivity(call: LayerCall) -> tuple[Sensitivity, ...]:
    if not runs_sparse(call.configuration, call.workload):
        return ()
    dense_ms = call.situation.cost(call.shape, DENSE).time.expected_ms
    lines = []
    for scale in SCALES:
        scaled = call.situation.scaled(scale)
        time = scaled.cost(call.shape, call.configuration).time
        crossover = scaled.threshold_tokens(call.shape, call.configuration)
        lines.append(Sensitivity(scale, time, dense_ms / time.expected_ms, crossover))
    return tuple(lines)


def _plain(value: Any) -> float:
    return int(value) if value == int(value) else float(value)


def _time_json(time: TimeEstimate) -> dict[str, Any]:
    return {
        "bound_ms": time.bound_ms,
        "low_ms": time.low_ms,
        "expected_ms": time.expected_ms,
        "high_ms": time.high_ms,
        "source": time.source.value,
    }


def _stage_json(stage: StageLine) -> dict[str, Any]:
    return {
        "name": stage.name,
        "flops_formula": stage.flops_formula,
        "dram_bytes_formula": stage.dram_formula,
        "flops": stage.cost.flops,
        "dram_bytes": stage.cost.dram_bytes,
        "l2_bytes": stage.cost.l2_bytes,
        "time": _time_json(stage.cost.time),
        "share_of_time": stage.share,
        "binding": stage.cost.binding,
        "basis": stage.basis,
    }


def _sensitivity_json(line: Sensitivity) -> dict[str, Any]:
    return {
        "efficiency_scale": line.scale,
        "time": _time_json(line.time),
        "speedup": line.speedup,
        "crossover_tokens": line.crossover_tokens,
    }
