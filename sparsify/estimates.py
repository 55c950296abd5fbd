"""Dense against sparse attention of a whole model, without loading it and without torch.

`estimate` reads a config, costs every context with and without sparse attention, and says in one
sentence what to expect of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsify.cost_model.calibration import Calibration, calibration_for
from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.efficiencies import SCALES
from sparsify.cost_model.hardware import Gpu, load_gpu
from sparsify.cost_model.model_shape import ModelShape
from sparsify.cost_model.workload import (
    BF16,
    MOST_BATCH,
    MOST_GPUS,
    MOST_TOKENS,
    ElementBytes,
    Phase,
    check_count,
)
from sparsify.errors import UsageError
from sparsify.estimate_report import Estimate, Row, SensitivityRow, best_row
from sparsify.estimate_schemes import Scheme, schemes_of
from sparsify.estimate_study import Study
from sparsify.model_files import read_model
from sparsify.plans import Plan
from sparsify.policy import Policy
from sparsify.verdicts import assumptions_of, verdict_on, warnings_of
from sparsify.versions import package_versions

__all__ = ["CONTEXTS", "estimate"]

CONTEXTS = (32_768, 131_072, 1_048_576)

Source = ModelShape | str | Path | Mapping[str, Any]


def estimate(
    model: Source,
    policy: Policy | Plan | Configuration | Sequence[Configuration] | None = None,
    *,
    gpu: str | Gpu = "h200",
    context: int | Sequence[int] = CONTEXTS,
    batch: int = 1,
    phase: str = "prefill",
    tensor_parallel: int = 1,
    index_bytes: float | None = None,
    element_bytes: ElementBytes | None = None,
    calibration: Calibration | str | Path | None = None,
) -> Estimate:
    """Estimate what a policy makes of a model's speed and memory on a GPU.

    Args:
        model: a shape, or what `model_files.read_model` reads.
        policy: also a plan or configurations; by default the published configurations.
        gpu: a name (`sparsify gpus`), or a file with the figures of one.
        context: tokens of a sequence: one or several numbers.
        batch: sequences at a time.
        phase: "prefill", "decode" (one step at the end of the context) or "training".
        tensor_parallel: GPUs that share every layer; the numbers are those of each.
        index_bytes: bytes of an element of the learned index keys, instead of `element_bytes`'.
        element_bytes: bytes of elements of caches; by default bfloat16's two.
        calibration: measured efficiencies, or the file that holds them; by default those that
            come with this package for that GPU, if any.

    Raises:
        UsageError: something is missing or makes no sense.
        UnknownGpuError: no figures are known for the GPU.
        NothingToDoError: the model has no full attention.
    """
    shape = _shape_of(model)
    device = gpu if isinstance(gpu, Gpu) else load_gpu(gpu)
    contexts = _contexts(context)
    sizes = _sizes(element_bytes, index_bytes)
    check_count("The batch", batch, MOST_BATCH)
    check_count("tensor_parallel", tensor_parallel, MOST_GPUS)
    study = Study(
        shape,
        device,
        _phase(phase),
        batch,
        tensor_parallel,
        sizes,
        calibration_for(device, calibration),
    )
    return _estimate(study, schemes_of(shape, policy), contexts)


def _shape_of(model: Source) -> ModelShape:
    if isinstance(model, ModelShape):
        return model
    if not isinstance(model, str | Path | Mapping):
        raise UsageError(
            f"model is a {type(model).__name__}; it must be a path, an id or the fields of a "
            "config.",
            "sparsify.estimate takes modules, too.",
        )
    return read_model(model)


def _sizes(element_bytes: ElementBytes | None, index_bytes: float | None) -> ElementBytes:
    if not isinstance(element_bytes, ElementBytes | None):
        raise UsageError(
            f"element_bytes is a {type(element_bytes).__name__}; it must be an ElementBytes."
        )
    sizes = element_bytes or BF16
    return sizes if index_bytes is None else replace(sizes, index=index_bytes)


def _contexts(context: int | Sequence[int]) -> tuple[int, ...]:
    given: tuple[Any, ...] = (context,)
    if isinstance(context, Iterable) and not isinstance(context, str | bytes | Mapping):
        given = tuple(context)
    if not given:
        raise UsageError("No context is given; expected one or several numbers of tokens.")
    for size in given:
        check_count("The context", size, MOST_TOKENS)
    return tuple(dict.fromkeys(given))


def _phase(name: str) -> Phase:
    try:
        return Phase(name)
    except ValueError:
        known = ", ".join(phase.value for phase in Phase)
        raise UsageError(f"The phase is {name!r:.40}; use one of {known}.") from None


def _estimate(study: Study, schemes: Sequence[Scheme], contexts: Sequence[int]) -> Estimate:
    crossovers = [study.crossover(scheme) for scheme in schemes]
    rows = tuple(
        study.row(context, scheme, crossover)
        for context in contexts
        for scheme, crossover in zip(schemes, crossovers, strict=True)
    )
    best = best_row(rows)
    sensitivity = tuple(_sensitivity(study, schemes, contexts))
    said = study.cost(best.context_tokens, None).warnings
    unverified = study.gpu.unverified_for(study.degree)
    warnings = warnings_of(study.model, rows, sensitivity, study.gpu, unverified)
    return Estimate(
        study.model.name,
        study.gpu.name,
        rows,
        best.crossover_tokens,
        verdict_on(best, study.gpu, len(schemes)),
        tuple(dict.fromkeys(_assumptions(study, rows))),
        (*warnings, *said),
        sensitivity,
        package_versions(),
    )


def _assumptions(study: Study, rows: Sequence[Row]) -> Iterable[str]:
    return assumptions_of(study.model, rows, study.gpu, study.degree, study.element_bytes)


def _sensitivity(
    study: Study, schemes: Sequence[Scheme], contexts: Iterable[int]
) -> Iterable[SensitivityRow]:
    for context in contexts:
        dense_ms = study.cost(context, None).total.expected_ms
        for scale in SCALES:
            times = {"dense": dense_ms}
            for scheme in schemes:
                ms = study.cost(context, scheme, scale).total.expected_ms
                times[scheme.label] = min(ms, times.get(scheme.label, ms))
            winner = min(times, key=times.__getitem__)
            yield SensitivityRow(context, scale, winner, dense_ms / times[winner])
