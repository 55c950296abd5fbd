"""What `sparsify plan` shows to people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from sparsify.cli.fitting import Fitting, number_table
from sparsify.cli.grouping import group
from sparsify.cli.units import milliseconds, source, time_range

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sparsify.cost_model.choosing import FrontPoint
    from sparsify.cost_model.times import TimeEstimate
    from sparsify.planning_result import Planned, Row, Scaled

__all__ = ["planned"]

MOST_POINTS = 8


def planned(found: Planned) -> list[RenderableType]:
    """The layers, what the whole is expected to gain, the alternatives, and how firm it is."""
    out: list[RenderableType] = [_head(found), _layers(found.rows), _gain(found)]
    if len(found.front) > 1:
        out += ["alternatives (expected time of everything; none is better in both):"]
        out += [_front(found.front)]
    out.append(_sensitivity(found.sensitivity))
    return out + [f"note: {note}" for note in found.notes]


def _head(found: Planned) -> str:
    target = found.target
    call = target.workload
    gpus = f"{target.tensor_parallel} x " if target.tensor_parallel > 1 else ""
    sparse = len(found.plan.rewritten)
    return (
        f"{found.plan.model}: {call.phase.value} of {call.batch} x {call.context_tokens:,} tokens "
        f"on {gpus}{target.gpu.name}, {sparse} of {len(found.plan)} attention layers sparse"
    )


def _layers(rows: Sequence[Row]) -> RenderableType:
    table = number_table(
        "layers",
        ">count",
        "method",
        ">b/k",
        ">min_context",
        ">dense ms",
        ">sparse ms (range)",
        "source",
        "~why",
    )
    for name, members in group(rows, _name, _facts):
        table.add_row(*map(Text, (name, str(len(members)), *_facts(members[0]))))
    return Fitting(table, keys=1)


def _name(row: Row) -> str:
    return row.layer.key.removesuffix("#0") or "(root)"


def _facts(row: Row) -> tuple[str, ...]:
    layer = row.layer
    method = layer.method if layer.indexer is None else f"{layer.method} {layer.indexer}"
    dense = "" if row.dense is None else milliseconds(row.dense.expected_ms)
    if not layer.sparse or row.planned is None:
        whence = "" if row.dense is None else source(row.dense)
        return (method, "", "", dense, "", whence, layer.reason)
    sizes = f"{layer.block_size}/{layer.topk}"
    times = (f"{layer.min_context:,}", dense, _time(row.planned))
    return (method, sizes, *times, source(row.planned), layer.reason)


def _time(time: TimeEstimate) -> str:
    return f"{milliseconds(time.expected_ms)} ({time_range(time)})"


def _gain(found: Planned) -> str:
    what = "end to end" if found.whole else "attention alone"
    share = ""
    if found.whole and found.attention_share < 1:
        limit = 1 / (1 - found.attention_share)
        share = (
            f"; attention is {found.attention_share:.0%} of dense, which limits it to {limit:.2f}x"
        )
    return (
        f"{what}: dense {_time(found.dense)} ms, planned {_time(found.planned)} ms, "
        f"{found.speedup:.2f}x expected{share}"
    )


def _front(points: Sequence[FrontPoint]) -> RenderableType:
    measured = points[0].loss is not None
    columns = (">ms", ">score recall", "layers") if measured else (">ms", "all layers")
    table = number_table(*columns)
    for point in _some(points):
        recall = () if point.loss is None else (f"{1 - point.loss:.3f}",)
        table.add_row(*map(Text, (milliseconds(point.total_ms), *recall, point.picks)))
    return Fitting(table, keys=1)


def _some(points: Sequence[FrontPoint]) -> list[FrontPoint]:
    """A few of them, evenly, with both ends."""
    if len(points) <= MOST_POINTS:
        return list(points)
    last = len(points) - 1
    return [points[round(last * i / (MOST_POINTS - 1))] for i in range(MOST_POINTS)]


def _sensitivity(found: Sequence[Scaled]) -> str:
    parts = (f"x{s.scale:g}: {s.dense_ms / s.planned_ms:.2f}x (best: {s.choice})" for s in found)
    return f"if sparse kernels are more or less efficient: {'; '.join(parts)}"
