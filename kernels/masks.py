"""Which pairs of a tile count: its block listed, the key real and not ahead of the query.

Legend: G key/value heads, R query heads of a group, H heads of the lists (G or G*R), T queries,
L keys, N blocks, K list places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsify.kernels.layout import Sequence, block_count

__all__ = ["TileMask", "listed"]

_HIDDEN = float("-inf")


@dataclass(frozen=True, slots=True)
class TileMask:
    """Mask of queries `first .. last-1` of a sequence against its keys `0 .. reach-1`.

    `listed_GRTN` names the blocks of each row; its R axis has size 1 where a group shares a list.
    """

    listed_GRTN: Tensor
    sequence: Sequence
    first: int
    last: int
    block_size: int

    @property
    def reach(self) -> int:
        """Keys that any of the queries may see."""
        return self.sequence.visible_keys(self.last)

    def groups(self, part: slice) -> TileMask:
        """The same tile for some of the groups."""
        listed_GRTN = self.listed_GRTN[part]
        return TileMask(listed_GRTN, self.sequence, self.first, self.last, self.block_size)

    def hide(self, logits_GRTL: Tensor) -> None:
        """Set the logits that do not count to -inf, in place; a NaN among them stays."""
        bound = torch.where(self.listed_GRTN, -_HIDDEN, _HIDDEN).to(logits_GRTL.dtype)
        whole = self.reach // self.block_size
        border = whole * self.block_size
        if whole:
            inner = logits_GRTL[..., :border].unfold(-1, self.block_size, self.block_size)
            torch.minimum(inner, bound[..., :whole, None], out=inner)
        if border < self.reach:
            tail = logits_GRTL[..., border:]
            torch.minimum(tail, bound[..., whole, None], out=tail)
        if self.sequence.real is not None:
            real_L = self.sequence.real[: self.reach]
            bound_L = torch.where(real_L, -_HIDDEN, _HIDDEN).to(logits_GRTL.dtype)
            torch.minimum(logits_GRTL, bound_L, out=logits_GRTL)
        ahead_TL, begin = self._ahead()
        logits_GRTL[..., begin:].masked_fill_(ahead_TL, _HIDDEN)

    def keep(self) -> Tensor:
        """The mask itself, bool `[G, R or 1, T, L]`."""
        blocks = block_count(self.reach, self.block_size)
        spread = min(self.block_size, self.reach)
        keep = self.listed_GRTN[..., :blocks].repeat_interleave(spread, -1)[..., : self.reach]
        if self.sequence.real is not None:
            keep &= self.sequence.real[: self.reach]
        ahead_TL, begin = self._ahead()
        keep[..., begin:].masked_fill_(ahead_TL, False)
        return keep

    def _ahead(self) -> tuple[Tensor, int]:
        """Keys ahead of their query, from the first key on that is ahead of any."""
        begin = min(self.reach, max(0, self.sequence.start + self.first))
        device = self.listed_GRTN.device
        numbers_L = torch.arange(begin, self.reach, device=device)
        p_T = self.sequence.positions(self.first, self.last, device)
        return numbers_L > p_T[:, None], begin


def listed(lists_HTK: Tensor, groups: int, blocks: int) -> Tensor:
    """Which blocks the lists name, bool `[G, R or 1, T, N]`; numbers outside 0..N-1 name none."""
    index = lists_HTK.long()
    index = index.masked_fill((index < 0) | (index >= blocks), blocks)
    named = torch.zeros(*index.shape[:2], blocks + 1, dtype=torch.bool, device=index.device)
    named.scatter_(-1, index, True)
    return named[..., :blocks].reshape(groups, -1, index.shape[1], blocks)
