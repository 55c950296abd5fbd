"""MoBA's choice of blocks: what the gate kernels are started with."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from sparsify.kernels.placement import Placement
from sparsify.kernels.select.gate import (
    gate_exact_fwd_kernel,
    gate_merge_fwd_kernel,
    gate_packed_fwd_kernel,
)
from sparsify.kernels.select.means import block_means_fwd_kernel
from sparsify.kernels.tiling import MOST_PROGRAMS, gate_tiles, padded

__all__ = ["Gate", "block_means"]

_MEAN_ROWS = 32
_MERGED = 128  # rows of a program that merges lanes: a thread each
_FIXING = 2112  # programs that redo flagged rows, for all heads: 16 on each of 132 processors
_PACKED = ("heads", "group", "BLOCK", "D", "DP", "PLAIN", "REAL", "EXACT_DOT")


def block_means(k: Tensor, placement: Placement, block_size: int) -> Tensor:
    """Means of the real keys of every block, `[B, G, N, D]` in the key dtype."""
    batch, groups, slots, size = k.shape
    means = k.new_empty(batch, groups, placement.blocks, size)
    if means.numel():
        block_means_fwd_kernel[(placement.blocks * batch * groups,)](
            k,
            means,
            placement.slot_BN,
            placement.keys_BN,
            placement.key_mask,
            *k.stride(),
            slots,
            placement.blocks,
            groups=groups,
            BLOCK=block_size,
            D=size,
            DP=padded(size),
            R=min(_MEAN_ROWS, padded(block_size)),
            STAGES=4,
            PLAIN=placement.plain,
            MASKED=placement.key_mask is not None,
            num_warps=4,
        )
    return means


def _of_blocks(means: Tensor, blocks: int, dtype: torch.dtype) -> Tensor:
    """The means of `blocks` blocks; whoever keeps them may have room for more. In a dtype that
    differs from the queries' they are scored in float32."""
    means = means[:, :, :blocks]
    short = blocks - means.shape[2]
    if short > 0:
        means = torch.nn.functional.pad(means, (0, 0, 0, short))
    return (means if means.dtype == dtype else means.float()).contiguous()


class Gate:
    """The best `chosen` past blocks of every query, in slices.

    `width` is the number of places of a list; places behind the chosen ones hold -1.
    """

    together = False

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        placement: Placement,
        means: Tensor | None,
        block_size: int,
        chosen: int,
    ) -> None:
        self.q, self.placement, self.block_size = q, placement, block_size
        self.chosen = min(chosen, max(placement.blocks - 1, 0))
        self.tiles = gate_tiles(
            max(self.chosen, 1), placement.blocks, q.shape[-1], q.element_size()
        )
        self.width = self.tiles.width
        self.group = q.shape[1] // k.shape[1]
        if self.chosen:
            self.means = (
                block_means(k, placement, block_size)
                if means is None
                else _of_blocks(means, placement.blocks, q.dtype)
            )

    def all_rows(self) -> Tensor:
        """Lists of all heads and queries, `[B, H, T, W]`."""
        batch, heads, q_len = self.q.shape[:3]
        lists = batch * heads
        parts = [
            self.rows(at, min(MOST_PROGRAMS, lists - at), 0, q_len)[0]
            for at in range(0, max(lists, 1), MOST_PROGRAMS)
        ]
        past = parts[0] if len(parts) == 1 else torch.cat(parts)
        return past.view(batch, heads, q_len, self.width)

    def rows(self, head: int, heads: int, first: int, count: int) -> tuple[Tensor, None]:
        """Past blocks `[heads, count, W]`; the own block is always chosen and not among them.

        Args:
            head, heads: the slice of the heads of all batch rows, counted through.
            first, count: the slice of the queries.
        """
        shape = (heads, count, self.width)
        if not self.chosen or not heads or not count:
            return self.q.new_full(shape, -1, dtype=torch.int32), None
        idx = self.q.new_empty(shape, dtype=torch.int32)
        flagged = self.q.new_zeros(heads, dtype=torch.int32)
        rows = self.q.new_empty(heads, count, dtype=torch.int32)
        if self.tiles.packed:
            self._packed(idx, flagged, rows, head, first)
        self._exact(idx, flagged, rows, head, first)
        return idx, None

    def _packed(self, idx: Tensor, flagged: Tensor, rows: Tensor, head: int, first: int) -> None:
        tiles, (heads, count, width) = self.tiles, idx.shape
        kept = 4 if self.chosen <= 3 else 8
        best = self.q.new_empty(heads, kept, 4, count, dtype=torch.float32)
        cut = self.q.new_empty(heads, 4, count, dtype=torch.float32)
        spare = max(7, (self.placement.blocks - 1).bit_length()) - 4  # four are the list's
        sizes = self._sizes()
        gate_packed_fwd_kernel[(triton.cdiv(count, tiles.rows), heads)](
            self.q,
            self.means,
            best,
            cut,
            *self._where(first, count, head),
            **{name: sizes[name] for name in _PACKED},
            M=tiles.rows,
            KEPT=kept,
            spare=spare,
            LIST=3 if self.chosen <= 2 else 4,
            STAGES=tiles.stages,
            num_warps=tiles.warps,
            maxnreg=tiles.max_registers,
        )
        gate_merge_fwd_kernel[(triton.cdiv(count, _MERGED), heads)](
            best,
            cut,
            idx,
            flagged,
            rows,
            count,
            R=_MERGED,
            KEPT=kept,
            CHOSEN=self.chosen,
            WIDTH=width,
            spare=spare,
            num_warps=4,
        )

    def _exact(self, idx: Tensor, flagged: Tensor, rows: Tensor, head: int, first: int) -> None:
        tiles = self.tiles
        programs = triton.cdiv(idx.shape[1], tiles.exact_rows)
        if tiles.packed:
            programs = min(programs, triton.cdiv(_FIXING, idx.shape[0]))
        gate_exact_fwd_kernel[(programs, idx.shape[0])](
            self.q,
            self.means,
            idx,
            flagged,
            rows,
            *self._where(first, idx.shape[1], head),
            **self._sizes(),
            M=tiles.exact_rows,
            TILE_N=tiles.exact_columns,
            LENGTH=tiles.exact_length,
            ONE_TILE=self.placement.blocks <= tiles.exact_columns,
            LISTED=tiles.packed,
            num_warps=tiles.exact_warps,
            num_stages=3 if tiles.packed else 1,
        )

    def _where(self, first: int, count: int, head: int) -> tuple[object, ...]:
        placement = self.placement
        return (
            placement.first_BT,
            placement.end_BT,
            placement.real_BN,
            *self.q.stride(),
            self.q.shape[2],
            placement.blocks,
            placement.start,
            first,
            count,
            head,
        )

    def _sizes(self) -> dict[str, object]:
        size = self.q.shape[-1]
        return {
            "heads": self.q.shape[1],
            "group": self.group,
            "BLOCK": self.block_size,
            "D": size,
            "DP": padded(size),
            "CHOSEN": self.chosen,
            "WIDTH": self.width,
            "PLAIN": self.placement.plain,
            "REAL": self.placement.real_BN is not None,
            "EXACT_DOT": torch.float32 in (self.q.dtype, self.means.dtype),
        }
