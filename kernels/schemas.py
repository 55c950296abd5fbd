"""The ops: their schemas and what they compute.

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

from torch import Tensor

from sparsify.kernels import flops
from sparsify.kernels.registration import Op, call, register

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

_OPS = (
    Op(
        "moba_select",
        f"(Tensor q, Tensor k, {_LAY}, Tensor? block_means=None, *, {_SIZES}) -> Tensor",
        own=2,
        further=1,
    ),
    Op("msa_select", f"(Tensor iq, Tensor ik, {_LAY}, *, {_SIZES}, {_LOCAL}) -> Tensor", own=2),
    Op(
        "block_attention",
        f"(Tensor q, Tensor k, Tensor v, Tensor blocks, {_LAY}, *, int block_size, {_ATT})"
        f" -> {_OUTS}",
        own=4,
    ),
    Op(
        "block_attention_backward",
        f"({_GRADS}, Tensor q, Tensor k, Tensor v, Tensor blocks, Tensor out, Tensor lse, "
        f"{_LAY}, *, int block_size, {_ATT}) -> {_GRAD_OUTS}",
        own=8,
    ),
    Op(
        "moba_attention",
        f"(Tensor q, Tensor k, Tensor v, {_LAY}, Tensor? block_means=None, *, {_SIZES}, {_DENSE}, "
        f"{_ATT}) -> {_OUTS}",
        own=3,
        further=1,
    ),
    Op(
        "moba_attention_backward",
        f"({_GRADS}, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_LAY}, "
        f"Tensor? block_means=None, *, {_SIZES}, {_DENSE}, {_ATT}) -> {_GRAD_OUTS}",
        own=7,
        further=1,
    ),
    Op(
        "msa_attention",
        f"(Tensor q, Tensor k, Tensor v, Tensor iq, Tensor ik, {_LAY}, *, {_SIZES}, {_LOCAL}, "
        f"{_DENSE}, {_ATT}) -> {_OUTS}",
        own=5,
    ),
    Op(
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
    blocks: Tensor = call("moba_select", q, k, *lay, block_means, **sizes)
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
    blocks: Tensor = call("msa_select", iq, ik, *lay, block_size=block_size, topk=topk, local=local)
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
    result: tuple[Tensor, Tensor] = call(
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
    grads: tuple[Tensor, Tensor, Tensor] = call(
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
    result: tuple[Tensor, Tensor] = call(
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
    result: tuple[Tensor, Tensor] = call(
        "msa_attention", q, k, v, iq, ik, *lay, **sizes, **dense, **options
    )
    return result


for _op in _OPS:
    register(_op)
flops.register()
