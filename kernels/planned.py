"""The op that a layer's plan names, on one call's tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsify.kernels import schemas
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
    block_means: Tensor | None = None,
    **layout: Tensor | None,
) -> Tensor:
    """Output `[B, H, T, V]` of the plan's op; every block is attended where the plan says dense.

    Args:
        plan: a layer with a sparse method.
        q_BHTD, k_BGSD, v_BGSV: queries, keys and values after the position encoding.
        scale: of the scores; D ** -0.5 by default.
        block_means: of MoBA, where a cache keeps them.
        layout: the ops' layout tensors, by name.
    """
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
    index = proxy_index(q_BHTD, k_BGSD)
    return schemas.msa_attention(q_BHTD, k_BGSD, v_BGSV, *index, local=plan.local, **options)[0]
