"""Slow attention in float64, one query at a time, written from the rules and nothing else.

Every list is a Python list, every softmax one row. It shares no code with the product, and can be
differentiated by autograd.

Legend: B batch, H query heads, G key/value heads, T queries, S key slots, N blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Answer", "dense", "moba", "msa"]


class Answer(NamedTuple):
    """Output `[B, H, T, V]`, log-sum-exp `[B, H, T]`, attended blocks `[B, H, T, N]` bool."""

    out: Tensor
    lse: Tensor
    chosen: Tensor


class _Row(NamedTuple):
    """One query: its batch row, head, group, number, position from the origin, visible slots."""

    b: int
    h: int
    g: int
    i: int
    p: int
    slots: list[int]


def moba(q, k, v, *, block_size, topk, scale=None, **where) -> Answer:
    """The own block and the best topk-1 whole past blocks by q . mean key."""

    def choose(row: _Row, blocks: dict[int, list[int]], origin: int) -> list[int]:
        own = row.p // block_size
        past = [
            c for c in range(own) if any(origin + c * block_size <= s for s in blocks.get(c, []))
        ]
        scores = {}
        for c in past:
            mean = k[row.b, row.g, blocks[c]].double().mean(0)
            if k.dtype != torch.float64:
                mean = mean.float().to(k.dtype).double()
            scores[c] = _rounded(mean @ q[row.b, row.h, row.i].double(), q, k)
        return [own, *_best(scores, topk - 1)]

    return _attend(q, k, v, block_size, scale, choose, **where)


def msa(q, k, v, iq, ik, *, block_size, topk, local="inside", scale=None, **where) -> Answer:
    """The own block and the best blocks by their best visible token in the index."""

    def choose(row: _Row, blocks: dict[int, list[int]], origin: int) -> list[int]:
        own = row.p // block_size
        g = row.g if ik.shape[1] > 1 else 0
        scores = {}
        for c, slots in blocks.items():
            dots = ik[row.b, g, slots].double() @ iq[row.b, row.g, row.i].double()
            scores[c] = _rounded(dots.max(), iq, ik)
        if local == "union":
            return [own, *_best(scores, topk)]
        scores.pop(own, None)
        return [own, *_best(scores, topk - 1)]

    return _attend(q, k, v, block_size, scale, choose, **where)


def dense(q, k, v, *, scale=None, **where) -> Answer:
    """Causal attention over all visible keys."""
    return _attend(q, k, v, max(1, k.shape[2]) * 2, scale, lambda row, *_: [0], **where)


def _rounded(score: Tensor, *inputs: Tensor) -> float:
    """A score as the rule reads it: float32, or float64 where an input is."""
    if any(x.dtype == torch.float64 for x in inputs):
        return float(score.detach())
    return float(score.detach().float())


def _best(scores: dict[int, float], count: int) -> list[int]:
    """Higher score first, then the lower block; NaN behind all others."""
    order = sorted(scores, key=lambda c: (scores[c] != scores[c], -_number(scores[c]), c))
    return order[:count]


def _number(score: float) -> float:
    return 0.0 if score != score else score


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    scale: float | None,
    choose: Callable[[_Row, dict[int, list[int]], int], list[int]],
    *,
    q_start=None,
    kv_len=None,
    key_mask=None,
    block_origin=None,
) -> Answer:
    (n_b, n_h, n_t, size), (n_g, n_s) = q.shape, k.shape[1:3]
    scale = size**-0.5 if scale is None else scale
    out = torch.zeros(n_b, n_h, n_t, v.shape[3], dtype=torch.float64)
    lse = torch.full((n_b, n_h, n_t), float("-inf"), dtype=torch.float64)
    chosen = torch.zeros(n_b, n_h, n_t, -(-n_s // block_size), dtype=torch.bool)
    for b in range(n_b):
        length = n_s if kv_len is None else int(kv_len[b])
        start = length - n_t if q_start is None else int(q_start[b])
        real = [s for s in range(length) if key_mask is None or bool(key_mask[b, s])]
        origin = (real[0] if real else 0) if block_origin is None else int(block_origin[b])
        for h in range(n_h):
            for i in range(n_t):
                p = start + i - origin
                slots = [s for s in real if origin <= s <= start + i]
                if p < 0 or not slots:
                    continue
                row = _Row(b, h, h // (n_h // n_g), i, p, slots)
                blocks: dict[int, list[int]] = {}
                for s in slots:
                    blocks.setdefault((s - origin) // block_size, []).append(s)
                picked = sorted(set(choose(row, blocks, origin)))
                chosen[b, h, i, [c for c in picked if origin + c * block_size < length]] = True
                keys = [s for c in picked for s in blocks.get(c, [])]
                if keys:
                    _softmax(q, k, v, row, keys, scale, out, lse)
    return Answer(out, lse, chosen)


def _softmax(q, k, v, row: _Row, keys, scale, out, lse) -> None:
    logits = (k[row.b, row.g, keys].double() @ q[row.b, row.h, row.i].double()) * scale
    top = logits.max().detach()
    if top == float("-inf"):
        return
    weights = torch.exp(logits - top)
    out[row.b, row.h, row.i] = (weights @ v[row.b, row.g, keys].double()) / weights.sum()
    lse[row.b, row.h, row.i] = top + weights.sum().log()
