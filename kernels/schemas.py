"""The ops: their schemas, shapes and gradients.

Importing this module registers them under `torch.ops.sparsify`, with formulas for torch's FLOP
counter; the functions below are the same ops with documentation. It imports no Triton (torch's
counter does where it is installed).

Every op takes the layout tensors of `sparsify.kernels.layout.Layout` after its own:
`q_start`, `kv_len`, `key_mask`, `block_origin`, `cu_seqlens_q`, `cu_seqlens_k`, `page_table`.

What the ops compute: a query at position p sees the real keys at positions <= p. Blocks of
`block_size` keys are counted from the origin of its sequence. `topk` blocks are attended, the own
block (the one p lies in) among them, by one softmax. MoBA (MoonshotAI/MoBA, arXiv 2502.13189)
chooses complete past blocks by q . mean key, for every query head; MSA (MiniMax-AI/MSA, arXiv
2606.13392) chooses by the best visible token of a block in an index, for every key/value head.
Equal scores go to the lower block number, NaN ranks last.

Legend: B batch, H query heads, G key/value heads, J index key heads (1 or G), T queries, S key
slots, D key size, V value size, I index size, N blocks, K list places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsify.kernels import flops, selection, validation
from sparsify.kernels.dispatch import implementation, with_topk_in_force
from sparsify.kernels.layout import Layout, key_slots, list_width

__all__ = [
    "block_attention",
    "block_attention_backward",
    "moba_attention",
    "moba_select",
    "msa_attention",
    "msa_select",
]

_LAY = (
    "Tensor? q_start=None, Tensor? kv_len=None, Tensor? key_mask=None, Tensor? block_origin=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? page_table=None"
)
_ATT = "float? scale=None, bool deterministic=False, int? workspace_bytes=None"
_SIZES = "int block_size, int topk"
_GRADS = "Tensor? grad_out, Tensor? grad_lse"
_DENSE = "int min_context=0, bool decode_dense=False"
_LOCAL = 'str local="inside"'
_OUTS = "(Tensor out, Tensor lse)"
_GRAD_OUTS = "(Tensor grad_q, Tensor grad_k, Tensor grad_v)"
_LAYOUT_SIZE = len(Layout._fields)


@dataclass(frozen=True, slots=True)
class _Op:
    """Schema of an op. Its positional arguments: own tensors, layout tensors, further tensors."""

    name: str
    schema: str
    own: int
    further: int = 0

    @property
    def chooses(self) -> bool:
        """Whether the op chooses blocks and attends them."""
        return self.name.startswith(("moba_attention", "msa_attention"))

    @property
    def first(self) -> int:
        """Place of q; k follows it."""
        return 2 if self.name.endswith("_backward") else 0

    def split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Layout, tuple[Any, ...]]:
        """The three parts; arguments left out at the end are None."""
        missing = self.own + _LAYOUT_SIZE + self.further - len(args)
        full = args + (None,) * missing
        border = self.own + _LAYOUT_SIZE
        return full[: self.own], Layout(*full[self.own : border]), full[border:]


_OPS = (
    _Op(
        "moba_select",
        f"(Tensor q, Tensor k, {_LAY}, Tensor? block_means=None, *, {_SIZES}) -> Tensor",
        own=2,
        further=1,
    ),
    _Op("msa_select", f"(Tensor iq, Tensor ik, {_LAY}, *, {_SIZES}, {_LOCAL}) -> Tensor", own=2),
    _Op(
        "block_attention",
        f"(Tensor q, Tensor k, Tensor v, Tensor blocks, {_LAY}, *, int block_size, {_ATT})"
        f" -> {_OUTS}",
        own=4,
    ),
    _Op(
        "block_attention_backward",
        f"({_GRADS}, Tensor q, Tensor k, Tensor v, Tensor blocks, Tensor out, Tensor lse, "
        f"{_LAY}, *, int block_size, {_ATT}) -> {_GRAD_OUTS}",
        own=8,
    ),
    _Op(
        "moba_attention",
        f"(Tensor q, Tensor k, Tensor v, {_LAY}, Tensor? block_means=None, *, {_SIZES}, {_DENSE}, "
        f"{_ATT}) -> {_OUTS}",
        own=3,
        further=1,
    ),
    _Op(
        "moba_attention_backward",
        f"({_GRADS}, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_LAY}, "
        f"Tensor? block_means=None, *, {_SIZES}, {_DENSE}, {_ATT}) -> {_GRAD_OUTS}",
        own=7,
        further=1,
    ),
    _Op(
        "msa_attention",
        f"(Tensor q, Tensor k, Tensor v, Tensor iq, Tensor ik, {_LAY}, *, {_SIZES}, {_LOCAL}, "
        f"{_DENSE}, {_ATT}) -> {_OUTS}",
        own=5,
    ),
    _Op(
        "msa_attention_backward",
        f"({_GRADS}, Tensor q, Tensor k, Tensor v, Tensor iq, Tensor ik, Tensor out, Tensor lse, "
        f"{_LAY}, *, {_SIZES}, {_LOCAL}, {_DENSE}, {_ATT}) -> {_GRAD_OUTS}",
        own=9,
    ),
)


def moba_select(
    q: Tensor,
    k: Tensor,
    q_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    key_mask: Tensor | None = None,
    block_origin: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    block_means: Tensor | None = None,
    *,
    block_size: int,
    topk: int,
) -> Tensor:
    """Blocks that MoBA attends: the own block and the best `topk - 1` complete past blocks.

    The gate is q . mean key in float32 (float64 for float64), without scale; means are taken over
    the real keys of a block in float32 and rounded to the key dtype. A past block without a real
    key is no candidate.

    Args:
        q: `[B, H, T, D]`, float16, bfloat16, float32 or float64.
        k: `[B, G, S, D]` of the same dtype, or pages `[P, G, block_size, D]`; H a multiple of G.
        q_start, kv_len, key_mask, block_origin, cu_seqlens_q, cu_seqlens_k, page_table: where
            queries and keys lie, see `sparsify.kernels.layout.Layout`.
        block_means: `[B, G, N, D]`, used in place of the means of `k`.
        block_size: keys of a block, at least 1.
        topk: blocks of a row, the own one included, at least 1; may exceed the number of blocks.

    Returns:
        int32 `[B, H, T, min(topk, N)]`, ascending, -1 behind; the own block is the last valid
        entry.

    Raises:
        ValueError: for arguments that do not fit, naming the argument.
    """
    lay = (q_start, kv_len, key_mask, block_origin, cu_seqlens_q, cu_seqlens_k, page_table)
    sizes = {"block_size": block_size, "topk": topk}
    blocks: Tensor = _call("moba_select", q, k, *lay, block_means, **sizes)
    return blocks


def msa_select(
    iq: Tensor,
    ik: Tensor,
    q_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    key_mask: Tensor | None = None,
    block_origin: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    *,
    block_size: int,
    topk: int,
    local: str = "inside",
) -> Tensor:
    """Blocks that MSA attends, one list per key/value head.

    A block scores by its best visible token, iq . ik in float32 (float64 for float64).

    Args:
        iq: index queries `[B, G, T, I]`, any floating-point dtype.
        ik: index keys `[B, 1 or G, S, I]`, or pages `[P, 1 or G, block_size, I]`.
        q_start, kv_len, key_mask, block_origin, cu_seqlens_q, cu_seqlens_k, page_table: where
            queries and keys lie, see `sparsify.kernels.layout.Layout`.
        block_size: keys of a block, at least 1.
        topk: blocks of a row, at least 1; may exceed the number of blocks.
        local: "inside": the own block takes one of the `topk` places (the released code);
            "union": the best `topk` visible blocks and the own block (the article's formula).

    Returns:
        int32 `[B, G, T, min(topk, N)]` (`min(topk + 1, N)` for "union"), ascending, -1 behind; the
        own block is the last valid entry.

    Raises:
        ValueError: for arguments that do not fit, naming the argument.
    """
    lay = (q_start, kv_len, key_mask, block_origin, cu_seqlens_q, cu_seqlens_k, page_table)
    blocks: Tensor = _call(
        "msa_select", iq, ik, *lay, block_size=block_size, topk=topk, local=local
    )
    return blocks


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    q_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    key_mask: Tensor | None = None,
    block_origin: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    *,
    block_size: int,
    scale: float | None = None,
    deterministic: bool = False,
    workspace_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal softmax attention over the listed blocks. Differentiable in q, k and v.

    Args:
        q: `[B, H, T, D]`, float16, bfloat16, float32 or float64.
        k: `[B, G, S, D]` of the same dtype, or pages `[P, G, block_size, D]`; H a multiple of G.
        v: `[B, G, S, V]` of the same dtype, or pages.
        blocks: int32 `[B, H or G, T, K]`; entries that are negative, repeated, ahead of the query
            or beyond the keys have no effect.
        q_start, kv_len, key_mask, block_origin, cu_seqlens_q, cu_seqlens_k, page_table: where
            queries and keys lie, see `sparsify.kernels.layout.Layout`.
        block_size: keys of a block, at least 1.
        scale: factor of the logits; default `D ** -0.5`.
        deterministic: the backward pass sums in a fixed order.
        workspace_bytes: bound on scratch memory; on a GPU kept where 128 rows of a list, or of all
            lists that one index key chooses, fit into it.

    Returns:
        out `[B, H, T, V]` in the dtype of q, and the log of the softmax sum `[B, H, T]` in float32
        (float64 for float64). Rows without a visible chosen key, or with all logits -inf, give 0
        and -inf, and gradient 0.

    Raises:
        ValueError: for arguments that do not fit, naming the argument.
    """
    lay = (q_start, kv_len, key_mask, block_origin, cu_seqlens_q, cu_seqlens_k, page_table)
    options = {"scale": scale, "deterministic": deterministic, "workspace_bytes": workspace_bytes}
    result: tuple[Tensor, Tensor] = _call(
        "block_attention", q, k, v, blocks, *lay, block_size=block_size, **options
    )
    return result


def block_attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    out: Tensor,
    lse: Tensor,
    q_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    key_mask: Tensor | None = None,
    block_origin: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    *,
    block_size: int,
    scale: float | None = None,
    deterministic: bool = False,
    workspace_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `block_attention` with respect to q, k and v, in their shapes and dtypes.

    Args:
        grad_out: gradient of the output `[B, H, T, V]`; None for zeros.
        grad_lse: gradient of the log-sum-exp `[B, H, T]`; None for zeros.
        out, lse: what the forward pass returned.
        q, k, v, blocks, block_size, scale, deterministic, workspace_bytes: as in the forward pass.
        q_start, kv_len, key_mask, block_origin, cu_seqlens_q, cu_seqlens_k, page_table: likewise.

    Raises:
        ValueError: for arguments that do not fit, naming the argument.
    """
    lay = (q_start, kv_len, key_mask, block_origin, cu_seqlens_q, cu_seqlens_k, page_table)
    options = {"scale": scale, "deterministic": deterministic, "workspace_bytes": workspace_bytes}
    tensors = (grad_out, grad_lse, q, k, v, blocks, out, lse, *lay)
    grads: tuple[Tensor, Tensor, Tensor] = _call(
        "block_attention_backward", *tensors, block_size=block_size, **options
    )
    return grads


def moba_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    key_mask: Tensor | None = None,
    block_origin: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    block_means: Tensor | None = None,
    *,
    block_size: int,
    topk: int,
    min_context: int = 0,
    decode_dense: bool = False,
    scale: float | None = None,
    deterministic: bool = False,
    workspace_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`moba_select` and `block_attention` in one; the backward pass chooses the blocks again.

    No gradient flows through the choice. Arguments, results and errors are those of the two, and:

    Args:
        min_context: with fewer key slots than this every block is attended; of packed documents
            the longest one counts.
        decode_dense: a single query over more keys attends every block.
    """
    lay = (q_start, kv_len, key_mask, block_origin, cu_seqlens_q, cu_seqlens_k, page_table)
    options = {"scale": scale, "deterministic": deterministic, "workspace_bytes": workspace_bytes}
    sizes = {"block_size": block_size, "topk": topk}
    dense = {"min_context": min_context, "decode_dense": decode_dense}
    result: tuple[Tensor, Tensor] = _call(
        "moba_attention", q, k, v, *lay, block_means, **sizes, **dense, **options
    )
    return result


def msa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    iq: Tensor,
    ik: Tensor,
    q_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    key_mask: Tensor | None = None,
    block_origin: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    *,
    block_size: int,
    topk: int,
    local: str = "inside",
    min_context: int = 0,
    decode_dense: bool = False,
    scale: float | None = None,
    deterministic: bool = False,
    workspace_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`msa_select` and `block_attention` in one; the backward pass chooses the blocks again.

    No gradient flows through the choice, so `iq` and `ik` get none. Arguments, results and errors
    are those of the two; `min_context` and `decode_dense` as in `moba_attention`.
    """
    lay = (q_start, kv_len, key_mask, block_origin, cu_seqlens_q, cu_seqlens_k, page_table)
    options = {"scale": scale, "deterministic": deterministic, "workspace_bytes": workspace_bytes}
    sizes = {"block_size": block_size, "topk": topk, "local": local}
    dense = {"min_context": min_context, "decode_dense": decode_dense}
    result: tuple[Tensor, Tensor] = _call(
        "msa_attention", q, k, v, iq, ik, *lay, **sizes, **dense, **options
    )
    return result


def _call(name: str, *args: Any, **options: Any) -> Any:
    validation.check_options(options)
    return getattr(torch.ops.sparsify, name)(*args, **options)


def _body(op: _Op) -> Callable[..., Any]:
    def body(*args: Any, **options: Any) -> Any:
        validation.check_options(options)
        own, layout, further = op.split(args)
        if op.chooses:
            options = with_topk_in_force(options, own[op.first], own[op.first + 1], layout)
        with torch.no_grad():
            run = getattr(implementation(op.name, own, layout, options), op.name)
            return run(*own, layout, *further, **options)

    return body


def _fake_lists(op: _Op) -> Callable[..., Tensor]:
    def fake(*args: Any, **options: Any) -> Tensor:
        (q, k), layout, further = op.split(args)
        block_size, topk = options["block_size"], options["topk"]
        local = options.get("local", "inside")
        if op.name == "moba_select":
            validation.check_moba(q, k, None, layout, further[0], block_size, topk)
        else:
            validation.check_msa(q, k, None, None, None, layout, block_size, topk, local)
        width = list_width(key_slots(k, layout), block_size, topk, local)
        blocks: Tensor = q.new_empty((*q.shape[:3], width), dtype=torch.int32)
        return blocks

    return fake


def _fake_attention(op: _Op) -> Callable[..., tuple[Tensor, Tensor]]:
    def fake(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        own, layout, further = op.split(args)
        q, k, v = own[:3]
        block_size = options["block_size"]
        if op.name == "block_attention":
            validation.check_blocks(q, k, v, own[3], layout, block_size)
        elif op.name == "moba_attention":
            validation.check_moba(q, k, v, layout, further[0], block_size, options["topk"])
        else:
            local = options.get("local", "inside")
            iq, ik = own[3:]
            validation.check_msa(iq, ik, q, k, v, layout, block_size, options["topk"], local)
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=lse_dtype)

    return fake


def _fake_gradients(op: _Op) -> Callable[..., tuple[Tensor, ...]]:
    def fake(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        q, k, v = op.split(args)[0][2:5]
        return tuple(x.new_empty(x.shape) for x in (q, k, v))

    return fake


def _keep_for_backward(op: _Op) -> Callable[..., None]:
    def setup(
        ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
    ) -> None:
        ctx.save_for_backward(*inputs[: op.own], *output, *inputs[op.own :])
        ctx.options = keyword_only_inputs
        ctx.replayed = selection.current_replay()

    return setup


def _backward(op: _Op) -> Callable[..., tuple[Any, ...]]:
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        with selection.resume(ctx.replayed):
            grads = _call(
                f"{op.name}_backward", grad_out, grad_lse, *ctx.saved_tensors, **ctx.options
            )
        return (*grads, *(None,) * (op.own - 3 + _LAYOUT_SIZE + op.further))

    return backward


def _no_gradient(op: _Op) -> Callable[..., tuple[None, ...]]:
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        return (None,) * (op.own + _LAYOUT_SIZE + op.further)

    return backward


def _no_second_gradient(op: _Op) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"sparsify::{op.name} has no derivative: second derivatives of "
            "block-sparse attention are not implemented."
        )

    return backward


def _register(op: _Op) -> None:
    name = f"sparsify::{op.name}"
    torch.library.define(name, op.schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "default", _body(op))
    if op.name.endswith("_select"):
        torch.library.register_fake(name, _fake_lists(op))
        torch.library.register_autograd(name, _no_gradient(op))
    elif op.name.endswith("_backward"):
        torch.library.register_fake(name, _fake_gradients(op))
        torch.library.register_autograd(name, _no_second_gradient(op))
    else:
        torch.library.register_fake(name, _fake_attention(op))
        setup = _keep_for_backward(op)
        torch.library.register_autograd(name, _backward(op), setup_context=setup)


for _op in _OPS:
    _register(_op)
flops.register()
