"""Every op in plain PyTorch: the oracle that other implementations answer to.

Runs on any device, in float32 (float64 for float64 inputs), with memory bounded by
`workspace_bytes`. Each sequence is computed by itself, so a row never depends on its neighbours;
on a CPU it is always deterministic.

Legend: B batch, H query heads, G key/value heads, J index key heads (1 or G), T queries, S key
slots, D key size, V value size, N blocks, K list places.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsify.kernels import scores, selection, validation
from sparsify.kernels.layout import (
    Layout,
    Sequence,
    gather_pages,
    key_slots,
    list_width,
    scatter_pages,
    sequences,
)
from sparsify.kernels.reference_tiles import (
    Heads,
    Settings,
    backward_sequence,
    compute_dtype,
    default_workspace,
    forward_sequence,
)
from sparsify.kernels.scores import Chooser

__all__ = [
    "block_attention",
    "block_attention_backward",
    "moba_attention",
    "moba_attention_backward",
    "moba_select",
    "msa_attention",
    "msa_attention_backward",
    "msa_select",
]

ChooserOf = Callable[[Sequence], Chooser]
"""Gives the chooser of each sequence."""


def moba_select(
    q: Tensor, k: Tensor, layout: Layout, block_means: Tensor | None, *, block_size: int, topk: int
) -> Tensor:
    """See `sparsify.kernels.schemas.moba_select`."""
    validation.check_moba(q, k, None, layout, block_means, block_size, topk)
    width = list_width(key_slots(k, layout), block_size, topk)
    k = gather_pages(k, layout.page_table)
    call = selection.begin_call(block_size)
    chooser = _moba(q, k, block_means, block_size, topk, width, call)
    return _select(q, k, layout, width, chooser)


def msa_select(
    iq: Tensor, ik: Tensor, layout: Layout, *, block_size: int, topk: int, local: str = "inside"
) -> Tensor:
    """See `sparsify.kernels.schemas.msa_select`."""
    validation.check_msa(iq, ik, None, None, None, layout, block_size, topk, local)
    width = list_width(key_slots(ik, layout), block_size, topk, local)
    ik = gather_pages(ik, layout.page_table)
    call = selection.begin_call(block_size)
    chooser = _msa(iq, ik, block_size, topk, local, width, call)
    return _select(iq, ik, layout, width, chooser)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    layout: Layout,
    *,
    block_size: int,
    scale: float | None = None,
    deterministic: bool = False,
    workspace_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `sparsify.kernels.schemas.block_attention`."""
    validation.check_blocks(q, k, v, blocks, layout, block_size)
    k, v = (gather_pages(x, layout.page_table) for x in (k, v))
    settings = _settings(q, block_size, blocks.shape[1], blocks.shape[3], scale, workspace_bytes)
    return _forward(q, k, v, layout, _given(blocks), settings)


def block_attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Layout,
    *,
    block_size: int,
    scale: float | None = None,
    deterministic: bool = False,
    workspace_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `sparsify.kernels.schemas.block_attention_backward`."""
    validation.check_blocks(q, k, v, blocks, layout, block_size)
    settings = _settings(q, block_size, blocks.shape[1], blocks.shape[3], scale, workspace_bytes)
    return _backward((grad_out, grad_lse), q, k, v, None, layout, _given(blocks), settings)


def moba_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    block_means: Tensor | None,
    *,
    block_size: int,
    topk: int,
    scale: float | None = None,
    deterministic: bool = False,
    workspace_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `sparsify.kernels.schemas.moba_attention`."""
    validation.check_moba(q, k, v, layout, block_means, block_size, topk)
    width = list_width(key_slots(k, layout), block_size, topk)
    k, v = (gather_pages(x, layout.page_table) for x in (k, v))
    call = selection.begin_call(block_size)
    chooser = _moba(q, k, block_means, block_size, topk, width, call)
    settings = _settings(q, block_size, q.shape[1], width, scale, workspace_bytes)
    return _forward(q, k, v, layout, chooser, settings)


def moba_attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Layout,
    block_means: Tensor | None,
    *,
    block_size: int,
    topk: int,
    scale: float | None = None,
    deterministic: bool = False,
    workspace_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `moba_attention`; chooses the blocks once more."""
    width = list_width(key_slots(k, layout), block_size, topk)
    flat_k = gather_pages(k, layout.page_table)
    call = selection.resumed(block_size)
    chooser = _moba(q, flat_k, block_means, block_size, topk, width, call)
    settings = _settings(q, block_size, q.shape[1], width, scale, workspace_bytes)
    return _backward((grad_out, grad_lse), q, k, v, lse, layout, chooser, settings)


def msa_attention(
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
    deterministic: bool = False,
    workspace_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `sparsify.kernels.schemas.msa_attention`."""
    validation.check_msa(iq, ik, q, k, v, layout, block_size, topk, local)
    width = list_width(key_slots(k, layout), block_size, topk, local)
    k, v, ik = (gather_pages(x, layout.page_table) for x in (k, v, ik))
    call = selection.begin_call(block_size)
    chooser = _msa(iq, ik, block_size, topk, local, width, call)
    settings = _settings(q, block_size, k.shape[1], width, scale, workspace_bytes)
    return _forward(q, k, v, layout, chooser, settings)


