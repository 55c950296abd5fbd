"""For which sizes a program holds: what the model's code asked of them while it was captured.

torch.export follows the path that the example's sizes take and notes every question on the way as
a guard. (That sizes are larger than 1 it takes for granted, without a note: see `trials`.)
"""

from __future__ import annotations

import sympy
import torch
from torch.fx import Node
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from sparsify.errors import CaptureError
from sparsify.hosts.sizes import Unknown, holds
from sparsify.passes.capture import Captured
from sparsify.passes.graphs import expression

__all__ = ["guards_of", "user_inputs"]


def guards_of(captured: Captured) -> tuple[str, ...]:
    """Conditions on the symbols of the inputs' sizes, as text for `holds`.

    Raises:
        CaptureError: one cannot be written down.
    """
    sizes = [size for node in user_inputs(captured) for size in node.meta["val"].shape]
    dynamic = [size for size in sizes if isinstance(size, torch.SymInt)]
    if not dynamic:
        return ()
    env = dynamic[0].node.shape_env
    known = {symbol for size in dynamic for symbol in expression(size).free_symbols}
    readable = {expression(size) for size in dynamic if expression(size).is_Symbol}
    if known - readable:
        told = min(str(expression(size)) for size in dynamic if not expression(size).is_Symbol)
        raise CaptureError(f"A size is given as {told} only.", "Let one size be the symbol itself.")
    found = []
    for guard in env.guards:
        condition = env.replace(guard.expr)
        if condition in (sympy.true, sympy.false) or not condition.free_symbols <= known:
            continue
        if _holds_from_two_on(condition):
            continue
        text = str(condition)
        try:
            holds(text, {str(symbol): 2 for symbol in readable})
        except Unknown as error:
            said = f"A condition on the inputs' sizes is not understood: {error}."
            raise CaptureError(said) from None
        found.append(text)
    return tuple(dict.fromkeys(found))


def _holds_from_two_on(condition: sympy.Basic) -> bool:
    """Whether a condition holds for all sizes of 2 and more: it only tells 1 (and 0) apart, which
    are tried against the model."""
    sizes = {symbol: ValueRanges(2, int_oo) for symbol in condition.free_symbols}
    found = bound_sympy(condition, sizes)
    return bool(found.is_singleton() and found.lower == sympy.true)


def user_inputs(captured: Captured) -> list[Node]:
    """Placeholders of the user's tensors."""
    names = set(captured.inputs)
    return [n for n in captured.graph.find_nodes(op="placeholder") if n.name in names]
