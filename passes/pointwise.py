"""Operators that work element by element."""

from __future__ import annotations

import torch
from torch.fx import Node

from sparsify.passes.graphs import argument, aten, op_name

__all__ = ["is_pointwise"]

POINTWISE = aten(
    "where __and__ __or__ __xor__ hardswish square relu6 selu clip true_divide subtract "
    "multiply divide negative greater less not_equal rrelu isnan"
)


def is_pointwise(node: Node) -> bool:
    """Whether every element of the output depends on the same element of the inputs only."""
    name = op_name(node)
    if name == "aten.batch_norm":  # with statistics of its own input it mixes all positions
        return argument(node, "training") is False
    if name in POINTWISE:
        return True
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
