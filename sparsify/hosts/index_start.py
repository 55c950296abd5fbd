"""Weights for a learned indexer that nobody has trained yet, from the layer's own projections.

Attention compares queries and keys channel pair by channel pair of equal frequency, which in
complex numbers is `conj(q) k`, one such product for each group. The index key is shared by the
groups, so for each pair it takes the main directions that the groups' keys span (eigenvectors, each
group weighted by how large its queries are there), and the index query holds what the group's mean
query makes of them. Turning by a position commutes with all of this. Channels that do not turn are
treated alike, all of them together. Hidden states are taken to have the size that the layer's norm
gives to each channel.

Legend: C channels of the hidden state (and one for the bias), H query heads, G groups, D head size,
I index size, P channels that do not turn, F frequencies.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.hosts.rotary import Rotary

__all__ = ["Projections", "gain_of", "projections_of", "start"]

_FUSED = ("qkv_proj", "c_attn")
_NORMS = ("input_layernorm", "ln_1", "self_attn_layer_norm", "attention_norm", "norm1")


@dataclass(frozen=True)
class Projections:
    """A layer's own projections in float32: q `[H, D, C + 1]`, k `[G, D, C + 1]`, the last column
    being the bias, and the size of each of these columns' inputs."""

    q_HDC: Tensor
    k_GDC: Tensor
    size_C: Tensor
    bias: bool


def projections_of(module: nn.Module, block: nn.Module | None, head_dim: int) -> Projections | None:
    """The projections of an attention module, or None if they are not known by their names.

    Args:
        block: the module that holds it, where the norm before it is.
    """
    found = _named(module, head_dim)
    if found is None:
        return None
    (q, q_bias), (k, k_bias) = found
    bias = q_bias is not None or k_bias is not None
    q_HDC, k_GDC = (_with_bias(w, b, head_dim) for w, b in ((q, q_bias), (k, k_bias)))
    for name, x in (("q_norm", q_HDC), ("k_norm", k_GDC)):
        gain_D = gain_of(getattr(module, name, None), head_dim)
        if gain_D is not None:
            x.mul_(gain_D.to(x)[:, None])
    norms = (getattr(block, name, None) for name in _NORMS)
    norm = next((norm for norm in norms if isinstance(norm, nn.Module)), None)
    gain_C = gain_of(norm, q.shape[1])
    size_C = torch.ones(q_HDC.shape[2], device=q.device)
    if gain_C is not None:
        size_C[:-1] = gain_C.abs().to(size_C)
    return Projections(q_HDC, k_GDC, size_C, bias)


Linear = tuple[Tensor, Tensor | None]


def _named(module: nn.Module, head_dim: int) -> tuple[Linear, Linear] | None:
    """Weights `[rows, C]` and biases of q and k."""
    q: Any = getattr(module, "q_proj", None)
    k: Any = getattr(module, "k_proj", None)
    if _is_plain(q) and _is_plain(k):
        return (q.weight, q.bias), (k.weight, k.bias)
    fused: Any = next((m for name in _FUSED if _is_plain(m := getattr(module, name, None))), None)
    if fused is None:
        return None
    # transformers' Conv1D keeps its weight the other way round
    weight = fused.weight if isinstance(fused, nn.Linear) else fused.weight.T
    heads = getattr(getattr(module, "config", None), "num_attention_heads", 0)
    queries = heads * head_dim
    keys, odd = divmod(weight.shape[0] - queries, 2)
    if odd or keys < 1 or keys % head_dim:
        return None
    parts = slice(0, queries), slice(queries, queries + keys)
    bias = fused.bias
    one, two = ((weight[p], None if bias is None else bias[p]) for p in parts)
    return one, two


