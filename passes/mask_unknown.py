"""Why a visibility formula with data in it is no proof: the code that says what the data is."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from sparsify.passes.frame import Frame
from sparsify.passes.graphs import shape_of
from sparsify.passes.index_expr import Evaluator, Leaf
from sparsify.passes.refused import Refused

__all__ = ["unknown"]

Expr = Any


def unknown(
    formula: Any, functions: Collection[Expr], evaluator: Evaluator, frame: Frame
) -> Refused:
    """The refusal of a formula that depends on `functions` besides positions and padding."""
    leaves = [_leaf(function, evaluator) for function in functions]
    names, evidence = ", ".join(sorted({leaf.node.name for leaf in leaves})), str(formula)[:600]
    if any(leaf.trained for leaf in leaves):
        return Refused("MASK_UNPROVED", f"the mask depends on parameters ({names})", evidence)
    if _by_document(formula, frame):
        return Refused("MASK_UNSUPPORTED", f"documents are kept apart by {names}", evidence)
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
    """Two reads of one table, at the query and at the key, that must be equal."""
    for atom in formula.atoms(Relational):
        found = atom.atoms(AppliedUndef)
        if not isinstance(atom, sympy.Eq | sympy.Ne) or len(found) != 2:
            continue
        one_table = len({f.func for f in found}) == 1
        if one_table and all(any(f.has(index) for f in found) for index in (frame.i, frame.j)):
            return True
    return False
