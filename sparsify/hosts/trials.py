"""What is settled by numbers: the captured program runs against the model itself.

torch.export takes for granted that sizes are larger than 1, and does not see what a model keeps in
Python; so the program is tried on the example, at size 1, and without the padding mask.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from sparsify.hosts.guards import user_inputs
from sparsify.hosts.sizes import evaluate, holds
from sparsify.passes.capture import Captured
from sparsify.passes.dims import doubled
from sparsify.passes.graphs import expression

__all__ = ["agree", "as_captured", "copies", "served_at_one"]

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4}
NEAR = 64
ROUGH = 5e-2  # 16-bit results of one and the same arithmetic


def as_captured(captured: Captured, inputs: Any) -> Any:
    """The example inputs `(args, kwargs)` with the batch that the capture gave them."""
    sizes = _sizes(captured, pytree.tree_leaves(inputs))
    same = all(captured.examples.get(symbol, size) == size for symbol, size in sizes.items())
    return inputs if same else doubled(*inputs)


def served_at_one(
    captured: Captured, guards: tuple[str, ...], inputs: Any, model: Call, program: Call
) -> frozenset[str]:
    """Symbols for which 1 is as good as any other size: there the program equals the model.

    Args:
        inputs: `(args, kwargs)` of the capture.
        model, program: both as functions of args and kwargs.
    """
    leaves, spec = pytree.tree_flatten(inputs)
    sizes = _sizes(captured, leaves)

    def agreed(ones: frozenset[str]) -> bool | None:
        wanted = _with_ones(ones, sizes, guards)
        if wanted is None:
            return None
        cut = [_cut(node, leaf, wanted) for node, leaf in _pairs(captured, leaves)]
        return agree(model, program, pytree.tree_unflatten(cut, spec))

    found: frozenset[str] = frozenset()
    for group in _groups(captured, sizes):
        # together too, as far as the guards let them: a model may ask for one of everything
        if not group <= found and agreed(group) and agreed(found | group) is not False:
            found |= group
    return found


def _pairs(captured: Captured, leaves: list[Any]) -> Iterator[tuple[Node | None, Any]]:
    """Every leaf with its placeholder; None for leaves that are no tensors."""
    nodes = iter(user_inputs(captured))
    for leaf in leaves:
        yield (next(nodes) if isinstance(leaf, torch.Tensor) else None), leaf


def _sizes(captured: Captured, leaves: list[Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for node, leaf in _pairs(captured, leaves):
        if node is not None:
            for symbol, number in zip(_symbols(node), leaf.shape, strict=True):
                if symbol is not None:
                    found.setdefault(symbol, int(number))
    return found


def _symbols(node: Node) -> list[str | None]:
    found = [expression(size) for size in node.meta["val"].shape]
    return [str(symbol) if symbol.is_Symbol else None for symbol in found]


def _groups(captured: Captured, sizes: Mapping[str, int]) -> list[frozenset[str]]:
    """Symbols that may belong together: dims of one place and size in all inputs (the batch), then
    those of one argument (all entries of a cache)."""
    alike: dict[tuple[int, int], set[str]] = {}
    own: dict[tuple[str, int], set[str]] = {}
    for node in user_inputs(captured):
        argument = node.name.rstrip("0123456789").rstrip("_")
        for dim, symbol in enumerate(_symbols(node)):
            if symbol is not None:
                alike.setdefault((dim, sizes[symbol]), set()).add(symbol)
                own.setdefault((argument, dim), set()).add(symbol)
    return list(dict.fromkeys(frozenset(group) for group in (*alike.values(), *own.values())))


def _with_ones(
    group: frozenset[str], sizes: Mapping[str, int], guards: tuple[str, ...]
) -> dict[str, int] | None:
    """Sizes with ones for the group, and others as the guards then ask; None if there are none."""
    wanted, free = {**sizes, **dict.fromkeys(group, 1)}, set(sizes) - group
    while broken := _broken(guards, wanted):
        changes = [
            {**wanted, name: size}
            for name in sorted(free & _names(broken[0]))
            for size in _smaller(wanted[name])
        ]
        best = min(changes, key=lambda change: len(_broken(guards, change)), default=wanted)
        if len(_broken(guards, best)) >= len(broken):
            return None
        free -= {name for name in free if best[name] != wanted[name]}
        wanted = best
    return wanted


def _broken(guards: tuple[str, ...], sizes: Mapping[str, int]) -> list[str]:
    return [guard for guard in guards if not holds(guard, sizes)]


def _names(guard: str) -> set[str]:
    return set(re.findall(r"\w+", guard))


def _smaller(size: int) -> list[int]:
    """Sizes to try in place of one: those close to it, and close to 1."""
    return sorted({*range(max(1, size - NEAR), size), *range(1, min(size, NEAR))}, reverse=True)


def _cut(node: Node | None, leaf: Any, wanted: Mapping[str, int]) -> Any:
    """The end of an input, in the wanted sizes."""
    if node is None:
        return leaf
    for dim, size in enumerate(expression(size) for size in node.meta["val"].shape):
        told = {str(symbol) for symbol in size.free_symbols}
        if told and told <= wanted.keys():  # one size, or a sum of several
            kept = min(int(evaluate(str(size), wanted)), leaf.shape[dim])
            leaf = leaf.narrow(dim, leaf.shape[dim] - kept, kept)
    return leaf.clone()


@torch.no_grad()
def agree(model: Call, program: Call, inputs: Any, asked: Any = None) -> bool:
    """Whether both run and compute the same.

    Args:
        inputs: `(args, kwargs)` of both.
        asked: those of the program, where it is to be called otherwise.
    """
    results = []
    for call, given in ((model, inputs), (program, asked or inputs)):
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                results.append(pytree.tree_leaves(call(*copies(given))))
        except Exception:  # the model's own code, at a size it may not know
            return False
    pairs = list(zip(*results, strict=False))
    return len(results[0]) == len(results[1]) and all(_close(a, b) for a, b in pairs)


def copies(inputs: Any) -> Any:
    """The same inputs as tensors of their own, which a forward may change."""

    def copied(leaf: Any) -> Any:
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(copied, inputs)


def _close(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = b.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if b.numel() else 0.0
    allowed = CLOSE.get(a.dtype, ROUGH) * scale
    return torch.allclose(a, b, rtol=0.0, atol=allowed, equal_nan=True)
