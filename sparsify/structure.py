"""V1 and V2: what a rewrite must leave as it was, and that doing nothing changes nothing."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection
from typing import Any

import torch

from sparsify.comparing import (
    Context,
    Pair,
    join,
    logits,
    plain_and_padded,
    result,
    same_bits,
)
from sparsify.hosts.graph_model import GraphModel
from sparsify.hosts.indexers import NAME as INDEXER
from sparsify.hosts.signature import signature_of
from sparsify.passes.index_branch import INDEX_KEYS
from sparsify.passes.retune import is_site, site_of
from sparsify.report import CheckResult

__all__ = [
    "interface_faults",
    "no_op",
    "program_faults",
    "site_faults",
    "state_faults",
    "structure",
]


def structure(c: Context) -> CheckResult:
    """V1: same weights, buffers and signature; every detected site is accounted for.

    `detected` are the sites of a fresh inspection of the original, where the caller made one.
    """
    faults = state_faults(c) + interface_faults(c) + site_faults(c) + program_faults(c)
    ids = c.tokens(2)
    if list(c.original(ids).keys()) != list(c.rewritten(ids).keys()):
        faults.append("the outputs have other names")
    counts = {s: sum(p.status == s for p in c.plan) for s in ("rewritten", "kept_dense", "refused")}
    summary = ", ".join(f"{n} {s.replace('_', ' ')}" for s, n in counts.items())
    weights = len(c.original.state_dict())
    added = len(c.rewritten.state_dict().keys() - c.original.state_dict().keys())
    metrics = {
        **counts,
        "added_weights": added,
        "detected": None if c.detected is None else len(c.detected),
        "expected": c.expected,
        "weights": weights,
    }
    more = f", {added} of learned indexers added" if added else ""
    done = f"{weights} tensors bit-identical{more}; {summary}"
    return result("V1", "structure", faults, done, metrics)


def state_faults(c: Pair) -> list[str]:
    """Parameters and buffers that were renamed, lost or changed."""
    a, b = c.original.state_dict(), c.rewritten.state_dict()
    faults = _indexer_faults(c, b.keys())
    b = {name: value for name, value in b.items() if name in a or not _is_added(c, name)}
    if a.keys() != b.keys():
        faults.append(f"parameters or buffers differ: {sorted(a.keys() ^ b.keys())[:3]}")
    # buffers that are not saved: an exported program keeps those that it reads
    unsaved, kept = dict(c.original.named_buffers()), dict(c.rewritten.named_buffers())
    kept = {name: value for name, value in kept.items() if not _is_added(c, name)}
    if not isinstance(c.rewritten, GraphModel) and unsaved.keys() != kept.keys():
        faults.append(f"buffers differ: {sorted(unsaved.keys() ^ kept.keys())[:3]}")
    one, two = {**unsaved, **a}, {**kept, **b}
    changed = [k for k in one.keys() & two.keys() if not same_bits(one[k], two[k])]
    if changed:
        faults.append(f"weights changed: {changed[:3]}")
    return faults


def _is_added(c: Pair, name: str) -> bool:
    """Whether the tensor belongs to a learned indexer of the plan."""
    learned = (layer.fqn for layer in c.plan.rewritten if layer.indexer == "learned")
    return any(name.startswith(f"{fqn}.{INDEXER}." if fqn else f"{INDEXER}.") for fqn in learned)


def _indexer_faults(c: Pair, names_there: Collection[str]) -> list[str]:
    """Layers that are to have a learned indexer, and have none."""
    learned = [layer for layer in c.plan.rewritten if layer.indexer == "learned"]
    names = {layer.key: f"{layer.fqn}.{INDEXER}.q_proj.weight".lstrip(".") for layer in learned}
    missing = [key for key, name in names.items() if name not in names_there]
    return [f"{missing[0]} has no indexer"] if missing else []


def interface_faults(c: Pair) -> list[str]:
    """Whether the forward takes other arguments."""
    if isinstance(c.rewritten, GraphModel):
        same = signature_of(c.original.forward) == c.rewritten.sparsify_signature
    else:
        one, two = (inspect.signature(model.forward) for model in (c.original, c.rewritten))
        same = one == two
    return [] if same else ["the forward signature changed"]


def site_faults(c: Pair) -> list[str]:
    """Attention that the plan does not account for, and plans for what is not there."""
    faults = []
    if c.expected is not None and len(c.plan) != c.expected:
        faults.append(
            f"{len(c.plan)} sites in the plan, {c.expected} attention layers in the model"
        )
    if c.detected is not None and set(c.detected) != set(c.plan.by_key()):
        other = sorted(set(c.detected) ^ set(c.plan.by_key()))
        faults.append(f"plan and detected sites differ in {other[:3]}")
    modules = dict(c.original.named_modules())
    missing = [p.fqn for p in c.plan if p.fqn not in modules]
    if missing:
        faults.append(f"no module {missing[0]}")
    return faults


def program_faults(c: Pair) -> list[str]:
    """Sites, inputs, outputs, mutations and dynamic sizes of the programs of the graph host against
    a fresh capture of the original."""
    if not isinstance(c.rewritten, GraphModel):
        return []
    planned = [p.key for p in c.plan.rewritten]
    faults = []
    pairs = zip(c.rewritten.sparsify_programs, c.dense.sparsify_programs, strict=True)
    for program, other in pairs:
        graph = program.exported.graph
        graph.lint()
        there = [site_of(node) for node in graph.nodes if is_site(node)]
        if there != planned:
            faults.append(f"a program replaces {there[:3]}, the plan says {planned[:3]}")
        if _inputs(program) != _inputs(other):
            faults.append("inputs of a program, or their dynamic sizes, changed")
        if _outputs(program) != _outputs(other):
            faults.append("outputs of a program changed")
    return faults


def _inputs(program: Any) -> list[Any]:
    """Kind, dtype and sizes of every input; None stands for a dynamic size. What a learned indexer
    adds is left out."""
    found: list[Any] = []
    specs = program.exported.graph_signature.input_specs
    nodes = program.exported.graph.find_nodes(op="placeholder")
    for spec, node in zip(specs, nodes, strict=True):
        value = node.meta.get("val")
        if node.name.startswith(INDEX_KEYS) or f".{INDEXER}." in f".{spec.target}":
            continue
        if isinstance(value, torch.Tensor):
            sizes = [size if isinstance(size, int) else None for size in value.shape]
            found.append((spec.kind, spec.target, value.dtype, sizes))
        else:
            found.append((spec.kind, spec.target, value))
    return found


def _outputs(program: Any) -> list[Any]:
    specs = program.exported.graph_signature.output_specs
    own = specs[: len(specs) - len(program.indexed)]
    return [(spec.kind, spec.target) for spec in own]


def no_op(c: Context) -> CheckResult:
    """V2: with an all-dense plan the outputs are bit-equal."""
    original = _on_the_same_memory(c.original, c.dense)
    lengths = sorted({1, min(c.spans[0] + 1, c.limit)})
    faults = [
        f"outputs differ at {n} tokens"
        for n in lengths
        for ids, mask in plain_and_padded(c, n)
        if not same_bits(logits(original, ids, mask), logits(c.dense, ids, mask))
    ]
    done = f"bit-equal at {join(lengths)} tokens, {c.settings_run}"
    return result("V2", "no-op", faults, done, {"tokens": lengths})


def _on_the_same_memory(model: torch.nn.Module, other: torch.nn.Module) -> torch.nn.Module:
    """A copy of `model` that holds the very tensors of `other`, where they have the same bits.

    Matrix products round differently for equal weights at differently aligned addresses.
    """
    memory = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    memo: dict[int, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        twin = memory.get(name)
        memo[id(tensor)] = tensor if twin is None or not same_bits(tensor, twin) else twin
    twin_model: torch.nn.Module = copy.deepcopy(model, memo)
    return twin_model
