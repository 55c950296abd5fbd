"""Why a softmax between products is no attention, or more than one operator can compute."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from sparsify.passes.dominators import Dataflow
from sparsify.passes.graphs import aten, dtype_of, is_tensor, op_name
from sparsify.passes.matchers.softmax_walk import Surroundings
from sparsify.passes.refused import Refused
from sparsify.passes.views import is_active_dropout

__all__ = ["check"]

FACTORS = aten("mul div true_divide multiply divide")


def check(around: Surroundings, flow: Dataflow) -> None:
    """Refuse what the operators around the softmax already rule out.

    Raises:
        Refused: NOT_ATTENTION when it is no attention at all; else the code of what is wrong.
    """
    softmax = around.softmax
    if not around.scores or not around.values:
        what = "a product with values" if around.scores else "scores of queries and keys"
        raise Refused("NOT_ATTENTION", f"a softmax without {what}", softmax.name)
    _check_scores(around)
    _check_uses(around)
    _check_types(around)
    factor = _data_factor(around, flow)
    if factor is not None:
        message = "the scores are scaled by computed values"
        raise Refused("SCALE_NOT_CONSTANT", message, factor.name)


def _check_scores(around: Surroundings) -> None:
    caps = [node for node in around.chain if op_name(node) == "aten.tanh"]
    if caps:
        raise Refused("SOFTCAP", "the scores are capped by tanh", _names(caps))
    if len(around.scores) > 1:
        message = "the scores are put together of several products"
        raise Refused("SCORES_MODIFIED", message, _names(around.scores))
    sinks = [node for node in around.chain if op_name(node) in aten("cat concat")]
    if sinks:
        raise Refused("ATTENTION_SINK", "the softmax has an extra column", _names(sinks))


def _check_uses(around: Surroundings) -> None:
    between = [*around.between, *around.weights, *around.chain]
    dropout = [node for node in between if is_active_dropout(node)]
    if dropout:
        raise Refused(
            "DROPOUT",
            "attention dropout is active, also outside training",
            _names(dropout),
            "Pass training=self.training.",
        )
    if around.between:
        message = "the attention weights are changed"
        raise Refused("WEIGHTS_MODIFIED", message, _names(around.between))
    others = (*around.others, *around.values[1:])
    if others:
        message = "the attention weights are used elsewhere"
        raise Refused("WEIGHTS_USED", message, f"also used by {_names(others)}")
    for node, user in around.readers_of_scores():
        evidence = f"{node.name} is also used by {user.name}"
        raise Refused("SCORES_USED", "the scores are used elsewhere", evidence)


def _check_types(around: Surroundings) -> None:
    """Rounding on the way must not be coarser than float32, or the type of the result."""
    result = dtype_of(around.values[0])
    for code, nodes in (("SCORES_MODIFIED", around.spine), ("WEIGHTS_MODIFIED", around.weights)):
        coarse = [node for node in nodes if _is_coarser(dtype_of(node), result)]
        if coarse:
            message = f"scores or weights are turned into {dtype_of(coarse[0])}"
            raise Refused(code, message, _names(coarse))


def _is_coarser(dtype: torch.dtype, result: torch.dtype) -> bool:
    if not (dtype.is_floating_point and result.is_floating_point):
        return dtype != result
    finest = max(torch.finfo(result).eps, torch.finfo(torch.float32).eps)
    return torch.finfo(dtype).eps > finest


def _data_factor(around: Surroundings, flow: Dataflow) -> Node | None:
    """What multiplies or divides the scores and depends on the input."""
    for node in around.chain:
        if op_name(node) in FACTORS:
            others = [s for s in node.all_input_nodes if s not in around.spine and is_tensor(s)]
            found = next((other for other in others if flow.inputs_of(other)), None)
            if found is not None:
                return found
    return None


def _names(nodes: Iterable[Node]) -> str:
    return ", ".join(sorted(node.name for node in nodes))
