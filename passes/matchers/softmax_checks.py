"""Why a softmax between products is no attention, or more than one operator can compute."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from sparsify.passes.dominators import Dataflow
from sparsify.passes.graphs import aten, is_tensor, op_name
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
    _check_weights(around)
    _check_scores(around)
    factor = _data_factor(around, flow)
    if factor is not None:
        message = "the scores are scaled by computed values"
        raise Refused("SCALE_NOT_CONSTANT", message, factor.name)


def _check_weights(around: Surroundings) -> None:
    between = [*around.between, *around.weights, *around.chain]
    dropout = [node for node in between if is_active_dropout(node)]
    if dropout:
        raise Refused(
            "DROPOUT",
            "attention dropout is active, also outside training",
            _names(dropout),
            "Pass training=self.training.",
        )
    sinks = [n for n in around.chain if op_name(n) in aten("cat concat")]
    if sinks:
        raise Refused("ATTENTION_SINK", "the softmax has an extra column", _names(sinks))
    if around.between:
        message = "the attention weights are changed"
        raise Refused("WEIGHTS_MODIFIED", message, _names(around.between))
    others = (*around.others, *around.values[1:])
    if others:
        message = "the attention weights are used elsewhere"
        raise Refused("WEIGHTS_USED", message, f"also used by {_names(others)}")


def _check_scores(around: Surroundings) -> None:
    caps = [node for node in around.chain if op_name(node) == "aten.tanh"]
    if caps:
        raise Refused("SOFTCAP", "the scores are capped by tanh", _names(caps))
    if len(around.scores) > 1:
        message = "the scores are put together of several products"
        raise Refused("SCORES_MODIFIED", message, _names(around.scores))
    for node, user in around.readers_of_scores():
        evidence = f"{node.name} is also used by {user.name}"
        raise Refused("SCORES_USED", "the scores are used elsewhere", evidence)


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
