"""Whether a plan meets what was asked for, and what it has to say for itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sparsify.cost_model.choosing import Choice
from sparsify.cost_model.configuration import PUBLISHED, Configuration
from sparsify.cost_model.model_shape import ModelShape
from sparsify.cost_model.search import LEAST_BUDGET_TOKENS, NEAR_FASTEST, Candidate, examine
from sparsify.cost_model.times import Source, TimeEstimate
from sparsify.cost_model.workload import AttentionShape, Phase, Workload
from sparsify.errors import InfeasibleError
from sparsify.ir import site_name
from sparsify.planning_result import Row, Scaled
from sparsify.planning_work import Work

__all__ = ["check", "notes_of"]

_NEAR = f"within {NEAR_FASTEST - 1:.0%} of the fastest"


def check(work: Work, rows: Sequence[Row], planned: TimeEstimate, choice: Choice | None) -> None:
    """Hold a plan against memory, quality and speed-up.

    Raises:
        InfeasibleError: one is not met; the message says which, and what can be reached.
    """
    _check_memory(work, rows)
    _check_quality(work, rows, choice)
    _check_speedup(work, planned, choice)


def _check_memory(work: Work, rows: Sequence[Row]) -> None:
    cost = work.target.cost(
        {
            site_name(row.layer.fqn, row.layer.ordinal): Configuration.of(row.layer)
            for row in rows
            if row.layer.sparse
        }
    )
    if cost is None or cost.memory.total_bytes <= work.target.gpu.memory_bytes:
        return
    need = cost.memory
    parts = {
        "weights": need.weights_bytes,
        "KV cache": need.kv_cache_bytes,
        "index cache": need.index_cache_bytes,
        "workspace": need.workspace_bytes,
    }
    shown = ", ".join(f"{name} {n_bytes / 1e9:,.1f}" for name, n_bytes in parts.items())
    raise InfeasibleError(
        f"The plan needs {need.total_bytes / 1e9:,.1f} GB ({shown}), {work.gpu_name} has "
        f"{work.target.gpu.memory_bytes / 1e9:,.1f} GB.",
        "Use more GPUs (--tensor-parallel), a shorter context or a smaller batch.",
    )


def _check_quality(work: Work, rows: Sequence[Row], choice: Choice | None) -> None:
    least = work.least_recall
    if least is None or work.losses is None:
        return
    if choice is not None and not choice.kept:
        best = "nothing could be measured: the samples are too short"
        if choice.best_recall is not None:
            best = f"the best keeps {choice.best_recall:.3f} in one layer"
        raise InfeasibleError(
            f"No configuration that is faster than dense keeps a mean score recall of {least:g} "
            f"on the samples: {best}.",
            "Lower min_score_recall, or keep the model dense.",
        )
    recall = mean_recall(work, rows)
    sparse = [row.layer for row in rows if row.layer.sparse]
    if sparse and recall is None:
        raise InfeasibleError(
            f"The score recall of {sparse[0].fqn} could not be measured: the samples are too short "
            f"for blocks of {sparse[0].block_size} and top-k {sparse[0].topk}.",
            "Give longer samples.",
        )
    if recall is not None and recall < least - 1e-9:
        raise InfeasibleError(
            f"The plan keeps a mean score recall of {recall:.3f} on the samples, less than the "
            f"policy's {least:g}.",
            "Lower min_score_recall, read more blocks, or use `auto`.",
        )


def mean_recall(work: Work, rows: Sequence[Row]) -> float | None:
    """Mean over the sparse layers, as the check V6 takes it; None if one was not measured."""
    found = []
    for row in rows:
        if row.layer.sparse:
            losses = (work.losses or {}).get(row.layer.key, {})
            configuration = Configuration.of(row.layer)
            if configuration not in losses:
                return None
            found.append(1 - losses[configuration])
    return sum(found) / len(found) if found else None


def _check_speedup(work: Work, planned: TimeEstimate, choice: Choice | None) -> None:
    wanted = work.min_speedup
    dense_ms = work.dense.expected_ms
    if wanted is None or dense_ms / planned.expected_ms >= wanted:
        return
    least_ms = min(planned.expected_ms, choice.fastest_ms if choice else planned.expected_ms)
    share = work.attention.expected_ms / dense_ms
    what = "end to end" if work.target.model is not None else "of attention"
    limit = ""
    if share < 1:
        limit = (
            f"; attention is {share:.0%} of the dense time, so no attention could give more than "
            f"{1 / (1 - share):.2f}x"
        )
    raise InfeasibleError(
        f"A speed-up of {wanted:g}x {what} cannot be reached at "
        f"{work.target.workload.context_tokens:,} tokens on {work.gpu_name}: expected are at best "
        f"{dense_ms / least_ms:.2f}x{limit}.",
        _untried(choice, dense_ms, least_ms) or "Ask for less, or plan for a longer context.",
    )


def _untried(choice: Choice | None, dense_ms: float, least_ms: float) -> str:
    """What would be faster if it were known to be good enough."""
    fastest = min((point.total_ms for point in choice.front), default=least_ms) if choice else 0.0
    if not 0 < fastest < least_ms:
        return ""
    return (
        f"Up to {dense_ms / fastest:.2f}x are expected of what reads fewer than "
        f"{LEAST_BUDGET_TOKENS:,} tokens, which is not taken unmeasured: give samples (--prompts), "
        "ask for less, or plan for a longer context."
    )


def notes_of(
    work: Work, rows: Sequence[Row], planned: TimeEstimate, sensitivity: Sequence[Scaled]
) -> tuple[str, ...]:
    """What a reader of the plan has to know, a sentence each."""
    found = [*_on_times(work, planned), *_on_quality(work, rows), *_on_training(work)]
    return (*found, *_on_sensitivity(sensitivity), *_on_phase(work, rows))


def _on_times(work: Work, planned: TimeEstimate) -> Iterator[str]:
    if planned.source is Source.BOUND:
        yield (
            f"Not all kernels of this plan are calibrated on {work.gpu_name}: the others have "
            "ranges of what public kernels reach, whose geometric middles are compared."
        )
    if work.target.model is None:
        yield "Only attention is estimated: nothing is known of the rest of the model."
    unverified = work.target.gpu.unverified_for(work.target.tensor_parallel)
    if unverified:
        yield f"Unverified figures of {work.gpu_name}: {', '.join(unverified)}."
    cost = work.target.cost()
    if cost is not None:
        yield from _beyond(cost.model, cost.workload)
        yield from cost.warnings
        yield from cost.model.assumptions


def _beyond(model: ModelShape, workload: Workload) -> Iterator[str]:
    most = model.max_context_tokens
    if most is not None and workload.context_tokens > most:
        yield f"The model is made for {most:,} tokens; {workload.context_tokens:,} are beyond."


def _on_quality(work: Work, rows: Sequence[Row]) -> Iterator[str]:
    if work.losses is not None:
        recall = mean_recall(work, rows)
        if recall is not None:
            yield (
                f"Measured on the samples: mean score recall {recall:.3f} over the sparse layers. "
                "Losses of layers are taken to add up; `sparsify verify` judges the whole."
            )
        if work.autos and work.least_recall is None:
            yield f"Of the plans {_NEAR} the one that loses least on the samples was taken."
        return
    if work.autos:
        yield (
            "Quality was not measured, only put in order: more tokens read first, of equal numbers "
            f"the smaller block (arXiv 2511.11571). Of what is {_NEAR} and reads "
            f"at least {LEAST_BUDGET_TOKENS:,} tokens, the first was taken. Samples would tell."
        )


def _on_training(work: Work) -> Iterator[str]:
    """What a trained indexer would give."""
    if not work.autos:
        return
    for configuration in PUBLISHED:
        if not configuration.needs_training:
            continue
        found = {
            shape: examine(configuration, shape, work.target.situation) for shape in work.candidates
        }
        if any(candidate.usable for candidate in found.values()):
            yield _what_if(work, configuration, found)


def _what_if(
    work: Work, configuration: Configuration, found: Mapping[AttentionShape, Candidate]
) -> str:
    saved = sum(
        work.dense_times[site.shape].expected_ms - found[site.shape].expected_ms
        for site in work.autos
        if found[site.shape].usable
    )
    speedup = work.dense.expected_ms / (work.dense.expected_ms - saved)
    return (
        f"What if: {configuration.label} (needs-training) would be expected to give "
        f"{speedup:.2f}x; it means nothing before its indexer is trained, so it is never chosen."
    )


def _on_sensitivity(sensitivity: Sequence[Scaled]) -> Iterator[str]:
    expected = next((s for s in sensitivity if s.scale == 1.0), None)
    for scaled in sensitivity:
        if expected is not None and scaled.choice != expected.choice:
            yield (
                f"The choice is not firm: with sparse kernels {scaled.scale:g} times as efficient "
                f"as expected it would be {scaled.choice}."
            )


def _on_phase(work: Work, rows: Sequence[Row]) -> Iterator[str]:
    if any(row.layer.sparse and row.layer.min_context for row in rows):
        phase = work.target.workload.phase
        other = "prefill" if phase is Phase.DECODE else "decode"
        yield f"min_context was found for {phase.value} and holds for {other} as well."
