"""Which dims of the inputs are captured as dynamic, what is tried when that fails, what came out.

By default the batch and the length of every tensor input are tried: dims 0 and 1, or 0 and 2 for
tensors of four axes (`[batch, heads, length, size]`: queries, keys, cache entries). torch.export
fixes a dim where the model's code asks for it; that is reported, never hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

__all__ = [
    "Attempt",
    "attempts",
    "doubled",
    "example_sizes",
    "found_dims",
    "fresh",
    "own_shapes",
    "specialised",
]

Tree = Any


@dataclass(frozen=True)
class Attempt:
    """One way to capture: the inputs, the dims asked for, and how to call it in a note."""

    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: Any  # a function tensor -> spec, a spec given by the user, or None for static
    double: bool


def attempts(args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> Iterator[Attempt]:
    """The ways to try, best first. With dims given by the user there is no other way."""
    if given is False:
        yield Attempt("static shapes", args, kwargs, None, False)
        return
    if given is not None:
        yield Attempt("the dynamic dims that were given", args, kwargs, given, False)
        return
    single = any(t.dim() > 0 and t.shape[0] == 1 for t in _tensors(args, kwargs))
    for double in (True, False) if single else (False,):
        yield Attempt("dynamic batch and length", args, kwargs, batch_and_length, double)
        yield Attempt("a dynamic batch only", args, kwargs, batch_only, double)
    yield Attempt("static shapes", args, kwargs, None, False)


def batch_and_length(tensor: torch.Tensor) -> dict[int, Any] | None:
    """Dims to try on one tensor: batch and length."""
    rank = tensor.dim()
    dims = (0, 2) if rank == 4 else (0, 1)[:rank]
    return _auto(tensor, dims)


def batch_only(tensor: torch.Tensor) -> dict[int, Any] | None:
    """Dims to try on one tensor: the first."""
    return _auto(tensor, (0,)[: tensor.dim()])


def _auto(tensor: torch.Tensor, dims: Sequence[int]) -> dict[int, Any] | None:
    # torch.export fixes sizes 0 and 1 in any case
    chosen = {dim: Dim.AUTO for dim in dims if tensor.shape[dim] > 1}
    return chosen or None


def own_shapes(
    model: torch.nn.Module, shapes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`dynamic_shapes` for torch.export: a spec for every input, by the forward's own names."""
    if shapes is None or not callable(shapes):
        return shapes
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    return _mapped(shapes, dict(bound))


def _mapped(shapes: Any, tree: Tree) -> Tree:
    """Specs in the tree of the inputs; torch.export wants a flat list for registered classes."""
    if _is_tensor(tree):
        return shapes(tree)
    if isinstance(tree, dict):
        return {key: _mapped(shapes, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        specs = [_mapped(shapes, value) for value in tree]
        return specs if isinstance(tree, list) else tuple(specs)
    leaves = pytree.tree_leaves(tree)
    if len(leaves) == 1 and leaves[0] is tree:
        return None
    return [_mapped(shapes, leaf) for leaf in leaves]


def fresh(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The same inputs as tensor objects of their own: torch.export leaves marks on tensors, which
    the next attempt would obey and the user would keep."""

    def unmarked(leaf: Any) -> Any:
        return leaf.detach() if _is_tensor(leaf) else leaf

    return pytree.tree_map(unmarked, args), pytree.tree_map(unmarked, kwargs)


def doubled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Inputs with every tensor of batch 1 repeated once along the batch."""

    def twice(leaf: Any) -> Any:
        if _is_tensor(leaf) and leaf.dim() > 0 and leaf.shape[0] == 1:
            return torch.cat([leaf, leaf])
        return leaf

    return pytree.tree_map(twice, args), pytree.tree_map(twice, kwargs)


def found_dims(program: ExportedProgram, users: Sequence[str]) -> dict[str, dict[int, str]]:
    """Dynamic dims of the user inputs in the captured program, with the symbol of each."""
    out: dict[str, dict[int, str]] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node.name in users and isinstance(value, torch.Tensor):
            dims = {d: str(s) for d, s in enumerate(value.shape) if _is_free(s)}
            if dims:
                out[node.name] = dims
    return out


def specialised(program: ExportedProgram, attempt: Attempt, inputs: Any) -> tuple[str, ...]:
    """One sentence for every dim that was tried and became fixed."""
    if not callable(attempt.shapes):
        return ()
    out = []
    for name, value, example in _pairs(program, inputs):
        for dim in attempt.shapes(example) or {}:
            if not _is_free(value.shape[dim]):
                fixed = value.shape[dim]
                out.append(f"dim {dim} of {name} is fixed at {fixed} by the model's code")
    return tuple(out)


def example_sizes(program: ExportedProgram, inputs: Any) -> dict[str, int]:
    """Every symbol that is a size of an input, with that size in the example."""
    return {
        str(size): int(example.shape[dim])
        for _, value, example in _pairs(program, inputs)
        for dim, size in enumerate(value.shape)
        if _is_free(size)
    }


def _is_free(size: Any) -> bool:
    """Whether a size still has a symbol: a captured SymInt can be a number by now."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def _pairs(
    program: ExportedProgram, inputs: Any
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, captured value and example of every tensor input, in order."""
    users = set(program.graph_signature.user_inputs)
    nodes = [n for n in program.graph.find_nodes(op="placeholder") if n.name in users]
    tensors = [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    for node, example in zip(tensors, _tensors(*inputs), strict=True):
        yield node.name, node.meta["val"], example


def _tensors(*trees: Tree) -> list[torch.Tensor]:
    return [leaf for tree in trees for leaf in pytree.tree_leaves(tree) if _is_tensor(leaf)]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)
