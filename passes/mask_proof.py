"""What a site's mask lets a query see: causal, sliding, full, document, or unknown.

Two independent readings must agree before a mask counts as proved: the formula from symbolic
evaluation, decided for all lengths, and the mask's own numbers at sizes larger than every constant
in it, with random padding.
"""

from __future__ import annotations

from typing import Any

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from sparsify.ir import NO_NEGATIVE_NUMBER, ONLY_0_AND_1, MaskKind, MaskProof
from sparsify.passes.capture import Captured
from sparsify.passes.context import Context
from sparsify.passes.frame import Frame
from sparsify.passes.graphs import dtype_of, number
from sparsify.passes.index_expr import Evaluator
from sparsify.passes.logits_check import LogitsCheck
from sparsify.passes.mask_check import NumericCheck
from sparsify.passes.mask_concrete import NotRunnable
from sparsify.passes.mask_documents import Documents, within_document
from sparsify.passes.mask_formula import Shape, decide
from sparsify.passes.mask_unknown import unknown
from sparsify.passes.mask_values import Visibility, visibility
from sparsify.passes.refused import Refused

__all__ = ["prove_mask"]

Expr = Any
LONGEST_EVIDENCE = 600


def prove_mask(frame: Frame, context: Context) -> MaskProof:
    """The mask of a site, as far as it is one that a sparse operator can honour.

    The kind is CAUSAL, aligned so that the last query sees the last key, or DOCUMENT: causal inside
    every document of a row.

    Args:
        frame: the site's indices.
        context: the graph around the site.

    Raises:
        Refused: with the code that says what the mask is instead, or why it is not known.
    """
    if frame.call.mask is None and context.logits is None:
        return _without_tensor(context.captured, frame)
    if frame.call.is_causal:
        raise Refused("FORM_UNSUPPORTED", "a mask and is_causal are given together")
    return _Proof(frame, context).run()


def _without_tensor(captured: Captured, frame: Frame) -> MaskProof:
    if not frame.call.is_causal:
        return _aligned(captured, frame, Shape(MaskKind.FULL), "no mask")
    if frame.q_len != frame.kv_len:
        raise Refused(
            "MASK_UPPER_LEFT",
            "is_causal starts its diagonal at key 0, and the lengths differ",
            f"is_causal=True with {frame.q_len} queries and {frame.kv_len} keys",
            "Pass a mask aligned to the last key.",
        )
    shape = Shape(MaskKind.CAUSAL, sympy.Integer(0))
    return _aligned(captured, frame, shape, "is_causal=True")


def _aligned(
    captured: Captured,
    frame: Frame,
    shape: Shape,
    evidence: str,
    *,
    padding: str | None = None,
    documents: Documents | None = None,
    assumptions: tuple[str, ...] = (),
) -> MaskProof:
    """The proof of a decided shape, if its diagonal ends at the last key."""
    if shape.kind == MaskKind.FULL and frame.q_len == 1:
        shape = Shape(MaskKind.CAUSAL, frame.shift)
        evidence = f"{evidence}; one query that sees every key"
    if shape.kind == MaskKind.FULL:
        raise Refused("NOT_CAUSAL", "every query sees every key", evidence)
    if shape.kind is None:
        raise Refused("MASK_UNSUPPORTED", f"not a causal mask: {shape.text}", evidence)
    if shape.kind == MaskKind.SLIDING:
        message = f"a query sees its last {shape.window} keys only"
        raise Refused("SLIDING_WINDOW", message, evidence)
    _check_offset(frame, shape.offset, evidence)
    offset = number(shape.offset)
    return MaskProof(
        kind=MaskKind.CAUSAL if documents is None else MaskKind.DOCUMENT,
        documents=None if documents is None else documents.table.name,
        padding=padding,
        q_offset=str(shape.offset) if offset is None else offset,
        assumptions=(*assumptions, *captured.flags, *_lengths(captured, frame)),
        evidence=evidence,
    )


def _check_offset(frame: Frame, offset: Expr, evidence: str) -> None:
    shift = frame.shift
    if sympy.expand(offset - shift) != 0:
        if offset == 0:
            raise Refused(
                "MASK_UPPER_LEFT", "the diagonal starts at key 0, and the lengths differ", evidence
            )
        message = f"query i sees keys up to i + ({offset}), not i + ({shift})"
        raise Refused("MASK_UNSUPPORTED", message, evidence)
    if not frame.space.is_nonnegative(shift):
        raise Refused(
            "ROWS_WITHOUT_KEYS",
            "there may be more queries than keys, so that the first queries see nothing",
            f"query i sees keys up to i + ({shift}); {evidence}",
        )


def _lengths(captured: Captured, frame: Frame) -> tuple[str, ...]:
    """What the capture fixed of the length: another length may take another way in the model."""
    length = number(frame.q_len)
    if length is not None:
        return () if length == 1 else (f"the number of queries is {length}, as captured",)
    low, high = captured.ranges.get(str(frame.q_len), (0, None))
    if low <= 2 and high is None:
        return ()
    limits = f"at least {low}" if high is None else f"{low} to {high}"
    return (f"the number of queries is {limits}, as captured",)


def _read(frame: Frame, context: Context) -> tuple[Visibility, Evaluator, NumericCheck]:
    """The visibility, what it was read by, and its check by numbers."""
    captured, mask, logits = context.captured, frame.call.mask, context.logits
    if logits is not None:
        return logits.visibility, logits.evaluator, LogitsCheck(captured, frame, logits.factor)
    assert mask is not None
    evaluator = context.evaluator(frame.space)
    value = evaluator.value(mask, frame.mask_index(mask))
    seen = visibility(value, dtype_of(mask), evaluator, frame.h)
    return seen, evaluator, NumericCheck(captured, frame)


