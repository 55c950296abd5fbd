"""`estimate --explain`: formulas, numbers, stages, what binds, sources and sensitivity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from sparsify.cli.fitting import Fitting, number_table
from sparsify.cli.units import count, milliseconds, time_range
from sparsify.cost_model.explaining import Explanation, StageLine
from sparsify.cost_model.times import Source

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["explanation"]

BAR = 24
BINDING = {
    "compute": "compute",
    "dram": "memory bandwidth",
    "l2": "L2 bandwidth",
    "launch": "kernel launches",
}


def explanation(found: Explanation, layers: str) -> list[RenderableType]:
    """All of it; `layers` names the layers that it holds for."""
    call = found.call
    head = (
        f"{call.configuration.label}, {call.workload.phase.value} at "
        f"{call.workload.context_tokens:,} tokens, one layer of {layers}:"
    )
    return [
        Text(head, style="bold"),
        _stages(found),
        *_formulas(found),
        *_sources(found),
        *_sensitivity(found),
    ]


def _stages(found: Explanation) -> RenderableType:
    table = number_table(
        "stage", ">part of the time", ">expected ms", ">bound ms", "what binds", ">FLOP", ">bytes"
    )
    for stage in found.stages:
        table.add_row(*map(Text, _stage(stage)))
    return Fitting(table, keys=1)


def _stage(stage: StageLine) -> tuple[str, ...]:
    cost = stage.cost
    bar = "#" * max(round(BAR * stage.share), 1)
    return (
        stage.name,
        f"{bar:<{BAR}} {stage.share:4.0%}",
        milliseconds(cost.time.expected_ms),
        milliseconds(cost.time.bound_ms),
        BINDING[cost.binding],
        count(cost.flops),
        count(cost.dram_bytes),
    )


def _formulas(found: Explanation) -> list[RenderableType]:
    lines: list[RenderableType] = ["formulas, for one layer:"]
    for stage in found.stages:
        for what, formula, value in (
            ("FLOP", stage.flops_formula, stage.cost.flops),
            ("bytes", stage.dram_formula, stage.cost.dram_bytes),
        ):
            if value:
                lines.append(Text(f"  {stage.name}, {what} = {formula} = {value:,}"))
    for pairs in found.pairs:
        formula = f"{pairs.formula} = " if pairs.formula else ""
        lines.append(Text(f"  {pairs.name} ({pairs.means}) = {formula}{pairs.value:,}"))
    values = ", ".join(f"{name} = {value:,}" for name, value in found.symbols.items())
    lines.append(Text(f"with {values}"))
    return lines


def _sources(found: Explanation) -> list[RenderableType]:
    lines: list[RenderableType] = ["", "what it rests on:"]
    bases: dict[str, list[str]] = {}
    for stage in found.stages:
        bases.setdefault(stage.basis, []).append(stage.name)
    for basis, names in bases.items():
        whose = "all stages" if len(names) == len(found.stages) else ", ".join(names)
        lines.append(Text(f"  {whose}: {basis}"))
    for name, value, unit, source in found.figures:
        lines.append(Text(f"  {found.call.gpu.name} {name}: {value:g} {unit} ({source})"))
    return lines


def _sensitivity(found: Explanation) -> list[RenderableType]:
    if not found.sensitivity:
        return []
    table = number_table(
        "sparse kernels", ">attention ms", ">expected speed-up of attention", "faster from"
    )
    for line in found.sensitivity:
        table.add_row(
            {0.5: "half as efficient", 1.0: "as expected", 2.0: "twice as efficient"}[line.scale],
            time_range(line.time),
            f"{line.speedup:.2f}x",
            "never" if line.crossover_tokens is None else f"{line.crossover_tokens:,} tokens",
        )
    shown = Fitting(table, keys=1)
    calibrated = found.sensitivity[0].time.source is Source.CALIBRATED
    note = "" if calibrated else " (the middle of its range)"
    return ["", f"if the sparse kernels are better or worse than expected{note}:", shown]
