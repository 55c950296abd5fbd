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

from sparsify.kernels.dense import attend, attend_backward, attend_gathered
from sparsify.kernels.layout import Sequence, block_count
from sparsify.kernels.masks import TileMask, listed
from sparsify.kernels.scores import Chooser

__all__ = [
    "Heads",
    "Settings",
    "backward_sequence",
    "compute_dtype",
    "default_workspace",
    "forward_sequence",
]

_ROWS = 64  # queries a tile should hold before it holds several groups
_CHOSEN_ROWS = 256  # queries whose blocks are chosen at once
_READ_COST = 10  # reading one key and value, in units of one query-key pair of a matrix product
_GATHER_COST = 40  # gathering one key and value, in the same units


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


def default_workspace(device: torch.device) -> int:
    """Bytes of scratch memory: few enough tiles to share busy cores well, few bytes on a CPU."""
    return (64 << 20) if device.type == "cpu" else (512 << 20)


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
    groups_count = heads.k.shape[0]
    q_GRTD, out_GRTV, lse_GRT = (_grouped(x, groups_count) for x in (heads.q, out_HTV, lse_HT))
    k, v = heads.k.to(dtype).contiguous(), heads.v.to(dtype).contiguous()
    for mask, groups in _tiles(sequence, heads, choose, settings, buffers=1):
        at = (groups, slice(None), slice(mask.first, mask.last))
        keys = (groups, slice(mask.reach))
        out, lse = attend(q_GRTD[at].to(dtype), k[keys], v[keys], mask, settings.scale)
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
        _grouped(x, groups_count) for x in (heads.q, grad_HTV, grad_lse_HT)
    )
    k, v = heads.k.to(dtype).contiguous(), heads.v.to(dtype).contiguous()
    grad_q = torch.zeros(q_GRTD.shape, dtype=dtype, device=k.device)
    lse = torch.full(q_GRTD.shape[:3], float("-inf"), dtype=dtype, device=k.device)
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    for mask, groups in _tiles(sequence, heads, choose, settings, buffers=3):
        at = (groups, slice(None), slice(mask.first, mask.last))
        keys = (groups, slice(mask.reach))
        q, grad, grad_lse = (x[at].to(dtype) for x in (q_GRTD, grad_GRTV, grad_lse_GRT))
        part = attend_backward(q, k[keys], v[keys], mask, grad, grad_lse, settings.scale)
        grad_q[at], lse[at] = part.q, part.lse
        grad_k[keys] += part.k
        grad_v[keys] += part.v
    return grad_q.flatten(0, 1), grad_k, grad_v, lse.flatten(0, 1)


def _grouped(x_HT: Tensor, groups: int) -> Tensor:
    """A view with the head axis cut into groups, `[G, R, T, ...]`."""
    return x_HT.view(groups, x_HT.shape[0] // groups, *x_HT.shape[1:])


def _tiles(
    sequence: Sequence, heads: Heads, choose: Chooser, settings: Settings, buffers: int
) -> Iterator[tuple[TileMask, slice]]:
    """Masks of all tiles, and the groups of each. Queries before the first key are in none.

    `buffers` is how many arrays of the size of the logits the work on a tile holds at once.
    """
    groups = heads.k.shape[0]
    size = torch.finfo(compute_dtype(heads.q.dtype)).bits // 8
    row_bytes = sequence.keys * size * buffers * heads.q.shape[0] // groups
    rows = max(1, settings.workspace_bytes // max(1, row_bytes))
    step_groups = max(1, min(groups, rows // min(_ROWS, sequence.queries)))
    step = max(1, rows // step_groups)
    blocks = block_count(sequence.keys, settings.block_size)
    for first, last, lists in _lists(sequence, choose, settings, step):
        named = listed(lists.to(heads.k.device), groups, blocks)
        mask = TileMask(named, sequence, first, last, settings.block_size)
        for group in range(0, groups, step_groups):
            part = slice(group, group + step_groups)
            yield mask.groups(part), part


def _lists(
    sequence: Sequence, choose: Chooser, settings: Settings, step: int
) -> Iterator[tuple[int, int, Tensor]]:
    """First and last query and lists of every `step` queries; chosen for many steps at once."""
    width = min(settings.list_width, block_count(sequence.keys, settings.block_size))
    row_bytes = 4 * settings.list_heads * max(1, width)
    steps = max(1, min(_CHOSEN_ROWS, settings.workspace_bytes // row_bytes) // step)
    for begin in range(max(0, -sequence.start), sequence.queries, steps * step):
        end = min(begin + steps * step, sequence.queries)
        lists_HTK = choose(begin, end)
        for first in range(begin, end, step):
            last = min(first + step, end)
            yield first, last, lists_HTK[:, first - begin : last - begin]


def _gather_is_less(sequence: Sequence, heads: Heads, settings: Settings) -> bool:
    """Whether gathering the keys of every list beats the masked product with all keys."""
    queries, reach = sequence.queries, sequence.visible_keys(sequence.queries)
    pairs = queries * reach - queries * (queries - 1) // 2
    masked = heads.k.shape[0] * reach * _READ_COST + heads.q.shape[0] * pairs
    gathered = settings.list_heads * queries * _gathered_keys(sequence, settings)
    return gathered * _GATHER_COST < masked


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
    for first, last, lists in _lists(sequence, choose, settings, step):
        lists = lists.to(heads.k.device)
        index_HTL, keep_HTL = _tokens(lists, sequence, first, last, settings.block_size)
        k, v = (_gathered(x, index_HTL, keep_HTL).to(dtype) for x in (heads.k, heads.v))
        q_HRTD = _grouped(heads.q[:, first:last].to(dtype), settings.list_heads)
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
