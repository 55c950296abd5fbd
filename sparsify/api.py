"""The verbs of the product, each a thin path through the layers below it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sparsify import planner
from sparsify.errors import NothingToDoError, UsageError
from sparsify.estimate_report import Estimate
from sparsify.gpu_plans import Request, plan_model
from sparsify.hosts.graph import agreed
from sparsify.hosts.native_sparse import named
from sparsify.inspections import Inspection, captured_shape
from sparsify.passes.examples import is_transformers_model
from sparsify.plans import Plan
from sparsify.policy import Policy
from sparsify.report import SparsifyReport, VerificationReport
from sparsify.rewriting import apply_plan, capture_programs, chosen_host, exporter_of, loader_of

__all__ = [
    "Inspection",
    "Result",
    "estimate",
    "expected_layers",
    "export",
    "inspect",
    "load",
    "plan",
    "sparsify",
    "verify",
]

Progress = Callable[[str], None]
A_POLICY = "a Policy (for a preset or a file: sparsify.load_policy)"


@dataclasses.dataclass
class Result:
    """A rewritten model with its plan and report.

    `model` is the rewritten module; with `inplace=True` it is the model that was given.
    """

    model: torch.nn.Module
    plan: Plan
    report: SparsifyReport
    inspection: Inspection | None
    original: torch.nn.Module | None
    handle: Any

    def restore(self) -> torch.nn.Module:
        """Undo an in-place rewrite and return the model.

        Raises:
            UsageError: the rewrite was not in place.
        """
        if self.handle is None:
            raise UsageError("The original model was not changed; there is nothing to restore.")
        self.handle.restore()
        return self.model

    def verify(self, samples: Any = None, **options: Any) -> VerificationReport:
        """`verify` of the original against this result.

        Raises:
            UsageError: the rewrite was in place, so there is no original to compare with.
        """
        if self.original is None:
            raise UsageError(
                "The rewrite was in place, so there is no original left to verify against.",
                "Rewrite with inplace=False, or pass the original to sparsify.verify.",
            )
        return verify(self.original, self.model, samples, **options)


def inspect(
    model: torch.nn.Module,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic: Any = None,
    seq_len: int | None = None,
    host: str = "auto",
    name: str = "",
    progress: Progress | None = None,
) -> Inspection:
    """Capture `model` and find all its attention; changes nothing.

    Args:
        model: any module; transformers language models need no example inputs.
        args, kwargs: example inputs of the forward.
        dynamic: dynamic dimensions for torch.export; by default batch and length are tried.
        seq_len: length of the example inputs made for a transformers model.
        host: for which host: on "graph", a language model is captured with a cache too.

    Raises:
        CaptureError: the model cannot be captured.
        UsageError: example inputs are needed and missing.
    """
    say = progress or _silent
    _must_be(model, torch.nn.Module, "model", "a torch.nn.Module")
    if seq_len is not None and seq_len < 1:
        raise UsageError(f"seq_len is {seq_len}; it must be at least 1.")
    programs = capture_programs(
        model, args, kwargs, host=host, dynamic=dynamic, seq_len=seq_len, progress=say
    )
    found = agreed(programs)
    notes = dict.fromkeys(note for program in programs for note in program.captured.notes)
    return Inspection(
        model=name or type(model).__name__,
        sites=tuple(found.sites),
        refusals=(*named(found.refusals, model, host), *found.lookalikes),
        notes=(*notes, *found.notes),
        expected=expected_layers(model),
        order=tuple(found.order),
        programs=tuple(programs),
    )


def plan(
    model: torch.nn.Module | Inspection,
    policy: Policy,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    gpu: str | None = None,
    context: int | None = None,
    batch: int = 1,
    phase: str | None = None,
    samples: Any = None,
    tokenizer: Any = None,
    tensor_parallel: int = 1,
    min_speedup: float | None = None,
    calibration: str | Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Decide what to do at every site under `policy`; with a GPU and a context, also where it pays.

    Args:
        gpu, context, batch, phase, tensor_parallel: the call to plan for: a GPU's name or file,
            tokens, sequences, "prefill" (default), "decode" or "training", and how many GPUs share
            the model. Layers where dense is faster stay dense; the others become sparse from the
            context on where that pays. `Policy.auto` needs GPU and context, here or in itself.
        samples, tokenizer: texts (or token ids) to measure score recall on. Without, `Policy.auto`
            only knows an order of quality. Needs the model itself, not its inspection.
        min_speedup: expected end to end, or it is an error.
        calibration: a file of efficiencies measured on that GPU, instead of this package's own.

    Raises:
        UsageError: a rule of the policy matches no site, or GPU, context or samples are missing.
        NothingToDoError: there is no attention at all.
        CaptureError: `on_unproved="error"` and a site was refused.
        UnknownGpuError: no figures are known for the GPU.
        InfeasibleError: memory, speed-up or quality budget cannot be met.
    """
    _must_be(policy, Policy, "policy", A_POLICY)
    request = Request(gpu, context, batch, phase, tensor_parallel, min_speedup, calibration)
    found = model if isinstance(model, Inspection) else inspect(model, args, kwargs)
    if samples is None and not request.names_a_target(policy):
        return _plan_of(None, found, policy)
    module = None if isinstance(model, Inspection) else model
    options = {"samples": samples, "tokenizer": tokenizer, "progress": progress}
    return plan_model(module, found, policy, request, **options).plan


