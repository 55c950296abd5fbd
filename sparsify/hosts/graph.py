"""The graph host: a model rewritten as exported programs, for inference.

The result takes the arguments of the original forward and has the original parameters under their
original names (the same tensors, no copies); batch and length stay dynamic. An exported program has
no training mode: train the original, or rewrite it on another host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sparsify.errors import CaptureError, SparsifyError
from sparsify.hosts.graph_index import branches, cache_layers
from sparsify.hosts.graph_model import GraphModel
from sparsify.hosts.guards import guards_of
from sparsify.hosts.program import Program
from sparsify.hosts.signature import Signature, signature_of
from sparsify.hosts.state import state_of
from sparsify.hosts.trials import agree, as_captured, copies, served_at_one
from sparsify.ir import AttentionSite, Refusal, site_key
from sparsify.passes.capture import Captured, capture
from sparsify.passes.detect import Detection, attention_calls, detect
from sparsify.passes.index_branch import INDEX_KEYS, IndexBranch
from sparsify.passes.modes import trying
from sparsify.passes.rewrite import rewrite
from sparsify.passes.separate import equal_lengths
from sparsify.plans import Plan

__all__ = ["Proved", "agreed", "build", "proved", "run_examples"]


@dataclasses.dataclass(frozen=True)
class Proved:
    """A captured program with what was proved of its attention, and how it is called.

    `args` and `kwargs` are the example inputs of the capture.
    """

    captured: Captured
    detection: Detection
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def proved(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    dynamic: Any = None,
    progress: Callable[[str], None] | None = None,
) -> Proved:
    """Capture `model` on example inputs and prove what its attention computes.

    Raises:
        CaptureError: the model cannot be captured.
    """
    captured = capture(model, tuple(args), kwargs, dynamic=dynamic)
    if progress is not None:
        progress("proving what each attention site computes")
    return Proved(captured, detect(captured), tuple(args), dict(kwargs))


def agreed(programs: Sequence[Proved]) -> Detection:
    """What was proved in every program: a site that one of them refuses is refused."""
    first, *others = (program.detection for program in programs)
    sites = {site_key(site.fqn, site.ordinal): site for site in first.sites}
    refusals = list(first.refusals)
    for other in others:
        there = {site_key(site.fqn, site.ordinal) for site in other.sites}
        reasons = {site_key(r.fqn, r.ordinal): r for r in other.refusals}
        for key in [key for key in sites if key not in there]:
            refusals.append(_with_cache(sites.pop(key), reasons.get(key)))
    return dataclasses.replace(first, sites=tuple(sites.values()), refusals=tuple(refusals))


def _with_cache(site: AttentionSite, reason: Refusal | None) -> Refusal:
    if reason is None:
        message = "the program with a cache does not have this attention"
        return Refusal(site.fqn, site.ordinal, "MASK_UNPROVED", message, source=site.source)
    return dataclasses.replace(reason, message=f"with a cache: {reason.message}")


def build(
    model: torch.nn.Module,
    programs: Sequence[Proved],
    plan: Plan,
    kind: type[GraphModel] | None = None,
) -> GraphModel:
    """The programs of `model` rewritten by the plan, as one module on the same weights.

    Raises:
        CaptureError: a planned site is not proved in one of the programs.
    """
    signature = signature_of(model.forward)
    first = programs[0]
    learned = branches(model, first.captured, first.detection.sites, plan)
    indexed = cache_layers(model, plan) if len(programs) > 1 else ()
    rewritten = [_program(model, p, plan, signature, learned, indexed) for p in programs]
    state = state_of([program.exported for program in rewritten])
    config = getattr(model, "config", None)
    return (kind or GraphModel)(rewritten, plan, signature, state, config)


def run_examples(model: GraphModel, programs: Sequence[Proved]) -> None:
    """Run every program once on the inputs it was captured with.

    Raises:
        CaptureError: one does not run.
    """
    if any(tensor.is_meta for tensor in model.parameters()):
        return
    for program in programs:
        args, kwargs = copies((program.args, dict(program.kwargs)))
        kwargs = model.sparsify_example(kwargs)
        try:
            with trying(model):
                model(*args, **kwargs)
        except SparsifyError:
            raise
        except Exception as error:
            raise CaptureError(f"The rewritten program does not run: {error}") from error


def _program(
    model: torch.nn.Module,
    proved: Proved,
    plan: Plan,
    signature: Signature,
    learned: Mapping[str, IndexBranch],
    indexed: tuple[int, ...],
) -> Program:
    captured = proved.captured
    sites = {site_key(site.fqn, site.ordinal): site for site in proved.detection.sites}
    given = signature.named(proved.args, proved.kwargs)
    args = tuple(name for name in given if name not in proved.kwargs)
    exported = rewrite(captured, sites, plan, learned, gives_keys=bool(indexed))
    after_cache = any(sites[p.key].stream.cached for p in plan.rewritten if p.indexer == "learned")
    kwargs = (*proved.kwargs, *([INDEX_KEYS] if after_cache else ()))
    program = Program(exported, args, kwargs, _padding_sizes(proved), indexed=indexed)
    values = {
        str(site.mask.padding): site.mask.padding_values
        for site in (sites[layer.key] for layer in plan.rewritten)
        if site.mask.padding_values is not None
    }
    guards = (*guards_of(captured), *_equal_lengths(captured, plan))
    program = dataclasses.replace(program, guards=guards, values=values)
    if any(tensor.is_meta for tensor in model.parameters()):
        return program
    return _tried(model, proved, program)


def _equal_lengths(captured: Captured, plan: Plan) -> Iterator[str]:
    """That queries and keys are equally many where the proof assumes it, and keys and values."""
    calls = attention_calls(captured)
    for call in (calls[layer.fqn, layer.ordinal] for layer in plan.rewritten):
        pairs = [*equal_lengths(captured, call).items(), (call.kv_len, call.v.shape[-2])]
        yield from (f"Eq({a}, {b})" for a, b in pairs if a != b)


def _tried(model: torch.nn.Module, proved: Proved, program: Program) -> Program:
    """The program with what running it as captured beside the model says of its calls.

    Raises:
        CaptureError: the two differ on the example inputs.
    """
    captured = proved.captured
    inputs = as_captured(captured, (proved.args, dict(proved.kwargs)))
    state = {**captured.program.state_dict, **captured.program.constants}
    unchanged = Program(captured.program, (), ())

    def run(*args: Any, **kwargs: Any) -> Any:
        return unchanged.run_flat(pytree.tree_leaves((args, kwargs)), state.__getitem__)

    # what the forward counts in Python shows in the second call
    if not agree(_calls(model, model, 2), _calls(model, run, 2), inputs):
        raise CaptureError(
            f"{captured.name} and its captured program do not agree on the example inputs.",
            "A capture does not see what a forward keeps in Python, such as a counter of calls.",
        )
    original, alone = _calls(model, model), _calls(model, run)
    padding = {
        name: sizes
        for name, sizes in program.padding.items()
        if name in program.names and agree(original, alone, *_unpadded(program, inputs, name))
    }
    ones = served_at_one(captured, program.guards, inputs, original, alone)
    return dataclasses.replace(program, padding=padding, ones=ones)


def _calls(
    model: torch.nn.Module, run: Callable[..., Any], times: int = 1
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """A number of calls in a row, as one function of their inputs; the model stays as it was."""

    def called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with trying(model):
            results = []
            for _ in range(times):
                own_args, own_kwargs = copies((args, kwargs))
                results.append(copies(pytree.tree_leaves(run(*own_args, **own_kwargs))))
            return results

    return called


def _unpadded(program: Program, inputs: Any, name: str) -> tuple[Any, Any]:
    """The example inputs without the padding, and with one that hides no key."""
    args, kwargs = inputs
    given = {**dict(zip(program.args, args, strict=True)), **kwargs}

    def with_padding(value: Any) -> Any:
        now = {**given, name: value}
        return tuple(now[n] for n in program.args), {n: now[n] for n in kwargs}

    return with_padding(None), with_padding(torch.ones_like(given[name]))


def _padding_sizes(proved: Proved) -> dict[str, tuple[str, str]]:
    """Batch and key length of every padding input, as expressions over other inputs' sizes."""
    calls = attention_calls(proved.captured)
    found = {}
    for site in proved.detection.sites:
        call = calls[site.fqn, site.ordinal]
        if site.mask.padding is not None and call.rank == 4:
            found[site.mask.padding] = (str(call.q.shape[0]), str(call.kv_len))
    return found
