"""From a host's name to what it does: capture for it, apply a plan on it, save, load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sparsify.errors import CaptureError, MissingExtraError, SparsifyError, UsageError
from sparsify.exporters.folder import kind_of
from sparsify.hosts import graph
from sparsify.hosts.graph import Proved
from sparsify.hosts.graph_model import GraphModel
from sparsify.passes.examples import example_inputs, is_transformers_model
from sparsify.passes.modes import trying
from sparsify.plans import Plan

__all__ = [
    "HOSTS",
    "apply_plan",
    "capture_programs",
    "chosen_host",
    "exporter_of",
    "loader_of",
]

HOSTS = ("auto", "transformers", "graph", "dynamo")
Args = Sequence[Any] | None
Kwargs = Mapping[str, Any] | None


def chosen_host(model: torch.nn.Module, args: Args, kwargs: Kwargs, host: str) -> str:
    """The host that "auto" stands for, or `host` itself.

    Raises:
        UsageError: no such host, or example inputs are needed and missing.
        CaptureError: the model cannot be on that host.
    """
    if host not in HOSTS:
        raise UsageError(f"Unknown host {host!r}; use {', '.join(HOSTS[:-1])} or {HOSTS[-1]}.")
    if host == "dynamo":
        raise CaptureError("The dynamo host does not exist yet in this version.")
    if isinstance(model, GraphModel):
        raise CaptureError(
            "The model is a result of the graph host, whose attention is rewritten already.",
            "Give the original model.",
        )
    known = is_transformers_model(model)
    if host == "auto":
        host = "transformers" if known else "graph"
    if host == "transformers" and not known:
        raise CaptureError(
            f"{type(model).__name__} is not a transformers model.", "Use the graph host."
        )
    if not known and not (args or kwargs):
        raise UsageError(
            f"{type(model).__name__} needs example inputs.",
            "Pass args= and kwargs= of its forward.",
        )
    if known:
        _need_transformers()
    return host


def capture_programs(
    model: torch.nn.Module,
    args: Args = None,
    kwargs: Kwargs = None,
    *,
    host: str = "auto",
    dynamic: Any = None,
    seq_len: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Proved]:
    """The programs that a host needs of a model, each captured and proved.

    Raises:
        CaptureError: the model cannot be captured.
        UsageError: as `chosen_host`.
    """
    say = progress or (lambda _: None)
    say("capturing the model")
    host = chosen_host(model, args, kwargs, host)
    found = []
    with _capturable(model):
        for inputs in _examples(model, args, kwargs, host, seq_len):
            found.append(graph.proved(model, *inputs, dynamic=dynamic, progress=say))
    return found


def _examples(
    model: torch.nn.Module, args: Args, kwargs: Kwargs, host: str, seq_len: int | None
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Example inputs of every program."""
    if args or kwargs:
        return [(tuple(args or ()), dict(kwargs or {}))]
    if host == "transformers":
        return [((), example_inputs(model, seq_len=seq_len))]
    from sparsify.hosts.graph_transformers import example_programs

    return [((), inputs) for inputs in example_programs(model, seq_len=seq_len)]


def _capturable(model: torch.nn.Module) -> Any:
    """The model in the form that the capture reads; only transformers models have several."""
    if not is_transformers_model(model):
        return contextlib.nullcontext()
    from sparsify.hosts.transformers import as_sdpa

    return as_sdpa(model)


def apply_plan(
    model: torch.nn.Module, plan: Plan, programs: Sequence[Proved], *, host: str, inplace: bool
) -> tuple[torch.nn.Module, Any]:
    """The rewritten model on a host, and what can undo it (None where nothing was changed).

    Raises:
        CaptureError: a planned site cannot be reached or replaced.
    """
    if host == "graph":
        with _capturable(model):  # programs are tried against the model that was captured
            built = graph.build(model, programs, plan, _class_for(model))
        graph.run_examples(built, programs)
        return built, None
    from sparsify.hosts import transformers

    target = model if inplace else transformers.copy_sharing_weights(model)
    handle = transformers.apply(target, plan)
    try:
        _probe(target, plan)
    except BaseException:
        handle.restore()
        raise
    return target, handle


def _class_for(model: torch.nn.Module) -> type[GraphModel]:
    if not is_transformers_model(model):
        return GraphModel
    from sparsify.hosts.graph_transformers import LanguageGraphModel

    return LanguageGraphModel


def exporter_of(model: torch.nn.Module) -> Any:
    """The module that saves a rewritten model."""
    if isinstance(model, GraphModel):
        from sparsify.exporters import pt2

        return pt2
    from sparsify.exporters import hf_folder

    return hf_folder


def loader_of(directory: Path) -> Callable[..., torch.nn.Module]:
    """What loads a saved folder."""
    if kind_of(directory) == "pt2":
        from sparsify.exporters import pt2

        return pt2.load
    _need_transformers()
    from sparsify.exporters import hf_folder

    return hf_folder.load


def _need_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "transformers is not installed.", 'Run: pip install "sparsify-attention[hf]"'
        ) from None


def _probe(model: torch.nn.Module, plan: Plan) -> None:
    """A short forward: every planned site must be reached through the registered attention."""
    from sparsify.hosts.transformers import call_counts, fallbacks

    device = next(model.parameters()).device
    if device.type == "meta":
        return
    before = call_counts(model)
    inputs = {k: _to(v, device) for k, v in example_inputs(model, seq_len=4).items()}
    try:
        with trying(model):
            model(**inputs)
    except SparsifyError:
        raise
    except Exception as error:
        raise CaptureError(f"The rewritten {type(model).__name__} does not run: {error}") from error
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
