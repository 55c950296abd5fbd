"""Softmax attention over chosen keys on one tile: forward, backward, and the rules for NaN and inf.

A tile is some queries of some heads against a run of keys, with a mask of the pairs that count.
Pairs that do not count contribute nothing, whatever their keys, values or queries hold. What they
hold is looked at only when a NaN or inf turns up.

Legend: G key/value heads, R query heads of a group, H heads of gathered lists, T queries, L keys,
M queries of all heads of a group, D key size, V value size.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsify.kernels.masks import TileMask

__all__ = ["TileGrads", "attend", "attend_backward", "attend_gathered"]

_HIDDEN = float("-inf")


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

    def log_total(self) -> Tensor:
        """Log of the softmax sum, -inf for dead rows."""
        return (self.top + self.total.log()).squeeze(-1)


def attend(
    q_GRTD: Tensor, k_GLD: Tensor, v_GLV: Tensor, mask: TileMask, scale: float
) -> tuple[Tensor, Tensor]:
    """Output `[G, R, T, V]` and log-sum-exp `[G, R, T]` of one tile, in the dtype of the inputs."""
    soft = _softmax(q_GRTD, k_GLD, mask, scale)
    out = _over_keys(soft.weights, mask, v_GLV)
    return (out / soft.total).masked_fill_(soft.dead, 0.0), soft.log_total()


def attend_gathered(
    q_HRTD: Tensor, k_HTLD: Tensor, v_HTLV: Tensor, keep_HTL: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The same for keys and values gathered row by row; those that do not count must be zeroed."""
    logits_HTRL = (q_HRTD * scale).transpose(1, 2) @ k_HTLD.mT
    logits_HTRL.masked_fill_(~keep_HTL[:, :, None], _HIDDEN)
    soft = _normalised(logits_HTRL)
    out = ((soft.weights @ v_HTLV) / soft.total).masked_fill_(soft.dead, 0.0)
    return out.transpose(1, 2), soft.log_total().transpose(1, 2)


def attend_backward(
    q_GRTD: Tensor,
    k_GLD: Tensor,
    v_GLV: Tensor,
    mask: TileMask,
    grad_GRTV: Tensor,
    grad_lse_GRT: Tensor,
    scale: float,
) -> TileGrads:
    """Gradients of one tile from the gradients of its output and of its log-sum-exp.

    Maximum and sum are computed again, not read from a rounded log-sum-exp.
    """
    soft = _softmax(q_GRTD, k_GLD, mask, scale)
    lse_GRT = soft.log_total()
    q_GRTD = q_GRTD.masked_fill(soft.dead, 0.0)
    grad_GRTV = grad_GRTV.masked_fill(soft.dead, 0.0)
    grad_lse = grad_lse_GRT[..., None].masked_fill(soft.dead, 0.0)
    p = soft.weights.div_(soft.total.masked_fill(soft.dead, 1.0))
    _clear(p, mask, soft.dead, soft.total)
    grad_v = _over_queries(p, mask, grad_GRTV)
    dp = _by_group(grad_GRTV, v_GLV.mT)
    _clear(dp, mask, soft.dead, dp)
    delta = (p * dp).sum(-1, keepdim=True)
    ds = dp.sub_(delta - grad_lse).mul_(p)
    _clear(ds, mask, soft.dead, delta)
    grad_q = _over_keys(ds, mask, k_GLD).masked_fill_(soft.dead, 0.0) * scale
    grad_k = _over_queries(ds, mask, q_GRTD) * scale
    return TileGrads(grad_q, grad_k, grad_v, lse_GRT)


def _softmax(q_GRTD: Tensor, k_GLD: Tensor, mask: TileMask, scale: float) -> _Softmax:
    logits = _by_group(q_GRTD * scale, k_GLD.mT)
    mask.hide(logits)
    soft = _normalised(logits)
    if bool(soft.top.isfinite().all()):
        return soft
    keep = mask.keep()
    logits = _by_group(q_GRTD * scale, k_GLD.mT).masked_fill_(~keep, _HIDDEN)
    soft = _normalised(logits)
    soft.weights.masked_fill_(~keep, 0.0)
    return soft


def _normalised(logits: Tensor) -> _Softmax:
    """Maximum and sum kept apart; overwrites the logits."""
    if logits.shape[-1]:
        top = logits.amax(-1, keepdim=True)
    else:  # rows without a key
        top = logits.new_full((*logits.shape[:-1], 1), _HIDDEN)
    dead = top == _HIDDEN
    top = top.masked_fill(dead, 0.0)
    weights = logits.sub_(top).exp_()
    return _Softmax(weights, top, weights.sum(-1, keepdim=True), dead)


def _over_keys(w_GRTL: Tensor, mask: TileMask, x_GLV: Tensor) -> Tensor:
    """Sum of w * x over the keys of each query, `[G, R, T, V]`; w is 0 where the mask is False."""
    if _finite(x_GLV):
        return _by_group(w_GRTL, x_GLV)
    keep_GML = mask.keep().expand_as(w_GRTL).flatten(1, 2)
    return _guarded(w_GRTL.flatten(1, 2), keep_GML, x_GLV).view(*w_GRTL.shape[:3], -1)


def _over_queries(w_GRTL: Tensor, mask: TileMask, x_GRTV: Tensor) -> Tensor:
    """Sum of w * x over the queries that keep a key, `[G, L, V]`."""
    w_GLM, x_GMV = w_GRTL.flatten(1, 2).mT, x_GRTV.flatten(1, 2)
    if _finite(x_GMV):
        return w_GLM @ x_GMV
    return _guarded(w_GLM, mask.keep().expand_as(w_GRTL).flatten(1, 2).mT, x_GMV)


def _guarded(w_GML: Tensor, keep_GML: Tensor, x_GLV: Tensor) -> Tensor:
    """Product in which infinite and NaN entries of x act as in a plain sum, on kept pairs only."""
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


def _clear(x: Tensor, mask: TileMask, dead: Tensor, cause: Tensor) -> None:
    """Zero pairs that do not count, or of dead rows, if a non-finite `cause` may have hit them."""
    if not _finite(cause):
        x.masked_fill_(~mask.keep() | dead, 0.0)


def _finite(x: Tensor) -> bool:
    """False if any entry is infinite or NaN; may be False for finite entries near the limit."""
    return bool(x.sum().isfinite())


def _by_group(x_GRTL: Tensor, y_GLV: Tensor) -> Tensor:
    """Matrix product of all heads of a group with what the group shares, `[G, R, T, V]`."""
    groups, heads, rows, _ = x_GRTL.shape
    return (x_GRTL.flatten(1, 2) @ y_GLV).view(groups, heads, rows, y_GLV.shape[-1])
