"""V4: what a token may not see is changed and its output stays, bit for bit.

Both runs of a probe have the same shapes, so a row that sees nothing new is computed by the same
arithmetic and keeps its bits; this holds of any model whose rows meet in attention only. Where they
meet elsewhere too (experts get batches of another size), the original itself moves by rounding, and
then rounding is what the rewritten model is allowed, with the selection replayed.

Every change leaves the token of one row alone, the witness, which sees the token before it: the
witness must move, or the probe would prove nothing.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from sparsify.comparing import (
    Context,
    error,
    join,
    logits,
    result,
    same_bits,
    variant,
)
from sparsify.errors import StrictError
from sparsify.kernels.selection import record_selection, replay_selection
from sparsify.report import CheckResult
from sparsify.sparse_rows import Seen, watching
from sparsify.variants import takes

__all__ = ["batches", "documents", "future"]


@dataclasses.dataclass(frozen=True)
class _Change:
    """Tokens `[B, T]` in place of others; which real rows must stay, and which must move."""

    what: str
    ids_BT: torch.Tensor
    still: torch.Tensor
    moving: torch.Tensor


@dataclasses.dataclass(frozen=True)
class _Input:
    """Tokens `[B, T]` with the padding mask and the positions they are run with."""

    ids_BT: torch.Tensor
    mask_BT: torch.Tensor | None = None
    positions_BT: torch.Tensor | None = None

    @property
    def real_BT(self) -> torch.Tensor:
        return torch.ones_like(self.ids_BT).bool() if self.mask_BT is None else self.mask_BT.bool()

    def logits(self, model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
        """Logits of the real tokens, `[rows, V]`."""
        more = {} if self.positions_BT is None else {"position_ids": self.positions_BT}
        out = logits(model, ids_BT, self.mask_BT, **more)
        return out if self.mask_BT is not None else out.flatten(0, 1)

    def change(
        self, what: str, where_BT: torch.Tensor, still_BT: torch.Tensor, witnesses: dict[int, int]
    ) -> _Change:
        """Other tokens at `where`, but not at the witnesses (sequence to slot)."""
        real, where, moving = self.real_BT, where_BT.clone(), torch.zeros_like(where_BT)
        for sequence, slot in witnesses.items():
            where[sequence, slot], moving[sequence, slot] = False, True
        if not witnesses:  # every row sees at least its own token
            moving = where & real
        other_BT = (self.ids_BT + 1) % max(2, int(self.ids_BT.max()) + 1)
        ids_BT = torch.where(where, other_BT, self.ids_BT)
        return _Change(what, ids_BT, (still_BT & real)[real], moving[real])


def future(c: Context) -> CheckResult:
    """V4: other tokens after a place leave every row up to it as it was."""
    given = _Input(c.tokens(c.limit))
    slots = torch.arange(c.limit, device=given.ids_BT.device)[None]
    borders = {span + size for size, span in _sizes(c)} | {c.limit - 1}
    lengths = sorted(n for n in {*c.derived_lengths(), *borders} if n < c.limit)
    changes = [
        given.change(f"tokens after {n}", slots >= n, slots < n, _witness(c, 0, n, c.limit))
        for n in lengths
    ]
    faults, seen = _run(c, given, changes)
    faults += seen.faults()
    metrics = {"tokens": c.limit, "changed_after": lengths, "sparse_rows": seen.sparse_rows}
    done = (
        f"{c.limit} tokens ({seen.sparse_rows} sparse rows in {len(changes) + 1} runs): other "
        f"tokens after the first {join(lengths)} leave these bit-equal"
    )
    return result("V4", "future", faults, done, metrics)


def batches(c: Context) -> CheckResult:
    """V4: other tokens behind the padding, or in other sequences, leave a sequence as it was."""
    given = _padded(c)
    real, witnesses = given.real_BT, _witnesses(c, given)
    changes = [given.change("padding", ~real, real, {})] if given.mask_BT is not None else []
    for kept in range(len(real)):
        still = torch.zeros_like(real)
        still[kept] = True
        moving = {sequence: slot for sequence, slot in witnesses.items() if sequence != kept}
        changes.append(given.change("neighbours in the batch", ~still, still, moving))
    faults, seen = _run(c, given, changes)
    faults += seen.faults()
    length = given.ids_BT.shape[1]
    hidden = int((~real).sum())
    metrics = {"tokens": length, "hidden_tokens": hidden, "sparse_rows": seen.sparse_rows}
    padding = f"padded left, right and inside ({hidden} tokens hidden)"
    if given.mask_BT is None:
        padding = "not padded, for the model takes no attention_mask"
    done = (
        f"3 sequences of {length} tokens, {padding}: other tokens behind the padding or in the "
        "neighbours leave a sequence bit-equal"
    )
    return result("V4", "padding and batch", faults, done, metrics)


def documents(c: Context) -> CheckResult:
    """V4: of two documents packed by position_ids, neither moves with the other."""
    name = "documents"
    if not takes(c.rewritten, "position_ids"):
        return CheckResult("V4", name, "skipped", "the model takes no position_ids", {})
    length = min(c.limit, max(2 * c.spans[-1] + 3, c.limit // 2))
    first = length // 2
    if not first:
        return CheckResult("V4", name, "skipped", "one token holds no two documents", {})
    ids = c.tokens(length)
    slots = torch.arange(length, device=ids.device)[None]
    given = _Input(ids, positions_BT=torch.where(slots < first, slots, slots - first))
    inside = (slots < first, slots >= first)
    seen_by = (_witness(c, 0, 0, first), _witness(c, first, first, length))
    changes = [
        given.change("the other document", inside[i], inside[1 - i], seen_by[i]) for i in (0, 1)
    ]
    try:
        faults, seen = _run(c, given, changes)
    except StrictError as refused:
        return CheckResult("V4", name, "skipped", f"SPARSIFY_STRICT=1: {refused.message}", {})
    if faults and _moves_likewise(c, given, changes):
        text = "the original does not separate documents by position_ids"
        return CheckResult("V4", name, "skipped", text, {})
    sparse = sum(bool(seen.calls[key]) for key in seen.spans)
    metrics = {"tokens": length, "documents": 2, "sites_run_sparse": sparse}
    how = "dense" if not sparse else f"sparse at {sparse} of {len(seen.spans)} planned sites"
    done = f"2 documents packed into {length} tokens ran {how}: the other leaves each bit-equal"
    return result("V4", name, faults, done, metrics)


def _run(c: Context, given: _Input, changes: list[_Change]) -> tuple[list[str], Seen]:
    """What moved that must not, and what stayed that must move; and what ran sparse."""
    model, faults = variant(c, min_context=0), []
    with watching(c.plan) as seen:
        before = given.logits(model, given.ids_BT)
        for change in changes:
            after = given.logits(model, change.ids_BT)
            if not same_bits(before[change.still], after[change.still]):
                faults += _judge(c, given, change, model)
            if any(map(same_bits, before[change.moving], after[change.moving])):
                faults.append(f"other {change.what} do not move a row that sees them")
    return faults, seen


def _judge(c: Context, given: _Input, change: _Change, model: Any) -> list[str]:
    """Whether a row that moved may have: by rounding, if rounding moves the original too."""
    run = functools.partial(_rows, given, change)
    if same_bits(*(run(c.original, ids) for ids in (given.ids_BT, change.ids_BT))):
        return [f"other {change.what} move rows that must not see them"]
    far, allowed = _error(c.original, given, run, change)
    if not far <= allowed:
        return [f"other {change.what} move rows of the original too (by {far:.1e})"]
    with record_selection() as chosen:
        run(model, given.ids_BT)
    with replay_selection(chosen):
        far, allowed = _error(model, given, run, change)
    if far <= allowed:
        return []
    return [f"other {change.what} move rows by {far:.1e}, more than rounding ({allowed:.0e})"]


def _rows(given: _Input, change: _Change, model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """Logits of the rows that must stay."""
    return given.logits(model, ids_BT)[change.still]


def _error(
    model: Any, given: _Input, run: Callable[..., torch.Tensor], change: _Change
) -> tuple[float, float]:
    before, after = run(model, given.ids_BT), run(model, change.ids_BT)
    return error(after, before, lambda: run(copy.deepcopy(model).double(), given.ids_BT))


def _moves_likewise(c: Context, given: _Input, changes: list[_Change]) -> bool:
    """Whether every change moves rows of the original beyond rounding."""
    return any(
        far > allowed
        for change in changes
        for far, allowed in [
            _error(c.original, given, functools.partial(_rows, given, change), change)
        ]
    )


def _padded(c: Context) -> _Input:
    """Three sequences, sparse behind their padding: on the left, on the right, and holes inside."""
    length = min(c.limit, max(2 * c.spans[-1] + 3, c.limit // 2))
    ids = torch.cat([c.tokens(length), c.tokens(length).flip(1), c.tokens(2 * length)[:, length:]])
    if not takes(c.rewritten, "attention_mask"):
        return _Input(ids)
    mask, gap = torch.ones_like(ids), length // 4
    mask[0, :gap] = 0
    mask[1, length - gap :] = 0
    mask[2, gap : gap + gap // 2] = 0
    mask[2, : gap // 4] = 0
    return _Input(ids, mask)


def _witnesses(c: Context, given: _Input) -> dict[int, int]:
    """A witness at the end of every sequence."""
    found: dict[int, int] = {}
    for sequence, real in enumerate(given.real_BT.tolist()):
        end = len(real) - real[::-1].index(True)
        first = end - [*real[:end][::-1], False].index(False)
        found |= _witness(c, real.index(True), first, end, sequence)
    return found


def _witness(c: Context, origin: int, first: int, end: int, sequence: int = 0) -> dict[int, int]:
    """The last slot before `end` that sees the slot before it, which is not before `first`.

    A row sees its own block, so the two stand in one block of some layer, counted from `origin`.
    """
    for slot in range(end - 1, first, -1):
        if any((slot - origin) % size for size, _ in _sizes(c)):
            return {sequence: slot}
    return {}


def _sizes(c: Context) -> list[tuple[int, int]]:
    """Block size and top-k * block size of the layers."""
    return sorted({(p.budget[0], p.budget[0] * p.budget[1]) for p in c.plan.rewritten})
