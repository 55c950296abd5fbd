"""A new program in which planned sites run the ops of their plans; the captured one stays.

What takes a site's place is traced from a function of its operands and inlined where the old result
stood, so that inputs, outputs, state and dynamic sizes are those of the captured program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from sparsify.errors import CaptureError
from sparsify.ir import AttentionSite, site_key
from sparsify.passes.capture import Captured
from sparsify.passes.cleanup import drop_dead, renamed
from sparsify.passes.detect import attention_calls
from sparsify.passes.exported import duplicate, rebuilt
from sparsify.passes.graphs import expression
from sparsify.passes.invariants import check
from sparsify.passes.matchers.call import AttentionCall
from sparsify.passes.replacement import replacement
from sparsify.passes.retune import SITE
from sparsify.passes.ungroup import ungrouped
from sparsify.plans import Plan

__all__ = ["rewrite"]


def rewrite(captured: Captured, sites: Mapping[str, AttentionSite], plan: Plan) -> ExportedProgram:
    """The captured program with every rewritten site of the plan replaced.

    Args:
        captured: a captured model; it is normalised, and otherwise left as it is.
        sites: the proved sites by key.
        plan: what to do; its rewritten layers must be among the sites.

    Raises:
        CaptureError: a planned site is not proved, or its replacement does not fit.
    """
    calls = attention_calls(captured)
    graph, nodes = duplicate(captured.graph)
    for layer in plan.rewritten:
        site = sites.get(layer.key)
        if site is None:
            raise CaptureError(f"{layer.key} is planned, but not proved in this capture.")
        call = ungrouped(calls[layer.fqn, layer.ordinal], site, captured.ranges)
        run = replacement(call, site, layer, captured.examples)
        _replace(graph, call, run, nodes, site)
    drop_dead(graph)
    check(graph)
    signature = renamed(captured.program.graph_signature, graph)
    return rebuilt(captured.program, graph=graph, signature=signature)


def _replace(
    graph: Graph,
    call: AttentionCall,
    run: Callable[..., Any],
    nodes: dict[Node, Node],
    site: AttentionSite,
) -> None:
    """Put the traced function in the place of the call's result."""
    old = nodes[call.out.node]
    operands = [nodes[operand.node] for operand in call.operands]
    wanted = {"padding": site.mask.padding, "documents": site.mask.documents}
    further = {key: _copy_of(nodes, name) for key, name in wanted.items() if name is not None}

    def replaced(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return run(q, k, v, **dict(zip(further, rest, strict=True)))

    arguments = [*operands, *further.values()]
    new = _inline(graph, old, replaced, arguments, site_key(site.fqn, site.ordinal))
    _check_fits(old, new, site)
    old.replace_all_uses_with(new)
    graph.erase_node(old)
    nodes[call.out.node] = new


def _copy_of(nodes: Mapping[Node, Node], name: str) -> Node:
    """The copy of the captured node of that name."""
    return next(new for old, new in nodes.items() if old.name == name)


def _inline(
    graph: Graph, before: Node, run: Callable[..., Any], arguments: list[Node], key: str
) -> Node:
    """Trace `run` on the arguments' shapes and copy its operators in front of a node."""
    values = [argument.meta["val"] for argument in arguments]
    mode = detect_fake_mode(values)
    assert mode is not None
    with mode, torch.no_grad():
        traced = make_fx(run, tracing_mode="real")(*values)
    traced.graph.eliminate_dead_code()
    known: dict[Node, Node] = dict(
        zip(traced.graph.find_nodes(op="placeholder"), arguments, strict=True)
    )
    with graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op not in ("placeholder", "output"):
                known[node] = graph.node_copy(node, lambda source: known[source])
                known[node].meta = _origin(before, node.meta.get("val"), key)
    (result,) = traced.graph.output_node().all_input_nodes
    return known[result]


def _origin(old: Node, value: Any, key: str) -> dict[str, Any]:
    """Metadata of a new node: where the old one came from, and the site."""
    kept = ("nn_module_stack", "stack_trace")
    meta: dict[str, Any] = {name: old.meta[name] for name in kept if name in old.meta}
    return meta | {"val": value, "custom": {**old.meta.get("custom", {}), SITE: key}}


def _check_fits(old: Node, new: Node, site: AttentionSite) -> None:
    """The new result must have the shape, the type and the memory layout of the old one."""
    a, b = old.meta["val"], new.meta["val"]
    shapes = [tuple(expression(size) for size in x.shape) for x in (a, b)]
    strides = [tuple(expression(size) for size in x.stride()) for x in (a, b)]
    if shapes[0] != shapes[1] or a.dtype != b.dtype:
        raise CaptureError(
            f"The replacement of {site_key(site.fqn, site.ordinal)} has another shape or type: "
            f"{tuple(b.shape)} {b.dtype}, not {tuple(a.shape)} {a.dtype}."
        )
    if strides[0] != strides[1] and not old.meta["val"].is_contiguous():
        raise CaptureError(
            f"The result of {site_key(site.fqn, site.ordinal)} lies in memory as {strides[0]}, "
            f"which its replacement cannot give ({strides[1]})."
        )
