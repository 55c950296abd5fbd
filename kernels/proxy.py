"""The proxy indexer of MSA: index tensors without parameters, made of the attention's own q and k.

Legend: B batch, H query heads, G key/value heads, T queries, S keys, D head size.
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
    wide = q_BHTD if q_BHTD.dtype == torch.float64 else q_BHTD.float()
    n_B, n_H, n_T, n_D = q_BHTD.shape
    return wide.reshape(n_B, groups, n_H // groups, n_T, n_D).mean(2), k_BGSD
