"""The proxy indexer of MSA: index tensors without parameters, made of the attention's own q and k.

Legend: B batch, H query heads, G key/value heads, R query heads of a group, T queries, S keys,
D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["proxy_index"]


def proxy_index(q_BHTD: Tensor, k_BGSD: Tensor) -> tuple[Tensor, Tensor]:
    """Index tensors of the proxy indexer: the mean of each group's queries, and the keys.

    Args:
        q_BHTD, k_BGSD: queries and keys after the position encoding.

    Returns:
        iq `[B, G, T, D]`, float32 (float64 for float64), and ik: the keys themselves.
    """
    groups = k_BGSD.shape[1]
    n_B, n_H, n_T, n_D = q_BHTD.shape
    # Widened while they are summed: in a prefill, wide queries would be the largest tensor of all.
    wide = torch.float64 if q_BHTD.dtype == torch.float64 else torch.float32
    by_group_BGRTD = q_BHTD.reshape(n_B, groups, n_H // groups, n_T, n_D)
    return by_group_BGRTD.mean(2, dtype=wide), k_BGSD
