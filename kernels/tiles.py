"""Cutting one sequence into tiles that fit the workspace, and attending tile by tile.

Two forms compute the same: a masked product with all keys up to the tile's last query (many
queries), or a gather of each query's own blocks (few queries over a long cache). The choice depends
on sizes of the sequence alone, never on its neighbours in the batch.

Legend: G key/value heads, R query heads of a group, H heads of the lists (G or G*R), T queries,
L keys, D key size, V value size, N blocks, K list places.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.kernels.dense import TileGrads, attend, attend_backward, attend_gathered
from sparsify.kernels.layout import Sequence, block_count
from sparsify.kernels.scores import Chooser

__all__ = [
    "DEFAULT_WORKSPACE_BYTES",
    "Heads",
    "Settings",
    "backward_sequence",
    "compute_dtype",
    "forward_sequence",
]

DEFAULT_WORKSPACE_BYTES = 64 << 20
_MASKED_BYTES = 2  # mask and its complement, beside the logits
_GATHER_COST = 8  # a gathered key against a key of a matrix product, per query head


class Heads(NamedTuple):
    """Queries, keys and values of one sequence: `[H, T, D]`, `[G, L, D]`, `[G, L, V]`."""

    q: Tensor
    k: Tensor
    v: Tensor


class Settings(NamedTuple):
    """What all sequences of a call share."""

    block_size: int
    list_heads: int
    list_width: int
    scale: float
    workspace_bytes: int


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward_sequence(
    sequence: Sequence,
    heads: Heads,
    choose: Chooser,
    settings: Settings,
    out_HTV: Tensor,
    lse_HT: Tensor,
) -> None:
    """Attend with the chosen blocks; writes into `out_HTV` and `lse_HT`."""
    if sequence.keys == 0:
        return
    if _gather_is_less(sequence, heads, settings):
        _forward_gathered(sequence, heads, choose, settings, out_HTV, lse_HT)
        return
    dtype = compute_dtype(heads.q.dtype)
    q_GRTD = heads.q.unflatten(0, (heads.k.shape[0], -1))
    k, v = heads.k.to(dtype).contiguous(), heads.v.to(dtype).contiguous()
    out_GRTV = out_HTV.unflatten(0, q_GRTD.shape[:2])
    lse_GRT = lse_HT.unflatten(0, q_GRTD.shape[:2])
    for first, last, keep, groups in _tiles(sequence, heads, choose, settings, 1):
        reach = keep.shape[-1]
        at = (groups, slice(None), slice(first, last))
        out, lse = attend(
            q_GRTD[at].to(dtype), k[groups, :reach], v[groups, :reach], keep, settings.scale
        )
        out_GRTV[at], lse_GRT[at] = out, lse


def backward_sequence(
    sequence: Sequence,
    heads: Heads,
    choose: Chooser,
    settings: Settings,
    grad_HTV: Tensor,
    grad_lse_HT: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in the compute dtype, and the log-sum-exp as recomputed `[H, T]`."""
    dtype = compute_dtype(heads.q.dtype)
    groups_count = heads.k.shape[0]
    q_GRTD, grad_GRTV, grad_lse_GRT = (
        x.unflatten(0, (groups_count, -1)) for x in (heads.q, grad_HTV, grad_lse_HT)
    )
    k, v = heads.k.to(dtype).contiguous(), heads.v.to(dtype).contiguous()
    grad_q = torch.zeros(q_GRTD.shape, dtype=dtype, device=k.device)
    lse = torch.full(q_GRTD.shape[:3], float("-inf"), dtype=dtype, device=k.device)
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    for first, last, keep, groups in _tiles(sequence, heads, choose, settings, 3):
        reach = keep.shape[-1]
        at = (groups, slice(None), slice(first, last))
        part: TileGrads = attend_backward(
            q_GRTD[at].to(dtype),
            k[groups, :reach],
            v[groups, :reach],
            keep,
            grad_GRTV[at].to(dtype),
            grad_lse_GRT[at].to(dtype),
            settings.scale,
        )
        grad_q[at], lse[at] = part.q, part.lse
        grad_k[groups, :reach] += part.k
        grad_v[groups, :reach] += part.v
    return grad_q.flatten(0, 1), grad_k, grad_v, lse.flatten(0, 1)


