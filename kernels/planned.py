"""The op that a layer's plan names, on one call's tensors.

Legend: B batch, H query heads, G key/value heads, T queries, S keys, D key size, V value size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsify.kernels import schemas
from sparsify.kernels.documents import as_batch, as_packed_row, document_layout
from sparsify.kernels.proxy import proxy_index
from sparsify.plans import LayerPlan

__all__ = ["planned_attention"]


def planned_attention(
    plan: LayerPlan,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSV: Tensor,
    *,
    scale: float | None = None,
    documents: Tensor | None = None,
    key_mask: Tensor | None = None,
    q_start: Tensor | None = None,
    block_means: Tensor | None = None,
    block_origin: Tensor | None = None,
    index: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Output `[B, H, T, V]` of the plan's op; every block is attended where the plan says dense.

    Args:
        plan: a layer with a sparse method.
        q_BHTD, k_BGSD, v_BGSV: queries, keys and values after the position encoding.
        scale: of the scores; D ** -0.5 by default.
        documents: `[B or 1, T]`, the number of every token's document: rows hold several documents,
            each of which is attended as if it were alone. As many keys as queries, and no cache.
        key_mask: `[B, S]` bool, False where a key is hidden.
        q_start, block_means: see `moba_attention`; with a cache.
        block_origin: where block 0 begins, `[B]`; at the first real key by default.
        index: index queries `[B, G, T, I]` and keys `[B, 1, S, I]` of a learned indexer.

    Raises:
        ValueError: `documents` are given with a cache, or a learned indexer's tensors are missing.
        RuntimeError: equal numbers of a row do not stand next to each other.
    """
    if (plan.indexer == "learned") != (index is not None):
        raise ValueError(f"{plan.key}: tensors of a learned indexer are missing, or not wanted.")
    if documents is None:
        where = {"q_start": q_start, "key_mask": key_mask, "block_means": block_means}
        where["block_origin"] = block_origin
        return _attention(plan, q_BHTD, k_BGSD, v_BGSV, scale, index, **where)
    _check_no_cache(q_BHTD, k_BGSD, q_start, block_means)
    batch, length = q_BHTD.shape[0], q_BHTD.shape[2]
    layout = document_layout(documents.expand(batch, -1), key_mask)
    q_row, k_row, v_row = (as_packed_row(x) for x in (q_BHTD, k_BGSD, v_BGSV))
    if index is not None:
        index = as_packed_row(index[0]), as_packed_row(index[1])
    out = _attention(plan, q_row, k_row, v_row, scale, index, **layout._asdict())
    return as_batch(out, batch, length)


def _check_no_cache(
    q: Tensor, k: Tensor, q_start: Tensor | None, block_means: Tensor | None
) -> None:
    lengths = (q.shape[2], k.shape[2])
    known = all(isinstance(length, int) for length in lengths)
    if q_start is not None or block_means is not None or (known and lengths[0] != lengths[1]):
        raise ValueError(
            f"documents are given for {lengths[0]} queries and {lengths[1]} keys; "
            "packed documents need as many of both, and no cache."
        )


def _attention(
    plan: LayerPlan,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSV: Tensor,
    scale: float | None,
    index: tuple[Tensor, Tensor] | None,
    *,
    block_means: Tensor | None = None,
    **layout: Tensor | None,
) -> Tensor:
    block_size, topk = plan.budget
    options: dict[str, Any] = {
        "block_size": block_size,
        "topk": topk,
        "min_context": plan.min_context,
        "decode_dense": plan.decode == "dense",
        "scale": scale,
        **layout,
    }
    if plan.method == "moba":
        return schemas.moba_attention(q_BHTD, k_BGSD, v_BGSV, block_means=block_means, **options)[0]
    index = proxy_index(q_BHTD, k_BGSD) if index is None else index
    return schemas.msa_attention(q_BHTD, k_BGSD, v_BGSV, *index, local=plan.local, **options)[0]
