"""Why a visibility formula with data in it is no proof: the code that says what the data is."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from sparsify.passes.frame import Frame
from sparsify.passes.graphs import shape_of
from sparsify.passes.index_expr import Evaluator, Leaf
from sparsify.passes.refused import Refused

__all__ = ["unknown"]

Expr = Any
_HINT = (
    "Documents are read where one table of whole numbers, a model input [batch, length] or a "
    "running count of borders, must be equal at the query and at the key, under a causal mask."
)


def unknown(
    formula: Any, functions: Collection[Expr], evaluator: Evaluator, frame: Frame
) -> Refused:
    """The refusal of a formula that depends on `functions` besides positions and padding."""
    leaves = [_leaf(function, evaluator) for function in functions]
    names, evidence = ", ".join(sorted({leaf.node.name for leaf in leaves})), str(formula)[:600]
    if any(leaf.trained for leaf in leaves):
        return Refused("MASK_UNPROVED", f"the mask depends on parameters ({names})", evidence)
    if all(leaf.inputs for leaf in leaves) and _by_document(formula, frame):
        return Refused("MASK_UNSUPPORTED", f"documents are kept apart by {names}", evidence, _HINT)
    if not all(leaf.kind == "input" for leaf in leaves):
        message = f"the mask depends on values that cannot be read ({names})"
        return Refused("MASK_UNPROVED", message, evidence)
    if _are_paddings(leaves, functions, frame):
        message = f"{names} hides more or other than padded keys"
        return Refused("PADDING_UNPROVED", message, evidence)
    return Refused(
        "MASK_UNPROVED",
        f"the mask is a model input ({names}), whose values are not known",
        evidence,
        "Leave it out, or pass a 2-D padding mask.",
    )


def _leaf(function: Expr, evaluator: Evaluator) -> Leaf:
    name = getattr(function.func, "__name__", "")
    return evaluator.leaves.get(name) or evaluator.leaves[str(function)]


def _are_paddings(leaves: list[Leaf], functions: Collection[Expr], frame: Frame) -> bool:
    """Inputs of two axes that are not read by query and key at once."""
    flat = all(len(shape_of(leaf.node)) == 2 for leaf in leaves)
    return flat and not any(f.has(frame.i) and f.has(frame.j) for f in functions)


def _by_document(formula: Any, frame: Frame) -> bool:
    """Something read at the query is compared with something read at the key."""
    for atom in formula.atoms(Relational):
        reads = atom.atoms(AppliedUndef)
        at_query = any(f.has(frame.i) and not f.has(frame.j) for f in reads)
        if at_query and any(f.has(frame.j) and not f.has(frame.i) for f in reads):
            return True
    return False