def estimate(
    model: Any,
    policy: Any = None,
    *,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> Estimate:
    """Estimate what a policy makes of the speed and memory of a model on a GPU.

    Args:
        model: a module or an `Inspection`, whose captured graph is read; or a config.json (its
            path or fields), a folder, a .gguf file or a cached id, of which no weights are read.
        policy: a policy, a plan or configurations; by default the published configurations.
        args, kwargs: example inputs of a module's forward.
        options: of `sparsify.estimates.estimate`, above all `gpu`, `context` and `phase`.

    Raises:
        UsageError: something is missing or makes no sense.
        UnknownGpuError: no figures are known for the GPU.
        NothingToDoError: the model has no full attention.
        CaptureError: the module cannot be captured.
    """
    from sparsify import estimates

    longest = None
    if isinstance(model, torch.nn.Module):
        longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        model = inspect(model, args, kwargs)
    if isinstance(model, Inspection):
        model = captured_shape(model, longest)
    return estimates.estimate(model, policy, **options)


def sparsify(
    model: torch.nn.Module,
    policy: Policy | None = None,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    host: str = "auto",
    inplace: bool = False,
    dynamic: Any = None,
    plan: Plan | None = None,
    inspection: Inspection | None = None,
    progress: Progress | None = None,
) -> Result:
    """Rewrite the proved attention of `model` under `policy`, or by a ready `plan`.

    Weights are never copied: with `inplace=False` the module objects are copied and share them.
    A ready plan is checked against a fresh proof: a site it would rewrite must be proved.

    Args:
        args, kwargs: example inputs of the forward; transformers language models need none.
        host: "transformers" keeps the model's own class, "graph" gives a module made of exported
            programs, for inference; "auto" takes the first for a transformers model, else the
            second.
        dynamic: dynamic dimensions for torch.export; by default batch and length are tried.
        inspection: what `inspect` of this model for this host found, to save the time.

    Raises:
        UsageError: neither or both of policy and plan, or an unknown host.
        NothingToDoError: no attention was found, or nothing was rewritten.
        CaptureError: the model cannot be captured or rewritten on this host.
    """
    say = progress or _silent
    _check_wanted(model, policy, plan)
    host = chosen_host(model, args, kwargs, host)
    if host == "graph" and inplace:
        raise UsageError("The graph host cannot rewrite in place.", "Use inplace=False.")
    found = inspection or inspect(
        model, args, kwargs, host=host, dynamic=dynamic, progress=progress
    )
    if plan is None:
        assert policy is not None
        plan = _plan_of(model, found, policy)
    else:
        planner.check_plan(plan, found.sites, found.refusals)
    if not plan.rewritten:
        raise NothingToDoError(
            f"Nothing to rewrite in {found.model}: {_why_nothing(plan)}.", "See `sparsify inspect`."
        )
    say("rewriting")
    target, handle = apply_plan(model, plan, found.programs, host=host, inplace=inplace)
    report = planner.build_report(
        found.sites, found.refusals, plan, model=found.model, notes=found.notes
    )
    return Result(target, plan, report, found, None if inplace else model, handle)


def _check_wanted(model: torch.nn.Module, policy: Policy | None, plan: Plan | None) -> None:
    if (policy is None) == (plan is None):
        raise UsageError("Give either a policy or a plan.")
    _must_be(model, torch.nn.Module, "model", "a torch.nn.Module")
    if policy is not None:
        _must_be(policy, Policy, "policy", A_POLICY)
    if plan is not None:
        _must_be(plan, Plan, "plan", "a Plan (from a file: sparsify.Plan.load)")


def verify(
    original: torch.nn.Module,
    rewritten: torch.nn.Module,
    samples: Any = None,
    **options: Any,
) -> VerificationReport:
    """Run the checks on `rewritten` against `original` (see `sparsify.checks.run`).

    Args:
        samples: for a language model text, texts or token ids; for any other module one call of
            its forward as `(args, kwargs)`, long enough that some rows are sparse.

    Raises:
        UsageError: an unknown check, a model without a plan, or unusable samples.
    """
    for name, model in (("original", original), ("rewritten", rewritten)):
        _must_be(model, torch.nn.Module, name, "a torch.nn.Module")
    language = is_transformers_model(original)
    args, kwargs = ((), {}) if language else _call_of(samples)
    names = options.get("checks")
    if names is None or "V1" in [str(name).strip().upper() for name in names]:
        found = inspect(original, args, kwargs, progress=options.get("progress"))
        options = {"detected": found.keys, **options}
        if language:
            options.setdefault("expected", found.expected)
    if not language:
        from sparsify import module_checks

        return module_checks.run(original, rewritten, args, kwargs, **options)
    from sparsify import checks

    return checks.run(original, rewritten, samples, **options)


def _call_of(samples: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as `(args, kwargs)`."""
    fits = isinstance(samples, tuple) and len(samples) == 2
    if not (fits and isinstance(samples[0], tuple | list) and isinstance(samples[1], dict)):
        raise UsageError(
            "A module that is no language model is verified on example inputs.",
            "Pass samples=(args, kwargs).",
        )
    return tuple(samples[0]), dict(samples[1])


def export(
    result: Result,
    directory: str | Path,
    *,
    format: str | None = None,
    tokenizer: Any = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Save a rewritten model with its plan, report and manifest; the folder appears whole or not.

    Raises:
        UsageError: an unknown format, or a target in the way.
    """
    if isinstance(result, torch.nn.Module):
        raise UsageError(
            f"result is a {type(result).__name__}; it must be what sparsify.sparsify returned.",
            "A transformers model that was loaded is saved by its own save_pretrained.",
        )
    _must_be(result, Result, "result", "what sparsify.sparsify returned")
    exporter = exporter_of(result.model)
    if format not in (None, exporter.FORMAT):
        raise UsageError(
            f"A {type(result.model).__name__} cannot be exported as {format!r}; "
            f"this version writes it as {exporter.FORMAT}."
        )
    folder: Path = exporter.save(
        result.model,
        Path(directory),
        plan=result.plan,
        report=result.report,
        tokenizer=tokenizer,
        force=force,
        progress=progress,
    )
    return folder


def load(directory: str | Path, **options: Any) -> torch.nn.Module:
    """Load a folder written by `export`, with its plan applied.

    Raises:
        ArtefactError: a file is missing or damaged, or a newer version wrote it.
    """
    _must_be(directory, (str, Path), "directory", "a path")
    loaded: torch.nn.Module = loader_of(Path(directory))(Path(directory), **options)
    return loaded


def _must_be(value: Any, kind: Any, name: str, wanted: str) -> None:
    if not isinstance(value, kind):
        raise UsageError(f"{name} is a {type(value).__name__}; it must be {wanted}.")


def expected_layers(model: torch.nn.Module) -> int | None:
    """Attention layers that the model's config names; None when it names none."""
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if text is not config:  # several towers: the config of one says nothing of the whole
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds:
        named_so = ("attention", "sparse")
        return sum(any(w in kind for w in named_so) and "linear" not in kind for kind in kinds)
    count = getattr(config, "num_hidden_layers", None)
    return count if isinstance(count, int) else None


def _plan_of(model: torch.nn.Module | None, found: Inspection, policy: Policy) -> Plan:
    """The policy's plan; where it is `Auto`, for the GPU and context that it names."""
    if policy.autos:
        return plan_model(model, found, policy, Request()).plan
    return planner.make_plan(
        policy, found.sites, found.refusals, model=found.model, order=found.order or None
    )


def _why_nothing(plan: Plan) -> str:
    if not len(plan):
        return "no attention was found"
    refused = sum(layer.status == "refused" for layer in plan)
    if plan.estimate and not refused:
        return plan.layers[0].reason
    return f"{refused} sites were refused and {len(plan) - refused} are dense by policy"


def _silent(_: str) -> None:
    return None
