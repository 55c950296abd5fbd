"""The verbs of the product, each a thin path through the layers below it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sparsify import planner
from sparsify.errors import (
    CaptureError,
    MissingExtraError,
    NothingToDoError,
    SparsifyError,
    UsageError,
)
from sparsify.ir import AttentionSite, Refusal, site_key
from sparsify.passes.capture import capture, example_inputs, is_transformers_model
from sparsify.passes.detect import detect
from sparsify.plans import Plan
from sparsify.policy import Policy
from sparsify.report import SparsifyReport, VerificationReport

__all__ = ["Inspection", "Result", "export", "inspect", "load", "plan", "sparsify", "verify"]

Progress = Callable[[str], None]
A_POLICY = "a Policy (for a preset or a file: sparsify.load_policy)"


@dataclasses.dataclass(frozen=True)
class Inspection:
    """All attention of a model: what can be replaced, and what cannot and why.

    Refusals with the code NOT_ATTENTION only resemble attention.
    `expected` is the number of attention layers that the model's config names, if it names any.
    `order` holds the site keys in execution order.
    """

    model: str
    sites: tuple[AttentionSite, ...]
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...] = ()
    expected: int | None = None
    order: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of all attention found; look-alikes do not count."""
        refused = [site_key(r.fqn, r.ordinal) for r in self.refusals if r.code != "NOT_ATTENTION"]
        return (*(site_key(site.fqn, site.ordinal) for site in self.sites), *refused)

    def to_json(self) -> dict[str, Any]:
        """The document of `inspect --json`."""
        return {
            "schema": 1,
            "model": self.model,
            "expected": self.expected,
            "sites": [site.to_json() for site in self.sites],
            "refusals": [refusal.to_json() for refusal in self.refusals],
            "notes": list(self.notes),
        }


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
        """Undo an in-place rewrite and return the model."""
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
    name: str = "",
    progress: Progress | None = None,
) -> Inspection:
    """Capture `model` and find all its attention; changes nothing.

    Args:
        model: any module; transformers language models need no example inputs.
        args, kwargs: example inputs of the forward.
        dynamic: dynamic dimensions for torch.export; by default batch and length are tried.
        seq_len: length of the example inputs made for a transformers model.

    Raises:
        CaptureError: the model cannot be captured.
        UsageError: example inputs are needed and missing.
    """
    say = progress or _silent
    _must_be(model, torch.nn.Module, "model", "a torch.nn.Module")
    if seq_len is not None and seq_len < 1:
        raise UsageError(f"seq_len is {seq_len}; it must be at least 1.")
    say("capturing the model")
    args, kwargs = _inputs(model, args, kwargs, seq_len)
    with _capturable(model):
        captured = capture(model, tuple(args), kwargs, dynamic=dynamic)
    say("proving what each attention site computes")
    found = detect(captured)
    return Inspection(
        model=name or type(model).__name__,
        sites=tuple(found.sites),
        refusals=(*found.refusals, *found.lookalikes),
        notes=tuple(captured.notes) + tuple(found.notes),
        expected=expected_layers(model),
        order=tuple(found.order),
    )


def plan(
    model: torch.nn.Module | Inspection,
    policy: Policy,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
) -> Plan:
    """Decide what to do at every site under `policy`.

    Raises:
        UsageError: a rule of the policy matches no site.
        NothingToDoError: there is no attention at all.
        CaptureError: `on_unproved="error"` and a site was refused.
    """
    _must_be(policy, Policy, "policy", A_POLICY)
    found = model if isinstance(model, Inspection) else inspect(model, args, kwargs)
    return planner.make_plan(
        policy, found.sites, found.refusals, model=found.model, order=found.order or None
    )


def sparsify(
    model: torch.nn.Module,
    policy: Policy | None = None,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    host: str = "auto",
    inplace: bool = False,
    plan: Plan | None = None,
    inspection: Inspection | None = None,
    progress: Progress | None = None,
) -> Result:
    """Rewrite the proved attention of `model` under `policy`, or by a ready `plan`.

    Weights are never copied: with `inplace=False` the module objects are copied and share them.
    A ready plan is checked against a fresh proof: a site it would rewrite must be proved.

    Raises:
        UsageError: neither or both of policy and plan, or an unknown host.
        NothingToDoError: no attention was found, or nothing was rewritten.
        CaptureError: the model cannot be captured or rewritten on this host.
    """
    say = progress or _silent
    if (policy is None) == (plan is None):
        raise UsageError("Give either a policy or a plan.")
    _must_be(model, torch.nn.Module, "model", "a torch.nn.Module")
    if policy is not None:
        _must_be(policy, Policy, "policy", A_POLICY)
    if plan is not None:
        _must_be(plan, Plan, "plan", "a Plan (from a file: sparsify.Plan.load)")
    _check_host(model, host)
    found = inspection or inspect(model, args, kwargs, progress=progress)
    if plan is None:
        assert policy is not None
        plan = planner.make_plan(
            policy, found.sites, found.refusals, model=found.model, order=found.order or None
        )
    else:
        planner.check_plan(plan, found.sites, found.refusals)
    if not plan.rewritten:
        raise NothingToDoError(
            f"Nothing to rewrite in {found.model}: {_why_nothing(plan)}.", "See `sparsify inspect`."
        )
    say("rewriting")
    from sparsify.hosts import transformers as host_module

    target = model if inplace else host_module.copy_sharing_weights(model)
    handle = host_module.apply(target, plan)
    try:
        _probe(target, plan)
    except BaseException:
        handle.restore()
        raise
    report = planner.build_report(
        found.sites, found.refusals, plan, model=found.model, notes=found.notes
    )
    return Result(target, plan, report, found, None if inplace else model, handle)


