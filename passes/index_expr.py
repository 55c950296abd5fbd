"""Symbolic evaluation of a tensor's elements: (node, index) -> expression.

A mask is a small sub-graph of arange, comparisons and views. Evaluated at the symbolic indices
(b, h, i, j) it becomes a formula such as `i - j >= 0 & attention_mask(b, j) != 0`. Whatever has no
rule becomes an uninterpreted function of its index, so that nothing is ever assumed of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from sparsify.passes.capture import Captured
from sparsify.passes.constants import formula_of
from sparsify.passes.graphs import behind, dtype_of, expression, is_tensor, op_name, shape_of
from sparsify.passes.index_space import IndexSpace
from sparsify.passes.index_values import Unreadable, Values
from sparsify.passes.views import broadcast_index, view_source

__all__ = ["UNFORESEEN", "Evaluator", "Leaf"]

Expr = Any
Value = Any
Index = tuple[Expr, ...]
UNFORESEEN = (AssertionError, AttributeError, IndexError, TypeError, ValueError)


@dataclass(frozen=True)
class Leaf:
    """An uninterpreted function of a formula: where evaluation stopped.

    `kind` is "input", "parameter", "state" (a buffer or constant whose values fit no formula) or
    "op"; `trained` says that a parameter is behind it, `inputs` which model inputs are.
    """

    node: Node
    kind: str
    trained: bool
    inputs: tuple[str, ...]


class Evaluator:
    """Evaluates elements of tensors of one captured graph.

    Args:
        captured: gives the values of buffers and constants.
        space: the index symbols in use.
        frozen: nodes that an in-place operator may change later; they are not read.

    `given` holds rules of single nodes, which go before those of their operators.
    """

    def __init__(
        self, captured: Captured, space: IndexSpace, frozen: frozenset[Node] = frozenset()
    ) -> None:
        self.captured, self.space, self.frozen = captured, space, frozen
        self.values = Values(space)
        self.leaves: dict[str, Leaf] = {}
        self.given: dict[Node, Callable[[Index], Value]] = {}
        self._known: dict[tuple[Node, Index], Value] = {}

    def value(self, node: Node, index: Index) -> Value:
        """Element `index` of `node`."""
        key = (node, index)
        if key not in self._known:
            self._known[key] = self._evaluate(node, index)
        return self._known[key]

    def operand(self, argument: Any, index: Index) -> Value:
        """Element of an operand that is broadcast to `index`: a tensor, a size or a number."""
        if is_tensor(argument):
            return self.value(argument, broadcast_index(index, shape_of(argument)))
        try:
            return expression(argument)
        except TypeError as error:
            raise Unreadable(str(error)) from None

    def function(self, node: Node, index: Index) -> Expr:
        """The element as an uninterpreted function, with the kind of leaf recorded."""
        if node.name not in self.leaves:
            self.leaves[node.name] = self._leaf(node)
        kind = {"real": True} if dtype_of(node).is_floating_point else {"integer": True}
        if not index:
            return sympy.Symbol(node.name, **kind)
        return sympy.Function(node.name, **kind)(*index)

    def _evaluate(self, node: Node, index: Index) -> Value:
        try:
            if node not in self.frozen:
                return self._read(node, index)
        except (Unreadable, RecursionError, *UNFORESEEN):
            pass  # a call that no rule foresees is as unknown as an operator without a rule
        value = self.function(node, index)
        return self.values.truth(value) if dtype_of(node) == torch.bool else value

    def _read(self, node: Node, index: Index) -> Value:
        from sparsify.passes.index_ops import RULES  # the rules call back into this class

        if node in self.given:
            return self.given[node](index)
        if node.op == "placeholder":
            return self._state(node, index)
        if node.op != "call_function":
            raise Unreadable(node.op)
        rule = RULES.get(op_name(node))
        if rule is not None:
            return rule(self, node, index)
        source = view_source(node, index, self.space)
        if source is None:
            raise Unreadable(op_name(node))
        return self.value(*source)

    def _state(self, node: Node, index: Index) -> Value:
        """A buffer or constant by its values. Inputs and parameters are never read by value."""
        if node.name in self.captured.parameters or node.name in self.captured.inputs:
            raise Unreadable("data")
        tensor = self.captured.value(node.name)
        if tensor is None or tensor.is_meta:
            raise Unreadable("no values")
        value = formula_of(tensor, index, self.values)
        if value is None:
            raise Unreadable("values without a formula")
        return value

    def _leaf(self, node: Node) -> Leaf:
        names = [n.name for n in behind(node) if n.op == "placeholder"]
        kind = _kind(self.captured, node)
        return Leaf(
            node=node,
            kind=kind,
            trained=any(name in self.captured.parameters for name in names),
            inputs=tuple(name for name in names if name in self.captured.inputs),
        )


def _kind(captured: Captured, node: Node) -> str:
    if node.op != "placeholder":
        return "op"
    if node.name in captured.parameters:
        return "parameter"
    return "input" if node.name in captured.inputs else "state"
