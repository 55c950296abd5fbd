"""Lists of blocks in the two forms they have: of the ops, and of the kernels.

The ops' lists are ascending numbers of each sequence's own blocks, the own block last. The kernels'
hold past blocks only, numbered through the batch row, ascending, -1 behind.

Legend: B batch, H lists of a batch row (one per query head or per key group), T queries, K list
places, W places of a kernel's list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.kernels.placement import Placement
from sparsify.kernels.tiling import padded

__all__ = ["Given", "every", "public"]

_NONE = 2**31 - 1


class Given:
    """Lists that were handed over, for the kernels: `chosen` places of `width`.

    Entries that are negative, repeated, ahead of the query or beyond the keys have no effect.
    """

    together = False

    def __init__(self, blocks_BHTK: Tensor, placement: Placement, block_size: int) -> None:
        self.blocks_BHTK, self.placement, self.block_size = blocks_BHTK, placement, block_size
        self.chosen = max(1, min(blocks_BHTK.shape[-1], placement.blocks))
        self.width = padded(self.chosen, 4)

    def rows(self, first_list: int, lists: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Past blocks `[lists, count, W]`, and whether each row's own block is listed."""
        first_T1, end_T1 = _past_range(
            self.placement, self.blocks_BHTK.shape[2], self.block_size, self.blocks_BHTK.device
        )
        at = slice(first, first + count)
        batch = torch.arange(first_list, first_list + lists, device=end_T1.device)
        batch = batch // self.blocks_BHTK.shape[1]
        mine = self.blocks_BHTK.flatten(0, 1)[first_list : first_list + lists, at]
        row = batch.clamp(max=end_T1.shape[0] - 1)
        first_HT1, end_HT1 = first_T1[row][:, at], end_T1[row][:, at]
        number = mine + first_HT1
        known = mine >= 0
        own = (known & (number == end_HT1)).any(-1)
        past = torch.where(known & (number < end_HT1), number, _NONE).sort(-1).values
        again = past[..., 1:] == past[..., :-1]
        past[..., 1:].masked_fill_(again, _NONE)
        past = past.sort(-1).values[..., : self.chosen]
        past = past.masked_fill(past == _NONE, -1)
        past = torch.nn.functional.pad(past, (0, self.width - past.shape[-1]), value=-1)
        return past.int().contiguous(), own.to(torch.int8).contiguous()


def public(
    past_BHTW: Tensor, placement: Placement, q_len: int, block_size: int, width: int
) -> Tensor:
    """Kernel lists as the ops show them: int32 `[B, H, T, width]`."""
    first_T1, end_T1 = _past_range(placement, q_len, block_size, past_BHTW.device)
    own_BT1 = torch.where(_own(placement, q_len, end_T1.device), end_T1 - first_T1, _NONE)
    local = torch.where(past_BHTW >= 0, past_BHTW - first_T1[:, None], _NONE)
    own = own_BT1[:, None].expand(*past_BHTW.shape[:2], -1, -1)
    every = torch.cat([local, own.expand(*past_BHTW.shape[:3], 1).to(local.dtype)], -1)
    every = every.sort(-1).values[..., :width]
    every = every.masked_fill(every == _NONE, -1).to(torch.int32)
    return torch.nn.functional.pad(every, (0, width - every.shape[-1]), value=-1)


def every(
    placement: Placement, width: int, q_len: int, block_size: int, device: torch.device
) -> Tensor:
    """The ops' lists where no sequence has more than `width` blocks: all past blocks that hold a
    real key and the own one, `[B or 1, 1, T, width]`."""
    first_T1, end_T1 = _past_range(placement, q_len, block_size, device)
    number_TW = first_T1 + torch.arange(width, device=device)
    past_TW = number_TW < end_T1
    if placement.real_BN is not None and width:
        at = number_TW.long().clamp(max=placement.real_BN.shape[1] - 1).flatten(1)
        past_TW = past_TW & placement.real_BN.gather(1, at).view_as(number_TW)
    past = torch.where(past_TW, number_TW, -1).int()[:, None]
    return public(past, placement, q_len, block_size, width)


def _own(placement: Placement, q_len: int, device: torch.device) -> Tensor:
    """Whether each query stands in a block, `[B or 1, T, 1]`."""
    if placement.own_BT is not None:
        return placement.own_BT[..., None]
    slot = placement.start + torch.arange(q_len, device=device)
    return (slot >= 0)[None, :, None]


def _past_range(
    placement: Placement, q_len: int, block_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """`first` and `end` of every query, `[B or 1, T, 1]`."""
    if placement.first_BT is not None and placement.end_BT is not None:
        return placement.first_BT[..., None], placement.end_BT[..., None]
    slot = placement.start + torch.arange(q_len, device=device)
    end = slot.clamp(min=0) // block_size
    return torch.zeros_like(end)[None, :, None], end[None, :, None]
