"""Tables of `sparsify gpus`: all GPUs in a row each, or one with the source of every figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from sparsify.cli.fitting import Fitting, number_table
from sparsify.cost_model.hardware import UNITS, Figure, Gpu, Span

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["sheet", "table"]

COLUMNS = (
    "GPU",
    "architecture",
    ">bf16\nTFLOP/s",
    ">fp8\nTFLOP/s",
    ">memory\nGB",
    ">bandwidth\nGB/s",
    ">L2\nMB",
    ">SMs",
    ">ridge\nFLOP/byte",
)
LEFT_OUT = ("architecture", ">L2\nMB", ">SMs")
FEWER = tuple(column for column in COLUMNS if column not in LEFT_OUT)


def table(found: Sequence[Gpu]) -> list[RenderableType]:
    """A row per GPU; figures not traced to the vendor carry a question mark."""
    return [
        Fitting(_rows(found, COLUMNS), _rows(found, FEWER), keys=1),
        "Rates are dense, with FP32 accumulation. SMs: compute units on AMD. Ridge: bf16 rate over "
        "bandwidth.",
        "? is a figure that was not traced to the vendor; `sparsify gpus NAME` shows all sources.",
    ]


def _rows(found: Sequence[Gpu], columns: Sequence[str]) -> Table:
    out = number_table(*columns)
    for gpu in found:
        figures = (
            gpu.bf16_dense_tflops,
            gpu.fp8_dense_tflops,
            gpu.memory_gb,
            gpu.memory_bandwidth_gbs,
            gpu.l2_mb,
            gpu.sm_count,
        )
        name = gpu.name if gpu.file is None else f"{gpu.name} (own file)"
        cells = (name, gpu.architecture, *map(_cell, figures), _ridge(gpu))
        shown = (cells[COLUMNS.index(column)] for column in columns)
        out.add_row(*map(Text, shown))
    return out


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    return f"{figure.value:g}" if figure.verified else f"{figure.value:g}?"


def _ridge(gpu: Gpu) -> str:
    sure = gpu.bf16_dense_tflops.verified and gpu.memory_bandwidth_gbs.verified
    return f"{gpu.ridge_flop_per_byte:.1f}" + ("" if sure else "?")


def sheet(gpu: Gpu) -> list[RenderableType]:
    """Everything that is known of one GPU."""
    out = number_table("figure", ">value", "unit", "~source")
    for name, figure in gpu.figures.items():
        out.add_row(*map(Text, (name, _cell(figure), UNITS[name], figure.source)))
    ridge = (_ridge(gpu), "FLOP/byte", "bf16_dense_tflops / memory_bandwidth_gbs")
    out.add_row("ridge", *map(Text, ridge))
    for name, measured in gpu.measured:
        if measured is not None:
            source = f"measured: {measured.source}"
            out.add_row(*map(Text, (name, _measured(measured), UNITS[name], source)))
    capability = f", compute capability {gpu.compute_capability}" if gpu.compute_capability else ""
    lines: list[RenderableType] = [
        Text(f"{gpu.name}: {gpu.vendor} {gpu.architecture}{capability}"),
        Fitting(out, keys=1),
    ]
    if gpu.aliases:
        lines.append(Text(f"also known as {', '.join(gpu.aliases)}"))
    if gpu.file is not None:
        lines.append(Text(f"read from {gpu.file}"))
    if gpu.unverified:
        lines.append(Text(f"? not traced to the vendor: {', '.join(gpu.unverified)}"))
    if gpu.notes:
        lines.append(Text(f"note: {gpu.notes}"))
    return lines


def _measured(found: Figure | Span) -> str:
    if isinstance(found, Figure):
        return _cell(found)
    return f"{found.low:g}" if found.low == found.high else f"{found.low:g}-{found.high:g}"
