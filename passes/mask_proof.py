"""What a site's mask lets a query see: causal, sliding, full, document, or unknown.

Two independent readings must agree before a mask counts as proved: the formula from symbolic
evaluation, decided for all lengths, and the mask's own numbers at sizes larger than every constant
in it, with random padding.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef

from sparsify.ir import MaskKind, MaskProof
from sparsify.passes import mask_concrete
from sparsify.passes.capture import Captured
from sparsify.passes.context import Context
from sparsify.passes.frame import Frame
from sparsify.passes.graphs import dtype_of, number, shape_of
from sparsify.passes.index_expr import Leaf
from sparsify.passes.mask_concrete import NotRunnable, Slice, concrete
from sparsify.passes.mask_formula import Shape, decide
from sparsify.passes.mask_values import SOFTEST_FILL, visibility
from sparsify.passes.refused import Refused

__all__ = ["prove_mask"]

Expr = Any


def prove_mask(frame: Frame, context: Context) -> MaskProof:
    """The mask of a site, as far as it is one that a sparse operator can honour.

    The kind is CAUSAL, aligned so that the last query sees the last key.

    Args:
        frame: the site's indices.
        context: the graph around the site.

    Raises:
        Refused: with the code that says what the mask is instead, or why it is not known.
    """
    call = frame.call
    if call.mask is None:
        return _without_tensor(context.captured, frame)
    if call.is_causal:
        raise Refused("FORM_UNSUPPORTED", "a mask and is_causal are given together")
    return _Proof(frame, context).run()


def _without_tensor(captured: Captured, frame: Frame) -> MaskProof:
    call = frame.call
    if call.is_causal:
        if frame.q_len != frame.kv_len:
            raise Refused(
                "MASK_UPPER_LEFT",
                "is_causal starts its diagonal at key 0, and the lengths differ",
                f"is_causal=True with {call.q_len} queries and {call.kv_len} keys",
                "Pass a mask aligned to the last key.",
            )
        shape = Shape(MaskKind.CAUSAL, sympy.Integer(0))
        return _aligned(captured, frame, shape, None, captured.flags, "is_causal=True")
    return _aligned(captured, frame, Shape(MaskKind.FULL), None, (), "no mask")


def _aligned(
    captured: Captured,
    frame: Frame,
    shape: Shape,
    padding: str | None,
    assumptions: tuple[str, ...],
    evidence: str,
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
        raise Refused("SLIDING_WINDOW", f"a query sees its last {shape.window} keys only", evidence)
    _check_offset(shape.offset, frame.shift, evidence)
    return MaskProof(
        kind=MaskKind.CAUSAL,
        padding=padding,
        q_offset=_plain(shape.offset),
        assumptions=(*assumptions, *_lengths(captured, frame)),
        evidence=evidence,
    )


def _check_offset(offset: Expr, shift: Expr, evidence: str) -> None:
    if sympy.expand(offset - shift) != 0:
        if offset == 0:
            raise Refused(
                "MASK_UPPER_LEFT", "the diagonal starts at key 0, and the lengths differ", evidence
            )
        raise Refused(
            "MASK_UNSUPPORTED", f"query i sees keys up to i + {offset}, not i + {shift}", evidence
        )
    if not shift.is_nonnegative:
        raise Refused(
            "ROWS_WITHOUT_KEYS",
            "there may be more queries than keys, so that the first queries see nothing",
            f"query i sees keys up to i + {shift}",
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


def _plain(offset: Expr) -> int | str:
    value = number(offset)
    return str(offset) if value is None else value


class _Proof:
    """One mask tensor: read, decided, checked."""

    def __init__(self, frame: Frame, context: Context) -> None:
        self.captured, self.frame = context.captured, frame
        assert frame.call.mask is not None
        self.mask = frame.call.mask
        self.evaluator = context.evaluator(frame.space)
        self.slice: Slice | None = None

    def run(self) -> MaskProof:
        value = self.evaluator.value(self.mask, self.frame.mask_index(self.mask))
        seen = visibility(value, dtype_of(self.mask), self.evaluator, self.frame.h)
        formula, padding, exact = self._without_padding(seen.formula.subs(self.frame.tie))
        assumptions = list(seen.assumptions)
        if not exact:
            assumptions.append(f"{padding} holds only 0 and 1")
        evidence = _shown(seen.formula)
        shape = decide(formula, self.frame, self.captured.ranges)
        if shape is None:
            raise self._undecided(evidence)
        proof = _aligned(
            self.captured, self.frame, shape, padding, tuple(dict.fromkeys(assumptions)), evidence
        )
        self._cross_check(proof)
        return proof

    def _without_padding(self, formula: Any) -> tuple[Any, str | None, bool]:
        """The formula of (i, j) alone, the padding input, and whether any non-zero value shows."""
        frame = self.frame
        functions = formula.atoms(AppliedUndef) | {
            s for s in formula.free_symbols if str(s) in self.evaluator.leaves
        }
        pads = [f for f in functions if self._is_padding(f)]
        others = [f for f in functions if f not in pads]
        if others:
            raise self._unknown(formula, others)
        if frame.h.is_Symbol and formula.has(frame.h):
            raise Refused("MASK_UNSUPPORTED", "heads have different masks", _shown(formula))
        if not pads:
            return formula, None, True
        if len(pads) > 1:
            raise Refused("PADDING_UNPROVED", "several padding inputs", _shown(formula))
        pad = pads[0]
        hidden = self.evaluator.values  # re-evaluation simplifies through sympy alone
        assert hidden is not None
        if formula.subs(pad, 0) != sympy.false:
            raise Refused(
                "PADDING_UNPROVED",
                f"a key that {pad.func.__name__} hides can still be seen",
                _shown(formula),
            )
        exact = all(
            isinstance(atom, sympy.Ne | sympy.Eq) and atom.lhs == pad and atom.rhs == 0
            for atom in formula.atoms(sympy.core.relational.Relational)
            if atom.has(pad)
        )
        return formula.subs(pad, 1), pad.func.__name__, exact

    def _is_padding(self, function: Expr) -> bool:
        """A model input of [batch, keys], read at this row and this key."""
        name = getattr(function.func, "__name__", "")
        leaf = self.evaluator.leaves.get(name)
        return (
            leaf is not None
            and leaf.kind == "input"
            and function.args == (self.frame.b, self.frame.j)
            and self.frame.b.is_Symbol
        )

    def _unknown(self, formula: Any, functions: list[Expr]) -> Refused:
        """The formula depends on more than positions and padding."""
        leaves = [self._leaf(f) for f in functions]
        evidence = _shown(formula)
        names = ", ".join(sorted({leaf.node.name for leaf in leaves}))
        if any(leaf.trained for leaf in leaves):
            return Refused("MASK_UNPROVED", f"the mask depends on parameters ({names})", evidence)
        if self._by_document(formula):
            return Refused("MASK_UNSUPPORTED", f"documents are kept apart by {names}", evidence)
        if not any(leaf.inputs for leaf in leaves):
            return self._by_numbers(evidence) or Refused(
                "MASK_UNPROVED", f"the mask cannot be read ({names})", evidence
            )
        if all(leaf.kind == "input" for leaf in leaves):
            return self._from_inputs(leaves, functions, evidence)
        counter = self._by_numbers(evidence)
        return counter or Refused(
            "MASK_UNPROVED", f"the mask depends on values that cannot be read ({names})", evidence
        )

    def _from_inputs(self, leaves: list[Leaf], functions: list[Expr], evidence: str) -> Refused:
        names = ", ".join(sorted({leaf.node.name for leaf in leaves}))
        if all(len(shape_of(leaf.node)) == 2 for leaf in leaves) and not any(
            f.has(self.frame.i) and f.has(self.frame.j) for f in functions
        ):
            return Refused(
                "PADDING_UNPROVED", f"{names} hides more or other than padded keys", evidence
            )
        return Refused(
            "MASK_UNPROVED",
            f"the mask is a model input ({names}), whose values are not known",
            evidence,
            "Leave it out, or pass a 2-D padding mask.",
        )

    def _leaf(self, function: Expr) -> Leaf:
        name = getattr(function.func, "__name__", "")
        return self.evaluator.leaves.get(name) or self.evaluator.leaves[str(function)]

    def _by_document(self, formula: Any) -> bool:
        """Two reads of one table, at the query and at the key, that must be equal."""
        i, j = self.frame.i, self.frame.j
        return any(
            isinstance(atom, sympy.Eq | sympy.Ne)
            and len(found := atom.atoms(AppliedUndef)) == 2
            and len({f.func for f in found}) == 1
            and any(f.has(i) for f in found)
            and any(f.has(j) for f in found)
            for atom in formula.atoms(sympy.core.relational.Relational)
        )

    def _undecided(self, evidence: str) -> Refused:
        """All was read, but it is no comparison of i - j with constants."""
        return self._by_numbers(evidence) or Refused(
            "MASK_UNPROVED", "the mask is not shown to be causal", evidence
        )

    def _by_numbers(self, evidence: str) -> Refused | None:
        """A refusal with a counterexample, when the mask's own numbers give one."""
        for length in self._lengths():
            try:
                mask, sizes = self._numbers(length, unpadded=True)
            except NotRunnable:
                return None
            found = self._counterexample(mask, sizes, None)
            if found is not None:
                evidence = f"{found}; {evidence}"
                return Refused("MASK_UNSUPPORTED", "not a causal mask", evidence)
        return None

    def _lengths(self) -> tuple[int, int]:
        """A short odd length, and one beyond every constant of the mask."""
        self.slice = self.slice or Slice(self.captured, self.mask)
        beyond = self.slice.largest_constant() + 8
        return 7, max(mask_concrete.MIN_LENGTH, beyond)

    def _cross_check(self, proof: MaskProof) -> None:
        """The mask's numbers against the formula, at sizes beyond every constant in it."""
        for length in self._lengths():
            try:
                mask, sizes = self._numbers(length)
            except NotRunnable as error:
                raise Refused(
                    "MASK_UNPROVED",
                    "the proof of the mask could not be checked by numbers",
                    f"{error}; {proof.evidence}",
                ) from None
            found = self._counterexample(mask, sizes, proof.padding)
            if found is not None:
                raise Refused(
                    "MASK_UNPROVED",
                    "the mask's numbers contradict its formula",
                    f"{found}; {proof.evidence}",
                )

    def _numbers(self, length: int, unpadded: bool = False) -> tuple[torch.Tensor, dict[Expr, int]]:
        """The mask's values at a length, with random padding or none, and the sizes used."""
        self.slice = self.slice or Slice(self.captured, self.mask)
        leads = _lead_symbols(self.frame).union(
            *(shape_of(n)[0].free_symbols for n in self.slice.model_inputs() if shape_of(n))
        )
        batch = leads - _length_symbols(self.frame)
        sizes = self.slice.sizes(batch, length)
        for extra in _length_symbols(self.frame) | batch:
            sizes.setdefault(extra, 2 if extra in batch else length)
        shape = [concrete(size, sizes) for size in shape_of(self.mask)]
        if sympy.prod(shape) > mask_concrete.MAX_ELEMENTS:
            raise NotRunnable(f"a mask of {shape} is too large to check")
        for key, query in self.frame.tie.items():
            sizes[key] = sizes[query]
        self._fit_padding(sizes)
        self.inputs = self._inputs(sizes, unpadded)
        return self.slice.run(sizes, self.inputs), sizes

    def _fit_padding(self, sizes: dict[Expr, int]) -> None:
        """A padding input of free length gets one column for every key."""
        assert self.slice is not None
        for node in self.slice.model_inputs():
            columns = shape_of(node)[-1] if len(shape_of(node)) == 2 else None
            if getattr(columns, "is_Symbol", False) and columns not in _length_symbols(self.frame):
                sizes[columns] = concrete(self.frame.kv_len, sizes)

    def _inputs(self, sizes: dict[Expr, int], unpadded: bool) -> dict[str, torch.Tensor]:
        assert self.slice is not None
        out = {}
        for node in self.slice.model_inputs():
            shape = tuple(concrete(size, sizes) for size in shape_of(node))
            if len(shape) != 2:
                raise NotRunnable(f"{node.name} would have to be made up")
            padding = mask_concrete.random_padding(shape, dtype_of(node))
            out[node.name] = torch.ones_like(padding) if unpadded else padding
        return out

    def _counterexample(
        self, mask: torch.Tensor, sizes: dict[Expr, int], padding: str | None
    ) -> str | None:
        """The first (query, key) where the mask differs from causal with this padding."""
        rows, keys = (concrete(s, sizes) for s in (self.frame.q_len, self.frame.kv_len))
        start = concrete(self.frame.shift, sizes)
        expected = torch.arange(rows)[:, None] + start >= torch.arange(keys)[None, :]
        if padding is not None:
            expected = expected & self.inputs[padding].bool()[:, None, :]
            if mask.dim() == 4:
                expected = expected[:, None]
        seen = mask if mask.dtype == torch.bool else _seen(mask)
        wrong = (seen != expected).nonzero()
        if not len(wrong):
            return None
        i, j = (int(n) for n in wrong[0][-2:])
        verb = (
            "sees"
            if bool(torch.broadcast_to(expected, seen.shape)[tuple(wrong[0])]) is False
            else "does not see"
        )
        return f"query {i} {verb} key {j} ({rows} queries, {keys} keys)"


def _seen(mask: torch.Tensor) -> torch.Tensor:
    """Visibility of a float mask: 0 shows; masking values hide; anything else counts as neither
    and is judged as visible, which the formula then contradicts."""
    return ~(mask <= SOFTEST_FILL)


def _lead_symbols(frame: Frame) -> set[Expr]:
    shape = shape_of(frame.call.q)[:-2]
    return set().union(*(size.free_symbols for size in shape)) if shape else set()


def _length_symbols(frame: Frame) -> set[Expr]:
    return set(frame.q_len.free_symbols) | set(frame.call.kv_len.free_symbols)


def _shown(formula: Any) -> str:
    text = str(formula)
    return text if len(text) <= 600 else text[:600] + "..."
