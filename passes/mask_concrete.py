"""Running a mask's sub-graph on real numbers, at sizes of our choice.

The sizes are larger than every constant in the sub-graph where the captured ranges allow it, so
that a window of 4096 cannot pass for causal; inputs are random.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from sparsify.passes.aliases import mutations_of, written
from sparsify.passes.capture import Captured
from sparsify.passes.graphs import dtype_of, expression, is_shape_only, is_tensor, shape_of
from sparsify.passes.matchers.products import added

__all__ = [
    "NotRunnable",
    "Slice",
    "concrete",
    "random_documents",
    "random_padding",
    "random_positions",
]

Expr = Any
Sizes = Mapping[Expr, int]
MAX_CONSTANT = 2**31
SEED = 1234


class NotRunnable(Exception):
    """The sub-graph cannot be run at sizes that would say something."""


class Slice:
    """The part of a captured graph that a node's value depends on.

    Operators that use only the shape of a tensor (`zeros_like`, `new_ones`) cut it off there.

    Args:
        captured: gives the values of buffers and constants.
        node: whose value is wanted.
        user: who reads it; what changes the value in place before that belongs to the slice.
        cut: a product whose values are given to `run`; what it is made of is left out.
    """

    def __init__(self, captured: Captured, node: Node, user: Node, cut: Node | None = None) -> None:
        self.captured, self.node, self.cut = captured, node, cut
        self.nodes = _closure(node, user, cut)

    def model_inputs(self) -> list[Node]:
        """Placeholders of the user's tensors that the value depends on."""
        return [n for n in self.nodes if n.op == "placeholder" and n.name in self.captured.inputs]

    def symbols(self) -> list[Expr]:
        """Shape symbols in use, in order of name."""
        found: set[Expr] = set()
        for node in self.nodes:
            found |= _symbols(node)
        return sorted(found, key=str)

    def largest_constant(self) -> int:
        """Largest integer written in the sub-graph, apart from "to the end" markers."""
        numbers = [abs(n) for node in self.nodes for n in _integers((node.args, node.kwargs))]
        return max((n for n in numbers if n < MAX_CONSTANT), default=0)

    def sizes(self, batch: Iterable[Expr], length: int) -> dict[Expr, int]:
        """Numbers for the symbols: 2 for a batch, about `length` for the others."""
        small, out = set(batch), {}
        for step, symbol in enumerate(self.symbols()):
            low, high = self.captured.ranges.get(str(symbol), (0, None))
            wanted = 2 if symbol in small else length + step
            wanted = max(wanted, low)
            out[symbol] = wanted if high is None else min(wanted, high)
        return out

    def run(
        self,
        sizes: Sizes,
        inputs: Mapping[str, torch.Tensor],
        product: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The node's value with these sizes, model inputs and values of the cut product.

        Raises:
            NotRunnable: values are missing, or an operator fails at these sizes.
        """
        known: dict[Node, Any] = {}
        with torch.no_grad():
            for node in self.nodes:
                if node is self.cut and product is not None:
                    known[node] = _with_addend(node, product, known)
                else:
                    known[node] = self._value(node, known, sizes, inputs)
        value = known[self.node]
        if not isinstance(value, torch.Tensor):
            raise NotRunnable(f"{self.node.name} is no tensor")
        return value

    def _value(
        self, node: Node, known: dict[Node, Any], sizes: Sizes, inputs: Mapping[str, torch.Tensor]
    ) -> Any:
        size = node.meta.get("val")
        if isinstance(size, torch.SymInt | int) and not isinstance(size, bool):
            return concrete(expression(node), sizes)
        if node.op == "placeholder":
            return self._placeholder(node, inputs)
        if node.op != "call_function":
            raise NotRunnable(node.op)

        def get(source: Node) -> Any:
            return known[source] if source in known else _shaped(source, sizes)

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), get)
        args, kwargs = pytree.tree_map(_on_cpu, (args, kwargs))
        try:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise NotRunnable(f"{node.name}: {error}") from None

    def _placeholder(self, node: Node, inputs: Mapping[str, torch.Tensor]) -> Any:
        if node.name in inputs:
            return inputs[node.name]
        value = self.captured.value(node.name)
        if value is None or value.is_meta:
            raise NotRunnable(f"{node.name} has no values")
        return value.cpu().clone()


def _on_cpu(value: Any) -> Any:
    """The model may lie on any device, or on none; numbers are checked on the processor."""
    return torch.device("cpu") if isinstance(value, torch.device) else value


def concrete(expr: Expr, sizes: Sizes) -> int:
    """A size expression as a number.

    Raises:
        NotRunnable: a symbol has no number.
    """
    value = sympy.sympify(expr).subs(dict(sizes))
    if not value.is_Integer:
        raise NotRunnable(f"size {expr} is not known")
    return int(value)


def random_padding(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A padding mask: the first row padded on the left, the others with random holes."""
    generator = torch.Generator().manual_seed(SEED)
    mask = torch.rand(shape, generator=generator) > 0.3
    mask[0] = torch.arange(shape[1]) >= shape[1] // 3
    return mask.to(dtype)


def random_documents(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers of packed documents, some of them used again later in the row."""
    return ((_borders(shape).cumsum(1) + 1) % 3).to(dtype)


def random_positions(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Positions in packed documents."""
    slots = torch.arange(shape[1]).expand(shape)
    return (slots - (slots * _borders(shape)).cummax(1).values).to(dtype)


def _borders(shape: tuple[int, ...]) -> torch.Tensor:
    """Where documents begin, after the first one. The first of several rows is one document."""
    generator = torch.Generator().manual_seed(SEED)
    begins = torch.rand(shape, generator=generator) > 0.8
    if shape[0] > 1:
        begins[0] = False
    return begins


def _closure(node: Node, user: Node, cut: Node | None) -> list[Node]:
    """Everything needed to compute `node`, in graph order, in-place operators included."""
    found, todo = {node}, [node]
    written_to = any(written(other) is not None for other in node.graph.nodes)
    while todo:
        current = todo.pop()
        for source in _addends(current) if current is cut else _needed(current):
            if source not in found:
                found.add(source)
                todo.append(source)
        for change in mutations_of(found, before=user) if written_to else ():
            if change not in found:
                found.add(change)
                todo.append(change)
    return [n for n in node.graph.nodes if n in found]


def _needed(node: Node) -> Iterator[Node]:
    shape_only = is_shape_only(node)
    for source in node.all_input_nodes:
        if not (shape_only and source is node.args[0]):
            yield source


def _addends(node: Node) -> list[Node]:
    """What a product adds, unless it counts nothing."""
    addend = added(node)
    return [] if addend is None or addend[1] == 0 else [addend[0]]


def _with_addend(node: Node, product: torch.Tensor, known: Mapping[Node, Any]) -> torch.Tensor:
    """The value of a node whose product of matrices is given."""
    addend = added(node)
    if addend is None:
        return product
    tensor, beta, alpha = addend
    value: torch.Tensor = alpha * product + (beta * known[tensor] if beta else 0)
    return value


def _shaped(node: Node, sizes: Sizes) -> torch.Tensor:
    shape = [concrete(size, sizes) for size in shape_of(node)]
    return torch.empty((1,), dtype=dtype_of(node)).expand(shape)


def _symbols(node: Node) -> set[Expr]:
    if is_tensor(node):
        return set().union(*(size.free_symbols for size in shape_of(node)))
    value = node.meta.get("val")
    return set(expression(node).free_symbols) if isinstance(value, torch.SymInt) else set()


def _integers(arguments: Any) -> Iterator[int]:
    if isinstance(arguments, bool):
        return
    if isinstance(arguments, int):
        yield arguments
    elif isinstance(arguments, list | tuple):
        for entry in arguments:
            yield from _integers(entry)
    elif isinstance(arguments, dict):
        yield from _integers(list(arguments.values()))
