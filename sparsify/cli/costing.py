"""What `estimate` and `compare` work on: a question, its answer, curves for plots, explanations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from sparsify import estimates
from sparsify.cli.grouping import collapse
from sparsify.cli.model_shapes import shape_of
from sparsify.cost_model.calibration import Calibration, calibration_for
from sparsify.cost_model.configuration import DENSE, Configuration
from sparsify.cost_model.explaining import Explanation, LayerCall, explain_layer
from sparsify.cost_model.hardware import Gpu, load_gpu
from sparsify.cost_model.situation import Situation
from sparsify.cost_model.times import Source
from sparsify.cost_model.workload import Phase, Workload
from sparsify.errors import UsageError
from sparsify.estimate_report import best_row
from sparsify.estimate_schemes import Scheme, schemes_of
from sparsify.plans import Plan
from sparsify.plots import CostCurves, CurvePoint, Range
from sparsify.policy import Policy, load_policy
from sparsify.versions import VERSION

if TYPE_CHECKING:
    from sparsify.cost_model.model_shape import LayerShape, ModelShape
    from sparsify.cost_model.times import TimeEstimate
    from sparsify.cost_model.workload import ElementBytes
    from sparsify.estimate_report import Estimate, Row

__all__ = [
    "Question",
    "answer",
    "ask",
    "ask_again",
    "chosen_policy",
    "curves",
    "explanations",
]

# Contexts of a curve: from where attention begins to matter to a few times what is asked for.
FIRST_TOKENS, LAST_TOKENS = 1 << 12, 1 << 20
BEYOND, PER_OCTAVE = 4, 4


@dataclass(frozen=True)
class Question:
    """What is to be estimated; all of it was read and checked."""

    model: ModelShape
    gpu: Gpu
    policy: Policy | Plan | Configuration | None
    contexts: tuple[int, ...]
    phase: Phase
    batch: int
    tensor_parallel: int
    element_bytes: ElementBytes
    calibration: Calibration | None


def chosen_policy(policy: str | None, plan: str | None = None) -> Policy | Plan | None:
    """The policy or plan of the options; None stands for what is published.

    Raises:
        UsageError: both are given, or a file is missing or wrong.
    """
    if policy is not None and plan is not None:
        raise UsageError("Both --policy and --plan are given; one is enough.")
    if policy == "auto":
        raise UsageError(
            "estimate shows what given sizes do; auto has none.",
            "`sparsify plan MODEL --policy auto --gpu GPU --context N` chooses them.",
        )
    if plan is not None:
        return Plan.load(plan)
    return None if policy is None else load_policy(policy)


def ask(
    model: str,
    gpu: str,
    policy: Policy | Plan | None,
    *,
    contexts: Sequence[int],
    phase: str,
    batch: int,
    tensor_parallel: int,
    element_bytes: ElementBytes,
    calibration: str | None = None,
) -> Question:
    """The question that arguments of the command line put; cheap faults are found first.

    Raises:
        UnknownGpuError: no figures are known for the GPU.
        UsageError: a file is missing or wrong.
    """
    device = load_gpu(gpu)
    return Question(
        shape_of(model),
        device,
        policy,
        tuple(contexts),
        Phase(phase),
        batch,
        tensor_parallel,
        element_bytes,
        calibration_for(device, calibration),
    )


def ask_again(question: Question, gpu: str) -> Question:
    """The same of another GPU, with the calibration that comes with this package for it.

    Raises:
        UnknownGpuError: no figures are known for it.
    """
    device = load_gpu(gpu)
    return replace(question, gpu=device, calibration=calibration_for(device))


def answer(question: Question) -> Estimate:
    """The estimate.

    Raises:
        UsageError: the policy does not fit the model, or heads cannot be split.
        NothingToDoError: the model has no full attention.
    """
    return estimates.estimate(
        question.model,
        question.policy,
        gpu=question.gpu,
        context=question.contexts,
        batch=question.batch,
        phase=question.phase.value,
        tensor_parallel=question.tensor_parallel,
        element_bytes=question.element_bytes,
        calibration=question.calibration,
    )


def explanations(question: Question, found: Estimate) -> list[tuple[Explanation, str]]:
    """Dense attention and that of the verdict at the longest context, with the layers' names."""
    best = best_row(found.rows)
    scheme = _scheme_of(question, best.configuration)
    sparse = scheme.at(Workload.of(question.phase, best.context_tokens, question.batch))
    chosen = [layer for layer in question.model.full_attention_layers if layer.name in sparse]
    explained = [_explained(question, question.model.full_attention_layers, DENSE, best)]
    mine = [layer for layer in chosen if sparse[layer.name] == best.configuration]
    if mine:
        explained.append(_explained(question, mine, best.configuration, best))
    return explained


