"""`sparsify bench DIR --against MODEL`: both models on one device, one after the other."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sparsify.benches.models import ModelTimes, pair_rows, time_language_model, time_module
from sparsify.cli.pairs import load_pair
from sparsify.passes.examples import is_transformers_model
from sparsify.sources import LoadedModel
from sparsify.timing import machine

__all__ = ["bench_models"]

Say = Callable[[str], None]


def bench_models(
    directory: Path,
    against: str,
    lengths: Sequence[int],
    batch: int,
    device: torch.device,
    repeats: int,
    say: Say,
) -> dict[str, Any]:
    """Times of both, with speed-ups; they are never on the device together.

    Raises:
        UsageError: DIR was not written by `sparsify rewrite`, or a model cannot be loaded.
    """
    rewritten, original = load_pair(directory, against, say)
    options: dict[str, Any] = {"repeats": repeats, "say": say}
    language = is_transformers_model(original.model)
    inputs = (original.args or (), original.kwargs or {})

    def times(loaded: LoadedModel, name: str) -> list[ModelTimes]:
        if not language:
            return time_module(loaded.model, *inputs, device, name=name, **options)
        return time_language_model(loaded.model, lengths, device, batch=batch, name=name, **options)

    dense = times(original, "original")
    original_name = original.name
    del original
    _forget(device)
    sparse = times(rewritten, "rewritten")
    return {
        "schema": 1,
        **machine(device),
        "rewritten": str(directory),
        "against": original_name,
        "dtype": str(next(rewritten.model.parameters()).dtype).removeprefix("torch."),
        "batch": batch,
        "rows": pair_rows(dense, sparse),
        "notes": _notes(rewritten.model, device, language, sparse),
    }


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _notes(
    model: Any, device: torch.device, language: bool, sparse: Sequence[ModelTimes]
) -> list[str]:
    """What the numbers do not say themselves."""
    notes = ["Speed-up: time of the original over that of the rewritten model, this run."]
    if device.type == "cpu":
        notes.append("On a CPU sparse attention is the reference implementation, right but slow.")
    if not language:
        return [*notes, "Timed on the example inputs of the factory."]
    if any(one.decode is None for one in sparse):
        notes.append("Decode was not timed: the cache of this model cannot be cut back.")
    return [*notes, _ran_sparse(model)]


def _ran_sparse(model: Any) -> str:
    """How many of the rewritten layers ran sparse, and why others did not."""
    from sparsify.hosts.transformers import call_counts, fallbacks

    counts = call_counts(model)
    sparse = sum(any(what == "sparse" for what in count) for count in counts.values())
    text = f"{sparse} of {len(counts)} planned layers ran sparse"
    reasons = sorted(set(fallbacks(model).values()))
    return f"{text}; {'; '.join(reasons)}." if reasons else f"{text}."
