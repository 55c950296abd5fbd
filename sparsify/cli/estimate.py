"""`sparsify estimate`: what sparse attention would make of a model's speed, before it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sparsify.cli import streams
from sparsify.cli.cost_options import (
    Batch,
    Calibrated,
    Contexts,
    ElementType,
    IndexType,
    KvType,
    ModelOrConfig,
    PhaseName,
    Phases,
    PolicyName,
    TensorParallel,
    element_bytes,
    parse_contexts,
    tell_warnings,
)
from sparsify.cli.gpus import tell_variants
from sparsify.cli.options import Json, check_given, parse_whole

if TYPE_CHECKING:
    from sparsify.cli.costing import Question
    from sparsify.estimate_report import Estimate

__all__ = ["estimate"]


def estimate(
    model: ModelOrConfig,
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="NAME|FILE", help="A GPU; `sparsify gpus` lists them.")
    ],
    context: Contexts = "32k,128k,1m",
    phase: Phases = PhaseName.PREFILL,
    batch: Batch = "1",
    policy: PolicyName = None,
    plan: Annotated[
        str | None, typer.Option("--plan", metavar="FILE", help="A plan.json instead of a policy.")
    ] = None,
    tensor_parallel: TensorParallel = "1",
    kv_dtype: KvType = ElementType.BF16,
    index_dtype: IndexType = ElementType.BF16,
    calibration: Calibrated = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Formulas, stages, what binds, sources, sensitivity.")
    ] = False,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Draw times and speed-up: .png, .svg, .pdf."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing plot.")] = False,
    json: Json = False,
) -> None:
    """Estimate what sparse attention makes of MODEL's speed and memory on a GPU.

    Without --policy or --plan, the published configurations are compared. Nothing is loaded or run.
    """
    check_given(MODEL=model, **{"--gpu": gpu, "--policy": policy, "--plot": plot})
    check_given(**{"--calibration": calibration, "--context": context, "--plan": plan})
    contexts = parse_contexts(context)
    if plot is not None:
        from sparsify.plots import check_plot

        check_plot(plot, force=force)
    tell_variants(gpu)
    from sparsify.cli.costing import answer, ask, chosen_policy

    question = ask(
        model,
        gpu,
        chosen_policy(policy, plan),
        contexts=contexts,
        phase=phase.value,
        batch=parse_whole(batch, "--batch"),
        tensor_parallel=parse_whole(tensor_parallel, "--tensor-parallel"),
        element_bytes=element_bytes(kv_dtype, index_dtype),
        calibration=calibration,
    )
    found = answer(question)
    _show(question, found, explain=explain, json=json)
    tell_warnings([found])
    if plot is not None:
        _draw(question, found, plot, force)


def _show(question: Question, found: Estimate, *, explain: bool, json: bool) -> None:
    from sparsify.cli import render_costs
    from sparsify.cli.costing import explanations

    explained = explanations(question, found) if explain else []
    if json:
        more = {"explanations": [one.to_json() for one, _ in explained]} if explain else {}
        streams.show_json({**found.to_json(), **more})
        return
    streams.show(*render_costs.estimate(found))
    if explained:
        from sparsify.cli.render_explain import explanation

        for one, layers in explained:
            streams.show("", *explanation(one, layers))


def _draw(question: Question, found: Estimate, plot: str, force: bool) -> None:
    from sparsify.cli.costing import curves
    from sparsify.plots import draw_costs

    draw_costs(curves(question, found), plot, force=force)
    streams.tell(f"sparsify: the plot was written to {plot}")