def msa_attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    iq: Tensor,
    ik: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Layout,
    *,
    block_size: int,
    topk: int,
    local: str = "inside",
    scale: float | None = None,
    deterministic: bool = False,
    workspace_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `msa_attention`; chooses the blocks once more."""
    width = list_width(key_slots(k, layout), block_size, topk, local)
    flat_ik = gather_pages(ik, layout.page_table)
    call = selection.resumed(block_size)
    chooser = _msa(iq, flat_ik, block_size, topk, local, width, call)
    settings = _settings(q, block_size, iq.shape[1], width, scale, workspace_bytes)
    return _backward((grad_out, grad_lse), q, k, v, lse, layout, chooser, settings)


def _moba(
    q: Tensor,
    k: Tensor,
    block_means: Tensor | None,
    block_size: int,
    topk: int,
    width: int,
    call: selection.Call,
) -> ChooserOf:
    def of(sequence: Sequence) -> Chooser:
        means_GND = None if block_means is None else block_means[sequence.batch]
        q_HTD, k_GLD = sequence.take_queries(q), sequence.take_keys(k)

        def make() -> Chooser:
            return scores.moba_chooser(
                sequence, q_HTD, k_GLD, means_GND, block_size=block_size, topk=topk, width=width
            )

        return call.wrap(sequence, q.shape[1], width, make)

    return of


def _msa(
    iq: Tensor,
    ik: Tensor,
    block_size: int,
    topk: int,
    local: str,
    width: int,
    call: selection.Call,
) -> ChooserOf:
    def of(sequence: Sequence) -> Chooser:
        iq_GTD, ik_JLD = sequence.take_queries(iq), sequence.take_keys(ik)

        def make() -> Chooser:
            return scores.msa_chooser(
                sequence, iq_GTD, ik_JLD, block_size=block_size, topk=topk, local=local, width=width
            )

        return call.wrap(sequence, iq.shape[1], width, make)

    return of


def _given(blocks: Tensor) -> ChooserOf:
    def of(sequence: Sequence) -> Chooser:
        lists_HTK = sequence.take_queries(blocks)
        return lambda first, last: lists_HTK[:, first:last]

    return of


def _select(q: Tensor, k: Tensor, layout: Layout, width: int, chooser_of: ChooserOf) -> Tensor:
    batch, heads, q_len = q.shape[:3]
    blocks = torch.full((batch, heads, q_len, width), -1, dtype=torch.int32, device=q.device)
    for sequence in sequences(batch, q_len, k.shape[2], layout):
        if sequence.queries and sequence.keys:
            lists = chooser_of(sequence)(0, sequence.queries)
            sequence.take_queries(blocks).copy_(lists)
    return blocks


def _settings(
    q: Tensor,
    block_size: int,
    list_heads: int,
    list_width: int,
    scale: float | None,
    workspace_bytes: int | None,
) -> Settings:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    workspace = default_workspace(q.device) if workspace_bytes is None else workspace_bytes
    return Settings(block_size, list_heads, list_width, scale, workspace)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, chooser_of: ChooserOf, settings: Settings
) -> tuple[Tensor, Tensor]:
    batch, heads, q_len = q.shape[:3]
    out = torch.zeros((batch, heads, q_len, v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = torch.full(out.shape[:3], float("-inf"), dtype=compute_dtype(q.dtype), device=q.device)
    for sequence in sequences(batch, q_len, k.shape[2], layout):
        if sequence.queries and sequence.keys:
            forward_sequence(
                sequence,
                _heads(sequence, q, k, v),
                chooser_of(sequence),
                settings,
                sequence.take_queries(out),
                sequence.take_queries(lse),
            )
    return out, lse


def _backward(
    grads: tuple[Tensor | None, Tensor | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor | None,
    layout: Layout,
    chooser_of: ChooserOf,
    settings: Settings,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(q.dtype)
    flat_k, flat_v = (gather_pages(x, layout.page_table) for x in (k, v))
    grad_out = q.new_zeros(*q.shape[:3], v.shape[-1]) if grads[0] is None else grads[0]
    grad_lse = q.new_zeros(q.shape[:3], dtype=dtype) if grads[1] is None else grads[1]
    grad_q, grad_k, grad_v = (_zeros(x, dtype) for x in (q, flat_k, flat_v))
    for sequence in sequences(q.shape[0], q.shape[2], flat_k.shape[2], layout):
        if sequence.queries == 0 or sequence.keys == 0:
            continue
        dq, dk, dv, lse_again = backward_sequence(
            sequence,
            _heads(sequence, q, flat_k, flat_v),
            chooser_of(sequence),
            settings,
            sequence.take_queries(grad_out),
            sequence.take_queries(grad_lse),
        )
        if lse is not None:
            _must_repeat(sequence.take_queries(lse), lse_again)
        sequence.take_queries(grad_q).copy_(dq)
        sequence.take_keys(grad_k).copy_(dk)
        sequence.take_keys(grad_v).copy_(dv)
    grad_k = scatter_pages(grad_k, layout.page_table, k)
    grad_v = scatter_pages(grad_v, layout.page_table, v)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(like.shape, dtype=dtype, device=like.device)


def _heads(sequence: Sequence, q: Tensor, k: Tensor, v: Tensor) -> Heads:
    return Heads(sequence.take_queries(q), sequence.take_keys(k), sequence.take_keys(v))


def _must_repeat(lse_HT: Tensor, again_HT: Tensor) -> None:
    """The softmax sums of both passes agree unless they attended to different blocks."""
    if not torch.allclose(lse_HT, again_HT.to(lse_HT.dtype), rtol=1e-3, atol=1e-3, equal_nan=True):
        raise RuntimeError(
            "The backward pass chose other blocks than the forward pass did. A compiled graph "
            "cannot replay a selection in its backward pass; use the select op and block_attention."
        )
