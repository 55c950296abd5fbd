"""The argument contract of the ops, shared by every implementation and by the shape functions.

All checks look at shapes and dtypes alone, so they cost no device synchronisation; values of layout
tensors are judged where they are read. Sizes that are symbols (dynamic shapes) are not compared,
which would pin them.

Legend: B batch, H query heads, G key/value heads, J index key heads, T queries, S key slots, P
pages, Z slots of a page, D key size, V value size, N blocks, K list places.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparsify.kernels.layout import Layout, block_count, key_slots

__all__ = ["check_blocks", "check_moba", "check_msa", "check_options"]

_HALF_OR_MORE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTS = (torch.int32, torch.int64)


def check_moba(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    layout: Layout,
    block_means: Tensor | None,
    block_size: int,
    topk: int,
) -> None:
    """Arguments of the MoBA ops; `v` is None for the select op.

    Raises:
        ValueError: naming the argument, what was given and what is expected.
    """
    _check_sizes(block_size, topk)
    _check_qkv(q, k, v, layout)
    _check_layout(q, k, layout, block_size)
    if block_means is not None:
        _check_means(block_means, q, k, layout, block_size)


def check_msa(
    iq: Tensor,
    ik: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    layout: Layout,
    block_size: int,
    topk: int,
    local: str,
) -> None:
    """Arguments of the MSA ops; `q`, `k` and `v` are None for the select op.

    Raises:
        ValueError: naming the argument, what was given and what is expected.
    """
    _check_sizes(block_size, topk)
    if local not in ("inside", "union"):
        raise ValueError(f'local is {local!r}; expected "inside" or "union".')
    _check_index(iq, ik, layout)
    _check_layout(iq, ik, layout, block_size)
    if q is not None and k is not None:
        _check_qkv(q, k, v, layout)
        _same("iq", "batch size", iq.shape[0], q.shape[0], "of q")
        _same("iq", "head count", iq.shape[1], k.shape[1], "of k")
        _same("iq", "length", iq.shape[2], q.shape[2], "of q")
        _same("ik", "batch size", ik.shape[0], k.shape[0], "of k")
        _same("ik", "length", ik.shape[2], k.shape[2], "of k")
        _one_device(q, iq=iq)


def check_blocks(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, layout: Layout, block_size: int
) -> None:
    """Arguments of `block_attention`.

    Raises:
        ValueError: naming the argument, what was given and what is expected.
    """
    _check_sizes(block_size, 1)
    _check_qkv(q, k, v, layout)
    _check_layout(q, k, layout, block_size)
    _rank("blocks", blocks, "[B, H or G, T, K]", 4)
    if blocks.dtype != torch.int32:
        raise ValueError(f"blocks has dtype {blocks.dtype}; expected torch.int32.")
    if _known(blocks.shape[1], q.shape[1], k.shape[1]) and blocks.shape[1] not in (
        q.shape[1],
        k.shape[1],
    ):
        raise ValueError(
            f"blocks has {blocks.shape[1]} heads; expected {q.shape[1]} (one list per query head) "
            f"or {k.shape[1]} (one per key/value head)."
        )
    _same("blocks", "batch size", blocks.shape[0], q.shape[0], "of q")
    _same("blocks", "length", blocks.shape[2], q.shape[2], "of q")
    _one_device(q, blocks=blocks)


def check_options(options: dict[str, Any]) -> None:
    """Types of the sizes, before torch converts them, and a finite scale.

    Raises:
        ValueError: naming the argument, what was given and what is expected.
    """
    for name in ("block_size", "topk"):
        value = options.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise ValueError(f"{name} is {value!r}; expected a whole number of at least 1.")
    shortest = options.get("min_context", 0)
    if isinstance(shortest, bool) or not isinstance(shortest, int) or shortest < 0:
        raise ValueError(f"min_context is {shortest!r}; expected a whole number of at least 0.")
    scale = options.get("scale")
    if isinstance(scale, bool) or (isinstance(scale, float) and not math.isfinite(scale)):
        raise ValueError(f"scale is {scale!r}; expected a finite number.")


def _check_sizes(block_size: int, topk: int) -> None:
    for name, value in (("block_size", block_size), ("topk", topk)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; expected a whole number of at least 1.")


def _check_qkv(q: Tensor, k: Tensor, v: Tensor | None, layout: Layout) -> None:
    keys = "[B, G, S, D]" if layout.page_table is None else "[P, G, Z, D]"
    _rank("q", q, "[B, H, T, D]", 4)
    _rank("k", k, keys, 4)
    if q.dtype not in _HALF_OR_MORE:
        raise ValueError(f"q has dtype {q.dtype}; expected float16, bfloat16, float32 or float64.")
    _same("k", "dtype", k.dtype, q.dtype, "of q")
    _same("k", "head size", k.shape[3], q.shape[3], "of q")
    if _known(q.shape[3]) and q.shape[3] < 1:
        raise ValueError("q has head size 0; expected at least 1.")
    if layout.page_table is None:
        _same("k", "batch size", k.shape[0], q.shape[0], "of q")
    heads, groups = q.shape[1], k.shape[1]
    if _known(heads, groups) and (groups < 1 or heads < 1 or heads % groups):
        raise ValueError(
            f"q has {heads} heads and k has {groups}; the first must be a multiple of the second."
        )
    _one_device(q, k=k)
    if v is not None:
        _rank("v", v, keys.replace("D", "V"), 4)
        _same("v", "dtype", v.dtype, q.dtype, "of q")
        for axis, name in ((0, "batch size"), (1, "head count"), (2, "length")):
            _same("v", name, v.shape[axis], k.shape[axis], "of k")
        _one_device(q, v=v)


def _check_index(iq: Tensor, ik: Tensor, layout: Layout) -> None:
    keys = "[B, 1 or G, S, D]" if layout.page_table is None else "[P, 1 or G, Z, D]"
    _rank("iq", iq, "[B, G, T, D]", 4)
    _rank("ik", ik, keys, 4)
    for name, tensor in (("iq", iq), ("ik", ik)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}; expected a floating-point dtype.")
    _same("ik", "head size", ik.shape[3], iq.shape[3], "of iq")
    if _known(ik.shape[1], iq.shape[1]) and ik.shape[1] not in (1, iq.shape[1]):
        raise ValueError(
            f"ik has {ik.shape[1]} heads; expected 1 (shared) or {iq.shape[1]}, the heads of iq."
        )
    if layout.page_table is None:
        _same("ik", "batch size", ik.shape[0], iq.shape[0], "of iq")
    _one_device(iq, ik=ik)


def _check_layout(q: Tensor, k: Tensor, layout: Layout, block_size: int) -> None:
    packed = layout.cu_seqlens_q is not None
    for name in ("q_start", "kv_len", "block_origin"):
        _check_vector(name, getattr(layout, name), None if packed else q.shape[0])
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        _check_vector(name, getattr(layout, name), None)
    vectors = ("q_start", "kv_len", "block_origin", "cu_seqlens_q", "cu_seqlens_k")
    given = {name: getattr(layout, name) for name in vectors}
    _one_device(q, **{name: x for name, x in given.items() if x is not None})
    if layout.page_table is not None:
        _check_pages(layout.page_table, q, k, layout, block_size)
    if layout.key_mask is not None:
        _rank("key_mask", layout.key_mask, "[B, S]", 2)
        if layout.key_mask.dtype != torch.bool:
            raise ValueError(f"key_mask has dtype {layout.key_mask.dtype}; expected torch.bool.")
        _same("key_mask", "batch size", layout.key_mask.shape[0], q.shape[0], "of the queries")
        slots = key_slots(k, layout)
        _same("key_mask", "length", layout.key_mask.shape[1], slots, "(key slots)")
        _one_device(q, key_mask=layout.key_mask)
    if packed or layout.cu_seqlens_k is not None:
        _check_packed(q, layout)


def _check_packed(q: Tensor, layout: Layout) -> None:
    cu_q, cu_k = layout.cu_seqlens_q, layout.cu_seqlens_k
    if cu_q is None:
        raise ValueError("cu_seqlens_k is given without cu_seqlens_q.")
    if _known(q.shape[0]) and q.shape[0] != 1:
        raise ValueError(f"cu_seqlens_q is given for batch size {q.shape[0]}; expected 1.")
    if _known(cu_q.shape[0]) and cu_q.shape[0] < 1:
        raise ValueError("cu_seqlens_q is empty; expected [documents + 1] entries.")
    if cu_k is not None:
        _same("cu_seqlens_k", "length", cu_k.shape[0], cu_q.shape[0], "of cu_seqlens_q")


def _check_pages(table: Tensor, q: Tensor, k: Tensor, layout: Layout, block_size: int) -> None:
    _rank("page_table", table, "[B, pages of a sequence]", 2)
    if table.dtype not in _INTS:
        raise ValueError(f"page_table has dtype {table.dtype}; expected int32 or int64.")
    _same("page_table", "batch size", table.shape[0], q.shape[0], "of the queries")
    _same("k", "page size", k.shape[2], block_size, "(block_size)")
    if layout.cu_seqlens_q is not None:
        raise ValueError("page_table and cu_seqlens_q are both given; expected at most one.")
    _one_device(q, page_table=table)


def _check_means(means: Tensor, q: Tensor, k: Tensor, layout: Layout, block_size: int) -> None:
    _rank("block_means", means, "[B, G, N, D]", 4)
    if not means.is_floating_point():
        raise ValueError(f"block_means has dtype {means.dtype}; expected a floating-point dtype.")
    if layout.cu_seqlens_q is not None:
        raise ValueError("block_means and cu_seqlens_q are both given; expected at most one.")
    _same("block_means", "batch size", means.shape[0], q.shape[0], "of q")
    _same("block_means", "head count", means.shape[1], k.shape[1], "of k")
    _same("block_means", "head size", means.shape[3], k.shape[3], "of k")
    blocks = block_count(key_slots(k, layout), block_size)
    if _known(means.shape[2], blocks) and means.shape[2] < blocks:
        raise ValueError(
            f"block_means holds {means.shape[2]} blocks; expected at least {blocks}, "
            "the blocks of the keys."
        )
    _one_device(q, block_means=means)


def _check_vector(name: str, values: Tensor | None, size: int | None) -> None:
    if values is None:
        return
    _rank(name, values, "[B]" if size is not None else "one axis", 1)
    if values.dtype not in _INTS:
        raise ValueError(f"{name} has dtype {values.dtype}; expected int32 or int64.")
    if size is not None:
        _same(name, "length", values.shape[0], size, "(batch size)")


def _rank(name: str, tensor: Tensor, wanted: str, rank: int) -> None:
    if tensor.dim() != rank:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; expected {wanted}.")


def _same(name: str, what: str, given: object, wanted: object, of: str) -> None:
    if isinstance(given, torch.SymInt) or isinstance(wanted, torch.SymInt):
        return
    if given != wanted:
        raise ValueError(f"{name} has {what} {given}; expected {wanted} {of}.")


def _one_device(q: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}; expected {q.device}, as the queries.")


def _known(*sizes: int) -> bool:
    return all(not isinstance(size, torch.SymInt) for size in sizes)
