"""In-place operators written as functional ones, where every alias can be followed.

`x.masked_fill_(...)` becomes `y = x.masked_fill(...)`; whoever read x or a view of it later reads y
or the same view of y. Writes to inputs, parameters and buffers, and writes whose aliases are
unclear, stay as they are; the analyses do not read what such a write touches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from sparsify.passes.aliases import aliases_of, base_of, is_certain_view, written
from sparsify.passes.graphs import argument, is_tensor, op_name

__all__ = ["make_functional"]


def make_functional(graph: Graph) -> tuple[Graph, bool]:
    """Replace the in-place operators that can be replaced safely, in execution order."""
    modified = False
    for node in list(graph.nodes):
        if written(node) is not None and _replace(graph, node):
            modified = True
    return graph, modified


def _replace(graph: Graph, node: Node) -> bool:
    target = written(node)
    assert target is not None
    functional, base = _functional(node), base_of(target)
    if functional is None or base.op != "call_function":
        return False
    if not _is_read_later(graph, node, target, base):
        base = target  # nobody else looks: the view is as good as memory of its own
    path = _path(target, base)
    later = _stale(graph, node, base)
    if path is None or later is None:
        return False
    with graph.inserting_before(node):
        new = graph.call_function(functional, node.args, node.kwargs)
        new.meta = dict(node.meta)
        whole = _written_back(graph, new, path)
    _redirect(graph, node, base, whole, later)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    if new in graph.output_node().all_input_nodes:
        new.name = node.name  # the program's signature knows a result by its name
    return True


def _functional(node: Node) -> Any:
    """The operator without the write, if it gives the same shape and type; None otherwise."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    name = target._schema.name.split("::")[1]
    plain = {"__iand__": "__and__", "__ior__": "__or__"}.get(name, name.removesuffix("_"))
    packet = getattr(torch.ops.aten, plain, None) if plain != name else None
    overload = getattr(packet, target._overloadname, None)
    if overload is None or any(a.alias_info for a in overload._schema.arguments):
        return None
    written_to = written(node)
    assert written_to is not None
    return overload if _same_result(node, overload, written_to.meta["val"]) else None


def _same_result(node: Node, overload: Any, wanted: torch.Tensor) -> bool:
    """In place, the type of the written tensor wins; a functional call may promote it."""
    args, kwargs = torch.fx.node.map_arg(
        (node.args, node.kwargs), lambda source: source.meta.get("val")
    )
    try:
        with torch.no_grad():
            result = overload(*args, **kwargs)
    except Exception:  # whatever the fake kernel objects to, the write stays
        return False
    return bool(result.dtype == wanted.dtype and len(result.shape) == len(wanted.shape)) and all(
        a is b or str(a) == str(b) for a, b in zip(result.shape, wanted.shape, strict=True)
    )


def _is_read_later(graph: Graph, node: Node, target: Node, base: Node) -> bool:
    """Whether memory of `base` is read after the write by another way than through `target`."""
    order = {other: position for position, other in enumerate(graph.nodes)}
    through: set[Node] = {target, node}
    for alias in aliases_of(graph, base):
        if alias in through or any(source in through for source in alias.all_input_nodes):
            through.add(alias)
        elif any(order[user] > order[node] for user in alias.users):
            return True
    return False


def _path(target: Node, base: Node) -> list[Node] | None:
    """Views from the written tensor up to its base, each of a kind that can be written back."""
    path = []
    while target is not base:
        if op_name(target) not in ("aten.select", "aten.slice"):
            return None
        path.append(target)
        source = target.args[0]
        assert isinstance(source, Node)
        target = source
    return path


def _written_back(graph: Graph, value: Node, path: list[Node]) -> Node:
    """The base with `value` in the place that the views of `path` show."""
    for view in path:
        source = view.args[0]
        assert isinstance(source, Node)
        if op_name(view) == "aten.select":
            args: tuple[Any, ...] = (source, value, argument(view, "dim"), argument(view, "index"))
            whole = graph.call_function(torch.ops.aten.select_scatter.default, args)
        else:
            bounds = [argument(view, name) for name in ("dim", "start", "end", "step")]
            args = (source, value, *bounds)
            whole = graph.call_function(torch.ops.aten.slice_scatter.default, args)
        whole.meta = dict(source.meta)
        value = whole
    return value


def _stale(graph: Graph, node: Node, base: Node) -> list[Node] | None:
    """Aliases of the base, older than the write and read after it; None if one is unclear."""
    order = {other: position for position, other in enumerate(graph.nodes)}
    stale = []
    for alias in _views_of(graph, base):
        late = any(order[user] > order[node] for user in alias.users)
        if alias is base or order[alias] >= order[node] or not late:
            continue
        if not is_certain_view(alias):
            return None
        stale.append(alias)
    return stale


def _views_of(graph: Graph, base: Node) -> list[Node]:
    """`base` and everything that may be a view of it, in order."""
    found = [base]
    for alias in aliases_of(graph, base_of(base)):
        if alias is not base and any(source in found for source in alias.all_input_nodes):
            found.append(alias)
    return found


def _redirect(graph: Graph, node: Node, base: Node, whole: Node, stale: list[Node]) -> None:
    """Whoever reads the base or a view of it after the write reads the new value."""
    order = {other: position for position, other in enumerate(graph.nodes)}
    fresh: dict[Node, Node] = {base: whole}
    with graph.inserting_before(node):
        for alias in sorted(stale, key=lambda n: order[n]):
            fresh[alias] = _again(graph, alias, fresh)
    added = set(fresh.values())
    for old, new in fresh.items():
        for user in list(old.users):
            if order[user] > order[node] and user not in added:
                user.replace_input_with(old, new)


def _again(graph: Graph, alias: Node, fresh: dict[Node, Node]) -> Node:
    """The same chain of views on the new value."""
    source = alias.args[0]
    assert isinstance(source, Node) and is_tensor(source)
    if source not in fresh:
        fresh[source] = _again(graph, source, fresh)
    return graph.node_copy(alias, lambda n: fresh[n] if n is source else n)
