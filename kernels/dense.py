"""Softmax attention over chosen keys on one tile: forward, backward, and the rules for NaN and inf.

A tile is some queries of some heads against a run of keys, with a mask of the pairs that count.
Pairs that do not count contribute nothing whatever their keys, values or queries hold.

Legend: G key/value heads, R query heads of a group, T queries, L keys, D key size, V value size.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["TileGrads", "attend", "attend_backward", "attend_gathered", "masked_matmul"]


class TileGrads(NamedTuple):
    """Gradients of one tile; those of keys and values are this tile's share.

    `lse` is the log of the softmax sum as recomputed, `[G, R, T]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor


class _Softmax(NamedTuple):
    weights: Tensor  # exp(logit - top), 0 for pairs that do not count
    top: Tensor  # row maximum, 0 where no logit is above -inf
    total: Tensor  # sum of the weights
    dead: Tensor  # rows without a logit above -inf


def attend(
    q_GRTD: Tensor, k_GLD: Tensor, v_GLV: Tensor, keep_GRTL: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output `[G, R, T, V]` and log-sum-exp `[G, R, T]` of one tile, in the dtype of the inputs.

    `keep_GRTL` is bool and may have size 1 on the R axis.
    """
    soft = _softmax(q_GRTD, k_GLD, keep_GRTL, scale)
    out = masked_matmul(soft.weights, keep_GRTL, v_GLV)
    out = (out / soft.total).masked_fill_(soft.dead, 0.0)
    return out, (soft.top + soft.total.log()).squeeze(-1)


def attend_gathered(
    q_HRTD: Tensor, k_HTLD: Tensor, v_HTLV: Tensor, keep_HTL: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The same for keys and values gathered row by row; those that do not count must be zeroed."""
    logits_HTRL = (q_HRTD * scale).transpose(1, 2) @ k_HTLD.mT
    soft = _normalise(logits_HTRL, keep_HTL[:, :, None])
    out = ((soft.weights @ v_HTLV) / soft.total).masked_fill_(soft.dead, 0.0)
    lse = (soft.top + soft.total.log()).squeeze(-1)
    return out.transpose(1, 2), lse.transpose(1, 2)


def attend_backward(
    q_GRTD: Tensor,
    k_GLD: Tensor,
    v_GLV: Tensor,
    keep_GRTL: Tensor,
    grad_GRTV: Tensor,
    grad_lse_GRT: Tensor,
    scale: float,
) -> TileGrads:
    """Gradients of one tile from the gradients of its output and of its log-sum-exp.

    Maximum and sum are computed again, not read from a rounded log-sum-exp.
    """
    soft = _softmax(q_GRTD, k_GLD, keep_GRTL, scale)
    lse_GRT = (soft.top + soft.total.log()).squeeze(-1)
    q_GRTD = q_GRTD.masked_fill(soft.dead, 0.0)
    grad_GRTV = grad_GRTV.masked_fill(soft.dead, 0.0)
    grad_lse = grad_lse_GRT[..., None].masked_fill(soft.dead, 0.0)
    p = soft.weights.div_(soft.total.masked_fill(soft.dead, 1.0))
    _clear(p, keep_GRTL, soft.total)
    dp = _by_group(grad_GRTV, v_GLV.mT)
    _clear(dp, keep_GRTL, v_GLV)
    delta = (p * dp).sum(-1, keepdim=True)
    grad_v = _into_keys(p, keep_GRTL, grad_GRTV)
    ds = dp.sub_(delta - grad_lse).mul_(p)
    _clear(ds, keep_GRTL, delta)
    grad_q = masked_matmul(ds, keep_GRTL, k_GLD) * scale
    grad_k = _into_keys(ds, keep_GRTL, q_GRTD) * scale
    return TileGrads(grad_q, grad_k, grad_v, lse_GRT)


def masked_matmul(w_GRTL: Tensor, keep_GRTL: Tensor, x_GLV: Tensor) -> Tensor:
    """Sum of w * x over the pairs that count, `[G, R, T, V]`; `w` is 0 for all other pairs.

    Infinite and NaN entries of `x` reach the rows that keep them, as in a plain sum, and no others.
    """
    if bool(x_GLV.isfinite().all()):
        return _by_group(w_GRTL, x_GLV)
    keep_GML = keep_GRTL.expand_as(w_GRTL).flatten(1, 2)
    return _guarded(w_GRTL.flatten(1, 2), keep_GML, x_GLV).view(*w_GRTL.shape[:3], -1)


def _into_keys(w_GRTL: Tensor, keep_GRTL: Tensor, x_GRTV: Tensor) -> Tensor:
    """The transposed product: sum over the queries that keep a key, `[G, L, V]`."""
    w_GLM, x_GMV = w_GRTL.flatten(1, 2).mT, x_GRTV.flatten(1, 2)
    if bool(x_GMV.isfinite().all()):
        return w_GLM @ x_GMV
    return _guarded(w_GLM, keep_GRTL.expand_as(w_GRTL).flatten(1, 2).mT, x_GMV)


def _guarded(w_GML: Tensor, keep_GML: Tensor, x_GLV: Tensor) -> Tensor:
    """Product in which non-finite entries of `x` act on kept pairs only."""
    dtype, inf = w_GML.dtype, float("inf")
    out = w_GML @ x_GLV.masked_fill(~x_GLV.isfinite(), 0.0)
    up, down = (w_GML > 0).to(dtype), (w_GML < 0).to(dtype)
    idle = ((w_GML == 0) & keep_GML).to(dtype)
    plus_x, minus_x = (x_GLV == inf).to(dtype), (x_GLV == -inf).to(dtype)
    plus = (up @ plus_x + down @ minus_x) > 0
    minus = (up @ minus_x + down @ plus_x) > 0
    nan = (keep_GML.to(dtype) @ x_GLV.isnan().to(dtype) + idle @ (plus_x + minus_x)) > 0
    out = out.masked_fill(plus, inf).masked_fill(minus, -inf)
    return out.masked_fill(nan | (plus & minus), float("nan"))


def _clear(x: Tensor, keep: Tensor, cause: Tensor) -> None:
    """Zero pairs that do not count, where a non-finite `cause` may have reached them."""
    if not bool(cause.isfinite().all()):
        x.masked_fill_(~keep, 0.0)


def _by_group(x_GRTL: Tensor, y_GLV: Tensor) -> Tensor:
    """Matrix product of all heads of a group with what the group shares, `[G, R, T, V]`."""
    groups, heads, rows, _ = x_GRTL.shape
    return (x_GRTL.flatten(1, 2) @ y_GLV).view(groups, heads, rows, y_GLV.shape[-1])


def _softmax(q_GRTD: Tensor, k_GLD: Tensor, keep_GRTL: Tensor, scale: float) -> _Softmax:
    return _normalise(_by_group(q_GRTD * scale, k_GLD.mT), keep_GRTL)


def _normalise(logits: Tensor, keep: Tensor) -> _Softmax:
    """Maximum and sum kept apart; overwrites the logits."""
    drop = ~keep
    logits.masked_fill_(drop, float("-inf"))
    if logits.shape[-1] == 0:
        top = logits.new_full((*logits.shape[:-1], 1), float("-inf"))
    else:
        top = logits.amax(-1, keepdim=True)
    dead = top == float("-inf")
    top = top.masked_fill(dead, 0.0)
    weights = logits.sub_(top).exp_()
    if not bool(top.isfinite().all()):
        weights.masked_fill_(drop, 0.0)
    return _Softmax(weights, top, weights.sum(-1, keepdim=True), dead)
