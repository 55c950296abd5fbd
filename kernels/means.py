"""Mean keys of blocks, MoBA's summary of the past, and cutting an axis into blocks.

Legend: B batch, G key/value heads, S key slots, L keys of a sequence, D key size, N blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsify.kernels.layout import Layout, block_count, sequences

__all__ = ["SCRATCH_BYTES", "block_chunks", "block_means", "by_block", "mean_keys"]

SCRATCH_BYTES = 64 << 20
"""Scratch memory of one step of a score or mean."""


def block_means(
    k: Tensor,
    kv_len: Tensor | None = None,
    key_mask: Tensor | None = None,
    block_origin: Tensor | None = None,
    *,
    block_size: int,
) -> Tensor:
    """The `block_means` that the MoBA ops compute when they are given none.

    Args:
        k: `[B, G, S, D]`, any floating-point dtype.
        kv_len, key_mask, block_origin: see `sparsify.kernels.layout.Layout`.
        block_size: keys of a block, at least 1.

    Returns:
        `[B, G, N, D]` in the key dtype, N the number of blocks of S slots. A block without a real
        key is 0; a block in progress is the mean of what it holds so far.

    Raises:
        ValueError: for a block size below 1, or values that describe no layout.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; expected a whole number of at least 1.")
    batch, groups, slots, size = k.shape
    out = k.new_zeros(batch, groups, block_count(slots, block_size), size)
    layout = Layout(kv_len=kv_len, key_mask=key_mask, block_origin=block_origin)
    for sequence in sequences(batch, 0, slots, layout):
        means_GND = mean_keys(sequence.take_keys(k), sequence.real, block_size)
        out[sequence.batch, :, : means_GND.shape[1]] = means_GND
    return out


def mean_keys(k_GLD: Tensor, real_L: Tensor | None, block_size: int) -> Tensor:
    """Means over the real keys of each block, `[G, N, D]`, rounded to float32 and the key dtype.

    A block without a real key gives 0.
    """
    heads, keys, size = k_GLD.shape
    blocks = block_count(keys, block_size)
    out = k_GLD.new_zeros(heads, blocks, size)
    for begin, end in block_chunks(blocks, heads * block_size * size * 16):
        span = slice(begin * block_size, min(end * block_size, keys))
        part_GLD, count_N = k_GLD[:, span].double(), None
        if real_L is not None:
            real = real_L[span]
            part_GLD = part_GLD.masked_fill(~real[:, None], 0.0)
            count_N = by_block(real.double(), block_size, 0.0).sum(-1).clamp(min=1.0)
        else:
            ones = torch.ones(part_GLD.shape[1], dtype=torch.float64, device=k_GLD.device)
            count_N = by_block(ones, block_size, 0.0).sum(-1)
        sums = by_block(part_GLD.mT, block_size, 0.0).sum(-1)
        mean = (sums / count_N).mT
        if k_GLD.dtype != torch.float64:
            mean = mean.float()
        out[:, begin:end] = mean.to(k_GLD.dtype)
    return out


def by_block(x_L: Tensor, block_size: int, fill: float | bool) -> Tensor:
    """The last axis cut into blocks, `[..., N, block]`, a short last one filled up."""
    length = x_L.shape[-1]
    if length < block_size:
        return x_L.unsqueeze(-2)
    rest = -length % block_size
    if rest:
        x_L = torch.nn.functional.pad(x_L, (0, rest), value=fill)
    return x_L.unfold(-1, block_size, block_size)


def block_chunks(blocks: int, bytes_per_block: int) -> Iterator[tuple[int, int]]:
    """Runs of blocks, first and one past the last, that fit the scratch memory."""
    step = max(1, SCRATCH_BYTES // max(1, bytes_per_block))
    for begin in range(0, blocks, step):
        yield begin, min(begin + step, blocks)
