"""MSA for a few queries over a cache, contiguous or in pages: three kernels or four.

All calls begin with the scores of all blocks. Where lists are so few that every place has a
multiprocessor of its own, programs of the attention find their place in the scores of a row that is
not too long, and a merge is last. With more places, or longer rows, a kernel ranks the blocks
before. With so many lists that each keeps a program busy, one walks over a whole list, and there is
nothing to merge. All of it rounds alike, and choices are exact, so a row does not depend on its
batch.

Nothing waits for the device and grids follow from shapes alone: a captured graph may be replayed
with other lengths, origins and pages.

Legend: B batch, H query heads, G key/value heads, J index key heads, T queries, S key slots,
D key size, V value size, I index size, N blocks, L list length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from sparsify.kernels.attend.cutting import scale_log2
from sparsify.kernels.attend.decode_kernels import (
    decode_attention_fwd_kernel,
    decode_merge_fwd_kernel,
)
from sparsify.kernels.decoding import MOST_PLACES, Call, call_of, readable, row_strides, starts
from sparsify.kernels.gpus import has_float8
from sparsify.kernels.layout import Layout, block_count, key_slots
from sparsify.kernels.select.decode_choice import best_blocks, choose, scored
from sparsify.kernels.tiling import padded

__all__ = ["MOST_QUERIES", "choice_unsupported", "chooser", "msa_decode", "unsupported"]

MOST_QUERIES = 16
_FLOAT8 = torch.float8_e4m3fn
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_GROUP = 64
_MOST_HEAD_DIM = 256
# A place's values are cut in two where that keeps how rows are summed: more rows than that are laid
# out over the warps by the width of a slice. Of fewer columns little would be saved.
_LEAST_SLICE, _MOST_SLICED_ROWS = 64, 32
_UNROLLED = 40  # places that the merge reads all at once


def unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    iq: Tensor,
    ik: Tensor,
    layout: Layout,
    block_size: int,
    topk: int,
    local: str = "inside",
) -> str | None:
    """Why these kernels do not run a call; None when they do."""
    if q.dtype not in _DTYPES:
        return f"{q.dtype} has no tensor-core kernels here"
    if q.shape[1] // k.shape[1] > _MOST_GROUP:
        return f"{q.shape[1] // k.shape[1]} query heads of a group do not fit a tile"
    if max(q.shape[-1], v.shape[-1]) > _MOST_HEAD_DIM:
        return f"head sizes beyond {_MOST_HEAD_DIM} do not fit a tile"
    return choice_unsupported(iq, ik, layout, block_size, topk, local)


def choice_unsupported(
    iq: Tensor, ik: Tensor, layout: Layout, block_size: int, topk: int, local: str = "inside"
) -> str | None:
    """Why these kernels do not choose the blocks of a call; None when they do."""
    if iq.shape[2] > MOST_QUERIES:
        return f"{iq.shape[2]} queries are no decode step; it has {MOST_QUERIES} at most"
    if layout.cu_seqlens_q is not None:
        return "packed documents are no decode step"
    if layout.page_table is not None and (
        layout.key_mask is not None or layout.block_origin is not None
    ):
        return "pages with a mask of keys or an origin of blocks are gathered first"
    if not 16 <= block_size <= 256:
        return f"blocks of {block_size} keys are not from 16 to 256"
    if iq.shape[-1] > _MOST_HEAD_DIM:
        return f"head sizes beyond {_MOST_HEAD_DIM} do not fit a tile"
    chosen = topk if local == "union" else topk - 1
    if min(chosen, block_count(key_slots(ik, layout), block_size)) > MOST_PLACES:
        return f"lists of more than {MOST_PLACES} blocks do not fit a tile"
    for x in (iq, ik):
        if x.dtype not in (*_DTYPES, _FLOAT8):
            return f"{x.dtype} index tensors have no kernels here"
        if x.dtype == _FLOAT8 and not has_float8(x.device):
            return "this GPU has no products of float8_e4m3fn"
    return None


def chooser(
    iq: Tensor, ik: Tensor, layout: Layout, block_size: int, topk: int, local: str
) -> Callable[[], Tensor] | None:
    """Makes the lists of `msa_select` as `msa_decode` chooses them; None where it does not run.

    Kernels that sum in another order may choose otherwise at near ties.

    Args:
        ik: contiguous, also if the layout says that it lay in pages.
    """
    if choice_unsupported(iq, ik, layout, block_size, topk, local) is not None:
        return None
    flat = layout._replace(page_table=None)
    return functools.partial(choose, iq, ik, flat, block_size=block_size, topk=topk, local=local)


def msa_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    iq: Tensor,
    ik: Tensor,
    layout: Layout,
    *,
    block_size: int,
    topk: int,
    local: str = "inside",
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output `[B, H, T, V]` and log-sum-exp `[B, H, T]` of `schemas.msa_attention`.

    Args:
        q: `[B, H, T, D]` of at most `MOST_QUERIES` queries, at consecutive positions.
        k, v: `[B, G, S, D]` and `[B, G, S, V]`, or pages `[P, G, block_size, D]` of them.
        iq, ik: `[B, G, T, I]` and `[B, 1 or G, S, I]`, or pages of the latter; of any two dtypes
            among bfloat16, float16, float32 and float8_e4m3fn.
        layout: of a batch or of pages; see `unsupported`.
        scale: above 0; by default `D ** -0.5`.

    Raises:
        ValueError: for a call that `unsupported` has a reason against.
    """
    reason = unsupported(q, k, v, iq, ik, layout, block_size, topk, local)
    if reason is None and scale is not None and scale <= 0:
        reason = "a scale that is not positive turns the order of the scores round"
    if reason is not None:
        raise ValueError(f"MSA's decode kernels do not run this call: {reason}.")
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    call = call_of(q, k, v, iq, ik, layout, block_size, topk, local)
    if not out.numel() or not call.slots or not k.shape[0]:
        return out.zero_(), lse.fill_(float("-inf"))
    layout = readable(layout)
    best = None if call.every else scored(iq, ik, layout, call)
    if best is not None and not call.ranked:
        best = best_blocks(best, layout, call, call.segments)
    _attend(q, k, v, best, layout, call, scale_log2(q, scale), out, lse)
    return out, lse


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    best: Tensor | None,
    layout: Layout,
    call: Call,
    factor: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    group, places = call.heads // call.groups, call.chosen + 1
    rows, split, sizes = padded(group), not call.one_program, _sizes(q, v)
    part = stat = None
    if split:
        part = q.new_empty(call.lists, places, group, v.shape[3], dtype=torch.float32)
        stat = q.new_empty(call.lists, places, 2, rows, dtype=torch.float32)
    same: dict[str, object] = {"T": call.queries, "GROUPS": call.groups, "GROUP": group, "M": rows}
    columns = call.tiles.columns
    parts = block_count(call.block, columns)
    slices = _slices(q, v, call)
    ranked = 0 if best is None else call.ranked
    decode_attention_fwd_kernel[(call.lists * (places * slices if split else 1),)](
        q,
        k,
        v,
        best,
        part,
        stat,
        out,
        lse,
        layout.kv_len,
        layout.q_start,
        layout.block_origin,
        layout.key_mask,
        layout.page_table,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *row_strides(layout),
        factor,
        call.slots,
        call.blocks,
        k.shape[0],
        **same,
        **sizes,
        BLOCK=call.block,
        CHOSEN=call.chosen,
        LENGTH=call.length,
        SEGMENTS=0 if best is None or ranked else call.segments,
        RANKED=ranked,
        TILE_N=columns,
        TILES=parts,
        STAGES=min(call.tiles.stages, parts + 1) if split else call.tiles.stages,
        UNION=call.union,
        SPLIT=split,
        SLICES=slices,
        EXACT_DOT=q.dtype == torch.float32,
        # As many warps for every call: rows are summed over them.
        **starts(call, first=best is None),
    )
    if split:
        decode_merge_fwd_kernel[(call.lists * group,)](
            part,
            stat,
            out,
            lse,
            factor,
            **same,
            V=v.shape[3],
            VP=padded(v.shape[3]),
            PLACES=places,
            UNROLLED=places <= _UNROLLED,
            **starts(call, warps=1),
        )


def _slices(q: Tensor, v: Tensor, call: Call) -> int:
    """Programs among which the values of a place are cut."""
    rows = padded(call.heads // call.groups)
    fits = rows <= _MOST_SLICED_ROWS and padded(v.shape[3]) >= 2 * _LEAST_SLICE
    # In float32 registers would be spilled.
    return 2 if call.per_place >= 2 and fits and q.dtype != torch.float32 else 1


def _sizes(q: Tensor, v: Tensor) -> dict[str, object]:
    size, value_size = q.shape[3], v.shape[3]
    return {"D": size, "DP": padded(size), "V": value_size, "VP": padded(value_size)}
