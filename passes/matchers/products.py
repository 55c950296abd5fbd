"""Matrix products in every spelling, read as `out[..., m, n] = sum over c of left[..., m, c] *
right[..., n, c]`: matmul, bmm, mm, baddbmm, addmm and einsum of two operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from sparsify.passes.graphs import argument, aten, is_tensor, op_name, shape_of
from sparsify.passes.matchers.call import Operand, as_is, turned

__all__ = ["PRODUCTS", "Product", "added", "factors_of", "read_product"]

WITH_ADDEND = aten("baddbmm addmm")
PRODUCTS = aten("matmul bmm mm einsum") | WITH_ADDEND


@dataclass(frozen=True)
class Product:
    """`left` [..., m, c], `right` [..., n, c] and `out` [..., m, n]."""

    left: Operand
    right: Operand
    out: Operand

    def swapped(self) -> Product:
        """The same product, seen with its operands exchanged."""
        return Product(self.right, self.left, turned(self.out))


def read_product(node: Node) -> Product | None:
    """The product, or None when it is not one of two tensors of one rank with one summed axis."""
    if op_name(node) == "aten.einsum":
        return _einsum(node)
    factors = factors_of(node)
    if len(factors) != 2:
        return None
    left, right = factors
    ranks = {len(shape_of(n)) for n in (left, right, node)}
    if len(ranks) != 1 or ranks < {2}:
        return None
    return Product(as_is(left), turned(as_is(right)), as_is(node))


def added(node: Node) -> tuple[Node, Any, Any] | None:
    """What a product adds: the tensor, its factor beta, and the factor alpha of the product."""
    if op_name(node) not in WITH_ADDEND:
        return None
    tensor = argument(node, "self")
    return tensor, argument(node, "beta", 1), argument(node, "alpha", 1)


def factors_of(node: Node) -> list[Node]:
    """The tensors that are multiplied, without what is added."""
    if op_name(node) == "aten.einsum":
        return list(argument(node, "tensors"))
    names = [entry.name for entry in node.target._schema.arguments]  # type: ignore[union-attr]
    return [value for name in names if is_tensor(value := argument(node, name))][-2:]


def _einsum(node: Node) -> Product | None:
    equation, tensors = node.args[:2]
    if not isinstance(tensors, list | tuple) or len(tensors) != 2:
        return None
    terms = _terms(str(equation), [len(shape_of(t)) for t in tensors])  # type: ignore[arg-type]
    if terms is None:
        return None
    left, right, out = terms
    batch = [x for x in out if x in left and x in right]
    m = [x for x in out if x not in right]
    n = [x for x in out if x not in left]
    c = [x for x in left if x in right and x not in out]
    sizes = {len(left), len(right), len(out), len(batch) + 2}
    if not (len(m) == len(n) == len(c) == 1 and len(sizes) == 1):
        return None

    def operand(tensor: Node, term: str, *own: str) -> Operand:
        return Operand(tensor, tuple(term.index(x) for x in (*batch, *own)))

    return Product(
        operand(tensors[0], left, *m, *c),  # type: ignore[arg-type]
        operand(tensors[1], right, *n, *c),  # type: ignore[arg-type]
        operand(node, out, *m, *n),
    )


def _terms(equation: str, ranks: list[int]) -> tuple[str, str, str] | None:
    """The letters of both operands and of the result, an ellipsis written as digits."""
    equation = equation.replace(" ", "")
    inputs, arrow, out = equation.partition("->")
    terms = inputs.split(",")
    if len(terms) != 2:
        return None
    if not arrow:
        letters = sorted(x for x in set(inputs) if x.isalpha() and inputs.count(x) == 1)
        out = ("..." if "..." in inputs else "") + "".join(letters)
    hidden = {rank - len(t.replace(".", "")) for t, rank in zip(terms, ranks, strict=True)}
    if "..." in equation and len(hidden) != 1:
        return None
    dots = "".join(str(n) for n in range(hidden.pop())) if "..." in equation else ""
    left, right, out = (term.replace("...", dots) for term in (*terms, out))
    if any(len(set(term)) != len(term) for term in (left, right, out)):
        return None  # a diagonal
    return left, right, out