def _tiles(
    sequence: Sequence,
    heads: Heads,
    choose: Chooser,
    settings: Settings,
    buffers: int,
) -> Iterator[tuple[int, int, Tensor, slice]]:
    """First and last query, mask of the pairs that count `[G, R or 1, T, L]`, groups of a tile.

    Queries that see no key are in no tile.
    """
    groups, block_size = heads.k.shape[0], settings.block_size
    size = torch.finfo(compute_dtype(heads.q.dtype)).bits // 8
    row_bytes = sequence.keys * (size * buffers + _MASKED_BYTES) * heads.q.shape[0] // groups
    rows = max(1, settings.workspace_bytes // max(1, row_bytes))
    step_groups = max(1, min(groups, rows // min(64, sequence.queries)))
    step = max(1, rows // step_groups)
    for first in range(max(0, -sequence.start), sequence.queries, step):
        last = min(first + step, sequence.queries)
        lists = choose(first, last).to(heads.k.device)
        allowed = _allowed(lists, groups, block_count(sequence.keys, block_size))
        for group in range(0, groups, step_groups):
            part = slice(group, group + step_groups)
            yield first, last, _keep(allowed[part], sequence, first, last, block_size), part


def _allowed(lists_HTK: Tensor, groups: int, blocks: int) -> Tensor:
    """Which blocks the lists name, bool `[G, R or 1, T, N]`; numbers outside 0..N-1 name none."""
    index = lists_HTK.long()
    index = index.masked_fill((index < 0) | (index >= blocks), blocks)
    allowed = torch.zeros(*index.shape[:2], blocks + 1, dtype=torch.bool, device=index.device)
    allowed.scatter_(-1, index, True)
    return allowed[..., :blocks].unflatten(0, (groups, -1))


def _keep(
    allowed_GRTN: Tensor, sequence: Sequence, first: int, last: int, block_size: int
) -> Tensor:
    """Pairs that count: the key's block is allowed, the key is real and not ahead of the query."""
    reach = sequence.visible_keys(last)
    numbers_L = torch.arange(reach, device=allowed_GRTN.device)
    visible_TL = numbers_L <= sequence.positions(first, last, numbers_L.device)[:, None]
    if sequence.real is not None:
        visible_TL &= sequence.real[:reach]
    blocks = block_count(reach, block_size)
    spread = min(block_size, reach)
    keep = allowed_GRTN[..., :blocks, None].expand(*allowed_GRTN.shape[:3], blocks, spread)
    return keep.flatten(-2)[..., :reach] & visible_TL


def _gather_is_less(sequence: Sequence, heads: Heads, settings: Settings) -> bool:
    """Whether gathering the keys of every list beats the masked product with all keys."""
    groups, all_heads = heads.k.shape[0], heads.q.shape[0]
    masked = sequence.keys * (groups * _GATHER_COST + all_heads * sequence.queries)
    rows = settings.list_heads * sequence.queries
    return rows * _gathered_keys(sequence, settings) * _GATHER_COST < masked


def _gathered_keys(sequence: Sequence, settings: Settings) -> int:
    blocks = min(settings.list_width, block_count(sequence.keys, settings.block_size))
    return blocks * min(settings.block_size, sequence.keys)


def _forward_gathered(
    sequence: Sequence,
    heads: Heads,
    choose: Chooser,
    settings: Settings,
    out_HTV: Tensor,
    lse_HT: Tensor,
) -> None:
    dtype = compute_dtype(heads.q.dtype)
    size = torch.finfo(dtype).bits // 8
    key_bytes = size * (heads.k.shape[-1] + heads.v.shape[-1]) + 24
    row_bytes = settings.list_heads * _gathered_keys(sequence, settings) * key_bytes
    step = max(1, settings.workspace_bytes // max(1, row_bytes))
    for first in range(max(0, -sequence.start), sequence.queries, step):
        last = min(first + step, sequence.queries)
        lists = choose(first, last).to(heads.k.device)
        index_HTL, keep_HTL = _tokens(lists, sequence, first, last, settings.block_size)
        k, v = (_gathered(x, index_HTL, keep_HTL).to(dtype) for x in (heads.k, heads.v))
        q_HRTD = heads.q[:, first:last].to(dtype).unflatten(0, (settings.list_heads, -1))
        out, lse = attend_gathered(q_HRTD, k, v, keep_HTL, settings.scale)
        out_HTV[:, first:last], lse_HT[:, first:last] = out.flatten(0, 1), lse.flatten(0, 1)


def _tokens(
    lists_HTK: Tensor, sequence: Sequence, first: int, last: int, block_size: int
) -> tuple[Tensor, Tensor]:
    """Keys of the listed blocks, in order, and which of them count; both `[H, T, L]`."""
    lists_HTK = _distinct(lists_HTK.long(), block_count(sequence.keys, block_size))
    spread = torch.arange(min(block_size, sequence.keys), device=lists_HTK.device)
    index = (lists_HTK[..., None] * block_size + spread).flatten(-2)
    p_T1 = sequence.positions(first, last, index.device)[:, None]
    keep = (lists_HTK >= 0).repeat_interleave(len(spread), -1)
    keep &= (index <= p_T1) & (index < sequence.keys)
    index = index.masked_fill(~keep, 0)
    if sequence.real is not None:
        keep = keep & sequence.real[index]
    return index, keep


def _distinct(lists_HTK: Tensor, blocks: int) -> Tensor:
    """Each number in 0..blocks-1 once, ascending, behind as many -1 as the list had room for."""
    lists_HTK = lists_HTK.masked_fill(lists_HTK >= blocks, -1).sort(-1).values
    again = lists_HTK[..., 1:] == lists_HTK[..., :-1]
    lists_HTK[..., 1:].masked_fill_(again, -1)
    return lists_HTK.sort(-1).values[..., -blocks:]


def _gathered(x_GLD: Tensor, index_HTL: Tensor, keep_HTL: Tensor) -> Tensor:
    """Keys or values by number, `[H, T, L, D]`, zero where they do not count."""
    groups, heads = x_GLD.shape[0], index_HTL.shape[0]
    group_H = torch.arange(heads, device=x_GLD.device) // (heads // groups)
    taken = x_GLD[group_H[:, None, None], index_HTL]
    return taken.masked_fill_(~keep_HTL[..., None], 0.0)
