"""`sparsify bench --shape TEXT --tune`: which tiles are the fastest here, kept for later processes.

Legend: q, k, v as `sparsify.benches.attention` makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.text import Text

from sparsify.benches.attention import Question, index_inputs, random_inputs
from sparsify.cli.fitting import Fitting, number_table
from sparsify.cli.units import milliseconds
from sparsify.errors import UsageError
from sparsify.timing import Run, machine, time_call

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import Tensor

    from sparsify.kernels.attend.tuning import TunedSlice, Tuning
    from sparsify.kernels.tiling import AttentionTiles

__all__ = ["bench_tune", "check_question", "render"]

BUDGET_S = 2.0
Say = Callable[[str], None]


def check_question(question: Question) -> None:
    """Refuse what cannot be tuned, before any work.

    Raises:
        UsageError: there are several contexts, top-k leaves no block out, the context is too short
            to tell, or the file of tiles cannot be read or written.
    """
    from sparsify.kernels import tuned

    if len(question.contexts) > 1:
        raise UsageError(
            "Tiles do not depend on the context, so --tune measures one.",
            "Give --context the length that matters most.",
        )
    context, budget = question.contexts[0], question.configuration.budget_tokens
    if context <= budget:
        raise UsageError(
            f"At {context:,} tokens top-k covers every block, and there is nothing to tune.",
            f"Give --context more than {budget:,}.",
        )
    least = _least_queries()
    if context < least:
        raise UsageError(
            f"{context:,} tokens say nothing of longer calls.",
            f"Give --context at least {least:,}.",
        )
    tuned.check_writable()


def _least_queries() -> int:
    try:
        from sparsify.kernels.attend.tuning import LEAST_QUERIES
    except ImportError:
        raise UsageError("Tiles are those of Triton kernels.", "Install triton.") from None
    return LEAST_QUERIES


def bench_tune(question: Question, say: Say) -> dict[str, Any]:
    """Measure, keep, and tell: the document of `--json`."""
    from sparsify.kernels import tuned
    from sparsify.kernels.attend.tuning import how

    found, chosen, sizes = measured(question, say)
    path = tuned.save(question.device, sizes, found.tiles, how(found, question.contexts[0], chosen))
    before, after = found.times_ms()
    return {
        "schema": 1,
        **machine(question.device),
        **question.to_json(),
        "context_tokens": question.contexts[0],
        "default_ms": before,
        "chosen_ms": after,
        "chosen": _fields(found.tiles),
        "default": _fields(found.default),
        "trials": _trials(found),
        "written_to": str(path),
    }


def measured(question: Question, say: Say) -> tuple[Tuning, int, Any]:
    """What tuning finds, the past blocks of a query, and what the tiles are kept under."""
    import torch

    from sparsify.kernels.attend.tuning import tune

    torch.cuda.set_device(question.device)
    q, k, v = random_inputs(question, question.contexts[0])
    _check_kernels(q, k, v, question)
    call = _call(q, k, v, question)

    def timer(run: Run) -> float:
        return time_call(
            run,
            device=question.device,
            repeats=question.repeats,
            graph=True,
            budget_s=BUDGET_S,
        ).median_ms

    with torch.no_grad():
        return tune(call, timer, say), call.chosen, call.sizes


def _call(q: Tensor, k: Tensor, v: Tensor, question: Question) -> TunedSlice:
    from sparsify.kernels.accelerated import WORKSPACE_BYTES
    from sparsify.kernels.attend import forward
    from sparsify.kernels.attend.tuning import TunedSlice
    from sparsify.kernels.layout import Layout
    from sparsify.kernels.placement import place
    from sparsify.kernels.select.moba import Gate
    from sparsify.kernels.select.msa import Index

    block, topk = question.configuration.block_size, question.configuration.topk
    placement = place(Layout(), q.shape[0], q.shape[2], k.shape[2], block)
    index = index_inputs(question, q, k)
    share = q.shape[1] // k.shape[1] if index else 1
    shape = forward.shape_of(q, k, v, block, None, share)
    chooser = (
        Index(*index, placement, block, topk, workspace_bytes=WORKSPACE_BYTES)
        if index
        else Gate(q, k, placement, None, block, topk - 1)
    )
    return TunedSlice(q, k, v, placement, shape, chooser, WORKSPACE_BYTES)


def _check_kernels(q: Tensor, k: Tensor, v: Tensor, question: Question) -> None:
    """Refuse shapes that the kernels do not run."""
    from sparsify.kernels.accelerated import unsupported
    from sparsify.kernels.layout import Layout

    configuration = question.configuration
    options = {"block_size": configuration.block_size, "topk": configuration.topk}
    tensors = (q, k, v, *(index_inputs(question, q, k) or ()))
    why = unsupported(f"{configuration.method}_attention", tensors, Layout(), options)
    if why is not None:
        raise UsageError(f"No Triton kernels run this shape: {why}.")
    if configuration.topk < 2:
        raise UsageError("With top-k 1 there are no past blocks to tune for.")


def _fields(tiles: AttentionTiles) -> dict[str, Any]:
    from sparsify.kernels.tuned import FIELDS

    return {name: getattr(tiles, name) for name in FIELDS}


def _trials(found: Tuning) -> list[dict[str, Any]]:
    """All candidates in the order they were measured, with the fields of their stage."""
    from sparsify.kernels.attend.candidates import ATTENTION, COMBINE

    names = {"attention": ATTENTION, "combine": COMBINE}
    rows = []
    for stage, tiles, ms, why in found.trials:
        mine = {name: getattr(tiles, name) for name in names[stage]}
        same = all(getattr(found.tiles, name) == value for name, value in mine.items())
        row = {"stage": stage, "tiles": mine, "ms": ms, "chosen": same and ms is not None}
        rows.append({**row, "why_not": why or None})
    return rows


def render(data: dict[str, Any]) -> list[RenderableType]:
    """A line for every candidate, then what was chosen and where it is kept."""
    out = number_table("stage", "tiles", ">ms", "")
    for row in data["trials"]:
        told = row["why_not"] or ("chosen" if row["chosen"] else "")
        ms = "-" if row["ms"] is None else milliseconds(row["ms"])
        out.add_row(*map(Text, (row["stage"], _shown(row["tiles"]), ms, told)))
    before, after = (milliseconds(data[name]) for name in ("default_ms", "chosen_ms"))
    verdict = f"Both stages: {after} ms, {before} ms with the default tiles."
    if data["chosen"] == data["default"]:
        verdict = f"The default tiles stay: nothing is faster by 2% than their {before} ms."
    about = (
        f"{data['gpu']}, {data['context_tokens']:,} tokens, batch {data['batch']}, {data['dtype']}"
    )
    return [about, Fitting(out, keys=2), verdict, f"Written to {data['written_to']}"]


def _shown(tiles: dict[str, Any]) -> str:
    told = (f"{name.removeprefix('combine_')} {value}" for name, value in tiles.items() if value)
    return ", ".join(told)
