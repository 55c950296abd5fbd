"""MSA's choice of blocks for a few queries over a cache: what starts `decode_choice_kernels`.

Legend: B batch, G key/value heads, J index key heads, T queries, S key slots, I index size,
N blocks, L list length, K list places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.kernels.decoding import (
    CHUNK,
    Call,
    call_of,
    index_width,
    is_exact,
    readable,
    row_strides,
    starts,
    terms_of,
)
from sparsify.kernels.gpus import is_bulk, is_hopper_or_newer
from sparsify.kernels.layout import Layout, block_count, list_width
from sparsify.kernels.placement import place
from sparsify.kernels.select import descriptors
from sparsify.kernels.select.decode_choice_kernels import (
    decode_score_fwd_kernel,
    decode_top_fwd_kernel,
)
from sparsify.kernels.tiling import padded

__all__ = ["best_blocks", "choose", "scored"]

_NO_BLOCK = 0x7FFFFFFF
_PARTS = 16  # of each of many sequences: what is rounded up counts for little then
_MOST_SEQUENCES = 1024


def choose(
    iq: Tensor, ik: Tensor, layout: Layout, *, block_size: int, topk: int, local: str = "inside"
) -> Tensor:
    """The lists that `msa_decode` attends, as `schemas.msa_select` gives them `[B, G, T, K]`."""
    call = call_of(iq, ik, ik, iq, ik, layout, block_size, topk, local)
    width = list_width(call.slots, block_size, topk, local)
    if not call.lists:
        return iq.new_empty((*iq.shape[:3], width), dtype=torch.int32)
    layout = readable(layout)
    own_BT, count_B1 = _own_blocks(layout, call, iq.device)
    own, count = own_BT[:, :, None, None], count_B1[:, :, None, None]
    shape = (call.batch, call.queries, call.groups, call.length)
    if call.every:
        end = (own + 1 if call.union else own).minimum(count)
        number = torch.arange(call.length, device=iq.device).expand(shape)
        number = number.masked_fill((number >= end) | (number >= call.chosen), _NO_BLOCK)
        number = _without_empty(number, layout, call)
    else:
        order = scored(iq, ik, layout, call)
        number = best_blocks(order, layout, call, 1).view(shape).long()
    number = number.masked_fill(number == own, _NO_BLOCK)
    last = own.expand(*shape[:3], 1)
    last = last.masked_fill((last < 0) | (last >= count), _NO_BLOCK)
    lists = torch.cat([number, last], -1).sort(-1).values[..., :width]
    return lists.masked_fill(lists == _NO_BLOCK, -1).int().transpose(1, 2).contiguous()


def _without_empty(number_BTGL: Tensor, layout: Layout, call: Call) -> Tensor:
    """Numbers of blocks, those left out of which a mask hides every key."""
    if layout.key_mask is None:
        return number_BTGL
    real_BN = place(layout, call.batch, call.queries, call.slots, call.block).real_BN
    assert real_BN is not None
    real_BL = torch.nn.functional.pad(real_BN, (0, max(call.length - call.blocks, 0)))
    return number_BTGL.masked_fill(~real_BL[:, None, None, : call.length], _NO_BLOCK)


def _own_blocks(layout: Layout, call: Call, device: torch.device) -> tuple[Tensor, Tensor]:
    """The block each query stands in `[B, T]`, below 0 where none; blocks that exist `[B, 1]`."""

    def given(values: Tensor | None, default: Tensor) -> Tensor:
        return default if values is None else values.long()[:, None]

    slots = torch.full((call.batch, 1), call.slots, device=device)
    length = given(layout.kv_len, slots).clamp(min=0).minimum(slots)
    origin = given(layout.block_origin, torch.zeros_like(length)).clamp(min=0).minimum(length)
    start = given(layout.q_start, length - call.queries) - origin
    position = start + torch.arange(call.queries, device=device)
    own = torch.div(position, call.block, rounding_mode="floor")
    return own, (length - origin + call.block - 1) // call.block


def best_blocks(order: Tensor, layout: Layout, call: Call, segments: int) -> Tensor:
    """The best blocks of every list, from their scores, see `decode_top_fwd_kernel`."""
    dtype = torch.int32 if segments == 1 else torch.int64
    best = order.new_empty(call.lists, segments, call.length, dtype=dtype)
    chunk = call.chunk if segments > 1 else max(call.length, min(CHUNK, padded(call.blocks)))
    decode_top_fwd_kernel[(call.lists * segments,)](
        order,
        best,
        layout.kv_len,
        layout.q_start,
        layout.block_origin,
        call.slots,
        call.blocks,
        block_count(call.blocks, chunk * segments),
        T=call.queries,
        GROUPS=call.groups,
        BLOCK=call.block,
        C=chunk,
        CHOSEN=call.chosen,
        LENGTH=call.length,
        SEGMENTS=segments,
        UNION=call.union,
        **starts(call, warps=min(max(chunk // 128, 1), 4)),
    )
    return best


def scored(iq: Tensor, ik: Tensor, layout: Layout, call: Call) -> Tensor:
    """Scores `[lists, N]` of all blocks as whole numbers, see `decode_score_fwd_kernel`."""
    order = iq.new_empty(call.lists, call.blocks, dtype=torch.int32)
    tiles, shared = call.tiles, ik.shape[1] == 1
    columns, per = _blocks_of_a_tile(call.block, tiles.score_columns)
    parts = 1 if per > 1 else block_count(call.block, columns)
    rows = call.queries * (call.groups if shared else 1)
    each = ik.shape[1] * block_count(rows, tiles.score_rows)
    shares, even = _shares(call, block_count(call.blocks, per), each)
    by_tma = _fits_tma(iq, ik, call.block, columns, layout.page_table is not None)
    decode_score_fwd_kernel[(each * shares,)](
        iq,
        descriptors.tiles(ik, columns) if by_tma else ik,
        order,
        layout.kv_len,
        layout.q_start,
        layout.block_origin,
        layout.key_mask,
        layout.page_table,
        *iq.stride(),
        *ik.stride(),
        *row_strides(layout),
        call.slots,
        call.blocks,
        ik.shape[0],
        shares,
        call.batch,
        T=call.queries,
        GROUPS=call.groups,
        SHARED=shared,
        BLOCK=call.block,
        D=iq.shape[3],
        DP=index_width(iq, ik),
        M=tiles.score_rows,
        TILE_N=columns,
        TILES=parts,
        PER=per,
        STAGES=tiles.score_stages,
        UNION=call.union,
        BY_TMA=by_tma,
        EXACT_DOT=is_exact(iq, ik),
        TERMS=terms_of(iq, ik),
        EVEN=even,
        BP=1 if even else padded(call.batch, 2),
        **starts(call, first=True, warps=tiles.score_warps),
    )
    return order


def _blocks_of_a_tile(block: int, columns: int) -> tuple[int, int]:
    """Columns of a tile, and how many blocks they hold."""
    if block < columns and padded(block) == block:
        return columns, columns // block
    return min(columns, padded(block)), 1


def _shares(call: Call, steps: int, each: int) -> tuple[int, bool]:
    """Programs among which the tiles of blocks of all sequences are dealt out, and whether each
    sequence gets as many. `steps` are the tiles of one sequence at most, `each` the programs that
    read the same keys, or other ones of the same sequence."""
    resident = 3 if call.one_program else 2  # those of places are to start beside them
    shares = block_count(resident * call.sm_count, each)
    if not 1 < call.batch <= _MOST_SEQUENCES:
        return min(steps, block_count(shares, call.batch)) * call.batch, True
    if shares < _PARTS // 4 * call.batch:
        shares = _PARTS * call.batch
    return min(shares, steps * call.batch), False


def _fits_tma(iq: Tensor, ik: Tensor, block: int, columns: int, paged: bool) -> bool:
    """Whether descriptors can fetch tiles of index keys: aligned, and no tile beyond its block."""
    whole = block % columns == 0 or (columns % block == 0 and not paged)
    fits = whole and index_width(iq, ik) == ik.shape[3]
    return fits and is_hopper_or_newer(ik.device) and is_bulk(ik)
