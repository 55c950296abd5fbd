"""The sentences of an estimate: what to expect, what was assumed, what to beware of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sparsify.cost_model.hardware import Gpu
from sparsify.cost_model.model_shape import ModelShape
from sparsify.cost_model.times import Source
from sparsify.cost_model.workload import ElementBytes, Phase
from sparsify.estimate_report import Row, SensitivityRow

__all__ = ["assumptions_of", "short_tokens", "verdict_on", "warnings_of"]

CALLS = {Phase.PREFILL: "", Phase.DECODE: " in a decode step", Phase.TRAINING: " in training"}
DENSE = "dense"


def short_tokens(count: int) -> str:
    """A context as people write it: "128K", "1M"; others with three digits, "17,600"."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= size and count % size == 0:
            return f"{count // size:,}{letter}"
    return f"{int(float(f'{count:.3g}')):,}"


def _factor(number: float) -> str:
    """A factor with digits that mean something: "1.43", "14.3", "1,430"."""
    digits = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:,.{digits}f}"


def verdict_on(row: Row, gpu: Gpu, rivals: int) -> str:
    """One sentence on the configuration of `row`, at its context.

    `rivals` is how many configurations it was chosen from as the fastest.
    """
    name = row.label
    if row.needs_training:
        name += " (once its indexer is trained)"
    if not row.layers["sparse"] and row.crossover_tokens is None:
        return f"Nothing is sparse{CALLS[Phase(row.phase)]}: all attention stays dense."
    if rivals > 1:
        name += f", the fastest of {rivals} at {short_tokens(row.context_tokens)}"
    return f"{name}: {_crossover(row, gpu)}; {_gain(row)}."


def _crossover(row: Row, gpu: Gpu) -> str:
    known = row.sparse.time.source is not Source.BOUND
    is_faster = "is" if known else "is probably"
    if row.crossover_tokens is None:
        return f"dense {is_faster} faster at every context on {gpu.name}"
    if row.crossover_tokens <= 1:
        return f"it {is_faster} faster than dense at every context on {gpu.name}"
    below = short_tokens(row.crossover_tokens)
    return f"dense {is_faster} faster below {below} tokens on {gpu.name}"


def _gain(row: Row) -> str:
    whole = row.end_to_end
    low, high = _factor(whole.low), _factor(whole.high)
    span = low if low == high else f"{low}-{high}"
    doubt = ""
    if whole.high <= 1:
        doubt = ", so it is no gain"
    elif whole.low < 1:
        doubt = ", so it may be slower"
    where = f"at {short_tokens(row.context_tokens)}{CALLS[Phase(row.phase)]}"
    return f"{where} expect {span}x end to end (bound {_factor(whole.bound)}x){doubt}"


def assumptions_of(
    model: ModelShape, rows: Sequence[Row], gpu: Gpu, degree: int, sizes: ElementBytes
) -> Iterator[str]:
    """What the numbers rest on, the model's own assumptions first."""
    yield from model.assumptions
    phase = rows[0].phase
    if phase == Phase.PREFILL:
        yield "A prefill computes the logits of the last position only."
    elif phase == Phase.DECODE:
        yield "A decode step reads every weight once, however many sequences it serves."
    else:
        yield "Gradients, optimiser and kept activations are not in the memory."
    yield (
        "Norms, activation functions and other passes over activations cost nothing when they are "
        "fused; the ranges end where each of them runs by itself, as in eager PyTorch."
    )
    if any(layer.experts for layer in model.layers):
        yield "Tokens are sent to the experts evenly."
    if model.count("sliding"):
        yield "Sliding windows cost their own pairs and are not made sparse."
    if model.count("recurrent"):
        yield "Recurrent layers cost their projections and 4 FLOP per number of their state."
    if degree > 1:
        yield f"Numbers are those of each of {degree} GPUs that share every layer."
    if any(row.sparse.time.source is Source.BOUND for row in rows):
        yield (
            "Nothing was calibrated for some kernels: their times are bounds, ranges come from "
            "public kernels, and what is expected is their geometric middle."
        )
    if gpu.fp8_dense_tflops is None and min(sizes.key, sizes.value, sizes.index) <= 1:
        yield f"{gpu.name} has no fp8 products: elements of one byte are multiplied as bf16."
    if len({row.configuration for row in rows}) > 1:
        yield "Configurations are compared by speed only; they read different numbers of tokens."
    if any(row.needs_training for row in rows):
        yield "A learned indexer means nothing before it is trained: its rows are a what-if."


def warnings_of(
    model: ModelShape,
    rows: Sequence[Row],
    sensitivity: Sequence[SensitivityRow],
    gpu: Gpu,
    unverified: Iterable[str],
) -> Iterator[str]:
    """What speaks against taking the numbers as they are."""
    yield from _memory(rows, gpu)
    longest = max(row.context_tokens for row in rows)
    if model.max_context_tokens is not None and longest > model.max_context_tokens:
        yield (
            f"The model is made for {short_tokens(model.max_context_tokens)} tokens; "
            f"{short_tokens(longest)} are beyond."
        )
    yield from _flips(sensitivity)
    names = ", ".join(unverified)
    if names:
        yield f"Figures of {gpu.name} not traced to its vendor: {names}."


def _memory(rows: Sequence[Row], gpu: Gpu) -> Iterator[str]:
    """The least need of every context that does not fit."""
    least: dict[int, Row] = {}
    for row in rows:
        known = least.get(row.context_tokens)
        if known is None or row.memory.total_bytes < known.memory.total_bytes:
            least[row.context_tokens] = row
    for context, row in least.items():
        if row.fits:
            continue
        need = row.memory
        caches = need.kv_cache_bytes + need.index_cache_bytes
        yield (
            f"At {short_tokens(context)} with a batch of {row.batch}, weights "
            f"({need.weights_bytes / 1e9:.1f} GB), caches ({caches / 1e9:.1f} GB) and workspace "
            f"({need.workspace_bytes / 1e9:.1f} GB) do not fit the "
            f"{row.gpu_memory_bytes / 1e9:.0f} GB of {gpu.name}."
        )


def _flips(sensitivity: Sequence[SensitivityRow]) -> Iterator[str]:
    """Contexts at which the winner depends on how efficient the sparse kernels are."""
    contexts = dict.fromkeys(row.context_tokens for row in sensitivity)
    for context in contexts:
        winners = {row.scale: row.winner for row in sensitivity if row.context_tokens == context}
        if len(set(winners.values())) == 1:
            continue
        others = " and ".join(
            f"{winner} at {scale:g} times the efficiency of the sparse kernels"
            for scale, winner in winners.items()
            if winner != winners[1.0]
        )
        yield f"At {short_tokens(context)} {winners[1.0]} is the fastest, but {others}."
