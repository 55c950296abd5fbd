"""The stages of MoBA's Triton kernels, timed over all slices of a call.

Kernels work in slices, so that scratch memory stays bounded. The choice of blocks is made once and
kept for all slices; what follows it is timed as a growing chain (index; index and attention; index,
attention and combine), since partial outputs of all slices would not fit, and a stage is the
difference of two chains.

Legend: B batch, H query heads, G key/value heads, T queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsify.timing import Run

__all__ = ["DECODE_STAGES", "PREFILL_STAGES", "moba_stages_ms"]

# Families of the cost model, and what tables call them.
PREFILL_STAGES = {
    "moba_means": "means",
    "moba_gate": "gate",
    "reverse_index": "index",
    "moba_attention": "attention",
    "combine": "combine",
}
DECODE_STAGES = {"moba_decode_gate": "gate", "moba_decode_attention": "attention"}
# Differences of two times may come out as nothing.
LEAST_MS = 1e-4

Timer = Callable[[Run], float]


def moba_stages_ms(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    block_size: int,
    topk: int,
    timer: Timer,
    workspace_bytes: int | None = None,
) -> dict[str, float]:
    """Times of the stages by family, in milliseconds; `timer` times one call.

    Calls of few queries are decode steps: they have two stages, and the block means are given.
    `topk` must be less than the number of blocks, or there are no stages.
    """
    from sparsify.kernels.attend.forward import FEW_QUERIES

    stages = _Stages(q_BHTD, k_BGSD, v_BGSD, block_size, topk, workspace_bytes)
    if q_BHTD.shape[2] <= FEW_QUERIES:
        attention = timer(lambda: stages.attend(stages.by_query, combine=True))
        return {"moba_decode_gate": timer(stages.choose), "moba_decode_attention": attention}
    found = {"moba_means": timer(stages.means), "moba_gate": timer(stages.choose)}
    index = timer(stages.index)
    attention = timer(lambda: stages.attend(stages.by_block, combine=False))
    whole = timer(lambda: stages.attend(stages.by_block, combine=True))
    found["reverse_index"] = index
    found["moba_attention"] = max(attention - index, LEAST_MS)
    found["combine"] = max(whole - attention, LEAST_MS)
    return found


class _Stages:
    """One call, cut into slices, with the chosen blocks of each."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, block: int, topk: int, workspace: int | None
    ) -> None:
        from sparsify.kernels.accelerated import WORKSPACE_BYTES
        from sparsify.kernels.attend import forward
        from sparsify.kernels.layout import Layout
        from sparsify.kernels.placement import place
        from sparsify.kernels.select.moba import Gate

        self.forward: Any = forward
        self.q, self.k, self.v, self.block = q, k, v, block
        self.place = place(Layout(), q.shape[0], q.shape[2], k.shape[2], block)
        self.shape = forward.shape_of(q, k, v, block, None)
        self.gate = Gate(q, k, self.place, None, block, topk - 1)
        room = WORKSPACE_BYTES if workspace is None else workspace
        self.slices = list(self.forward.slices(q, v, self.gate, room))
        self.chosen = self.choose()
        self.by_block = self.forward.by_block
        self.by_query = self.forward.by_query
        self.out, self.lse = self.forward.outputs(q, v)

    def means(self) -> Tensor:
        """Means of all blocks."""
        from sparsify.kernels.select.moba import block_means

        return block_means(self.k, self.place, self.block)

    def choose(self) -> list[Tensor]:
        """The chosen past blocks of every slice, `[heads, queries, W]`."""
        return [self.gate.rows(*part)[0] for part in self.slices]

    def index(self) -> None:
        """The reverse index of every slice."""
        from sparsify.kernels.select.index import reverse_index

        for part, idx in zip(self.slices, self.chosen, strict=True):
            fixed = (self.place, self.shape, part.queries)
            chunk = self.forward.entries_per_item(self.q, self.k, self.v, *fixed)
            reverse_index(idx, self.place.blocks, chunk)

    def attend(self, attend: Callable[..., Any], *, combine: bool) -> None:
        """Past blocks of every slice by `attend`, then what `combine` adds: the own blocks."""
        call = (self.q, self.k, self.v)
        for part, idx in zip(self.slices, self.chosen, strict=True):
            fixed = (self.place, self.shape, part, self.gate.chosen)
            parts = attend(*call, idx, *fixed)
            if combine:
                self.forward.combine(*call, idx, None, parts, self.out, self.lse, *fixed)