def verify(
    original: torch.nn.Module,
    rewritten: torch.nn.Module,
    samples: Any = None,
    **options: Any,
) -> VerificationReport:
    """Run the checks V1-V7 on `rewritten` against `original` (`sparsify.checks.run`)."""
    from sparsify import checks

    for name, model in (("original", original), ("rewritten", rewritten)):
        _must_be(model, torch.nn.Module, name, "a torch.nn.Module")
    names = options.get("checks")
    if names is None or "V1" in [str(name).strip().upper() for name in names]:
        found = inspect(original, progress=options.get("progress"))
        options = {"expected": found.expected, "detected": found.keys, **options}
    return checks.run(original, rewritten, samples, **options)


def export(
    result: Result,
    directory: str | Path,
    *,
    format: str = "hf",
    tokenizer: Any = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Save a rewritten model with its plan, report and manifest; the folder appears whole or not.

    Raises:
        UsageError: an unknown format, or a target in the way.
    """
    _must_be(result, Result, "result", "what sparsify.sparsify returned")
    if format != "hf":
        raise UsageError(f"Unknown export format {format!r}; this version writes hf.")
    from sparsify.exporters import hf_folder

    return hf_folder.save(
        result.model,
        Path(directory),
        plan=result.plan,
        report=result.report,
        tokenizer=tokenizer,
        force=force,
        progress=progress,
    )


def load(directory: str | Path, **options: Any) -> torch.nn.Module:
    """Load a folder written by `export`, with its plan applied.

    Raises:
        ArtefactError: a file is missing or damaged, or a newer version wrote it.
    """
    _must_be(directory, (str, Path), "directory", "a path")
    _need_transformers()
    from sparsify.exporters import hf_folder

    return hf_folder.load(Path(directory), **options)


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
        return sum("attention" in kind and "linear" not in kind for kind in kinds)
    count = getattr(config, "num_hidden_layers", None)
    return count if isinstance(count, int) else None


def _inputs(
    model: torch.nn.Module,
    args: Sequence[Any] | None,
    kwargs: dict[str, Any] | None,
    seq_len: int | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args or kwargs:
        return tuple(args or ()), dict(kwargs or {})
    if not is_transformers_model(model):
        raise UsageError(
            f"{type(model).__name__} needs example inputs.",
            "Pass args= and kwargs= of its forward.",
        )
    return (), example_inputs(model, seq_len=seq_len)


def _capturable(model: torch.nn.Module) -> Any:
    """The model in the form that the capture reads; only transformers models have several."""
    import contextlib

    if not is_transformers_model(model):
        return contextlib.nullcontext()
    from sparsify.hosts.transformers import as_sdpa

    return as_sdpa(model)


def _check_host(model: torch.nn.Module, host: str) -> None:
    if host not in ("auto", "transformers", "graph", "dynamo"):
        raise UsageError(f"Unknown host {host!r}; use auto, transformers, graph or dynamo.")
    if host in ("graph", "dynamo"):
        raise CaptureError(f"The {host} host does not exist yet in this version.")
    if not is_transformers_model(model):
        raise CaptureError(
            f"{type(model).__name__} is not a transformers model, and rewriting other models needs "
            "the graph host, which this version does not have yet."
        )
    _need_transformers()


def _need_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "transformers is not installed.", 'Run: pip install "sparsify-attention[hf]"'
        ) from None


def _why_nothing(plan: Plan) -> str:
    if not len(plan):
        return "no attention was found"
    refused = sum(layer.status == "refused" for layer in plan)
    return f"{refused} sites were refused and {len(plan) - refused} are dense by policy"


@torch.no_grad()
def _probe(model: torch.nn.Module, plan: Plan) -> None:
    """A short forward: every planned site must be reached through the registered attention."""
    from sparsify.hosts.transformers import call_counts, fallbacks

    device = next(model.parameters()).device
    if device.type == "meta":
        return
    was_training = model.training
    model.eval()
    before = call_counts(model)
    try:
        model(**{k: _to(v, device) for k, v in example_inputs(model, seq_len=4).items()})
    except SparsifyError:
        raise
    except Exception as error:
        raise CaptureError(f"The rewritten {type(model).__name__} does not run: {error}") from error
    finally:
        model.train(was_training)
    after = call_counts(model)
    for layer in plan.rewritten:
        if after[layer.fqn] == before[layer.fqn]:
            raise CaptureError(
                f"{layer.fqn} was planned, but the model does not call its attention through "
                "transformers' interface.",
                "Keep it dense by a layer rule.",
            )
    for fqn, reason in fallbacks(model).items():
        raise CaptureError(
            f"{fqn} was planned, but runs dense in this model: {reason}.",
            "Keep it dense by a layer rule.",
        )


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _silent(_: str) -> None:
    return None
