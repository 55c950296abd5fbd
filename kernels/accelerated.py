"""The ops by Triton kernels.

The stages of a forward pass: the choice of blocks (MoBA: block means and gate; MSA: index scores
and top-k), reverse index, KV-outer attention, combine with the own block; with few queries, the
reverse index and KV-outer attention give way to one program per query and block. Where top-k covers
every block, the combine alone does it, and a decode step of MSA has kernels of its own. Stages work
on slices (some lists, or some queries), so that scratch memory stays below `workspace_bytes` at any
length; a decode step is not cut, and takes 4 bytes for each block of a query and group. Nothing
waits for the device.

Backward passes choose by these kernels and differentiate by the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from sparsify.kernels import lists, reference, selection, validation
from sparsify.kernels.attend import decode, forward
from sparsify.kernels.layout import (
    Layout,
    block_count,
    gather_pages,
    key_slots,
    list_width,
    sequences,
)
from sparsify.kernels.placement import Placement, place
from sparsify.kernels.select import moba, msa

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

block_attention_backward = reference.block_attention_backward

# What a call brings: position of the keys among its tensors, and of the index tensors.
_OPS = {
    "moba_select": (1, slice(0)),
    "moba_attention": (1, slice(0)),
    "moba_attention_backward": (3, slice(0)),
    "msa_select": (1, slice(0, 2)),
    "msa_attention": (1, slice(3, 5)),
    "msa_attention_backward": (3, slice(5, 7)),
    "block_attention": (1, slice(0)),
    "block_attention_backward": (3, slice(0)),
}
_Run = TypeVar("_Run", bound=Callable[..., Any])
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_INDEX_DTYPES = (*_DTYPES, torch.float8_e4m3fn)
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
    keys, index = _OPS[name]
    tensors = [x for x in args if isinstance(x, Tensor) and x.dim() == 4]
    floats = [x for x in tensors if x.dtype != torch.int32]
    other = _other_dtype(floats, args[index])
    if other is not None:
        return f"{other} has no tensor-core kernels here"
    if max(x.shape[-1] for x in floats) > _MOST_HEAD_DIM:
        return f"head sizes beyond {_MOST_HEAD_DIM} do not fit a tile"
    scale = options.get("scale")
    if scale is not None and scale <= 0:
        return "a scale that is not positive turns the order of the scores round"
    blocks = block_count(key_slots(args[keys], layout), options["block_size"])
    listed = name == "block_attention"
    places = args[3].shape[-1] if listed else options["topk"] + (options.get("local") == "union")
    if places > _MOST_PLACES and (listed or options["topk"] < blocks):
        return f"lists of more than {_MOST_PLACES} blocks do not fit a tile"
    documents = 0 if layout.cu_seqlens_q is None else layout.cu_seqlens_q.shape[0]
    if blocks + documents >= _MOST_BLOCKS:  # each may have a block that is not full
        return f"{blocks:,} blocks are too many to number"
    return None


def _other_dtype(floats: list[Tensor], index: tuple[Tensor, ...]) -> torch.dtype | None:
    """The first dtype that has no kernels; index tensors may be of eight bits."""
    for x in floats:
        if x.dtype not in (_INDEX_DTYPES if any(x is i for i in index) else _DTYPES):
            return x.dtype
    return None


@_on_its_device
def moba_select(
    q: Tensor, k: Tensor, layout: Layout, block_means: Tensor | None, *, block_size: int, topk: int
) -> Tensor:
    """See `sparsify.kernels.schemas.moba_select`."""
    validation.check_moba(q, k, None, layout, block_means, block_size, topk)
    call = selection.begin_call(block_size)
    k = gather_pages(k, layout.page_table)
    return _moba_lists(q, k, layout, block_means, block_size, topk, call)


@_on_its_device
def msa_select(
    iq: Tensor, ik: Tensor, layout: Layout, *, block_size: int, topk: int, local: str = "inside"
) -> Tensor:
    """See `sparsify.kernels.schemas.msa_select`."""
    validation.check_msa(iq, ik, None, None, None, layout, block_size, topk, local)
    call = selection.begin_call(block_size)
    ik = gather_pages(ik, layout.page_table)
    return _msa_lists(iq, ik, layout, block_size, topk, local, call)


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
        blocks = _moba_lists(q, k, layout, block_means, block_size, topk, call)
        return _listed(q, k, v, blocks, placement, block_size, scale, workspace_bytes)
    shape = forward.shape_of(q, k, v, block_size, scale)
    if topk >= block_count(k.shape[2], block_size):  # no packed document has more
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
    blocks = _moba_lists(q, flat_k, layout, block_means, block_size, topk, call)
    options: dict[str, Any] = {"scale": scale, "deterministic": deterministic}
    options["workspace_bytes"] = workspace_bytes
    made = (grad_out, grad_lse, q, k, v, blocks, out, lse, layout)
    return block_attention_backward(*made, block_size=block_size, **options)


@_on_its_device
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
    call = selection.begin_call(block_size)
    sizes: dict[str, Any] = {"block_size": block_size, "topk": topk, "local": local}
    if not selection.is_active() and not decode.unsupported(q, k, v, iq, ik, layout, **sizes):
        return decode.msa_decode(q, k, v, iq, ik, layout, **sizes, scale=scale)
    k, v, ik = (gather_pages(x, layout.page_table) for x in (k, v, ik))
    placement = place(layout, q.shape[0], q.shape[2], k.shape[2], block_size)
    if selection.is_active():
        blocks = _msa_lists(iq, ik, layout, block_size, topk, local, call)
        return _listed(q, k, v, blocks, placement, block_size, scale, workspace_bytes)
    if topk >= block_count(k.shape[2], block_size):
        return forward.dense(q, k, v, placement, forward.shape_of(q, k, v, block_size, scale))
    workspace = WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
    chooser = msa.Index(iq, ik, placement, block_size, topk, local, workspace_bytes=workspace)
    shape = forward.shape_of(q, k, v, block_size, scale, q.shape[1] // k.shape[1])
    return forward.sparse(q, k, v, placement, shape, chooser, workspace)


@_on_its_device
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
    """Gradients of `msa_attention`; the same kernels choose the same blocks once more."""
    call = selection.resumed(block_size)
    flat_ik = gather_pages(ik, layout.page_table)
    blocks = _msa_lists(iq, flat_ik, layout, block_size, topk, local, call)
    options: dict[str, Any] = {"scale": scale, "deterministic": deterministic}
    options["workspace_bytes"] = workspace_bytes
    made = (grad_out, grad_lse, q, k, v, blocks, out, lse, layout)
    return block_attention_backward(*made, block_size=block_size, **options)


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


def _moba_lists(
    q: Tensor,
    k: Tensor,
    layout: Layout,
    block_means: Tensor | None,
    block_size: int,
    topk: int,
    call: selection.Call,
) -> Tensor:
    def past(placement: Placement) -> Tensor:
        return moba.Gate(q, k, placement, block_means, block_size, topk - 1).all_rows()

    width = list_width(k.shape[2], block_size, topk)
    return _lists(past, q, k.shape[2], layout, block_size, topk, width, call)


def _msa_lists(
    iq: Tensor,
    ik: Tensor,
    layout: Layout,
    block_size: int,
    topk: int,
    local: str,
    call: selection.Call,
) -> Tensor:
    def past(placement: Placement) -> Tensor:
        return msa.Index(iq, ik, placement, block_size, topk, local).all_rows()

    width = list_width(ik.shape[2], block_size, topk, local)
    whole = decode.chooser(iq, ik, layout, block_size, topk, local)
    return _lists(past, iq, ik.shape[2], layout, block_size, topk, width, call, whole)


def _lists(
    past: Callable[[Placement], Tensor],
    q: Tensor,
    slots: int,
    layout: Layout,
    block_size: int,
    topk: int,
    width: int,
    call: selection.Call,
    whole: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Lists of the select op, one for each head of `q`; recorded or replayed if that is asked for.

    `past` chooses past blocks where not all are attended; `whole`, if given, makes the lists."""
    batch, heads, q_len = q.shape[:3]
    flat = layout._replace(page_table=None)

    def chosen() -> Tensor:
        if whole is not None:
            return whole()
        placement = place(flat, batch, q_len, slots, block_size)
        if topk >= block_count(slots, block_size):
            every = lists.every(placement, width, q_len, block_size, q.device)
            return every.expand(batch, heads, q_len, width).contiguous()
        return lists.public(past(placement), placement, q_len, block_size, width)

    if call.replayed is None and not call.recorders:
        return chosen()
    made = None if call.replayed is not None else chosen()
    out = torch.full((batch, heads, q_len, width), -1, dtype=torch.int32, device=q.device)
    for sequence in sequences(batch, q_len, slots, flat):
        if sequence.queries and sequence.keys:

            def make(sequence: Any = sequence) -> selection.Lists:
                assert made is not None
                mine = sequence.take_queries(made)
                return lambda first, last: mine[:, first:last]

            rows = call.wrap(sequence, heads, width, make)(0, sequence.queries)
            sequence.take_queries(out).copy_(rows)
    return out
