"""`sparsify plan`: what to do at every layer, for a GPU and a context."""

from __future__ import annotations

import json as json_module
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsify.cli import render_plan, streams
from sparsify.cli.cost_options import Batch, Calibrated, PhaseName
from sparsify.cli.gpus import tell_variants
from sparsify.cli.options import (
    DType,
    Dtype,
    Json,
    check_given,
    check_settings,
    parse_size,
    parse_whole,
)
from sparsify.cli.verify import read_prompts
from sparsify.errors import UsageError
from sparsify.files import check_target, write_text

if TYPE_CHECKING:
    from sparsify.gpu_plans import Request
    from sparsify.planning_result import Planned
    from sparsify.policy import Policy

__all__ = ["plan"]


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="As for rewrite, or a config.json, whose plan is unproved until it is applied.",
            show_default=False,
        ),
    ],
    policy: Annotated[
        str | None,
        typer.Option("--policy", metavar="P", help="A policy file, a preset's name, or auto."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME|FILE", help="The GPU to plan for (sparsify gpus)."),
    ] = None,
    context: Annotated[
        str | None, typer.Option("--context", metavar="N", help="Tokens of a sequence: 128k.")
    ] = None,
    phase: Annotated[
        PhaseName | None, typer.Option("--phase", help="What the model does; prefill by default.")
    ] = None,
    batch: Batch = "1",
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help='Text to measure quality on; .jsonl holds "text" fields.',
        ),
    ] = None,
    tensor_parallel: Annotated[
        str, typer.Option("--tensor-parallel", metavar="N", help="GPUs that share the model.")
    ] = "1",
    min_speedup: Annotated[
        str | None,
        typer.Option("--min-speedup", metavar="X", help="Expected end to end, or exit code 8."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The plan.json to write.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    calibration: Calibrated = None,
    json: Json = False,
    dtype: Dtype = DType.AUTO,
) -> int:
    """Decide for every layer of MODEL what pays on a GPU at a context, and write a plan.

    `sparsify rewrite MODEL --plan FILE` carries it out.
    """
    given = {"--policy": policy, "--gpu": gpu, "--context": context, "--min-speedup": min_speedup}
    given["--calibration"] = calibration
    check_given(MODEL=model, **given)
    check_settings()
    wanted = _policy(policy)
    request = _request(gpu, context, batch, phase, tensor_parallel, min_speedup, calibration)
    request.target(wanted, None)  # what is wrong with it is said before long work
    if gpu is not None:
        tell_variants(gpu)
    texts = None if prompts is None else read_prompts(prompts)
    if output is not None:
        check_target(output, force=force, directory=False)
    done = _work(model, wanted, request, texts, dtype.value)
    if output is not None:
        _write(done, output, force)
    if json:
        streams.show_json(done.to_json())
    else:
        streams.show(*render_plan.planned(done))
        streams.show(f"written to {output}" if output else "nothing was written; -o FILE does")
    return 0


def _request(
    gpu: str | None,
    context: str | None,
    batch: str,
    phase: PhaseName | None,
    tensor_parallel: str,
    min_speedup: str | None,
    calibration: str | None,
) -> Request:
    """What the options ask for, their texts read."""
    from sparsify.gpu_plans import Request

    return Request(
        gpu,
        None if context is None else parse_size(context, "--context"),
        parse_whole(batch, "--batch"),
        None if phase is None else str(phase),
        parse_whole(tensor_parallel, "--tensor-parallel"),
        None if min_speedup is None else _factor(min_speedup),
        calibration,
    )


def _write(done: Planned, output: Path, force: bool) -> None:
    text = json_module.dumps(done.plan.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(output, text + "\n", force=force)


def _policy(name: str | None) -> Policy:
    from sparsify.policy import Policy, load_policy

    if name is None:
        raise UsageError("What to do is missing.", "Give --policy auto, a preset or a policy file.")
    return Policy.auto() if name == "auto" else load_policy(name)


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 1):
        raise UsageError(f"--min-speedup is {text!r}; expected a number of at least 1.")
    return value


def _work(
    model: str, policy: Policy, request: Request, texts: list[str] | None, dtype: str
) -> Planned:
    from sparsify import gpu_plans

    if _is_description(Path(model)):
        if texts is not None:
            raise UsageError("--prompts needs the model itself, not its config.")
        from sparsify.model_files import read_model

        return gpu_plans.plan_config(policy, read_model(model), request)
    with streams.progress(stages=None) as say:
        return _loaded(model, policy, request, texts, dtype, say)


def _loaded(
    model: str, policy: Policy, request: Request, texts: list[str] | None, dtype: str, say: Any
) -> Planned:
    from sparsify import api, gpu_plans
    from sparsify.sources import load_model

    loaded = load_model(model, dtype=dtype, with_tokenizer=texts is not None, progress=say)
    if texts is not None and loaded.tokenizer is None:
        raise UsageError(f"{model} has no tokenizer for the texts of --prompts.")
    found = api.inspect(loaded.model, loaded.args, loaded.kwargs, name=loaded.name, progress=say)
    return gpu_plans.plan_model(
        loaded.model,
        found,
        policy,
        request,
        samples=texts,
        tokenizer=loaded.tokenizer,
        progress=say,
    )


def _is_description(path: Path) -> bool:
    """Whether there is a config and nothing to load."""
    if path.is_dir():
        return (path / "config.json").is_file() and not any(path.glob("*.safetensors*"))
    return path.suffix.lower() == ".json"
