"""MoBA and listed-block attention by Triton kernels; every other op is the reference's.

The stages of a forward pass: block means, gate, reverse index, KV-outer attention, combine with the
own block; with few queries, the reverse index and KV-outer attention give way to one program per
query and block. Stages work on slices (some heads, or some queries of one head), so that scratch
memory stays below `workspace_bytes` at any length. Nothing waits for the device.

Backward passes choose by these kernels and differentiate by the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from sparsify.kernels import lists, reference, selection, validation
from sparsify.kernels.attend import forward
from sparsify.kernels.layout import (
    Layout,
    block_count,
    gather_pages,
    key_slots,
    list_width,
    sequences,
)
from sparsify.kernels.placement import Placement, place
from sparsify.kernels.select import moba

__all__ = [
    "WORKSPACE_BYTES",
    "block_attention",
    "block_attention_backward",
    "moba_attention",
    "moba_attention_backward",
    "moba_select",
    "msa_attention",
    "msa_attention_backward",
    "msa_select",
    "unsupported",
]

WORKSPACE_BYTES = 2 << 30

msa_select = reference.msa_select
msa_attention = reference.msa_attention
msa_attention_backward = reference.msa_attention_backward
block_attention_backward = reference.block_attention_backward

_OPS = (
    "moba_select",
    "moba_attention",
    "moba_attention_backward",
    "block_attention",
    "block_attention_backward",
)
_Run = TypeVar("_Run", bound=Callable[..., Any])
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_HEAD_DIM = 256
_MOST_PLACES = 256
_MOST_BLOCKS = 1 << 19


def _on_its_device(run: _Run) -> _Run:
    """Kernels start on the current device: make it the one of the first tensor."""

    @functools.wraps(run)
    def there(*args: Any, **options: Any) -> Any:
        first = next(x for x in args if isinstance(x, Tensor))
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            return run(*args, **options)

    return cast(_Run, there)


def unsupported(
    name: str, args: tuple[Any, ...], layout: Layout, options: dict[str, Any]
) -> str | None:
    """Why these kernels do not run a call; None when they do.

    Args:
        args: the op's own tensors.
        layout, options: of the call; top-k as it is in force.
    """
    if name not in _OPS:
        return f"there are no Triton kernels for {name} yet"
    if name == "block_attention_backward":
        return None  # the reference's, whatever it is given
    tensors = [x for x in args if isinstance(x, Tensor) and x.dim() == 4]
    other = [x.dtype for x in tensors if x.dtype not in (*_DTYPES, torch.int32)]
    if other:
        return f"{other[0]} has no tensor-core kernels here"
    if max(x.shape[-1] for x in tensors if x.dtype != torch.int32) > _MOST_HEAD_DIM:
        return f"head sizes beyond {_MOST_HEAD_DIM} do not fit a tile"
    scale = options.get("scale")
    if scale is not None and scale <= 0:
        return "a scale that is not positive turns the order of the scores round"
    first = 2 if name.endswith("_backward") else 0
    blocks = block_count(key_slots(args[first + 1], layout), options["block_size"])
    places = args[3].shape[-1] if name == "block_attention" else options["topk"]
    if places > _MOST_PLACES and (name == "block_attention" or places < blocks):
        return f"lists of more than {_MOST_PLACES} blocks do not fit a tile"
    if blocks >= _MOST_BLOCKS:
        return f"{blocks:,} blocks are too many to number"
    return None


@_on_its_device
def moba_select(
    q: Tensor, k: Tensor, layout: Layout, block_means: Tensor | None, *, block_size: int, topk: int
) -> Tensor:
    """See `sparsify.kernels.schemas.moba_select`."""
    validation.check_moba(q, k, None, layout, block_means, block_size, topk)
    call = selection.begin_call(block_size)
    k = gather_pages(k, layout.page_table)
    return _lists(q, k, layout, block_means, block_size, topk, call)


@_on_its_device
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
    placement = place(layout, q.shape[0], q.shape[2], k.shape[2], block_size)
    return _listed(q, k, v, blocks, placement, block_size, scale, workspace_bytes)


@_on_its_device
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
    call = selection.begin_call(block_size)
    k, v = (gather_pages(x, layout.page_table) for x in (k, v))
    placement = place(layout, q.shape[0], q.shape[2], k.shape[2], block_size)
    if selection.is_active():
        blocks = _lists(q, k, layout, block_means, block_size, topk, call)
        return _listed(q, k, v, blocks, placement, block_size, scale, workspace_bytes)
    shape = forward.shape_of(q, k, v, block_size, scale)
    if topk >= placement.blocks:
        return forward.dense(q, k, v, placement, shape)
    chooser = moba.Gate(q, k, placement, block_means, block_size, topk - 1)
    workspace = WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
    return forward.sparse(q, k, v, placement, shape, chooser, workspace)


@_on_its_device
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
    """Gradients of `moba_attention`; the same kernels choose the same blocks once more."""
    call = selection.resumed(block_size)
    flat_k = gather_pages(k, layout.page_table)
    blocks = _lists(q, flat_k, layout, block_means, block_size, topk, call)
    grads: tuple[Tensor, Tensor, Tensor] = reference.block_attention_backward(
        grad_out,
        grad_lse,
        q,
        k,
        v,
        blocks,
        out,
        lse,
        layout,
        block_size=block_size,
        scale=scale,
        deterministic=deterministic,
        workspace_bytes=workspace_bytes,
    )
    return grads


def _listed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    placement: Placement,
    block_size: int,
    scale: float | None,
    workspace_bytes: int | None,
) -> tuple[Tensor, Tensor]:
    shape = forward.shape_of(q, k, v, block_size, scale, q.shape[1] // blocks.shape[1])
    workspace = WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
    given = lists.Given(blocks, placement, block_size)
    return forward.sparse(q, k, v, placement, shape, given, workspace)


def _lists(
    q: Tensor,
    k: Tensor,
    layout: Layout,
    block_means: Tensor | None,
    block_size: int,
    topk: int,
    call: selection.Call,
) -> Tensor:
    """Lists of the select op; recorded or replayed if that is asked for."""
    batch, heads, q_len = q.shape[:3]
    flat = layout._replace(page_table=None)
    width = list_width(k.shape[2], block_size, topk)

    def chosen() -> Tensor:
        placement = place(flat, batch, q_len, k.shape[2], block_size)
        if topk >= placement.blocks:
            past = lists.every(placement, batch, heads, q_len, block_size, q.device)
        else:
            past = moba.Gate(q, k, placement, block_means, block_size, topk - 1).all_rows()
        return lists.public(past, placement, q_len, block_size, width)

    if call.replayed is None and not call.recorders:
        return chosen()
    made = None if call.replayed is not None else chosen()
    out = torch.full((batch, heads, q_len, width), -1, dtype=torch.int32, device=q.device)
    for sequence in sequences(batch, q_len, k.shape[2], flat):
        if sequence.queries and sequence.keys:

            def make(sequence: Any = sequence) -> selection.Lists:
                assert made is not None
                mine = sequence.take_queries(made)
                return lambda first, last: mine[:, first:last]

            rows = call.wrap(sequence, heads, width, make)(0, sequence.queries)
            sequence.take_queries(out).copy_(rows)
    return out