def _is_plain(projection: object) -> bool:
    """Whether its weight is an ordinary matrix (quantised ones are packed)."""
    if not (isinstance(projection, nn.Linear) or type(projection).__name__ == "Conv1D"):
        return False
    weight = getattr(projection, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()


def _with_bias(weight: Tensor, bias: Tensor | None, head_dim: int) -> Tensor:
    """`[heads, D, C + 1]` in float32."""
    column = weight.new_zeros(weight.shape[0]) if bias is None else bias
    both = torch.cat([weight.detach(), column.detach()[:, None]], 1).float()
    return both.reshape(-1, head_dim, both.shape[1])


@torch.no_grad()
def gain_of(norm: object, size: int) -> Tensor | None:
    """The gain of a norm, seen by what it makes of numbers of size 1, or None without one."""
    weight = getattr(norm, "weight", None)
    if not isinstance(norm, nn.Module) or not isinstance(weight, Tensor):
        return None
    if weight.shape != (size,) or size % 2:
        return None
    x = torch.ones(1, size, dtype=weight.dtype, device=weight.device)
    x[:, 1::2] = -1
    gain: Tensor = (norm(x) - norm(-x))[0] * x[0] / 2
    return gain.float()


@torch.no_grad()
def start(
    projections: Projections, index_dim: int, pairs: list[int], turning: Rotary
) -> tuple[Tensor, Tensor]:
    """Projections of the index queries `[G, I, C + 1]` and of the index keys `[I, C + 1]`.

    Args:
        pairs: the frequency of each pair of index channels that turns; the other channels do not.
        turning: the channels of a head that turn.
    """
    k_GDC = projections.k_GDC
    groups = k_GDC.shape[0]
    q_GDC = projections.q_HDC.reshape(groups, -1, *k_GDC.shape[1:]).mean(1)
    q_turn, q_still = _as_complex(q_GDC, turning)
    k_turn, k_still = _as_complex(k_GDC, turning)
    size_C = projections.size_C
    one_iq, one_ik = _turning(q_turn, k_turn, size_C, pairs)
    two_iq, two_ik = _still(q_still, k_still, size_C, index_dim - 2 * len(pairs))
    iq_GIC = torch.cat([one_iq.real, one_iq.imag, two_iq], 1)
    ik_IC = torch.cat([one_ik.real, one_ik.imag, two_ik], 0)
    return _scaled(iq_GIC, size_C), _scaled(ik_IC, size_C)


def _as_complex(x_GDC: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """The channels that turn as complex numbers `[G, F, C]`, and those that do not `[G, P, C]`."""
    turning, still = x_GDC[:, : rotary.width], x_GDC[:, rotary.width :]
    if rotary.channels_interleaved:
        return torch.complex(turning[:, ::2], turning[:, 1::2]), still
    half = rotary.width // 2
    return torch.complex(turning[:, :half], turning[:, half:]), still


def _turning(
    q_GFC: Tensor, k_GFC: Tensor, size_C: Tensor, pairs: list[int]
) -> tuple[Tensor, Tensor]:
    """Index queries `[G, pairs, C]` and keys `[pairs, C]`, complex."""
    groups, _, n_C = q_GFC.shape
    large_FG = (q_GFC * size_C).abs().square().sum(-1).sqrt().T
    k_FGC = k_GFC.transpose(0, 1) * large_FG[..., None]
    gram_FGG = (k_FGC * size_C) @ (k_FGC * size_C).mH
    values_FG, vectors_FGG = torch.linalg.eigh(gram_FGG)
    iq, ik = q_GFC.new_zeros(groups, len(pairs), n_C), k_GFC.new_zeros(len(pairs), n_C)
    seen: Counter[int] = Counter()
    for place, f in enumerate(pairs):
        rank, seen[f] = groups - 1 - seen[f], seen[f] + 1  # largest last
        if rank < 0:
            ik[place] = ik[place - 1]  # no direction is left: the queries ignore it
            continue
        direction_G, length = vectors_FGG[f, :, rank], values_FG[f, rank].clamp(min=1e-30).sqrt()
        ik[place] = direction_G.conj() @ k_FGC[f] / length
        part_G = direction_G * length / large_FG[f].clamp(min=1e-30)
        iq[:, place] = part_G.conj()[:, None] * q_GFC[:, f]
    return iq, ik


def _still(q_GPC: Tensor, k_GPC: Tensor, size_C: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Index queries `[G, count, C]` and keys `[count, C]` of channels that do not turn."""
    groups, channels, n_C = q_GPC.shape
    iq, ik = q_GPC.new_zeros(groups, count, n_C), k_GPC.new_zeros(count, n_C)
    if not count or not channels:
        return iq, ik
    # what the queries make of the keys, in a basis of each group's queries
    factors_GPP = torch.linalg.qr((q_GPC * size_C).mT).R
    k_NC = (factors_GPP @ k_GPC).flatten(0, 1)
    gram_NN = (k_NC * size_C) @ (k_NC * size_C).mT
    values_N, vectors_NN = torch.linalg.eigh(gram_NN)
    known = min(count, values_N.shape[0])
    best = torch.arange(values_N.shape[0] - 1, values_N.shape[0] - 1 - known, -1)
    lengths = values_N[best].clamp(min=1e-30).sqrt()
    ik[:known] = (vectors_NN[:, best] / lengths).mT @ k_NC
    made_GKP = torch.einsum("kc,gpc->gkp", ik[:known] * size_C, k_GPC * size_C)
    iq[:, :known] = made_GKP @ q_GPC
    return iq, ik


def _scaled(x: Tensor, size_C: Tensor) -> Tensor:
    """The same up to one factor, so that results are of size 1 on average."""
    return x / (x * size_C).square().sum(-1).mean().sqrt().clamp(min=1e-30)