class _Proof:
    """One mask, a tensor or part of the scores: read, decided, checked."""

    def __init__(self, frame: Frame, context: Context) -> None:
        self.captured, self.frame = context.captured, frame
        self.seen, self.evaluator, self.check = _read(frame, context)

    def run(self) -> MaskProof:
        formula = self.seen.formula.subs(self.frame.tie)
        evidence = _shown(formula)
        documents = within_document(formula, self.evaluator, self.frame)
        if documents is not None:
            formula = documents.inside
        pad = self._padding(formula, evidence)
        shape = decide(self._unpadded(formula, pad, evidence), self.frame, self.captured.ranges)
        if shape is None:
            raise self._by_numbers(evidence) or Refused(
                "MASK_UNPROVED", "the mask is not shown to be causal", evidence
            )
        assumptions = (*self.seen.assumptions, *(documents.assumptions if documents else ()))
        if pad is not None and not _is_truth_only(formula, pad):
            assumptions = (*assumptions, _numbers_of(pad, formula, documents, evidence))
        proof = _aligned(
            self.captured,
            self.frame,
            shape,
            evidence,
            padding=None if pad is None else pad.func.__name__,
            documents=documents,
            assumptions=tuple(dict.fromkeys(assumptions)),
        )
        self._cross_check(proof)
        return proof

    def _padding(self, formula: Any, evidence: str) -> Expr | None:
        """The one function of (batch, key) that hides keys; the formula holds no other data."""
        functions = formula.atoms(AppliedUndef) | {
            symbol for symbol in formula.free_symbols if str(symbol) in self.evaluator.leaves
        }
        pads = [function for function in functions if self._is_padding(function)]
        if len(pads) < len(functions):
            reason = unknown(formula, functions - set(pads), self.evaluator, self.frame)
            if reason.code == "MASK_UNPROVED" and not reason.hint:
                reason = self._by_numbers(evidence) or reason
            raise reason
        if self.frame.h.is_Symbol and formula.has(self.frame.h):
            raise Refused("MASK_UNSUPPORTED", "heads have different masks", evidence)
        if len(pads) > 1:
            raise Refused("PADDING_UNPROVED", "several padding inputs", evidence)
        return pads[0] if pads else None

    def _is_padding(self, function: Expr) -> bool:
        """A model input of [batch, keys], read at this row and this key."""
        leaf = self.evaluator.leaves.get(getattr(function.func, "__name__", ""))
        here = (self.frame.b, self.frame.j)
        return leaf is not None and leaf.kind == "input" and tuple(function.args) == here

    def _unpadded(self, formula: Any, pad: Expr | None, evidence: str) -> Any:
        """The formula for real keys, once it is sure that hidden keys are hidden."""
        if pad is None:
            return formula
        if formula.subs(pad, 0) != sympy.false:
            message = f"a key that {pad.func.__name__} hides can still be seen"
            raise Refused("PADDING_UNPROVED", message, evidence)
        return formula.subs(pad, 1)

    def _by_numbers(self, evidence: str) -> Refused | None:
        """A refusal with a counterexample, when the mask's own numbers give one."""
        try:
            found = self.check.counterexample(padded=False)
        except NotRunnable:
            return None
        if found is None:
            return None
        return Refused("MASK_UNSUPPORTED", "not a causal mask", f"{found}; {evidence}")

    def _cross_check(self, proof: MaskProof) -> None:
        try:
            found = self.check.counterexample(proof.padding, proof.documents)
        except NotRunnable as error:
            message = "the proof of the mask could not be checked by numbers"
            raise Refused("MASK_UNPROVED", message, f"{error}; {proof.evidence}") from None
        if found is not None:
            message = "the mask's numbers contradict its formula"
            raise Refused("MASK_UNPROVED", message, f"{found}; {proof.evidence}")


def _numbers_of(pad: Expr, formula: Any, documents: Documents | None, evidence: str) -> str:
    """What is assumed of the numbers in a padding mask that is used for more than its truth."""
    name = pad.func.__name__
    numbered = documents is not None and documents.table.name == name
    if numbered and not _is_sign_only(formula, pad):
        raise Refused("PADDING_UNPROVED", f"{name} hides more than number 0", evidence)
    return f"{name} holds {NO_NEGATIVE_NUMBER if numbered else ONLY_0_AND_1}"


def _is_truth_only(formula: Any, pad: Expr) -> bool:
    """Whether the padding is only asked to be zero or not, so that any other number shows a key."""
    atoms = [atom for atom in formula.atoms(Relational) if atom.has(pad)]
    return all(isinstance(a, sympy.Ne | sympy.Eq) and a.lhs == pad and a.rhs == 0 for a in atoms)


def _is_sign_only(formula: Any, pad: Expr) -> bool:
    """Whether the padding is only asked to be positive, so that any positive number shows a key."""
    atoms = [atom for atom in formula.atoms(Relational) if atom.has(pad)]
    return all(
        sympy.expand(a.lhs - a.rhs - sign * pad).is_number
        and a.subs(pad, 1) == a.subs(pad, sympy.oo)
        for a in atoms
        for sign in (sympy.expand(a.lhs - a.rhs).coeff(pad),)
    )


def _shown(formula: Any) -> str:
    text = "no mask" if formula == sympy.true else str(formula)
    return text if len(text) <= LONGEST_EVIDENCE else text[:LONGEST_EVIDENCE] + "..."
