"""Formulas for the values of constant tensors: position tables and triangular masks.

Masks stored as buffers are read by value: a matrix that depends on column minus row only, with few
steps, becomes a condition on that difference; a row with few steps or equal increments becomes a
condition or a line. Anything else has no formula and is judged by its numbers alone.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch

from sparsify.passes.graphs import expression
from sparsify.passes.index_values import Values

__all__ = ["formula_of"]

Expr = Any
Index = tuple[Expr, ...]
MAX_STEPS = 4
MAX_ELEMENTS = 2**28


def formula_of(tensor: torch.Tensor, index: Index, values: Values) -> Any:
    """Element `index` of a constant tensor, or None when its values follow no simple rule."""
    if tensor.numel() == 0 or tensor.numel() > MAX_ELEMENTS or tensor.is_complex():
        return None
    tensor = tensor.detach()
    index, tensor = _varying(index, tensor)
    if not index:
        return _constant(tensor)
    if all(getattr(entry, "is_Integer", False) for entry in index):
        return _constant(tensor[tuple(int(entry) for entry in index)])
    if len(index) == 1:
        return _line(tensor, index[0], values)
    if len(index) == 2:
        return _diagonals(tensor, index, values)
    return None


def _varying(index: Index, tensor: torch.Tensor) -> tuple[Index, torch.Tensor]:
    """Without the axes along which all values are equal."""
    kept = []
    for axis in reversed(range(tensor.dim())):
        first = tensor.select(axis, 0)
        if torch.equal(tensor, first.unsqueeze(axis).expand_as(tensor)):
            tensor = first
        else:
            kept.append(index[axis])
    return tuple(reversed(kept)), tensor


def _constant(tensor: torch.Tensor) -> Expr:
    return expression(tensor.item())


def _line(vector: torch.Tensor, entry: Expr, values: Values) -> Any:
    if vector.dtype != torch.bool and vector.numel() > 2:
        steps = vector[1:].double() - vector[:-1].double()
        if bool((steps == steps[0]).all()):
            slope, start = expression(float(steps[0])), _constant(vector[0])
            return sympy.expand(start + slope * entry)
    return _by_runs(vector, entry, values)


def _by_runs(vector: torch.Tensor, entry: Expr, values: Values, shift: int = 0) -> Any:
    """Constant runs: vector[k] is the value where entry equals k + shift."""
    runs, lengths = torch.unique_consecutive(vector, return_counts=True)
    if len(runs) > MAX_STEPS:
        return None
    ends = torch.cumsum(lengths, 0)
    value = _constant(runs[-1])
    for run, end in reversed(list(zip(runs[:-1], ends[:-1], strict=True))):
        below = values.compare("lt", entry, sympy.Integer(int(end) + shift))
        value = values.choose(below, _constant(run), value)
    return value


def _diagonals(matrix: torch.Tensor, index: Index, values: Values) -> Any:
    """A matrix that depends on column - row only."""
    rows = matrix.shape[0]
    if not torch.equal(matrix[1:, 1:], matrix[:-1, :-1]):
        return None
    lower = matrix[:, 0].flip(0)  # differences -(rows-1) .. 0
    by_difference = torch.cat([lower, matrix[0, 1:]])
    return _by_runs(by_difference, index[1] - index[0], values, shift=-(rows - 1))
