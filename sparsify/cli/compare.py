"""`sparsify compare`: one estimate on several GPUs."""

from __future__ import annotations

from typing import Annotated

import typer

from sparsify.cli import streams
from sparsify.cli.cost_options import (
    Batch,
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
from sparsify.errors import UsageError

__all__ = ["compare"]


def compare(
    model: ModelOrConfig,
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="NAMES", help="GPUs or files: a100,h100,h200.")
    ],
    context: Contexts = "128k",
    phase: Phases = PhaseName.PREFILL,
    batch: Batch = "1",
    policy: PolicyName = None,
    tensor_parallel: TensorParallel = "1",
    kv_dtype: KvType = ElementType.BF16,
    index_dtype: IndexType = ElementType.BF16,
    json: Json = False,
) -> None:
    """Estimate MODEL on several GPUs, a row for each of them and each configuration."""
    check_given(MODEL=model, **{"--gpu": gpu, "--policy": policy, "--context": context})
    contexts, names = parse_contexts(context), _names(gpu)
    for name in names:
        tell_variants(name)
    names = _once(names)
    from sparsify.cli import render_costs
    from sparsify.cli.costing import answer, ask, ask_again, chosen_policy

    question = ask(
        model,
        names[0],
        chosen_policy(policy),
        contexts=contexts,
        phase=phase.value,
        batch=parse_whole(batch, "--batch"),
        tensor_parallel=parse_whole(tensor_parallel, "--tensor-parallel"),
        element_bytes=element_bytes(kv_dtype, index_dtype),
    )
    found = [answer(ask_again(question, name)) for name in names]
    if json:
        streams.show_json({"schema": 1, "estimates": [one.to_json() for one in found]})
    else:
        streams.show(*render_costs.comparison(found))
    tell_warnings(found)


def _names(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise UsageError(f"--gpu is {text!r}; expected names such as a100,h100.")
    return list(dict.fromkeys(names))


def _once(names: list[str]) -> list[str]:
    """Each GPU once, under the first of its names."""
    from sparsify.cost_model.hardware import load_gpu

    found: dict[str, str] = {}
    for name in names:
        found.setdefault(load_gpu(name).name, name)
    return list(found.values())
