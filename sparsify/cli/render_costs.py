"""Tables of `estimate` and `compare`. Units stand in the headers; a range is low to high."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from sparsify.cli.fitting import Fitting, number_table
from sparsify.cli.units import gigabytes, milliseconds, source, time_range, times
from sparsify.cost_model.times import Source
from sparsify.plots import tokens

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sparsify.estimate_report import Estimate, Row

__all__ = ["comparison", "estimate"]

MEANINGS = {
    Source.BOUND: "range: nothing was calibrated; what published measurements of kernels span.",
    Source.CALIBRATED: "calibrated: from efficiencies measured on this GPU, with their error.",
    Source.MEASURED: "measured: runs of this very configuration.",
}
TIMES = (
    ">attention\nms",
    ">bound\nms",
    ">attention\nspeed-up",
    ">model\nms",
    ">model\nspeed-up",
    "source",
)
FEWER = tuple(column for column in TIMES if column not in (">bound\nms", ">model\nms"))


def estimate(found: Estimate) -> list[RenderableType]:
    """The verdict, times, needs, what the words mean, and what was assumed."""
    first = found.rows[0]
    return [
        Text(f"{found.model} on {found.gpu}, {_call(first)}: {_layers(found.rows)}"),
        Text(found.verdict, style="bold"),
        Fitting(_times(found.rows, TIMES), _times(found.rows, FEWER), keys=2),
        *_legend(found.rows),
        _needs(found.rows),
        *_assumed([found]),
    ]


def comparison(found: Sequence[Estimate]) -> list[RenderableType]:
    """Rows per GPU and configuration, dense ones first, then the verdict for every GPU."""
    table = number_table(
        "GPU", ">context", "attention", *TIMES, ">faster from\ntokens", ">memory\nGB"
    )
    for one in found:
        name = one.gpu
        for context, rows in _by_context(one.rows).items():
            dense = (*_dense(rows[0]), "", _dense_memory(rows[0]))
            table.add_row(*map(Text, (name, tokens(context), *dense)))
            name = ""
            for row in _not_dense(rows):
                more = (_crossover(row), _memory(row.memory.total_bytes, row))
                table.add_row(*map(Text, ("", "", *_sparse(row), *more)))
    every = [row for one in found for row in one.rows]
    return [
        Text(f"{found[0].model}, {_call(every[0])}: {_layers(every)}"),
        Fitting(table, keys=3),
        *(Text(one.verdict) for one in found),
        *_legend(every),
        *_assumed(found),
    ]


def _times(rows: Sequence[Row], columns: Sequence[str]) -> Table:
    shown = [TIMES.index(column) for column in columns]
    table = number_table(">context", "attention", *columns)

    def add(context: str, cells: tuple[str, ...]) -> None:
        label, *numbers = cells
        table.add_row(*map(Text, (context, label, *(numbers[index] for index in shown))))

    for context, mine in _by_context(rows).items():
        add(tokens(context), _dense(mine[0]))
        for row in _not_dense(mine):
            add("", _sparse(row))
    return table


def _by_context(rows: Sequence[Row]) -> dict[int, list[Row]]:
    contexts = dict.fromkeys(row.context_tokens for row in rows)
    return {size: [row for row in rows if row.context_tokens == size] for size in contexts}


def _not_dense(rows: Sequence[Row]) -> list[Row]:
    """Rows beside the dense one: a policy may be all dense."""
    return [row for row in rows if row.configuration.sparse]


def _needs(rows: Sequence[Row]) -> RenderableType:
    """From which context every configuration pays, and the memory it needs at each."""
    contexts = _by_context(rows)
    names = [f">memory GB\nat {tokens(context)}" for context in contexts]
    table = number_table("attention", ">faster than dense\nfrom tokens", *names)
    dense = [_dense_memory(mine[0]) for mine in contexts.values()]
    table.add_row("dense", "", *dense)
    for index, row in enumerate(_not_dense(next(iter(contexts.values())))):
        same = [_not_dense(mine)[index] for mine in contexts.values()]
        memory = [_memory(one.memory.total_bytes, one) for one in same]
        table.add_row(*map(Text, (row.label, _crossover(row), *memory)))
    return Fitting(table, keys=1)


def _call(row: Row) -> str:
    return row.phase if row.batch == 1 else f"{row.phase}, batch {row.batch}"


def _layers(rows: Sequence[Row]) -> str:
    """Layers of every kind, and how many of them become sparse."""
    counts = rows[0].layers
    full, sparse = counts["sparse"] + counts["dense"], {row.layers["sparse"] for row in rows}
    some = f", {min(sparse)} of them sparse" if len(sparse) == 1 and min(sparse) < full else ""
    parts = [f"{full} {'layer' if full == 1 else 'layers'} of full attention{some}"]
    for kind, name in (
        ("sliding", "with a sliding window"),
        ("recurrent", "recurrent"),
        ("feed_forward", "without attention"),
    ):
        if counts[kind]:
            parts.append(f"{counts[kind]} {name}")
    return ", ".join(parts)


def _dense(row: Row) -> tuple[str, ...]:
    return (
        f"dense ({row.end_to_end.attention_share:.0%} of model)",
        time_range(row.dense.time),
        milliseconds(row.dense.time.bound_ms),
        "",
        milliseconds(_dense_model_ms(row)),
        "",
        source(row.dense.time),
    )


def _sparse(row: Row) -> tuple[str, ...]:
    whole = row.end_to_end
    return (
        row.label,
        time_range(row.sparse.time),
        milliseconds(row.sparse.time.bound_ms),
        times(row.speedup.low, row.speedup.high),
        milliseconds(_dense_model_ms(row) / whole.speedup),
        times(whole.low, whole.high),
        source(row.sparse.time),
    )


def _crossover(row: Row) -> str:
    return "never" if row.crossover_tokens is None else f"{row.crossover_tokens:,}"


def _dense_memory(row: Row) -> str:
    return _memory(row.dense_memory.total_bytes, row)


def _dense_model_ms(row: Row) -> float:
    """Expected time of the whole model with dense attention."""
    return row.dense.time.expected_ms / row.end_to_end.attention_share


def _memory(n_bytes: float, row: Row) -> str:
    more = " > " + gigabytes(row.gpu_memory_bytes) if n_bytes > row.gpu_memory_bytes else ""
    return gigabytes(n_bytes) + more


def _legend(rows: Sequence[Row]) -> list[RenderableType]:
    sources = {time.source for row in rows for time in (row.dense.time, row.sparse.time)}
    lines: list[RenderableType] = [Text(MEANINGS[s]) for s in Source if s in sources]
    return [
        *lines,
        Text(
            "attention ms: all attention of one call; bound: no kernel can be faster; model ms: "
            "everything, as expected; speed-up: dense time / sparse time; memory: weights, caches "
            "and workspace."
        ),
    ]


def _assumed(found: Sequence[Estimate]) -> list[RenderableType]:
    texts = dict.fromkeys(text for one in found for text in one.assumptions)
    return [Text(f"assumed: {text}") for text in texts]
