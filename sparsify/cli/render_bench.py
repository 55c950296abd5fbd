"""Tables of `sparsify bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from sparsify.cli.fitting import Fitting, number_table
from sparsify.cli.units import gigabytes, milliseconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sparsify.benches.attention import AttentionRow, Question
    from sparsify.cost_model.calibration import Calibration
    from sparsify.timing import Timing

__all__ = ["attention", "calibration", "models"]


def attention(
    question: Question, rows: Sequence[AttentionRow], about: dict[str, Any]
) -> list[RenderableType]:
    """Dense kernels, the op, and its stages, per context."""
    out = number_table(
        ">context", "what", ">p50 ms", ">p95 ms", ">p99 ms", ">speed-up", ">memory GB"
    )
    for row in rows:
        for line in _lines(row, question.method):
            out.add_row(*map(Text, line))
    shape = question.shape
    head = (
        f"{question.configuration.label}, {shape.q_heads}/{shape.kv_heads} heads of size "
        f"{shape.head_dim}, {_index(question)}batch {question.batch}, {question.dtype}, "
        f"{question.phase}, on {_device(about)}"
    )
    return [head, Fitting(out, keys=2), *_notes(question, rows)]


def _index(question: Question) -> str:
    """What is scored by MSA."""
    if question.configuration.method != "msa":
        return ""
    data = question.to_json()
    keys = "one index key" if data["index_keys"] == 1 else f"{data['index_keys']} index keys"
    # The proxy's keys are those of the attention; its queries are means.
    of_what = " with queries" if data["indexer"] == "proxy" else ""
    return f"{keys} of size {data['index_dim']}{of_what} in {data['index_dtype']}, "


def _lines(row: AttentionRow, method: str) -> list[tuple[str, ...]]:
    lines = []
    for name, timing in row.dense.items():
        mark = " (timed once)" if timing.once else ""
        best = ", best" if name == row.dense_best and len(row.dense) > 1 else ""
        lines.append((f"dense {name}{best}{mark}", *_percentiles(timing), "", ""))
    memory = "-" if row.extra_bytes is None else gigabytes(row.extra_bytes)
    lines.append((method, *_percentiles(row.sparse), _gain(row, row.sparse), memory))
    if row.graph is not None:
        lines.append((f"{method}, CUDA graph", *_percentiles(row.graph), _gain(row, row.graph), ""))
    lines += [(f"  {name}", milliseconds(ms), "", "", "", "") for name, ms in row.stages_ms.items()]
    context = f"{row.context_tokens:,}"
    return [(context if index == 0 else "", *line) for index, line in enumerate(lines)]


def _percentiles(timing: Timing) -> tuple[str, str, str]:
    p50, p95, p99 = (milliseconds(timing.percentile_ms(p)) for p in (50, 95, 99))
    return (p50, "-", "-") if timing.once else (p50, p95, p99)


def _gain(row: AttentionRow, timing: Timing) -> str:
    name = row.dense_best
    return "" if name is None else _times(row.dense[name].median_ms / timing.median_ms)


def _times(factor: float | None) -> str:
    return "-" if factor is None else f"{factor:.2f}x"


def _notes(question: Question, rows: Sequence[AttentionRow]) -> list[RenderableType]:
    method = question.method
    notes = [
        f"Speed-up: the best dense time of this run over {method}'s. "
        "Memory: beyond in- and outputs."
    ]
    if method == "MSA":
        notes.append("Index queries and keys are given: what makes them is not timed.")
    if any(row.implementation == "reference" for row in rows):
        notes.append(
            f"{method} ran as the reference implementation, which is made to be right, not fast."
        )
    if any(row.dense_once for row in rows):
        notes.append(
            "Timed once: one call after at most one to warm up; nothing is known of the spread."
        )
    every = [f"{row.context_tokens:,}" for row in rows if row.attends_all]
    if every:
        notes.append(f"At {', '.join(every)} tokens top-k covers every block: nothing is left out.")
    if any(not row.dense for row in rows):
        notes.append("None of torch's fused kernels runs this shape; there is no speed-up to tell.")
    if any(1 < question.queries_of(row.context_tokens) < row.context_tokens for row in rows):
        notes.append(
            "Dense: of torch's kernels only FlashAttention takes queries at the end of more keys."
        )
    return list(notes)


def _device(about: dict[str, Any]) -> str:
    software = about["software"]
    return f"{about.get('gpu') or about.get('cpu')}, torch {software['torch']}, {about['date']}"


def models(data: dict[str, Any]) -> list[RenderableType]:
    """Prefill and decode of both models, per length."""
    out = number_table(
        ">tokens",
        "what",
        ">dense ms",
        ">rewritten ms",
        ">speed-up",
        ">memory GB (dense, rewritten)",
    )
    for row in data["rows"]:
        tokens = "-" if row["tokens"] is None else f"{row['tokens']:,}"
        what = "forward" if row["tokens"] is None else "prefill"
        memory = " ".join(_memory(row[side]["extra_bytes"]) for side in ("dense", "rewritten"))
        out.add_row(*map(Text, (tokens, what, *_both(row, "prefill"), memory)))
        if row["dense"]["decode"] and row["rewritten"]["decode"]:
            out.add_row(*map(Text, ("", "decode step", *_both(row, "decode"), "")))
    head = (
        f"{data['rewritten']} against {data['against']}, batch {data['batch']}, on {_device(data)}"
    )
    return [head, Fitting(out, keys=2), *data["notes"]]


def _both(row: dict[str, Any], phase: str) -> tuple[str, str, str]:
    dense, mine = (milliseconds(row[side][phase]["median_ms"]) for side in ("dense", "rewritten"))
    return dense, mine, _times(row[f"{phase}_speedup"])


def _memory(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else gigabytes(n_bytes)


def calibration(found: Calibration) -> list[RenderableType]:
    """The entries, a row each."""
    out = number_table(
        "family", "kernel", ">group", ">block", ">efficiency", ">overhead us", ">error", ">runs"
    )
    for entry in found.families:
        sizes = (str(size or "any") for size in (entry.group_size, entry.block_size))
        figures = (f"{entry.efficiency:.3f}", f"{entry.overhead_us:.1f}", f"{entry.error:.1%}")
        cells = (entry.family, entry.kernel, *sizes, *figures, str(entry.points))
        out.add_row(*map(Text, cells))
    note = "Error: mean over the runs that the fit did not see; kept is the fit on all runs."
    return [f"{found.gpu}, {found.date}", Fitting(out, keys=1), note]
