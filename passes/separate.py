"""Sites whose q, k and v are model inputs of their own, taken at their word.

No graph can show that three inputs belong to one token stream. They are accepted when all three are
inputs seen through views, of one length in the example; both are written down as assumptions.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from sparsify.ir import StreamProof
from sparsify.passes.capture import Captured
from sparsify.passes.dominators import VIEWS, Dataflow
from sparsify.passes.graphs import op_name
from sparsify.passes.matchers.call import AttentionCall
from sparsify.passes.refused import Refused

__all__ = ["equal_lengths", "separate_stream"]

Expr = Any


def equal_lengths(captured: Captured, call: AttentionCall) -> dict[Expr, Expr]:
    """The key length as the query length, when q, k and v are bare inputs whose lengths are free
    and equal in the example; empty otherwise."""
    q_len, kv_len = call.q_len, call.kv_len
    if q_len == kv_len or not (q_len.is_Symbol and kv_len.is_Symbol) or not _are_inputs(call):
        return {}
    sizes = captured.examples
    same = sizes.get(str(q_len)) is not None and sizes.get(str(q_len)) == sizes.get(str(kv_len))
    return {kv_len: q_len} if same else {}


def separate_stream(call: AttentionCall, flow: Dataflow, tied: bool) -> StreamProof:
    """The assumed stream of a site whose q, k and v share no input.

    Raises:
        Refused: CROSS_ATTENTION, or NOT_SELF_ATTENTION when one depends on no input at all.
    """
    sources = [flow.inputs_of(operand.node) for operand in call.operands]
    if not all(sources):
        missing = [n for n, s in zip(("q", "k", "v"), sources, strict=True) if not s]
        raise Refused(
            "NOT_SELF_ATTENTION",
            "queries, keys and values do not all come from the model's inputs",
            f"{', '.join(missing)} depend on parameters only",
        )
    if not (_are_inputs(call) and (tied or call.q_len == call.kv_len)):
        raise Refused(
            "CROSS_ATTENTION",
            "keys and values do not come from the queries' token stream",
            "; ".join(f"{n} from {_names(s)}" for n, s in zip("qkv", sources, strict=True)),
        )
    names = ", ".join(node.name for source in sources for node in source)
    assumptions = [f"the model inputs {names} belong to one token stream"]
    if tied:
        assumptions.append("queries and keys are equally many, as in the example")
    return StreamProof(source=None, assumptions=tuple(assumptions))


def _are_inputs(call: AttentionCall) -> bool:
    """Whether q, k and v are three model inputs, seen through views only."""
    bases = []
    for operand in call.operands:
        node = operand.node
        while node.op == "call_function" and op_name(node) in VIEWS:
            node = node.all_input_nodes[0]
        bases.append(node)
    return all(base.op == "placeholder" for base in bases) and len(set(bases)) == 3


def _names(nodes: frozenset[Node]) -> str:
    return ", ".join(sorted(node.name for node in nodes)) or "no input"