def _scheme_of(question: Question, configuration: Configuration) -> Scheme:
    schemes = schemes_of(question.model, question.policy)
    return next(scheme for scheme in schemes if scheme.main == configuration)


def _explained(
    question: Question, layers: Sequence[LayerShape], configuration: Configuration, row: Row
) -> tuple[Explanation, str]:
    """The first layer and those that are as it is."""
    shape = layers[0].attention
    assert shape is not None
    call = LayerCall(
        shape.sharded(question.tensor_parallel),
        configuration,
        Situation(
            question.gpu,
            Workload.of(question.phase, row.context_tokens, question.batch),
            question.calibration,
            question.element_bytes,
            question.model.hidden_size,
        ),
    )
    names = [layer.name for layer in layers if layer.attention == shape]
    return explain_layer(call), collapse(names)


def curves(question: Question, found: Estimate) -> CostCurves:
    """What is drawn: the configuration of the verdict over a grid of contexts.

    Raises:
        UsageError: the policy makes nothing sparse.
    """
    best = best_row(found.rows)
    if not best.configuration.sparse:
        raise UsageError("Nothing is sparse under that policy, so there is nothing to draw.")
    grid = _grid(question.contexts, best.crossover_tokens)
    policy = question.policy if question.policy is not None else best.configuration
    drawn = answer(replace(question, contexts=grid, policy=policy))
    rows = sorted(drawn.rows, key=lambda row: row.context_tokens)
    return CostCurves(
        model=found.model,
        gpu=found.gpu,
        phase=question.phase.value,
        batch=question.batch,
        configuration=best.label + (" (once trained)" if best.needs_training else ""),
        points=[_point(row) for row in rows],
        crossover_tokens=best.crossover_tokens,
        full_tokens=_full_tokens(rows),
        asked_tokens=question.contexts,
        layers=len(question.model.attention_layers),
        sparse_layers=best.layers["sparse"],
        range_means=_range_means(best),
        source=_source(found, question),
    )


def _grid(asked: Sequence[int], crossover: int | None) -> tuple[int, ...]:
    """Contexts around those asked for and the crossover, evenly spaced in the logarithm."""
    of_interest = max(*asked, min(crossover or 0, LAST_TOKENS // BEYOND))
    first = min(FIRST_TOKENS, *asked)
    last = max(min(BEYOND * of_interest, LAST_TOKENS), *asked, 2 * first)
    found = {*asked, last}
    size = float(first)
    while size < last:
        found.add(round(size))
        size *= 2 ** (1 / PER_OCTAVE)
    return tuple(sorted(found))


def _full_tokens(rows: Sequence[Row]) -> int | None:
    """From where on the memory is exceeded: caches grow evenly between two points of a curve."""
    if not rows[0].fits:
        return rows[0].context_tokens
    for fits, full in pairwise(rows):
        if not full.fits:
            free = fits.gpu_memory_bytes - fits.memory.total_bytes
            share = free / (full.memory.total_bytes - fits.memory.total_bytes)
            more = share * (full.context_tokens - fits.context_tokens)
            return fits.context_tokens + math.floor(more) + 1
    return None


def _point(row: Row) -> CurvePoint:
    whole = row.end_to_end
    return CurvePoint(
        row.context_tokens,
        _range(row.dense.time),
        _range(row.sparse.time),
        Range(whole.low, whole.speedup, whole.high),
        whole.attention_share,
    )


def _range(time: TimeEstimate) -> Range:
    return Range(time.low_ms, time.expected_ms, time.high_ms)


def _range_means(row: Row) -> str:
    if row.sparse.time.source is Source.BOUND:
        return "shaded: what published measurements of kernels span; nothing is calibrated here"
    return "shaded: mean error of the calibration on runs it had not seen"


def _source(found: Estimate, question: Question) -> str:
    best = best_row(found.rows)
    names: dict[Source, list[str]] = {}
    for name, time in (("dense", best.dense.time), (best.label, best.sparse.time)):
        names.setdefault(time.source, []).append(name)
    how = {
        Source.BOUND: "datasheets and published efficiencies, the geometric middle of their range",
        Source.CALIBRATED: f"efficiencies calibrated on {found.gpu}",
        Source.MEASURED: "measured",
    }
    told = "; ".join(f"{' and '.join(who)}: {how[source]}" for source, who in names.items())
    shared = question.tensor_parallel
    each = f" Each of {shared} GPUs that share every layer." if shared > 1 else ""
    return f"Estimate of sparsify {VERSION}, not a measurement. Lines: {told}.{each}"
