"""All attention of a captured model: what is proved, and what is refused and why.

Anchors are found by the matchers, then proved one after the other in execution order, so that a
later site can build on an earlier one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from sparsify.ir import AttentionSite, MaskProof, Refusal, site_key
from sparsify.passes.aliases import changed_in_place
from sparsify.passes.anchors import find_anchors
from sparsify.passes.capture import Captured
from sparsify.passes.context import Context
from sparsify.passes.dataflow import Dataflow, Stream, prove_stream
from sparsify.passes.frame import Frame
from sparsify.passes.graphs import dtype_of, number, source_of
from sparsify.passes.heads import framed, head_layout
from sparsify.passes.logits import read_logits
from sparsify.passes.mask_proof import prove_mask
from sparsify.passes.matchers.call import AttentionCall
from sparsify.passes.normalize import normalize
from sparsify.passes.phase import phase_of
from sparsify.passes.refused import Refused
from sparsify.passes.separate import equal_lengths

__all__ = ["Detection", "attention_calls", "attention_nodes", "detect"]

Expr = Any
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# what a mask may be refused for that says less than "this is no self-attention"
WEAK_CODES = ("NOT_CAUSAL", "MASK_UPPER_LEFT")


@dataclass(frozen=True)
class Detection:
    """`sites` are proved and replaceable, `refusals` the other attention found; both in execution
    order. `order` holds the keys of all of them; `lookalikes` are refusals with NOT_ATTENTION."""

    sites: tuple[AttentionSite, ...]
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    lookalikes: tuple[Refusal, ...] = field(default=(), compare=False)


def detect(captured: Captured) -> Detection:
    """Find all attention of a captured model and prove what each site computes."""
    anchors = find_anchors(normalize(captured))
    prover = _Prover(captured, anchors.calls)
    sites: list[AttentionSite] = []
    refusals: list[Refusal] = []
    order = []
    for anchor in anchors.attention:
        fqn, ordinal = anchor.fqn, anchor.ordinal
        order.append(site_key(fqn, ordinal))
        try:
            if anchor.call is None:
                assert anchor.reason is not None
                raise anchor.reason
            sites.append(prover.site(anchor.call, fqn, ordinal))
        except Refused as reason:
            refusals.append(_refusal(reason, anchor.node, fqn, ordinal))
    lookalikes = tuple(
        _refusal(anchor.reason, anchor.node, anchor.fqn, anchor.ordinal)
        for anchor in anchors.lookalikes
        if anchor.reason is not None
    )
    return Detection(tuple(sites), tuple(refusals), (), tuple(order), lookalikes)


def attention_nodes(captured: Captured) -> dict[tuple[str, int], Node]:
    """The node of every attention call, by module path and order inside that module, in
    execution order. The graph is normalised first: the nodes are those of the normalised graph."""
    found = find_anchors(normalize(captured)).attention
    return {(anchor.fqn, anchor.ordinal): anchor.node for anchor in found}


def attention_calls(captured: Captured) -> dict[tuple[str, int], AttentionCall]:
    """How every attention call of `attention_nodes` is written, where its form is read. A rewrite
    replaces `call.out.node`, which has the type and the layout that the graph behind it expects."""
    found = find_anchors(normalize(captured)).attention
    return {(anchor.fqn, anchor.ordinal): anchor.call for anchor in found if anchor.call}


def _refusal(reason: Refused, node: Node, fqn: str, ordinal: int) -> Refusal:
    return Refusal(
        fqn, ordinal, reason.code, reason.message, reason.evidence, reason.hint, source_of(node)
    )


class _Prover:
    """Proves sites of one graph; equal masks are proved once."""

    def __init__(self, captured: Captured, calls: dict[Node, AttentionCall]) -> None:
        self.captured = captured
        self.flow = Dataflow(captured.graph, captured.inputs, calls)
        self.frozen = changed_in_place(captured.graph)
        self.causal: set[Node] = set()
        self.masks: dict[Any, MaskProof | Refused] = {}

    def site(self, call: AttentionCall, fqn: str, ordinal: int) -> AttentionSite:
        """The proved site.

        Raises:
            Refused: something is not proved, or not what can be replaced.
        """
        _check_call(call, self.frozen)
        context = self._context(call)
        frame = framed(call, context)
        if context.hidden is None:
            frame = dataclasses.replace(frame, tie=equal_lengths(self.captured, call))
        scale = _scale(call)
        if call.scores is not None:
            logits = read_logits(frame, context.evaluator(frame.space))
            scale, context = scale * logits.factor, dataclasses.replace(context, logits=logits)
        mask, stream = self._mask_and_stream(frame, context)
        heads = head_layout(frame, context)
        self.causal.add(call.node)
        return AttentionSite(
            fqn=fqn,
            ordinal=ordinal,
            pattern=call.pattern,
            heads=heads,
            scale=scale,
            mask=mask,
            stream=stream.proof,
            phase=phase_of(frame, stream.proof),
            q_len=_length(frame.q_len),
            kv_len=_length(frame.kv_len),
            source=source_of(call.node),
        )

    def _context(self, call: AttentionCall) -> Context:
        hidden = self.flow.common_source([operand.node for operand in call.operands])
        return Context(self.captured, self.flow, hidden, frozenset(self.causal), self.frozen)

    def _mask_and_stream(self, frame: Frame, context: Context) -> tuple[MaskProof, Stream]:
        """Both proofs. "Not causal" says less than "not self-attention", so the latter is told."""
        mask = _outcome(lambda: self._mask(frame, context))
        stream = _outcome(lambda: prove_stream(frame, context))
        if isinstance(mask, Refused):
            weak = mask.code in WEAK_CODES and isinstance(stream, Refused)
            if mask.code == "SLIDING_WINDOW" and isinstance(stream, Stream):
                self.causal.add(frame.call.node)  # its rows see no later position either
            raise stream if weak else mask
        if isinstance(stream, Refused):
            raise stream
        if stream.offset is not None and sympy.expand(stream.offset - frame.shift) != 0:
            raise Refused(
                "NOT_SELF_ATTENTION",
                "the mask and the token stream place the queries differently",
                f"query 0 stands at {stream.offset} of the stream, at {frame.shift} of the mask",
            )
        return mask, stream

    def _mask(self, frame: Frame, context: Context) -> MaskProof:
        call = frame.call
        key = (call.mask, call.scores, bool(call.is_causal), frame.q_len, frame.kv_len, frame.lead)
        if key not in self.masks:
            self.masks[key] = _outcome(lambda: prove_mask(frame, context))
        known = self.masks[key]
        if isinstance(known, Refused):
            raise known
        return known


def _outcome(prove: Callable[[], Any]) -> Any:
    try:
        return prove()
    except Refused as reason:
        return reason


def _check_call(call: AttentionCall, frozen: frozenset[Node]) -> None:
    """What stands in the call itself: dropout, flags, dtypes, and when its operands are read."""
    if call.dropout_p != 0.0:
        raise Refused(
            "DROPOUT",
            "attention dropout is active, also outside training",
            f"dropout_p={call.dropout_p}",
            "Pass dropout_p=0.0 unless self.training.",
        )
    if isinstance(call.is_causal, Node):
        raise Refused("MASK_UNPROVED", "is_causal is computed while the model runs")
    changed = [o.node.name for o in call.operands if o.node in frozen]
    if call.scores is not None and changed:
        # the products read them at two times, an operator at one
        message = "the operands are changed in place while attention is written out"
        raise Refused("FORM_UNSUPPORTED", message, ", ".join(changed))
    dtypes = call.dtypes | {dtype_of(call.node)}
    if len(dtypes) != 1 or not dtypes <= DTYPES:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        message = "q, k, v and the result must have one floating-point type, of 16 bits or more"
        raise Refused("DTYPE", message, names)


def _scale(call: AttentionCall) -> float:
    if call.scale is None:
        head_dim = number(call.head_dim)
        if head_dim is None:
            raise Refused("HEAD_DIM", "the head size is not a fixed number", str(call.head_dim))
        return float(head_dim**-0.5)
    if isinstance(call.scale, int | float):
        return float(call.scale)
    raise Refused("SCALE_NOT_CONSTANT", "the scale is not a number", f"scale = {call.scale}")


def _length(size: Expr) -> int | str:
    value = number(size)
    return str(size) if value is None else value
