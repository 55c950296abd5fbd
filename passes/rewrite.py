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
from sparsify.passes.index_branch import IndexBranch, IndexState, rotary_tables
from sparsify.passes.invariants import check
from sparsify.passes.matchers.call import AttentionCall
from sparsify.passes.replacement import replacement
from sparsify.passes.retune import SITE
from sparsify.passes.ungroup import ungrouped
from sparsify.plans import Plan

__all__ = ["rewrite"]


def rewrite(
    captured: Captured,
    sites: Mapping[str, AttentionSite],
    plan: Plan,
    branches: Mapping[str, IndexBranch] | None = None,
    *,
    gives_keys: bool = False,
) -> ExportedProgram:
    """The captured program with every rewritten site of the plan replaced.

    Args:
        captured: a captured model; it is normalised, and otherwise left as it is.
        sites: the proved sites by key.
        plan: what to do; its rewritten layers must be among the sites.
        branches: the learned indexers of the plan's layers, by site.
        gives_keys: whether the program gives the index keys of all tokens as well, for a cache.

    Raises:
        CaptureError: a planned site is not proved, or its replacement does not fit.
    """
    calls = attention_calls(captured)
    graph, nodes = duplicate(captured.graph)
    state = IndexState(graph, captured.program, gives_keys=gives_keys)
    for layer in plan.rewritten:
        site = sites.get(layer.key)
        if site is None:
            raise CaptureError(f"{layer.key} is planned, but not proved in this capture.")
        call = ungrouped(calls[layer.fqn, layer.ordinal], site, captured.ranges)
        run = replacement(call, site, layer, captured.examples)
        index = None
        if layer.indexer == "learned":
            index = _index(state, call, site, nodes, (branches or {})[layer.key])
        _replace(graph, call, run, nodes, site, index)
    state.finish()
    drop_dead(graph)
    check(graph)
    return rebuilt(
        captured.program,
        graph=graph,
        signature=renamed(state.signature(), graph),
        state_dict={**captured.program.state_dict, **state.weights},
        calls=state.call_graph(),
    )


def _index(
    state: IndexState,
    call: AttentionCall,
    site: AttentionSite,
    nodes: dict[Node, Node],
    branch: IndexBranch,
) -> tuple[Node, Node]:
    """Index queries, and index keys of all tokens, in front of the call's result."""
    graph, old, key = state.graph, nodes[call.out.node], site_key(site.fqn, site.ordinal)
    source = next(node for node in nodes if node.name == site.stream.source)
    _check_hidden(source, branch, key)
    mode = detect_fake_mode([source.meta["val"]])
    assert mode is not None
    weights = [state.parameter(name, w, mode) for name, w in branch.weights.items()]
    tables = rotary_tables(call.q.node, source) if branch.turns else ()
    if tables is None:
        raise CaptureError(f"{key}: no rotary tables are found in the graph.")
    given = [nodes[source], *(nodes[table] for table in tables), *weights]
    queries = _inline(graph, old, branch.queries, given, key)
    keys = _inline(graph, old, branch.keys, given, key)
    if site.stream.cached:
        own, all_k = keys.meta["val"], nodes[call.k.node].meta["val"]
        earlier = all_k.shape[call.k.order[-2]] - own.shape[2]
        like = own.new_empty(own.shape[0], 1, earlier, own.shape[3])
        before = state.earlier(like)
        keys = _inline(graph, old, lambda a, b: torch.cat([a, b], 2), [before, keys], key)
    state.give(keys)
    return queries, keys


def _check_hidden(source: Node, branch: IndexBranch, key: str) -> None:
    shape = source.meta["val"].shape
    if len(shape) != 3 or shape[2] != branch.hidden_size:
        raise CaptureError(
            f"{key}: q, k and v come from {source.name} of shape {tuple(shape)}; a learned indexer "
            f"needs hidden states [batch, tokens, {branch.hidden_size}].",
            'Use indexer="proxy".',
        )


def _replace(
    graph: Graph,
    call: AttentionCall,
    run: Callable[..., Any],
    nodes: dict[Node, Node],
    site: AttentionSite,
    index: tuple[Node, Node] | None = None,
) -> None:
    """Put the traced function in the place of the call's result."""
    old = nodes[call.out.node]
    operands = [nodes[operand.node] for operand in call.operands]
    wanted = {"padding": site.mask.padding, "documents": site.mask.documents}
    further = {key: _copy_of(nodes, name) for key, name in wanted.items() if name is not None}
    if index is not None:
        further |= dict(zip(("index_queries", "index_keys"), index, strict=True))

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
