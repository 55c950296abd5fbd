"""Models beside a rewritten one, as the checks need them: other sizes, all dense, float64."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Collection
from typing import Any

import torch

from sparsify import rewriting
from sparsify.hosts import transformers as host
from sparsify.hosts.graph_model import GraphModel
from sparsify.hosts.indexers import NAME as INDEXER
from sparsify.hosts.native_sparse import native_layers
from sparsify.plans import Plan

__all__ = ["all_dense", "in_float64", "plan_of", "retuned", "takes"]


def plan_of(model: torch.nn.Module) -> Plan | None:
    """The plan that was applied to a model on any host; None for an original."""
    return model.sparsify_plan if isinstance(model, GraphModel) else host.plan_of(model)


def takes(model: Any, name: str) -> bool:
    """Whether the model has an input of that name."""
    if isinstance(model, GraphModel):
        return model.sparsify_takes(name)
    return name in inspect.signature(model.forward).parameters


def retuned(model: Any, **changes: Any) -> Any:
    """A rewritten model with its sparse layers changed, on the same weights. Sizes of layers that
    are sparse by themselves stay."""
    plan = plan_of(model)
    assert plan is not None
    return _with_plan(model, _changed(plan, native_layers(model), **changes))


def _changed(plan: Plan, native: Collection[str] = (), **changes: Any) -> Plan:
    others = {name: value for name, value in changes.items() if name != "topk"}
    layers = tuple(
        dataclasses.replace(p, **(others if p.fqn in native else changes)) if p.sparse else p
        for p in plan
    )
    return Plan(layers, plan.policy, plan.model)


def _with_plan(model: Any, plan: Plan) -> Any:
    if isinstance(model, GraphModel):
        return model.sparsify_retuned(plan)
    twin = host.copy_sharing_weights(model)
    host.apply(twin, plan)
    return twin


Inputs = tuple[tuple[Any, ...], dict[str, Any]] | None


def all_dense(original: Any, rewritten: Any, inputs: Inputs = None) -> Any:
    """What rewriting the original makes of it under a policy that keeps every layer dense."""
    plan = plan_of(rewritten)
    assert plan is not None
    dense = _changed(plan, method="dense", status="kept_dense")
    if not isinstance(rewritten, GraphModel):
        return _with_plan(rewritten, dense)
    return _built(original, dense, inputs)


def in_float64(original: Any, rewritten: Any) -> Any:
    """The rewritten model in float64."""
    if not isinstance(rewritten, GraphModel):
        return copy.deepcopy(rewritten).double()
    plan = plan_of(rewritten)
    assert plan is not None
    exact = _built(copy.deepcopy(original).double(), plan)
    weights = dict(rewritten.named_parameters())
    with torch.no_grad():  # its learned indexers start anew
        for name, parameter in exact.named_parameters():
            if f".{INDEXER}." in f".{name}":
                parameter.copy_(weights[name])
    return exact


def _built(original: Any, plan: Plan, inputs: Inputs = None) -> Any:
    args, kwargs = inputs or ((), {})
    programs = rewriting.capture_programs(original, args, kwargs, host="graph")
    model, _ = rewriting.apply_plan(original, plan, programs, host="graph", inplace=False)
    return model
