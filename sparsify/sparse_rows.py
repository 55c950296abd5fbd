"""What ran sparse: calls and rows of every planned site, counted while a check runs the model."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator

from sparsify.hosts.calls import SiteCall, observing
from sparsify.plans import Plan

__all__ = ["Seen", "watching"]


class Seen:
    """What ran sparse while it watched: calls and sparse rows of every planned site.

    A row is sparse when its position, counted from the first real key, is at least top-k blocks
    of the plan; it is counted once for all heads.
    """

    def __init__(self, plan: Plan) -> None:
        self.spans = {p.key: math.prod(p.budget) for p in plan.rewritten}
        self.calls: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()

    def note(self, call: SiteCall) -> None:
        """Observer of `sparsify.hosts.calls.observing`."""
        key, n_T = call.plan.key, call.q.shape[2]
        self.calls[key] += 1
        self.rows[key] += sum(max(0, n - max(self.spans[key], n - n_T)) for n in _real_keys(call))

    @property
    def sparse_rows(self) -> int:
        """Sparse rows of the site that had the fewest."""
        return min(self.rows[key] for key in self.spans)

    def faults(self) -> list[str]:
        """Planned sites that ran dense, and budgets that no input was long enough for."""
        dense = [key for key in self.spans if not self.calls[key]]
        if dense:
            others = f" and {len(dense) - 1} others" if len(dense) > 1 else ""
            return [f"{dense[0]}{others} ran dense"]
        short = sorted({span for key, span in self.spans.items() if not self.rows[key]})
        return [f"no input was longer than top-k blocks ({span} tokens)" for span in short]


def _real_keys(call: SiteCall) -> list[int]:
    """Real keys of every sequence: a row of the batch, or a document packed into it."""
    n_B, n_S = call.q.shape[0], call.k.shape[2]
    if call.documents is None:
        return [n_S] * n_B if call.key_mask is None else call.key_mask.sum(-1).tolist()
    found = []
    for row, documents in enumerate(call.documents.expand(n_B, -1)):
        seen = documents if call.key_mask is None else documents[call.key_mask[row]]
        found += seen.unique_consecutive(return_counts=True)[1].tolist()
    return found


@contextlib.contextmanager
def watching(plan: Plan) -> Iterator[Seen]:
    """Count what runs sparse inside the `with`."""
    seen = Seen(plan)
    with observing(seen.note):
        yield seen
