"""The learned indexer of MSA: index tensors from the hidden states that q, k and v are made of.

A query has one index vector per key/value head and a key one for all of them. Both are projected,
normalised where the indexer has norms, and turned by the model's own rotary tables; there are no
values. No gradient of attention reaches them: the choice of blocks has none.

Legend: B batch, T tokens, C channels of the hidden state, G index heads, I index size, R width of
the rotary tables, W index channels that turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["index_heads", "normalised", "rotated"]


def index_heads(
    hidden_BTC: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain_I: Tensor | None,
    eps: float,
    tables: tuple[Tensor, Tensor] | None,
    index_dim: int,
) -> Tensor:
    """Index vectors `[B, G, T, I]` of one side, queries or keys.

    Args:
        hidden_BTC: what q, k and v are projected from.
        weight, bias: of the projection, `[G * I, C]` and `[G * I]`.
        gain_I: of the norm, less 1; None without a norm.
        eps: of the norm.
        tables: cosines and sines `[B or 1, T, W]` of the channels that turn; None if none does.
    """
    x = torch.nn.functional.linear(hidden_BTC, weight, bias)
    x_BTGI = x.view(*x.shape[:2], -1, index_dim)
    if gain_I is not None:
        x_BTGI = normalised(x_BTGI, gain_I, eps)
    x_BGTI = x_BTGI.transpose(1, 2)
    return x_BGTI if tables is None else rotated(x_BGTI, *tables)


def normalised(x: Tensor, gain_I: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis with the gain `1 + gain`, in float32, in x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + gain_I.to(wide.dtype))).to(x.dtype)


def rotated(x_BGTI: Tensor, cos_BTW: Tensor, sin_BTW: Tensor) -> Tensor:
    """The first W channels turned, channel i with channel i + W/2; the others pass."""
    width = cos_BTW.shape[-1]
    cos, sin = cos_BTW.unsqueeze(1), sin_BTW.unsqueeze(1)
    turning = x_BGTI[..., :width]
    one, two = turning[..., : width // 2], turning[..., width // 2 :]
    turned = turning * cos + torch.cat((-two, one), -1) * sin
    if width == x_BGTI.shape[-1]:
        return turned
    return torch.cat((turned, x_BGTI[..., width:]), -1)
