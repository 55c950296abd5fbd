"""The computation that takes a site's place, as a function of its operands.

It is written in plain torch and traced into the graph: operands are brought into the layout of the
ops `[B, heads, length, size]`, the op of the plan runs, and the result goes back into the layout
and the memory order of the node that it replaces (a view behind that node may rely on both).

Legend: B batch, H query heads, G key/value heads, T queries, S keys, D key size, V value size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from sparsify.ir import AttentionSite
from sparsify.kernels.planned import planned_attention
from sparsify.passes.graphs import expression
from sparsify.passes.matchers.call import AttentionCall, Operand
from sparsify.plans import LayerPlan

__all__ = ["replacement"]

Order = tuple[int, ...]


def replacement(
    call: AttentionCall, site: AttentionSite, plan: LayerPlan, examples: Mapping[str, int]
) -> Callable[..., Tensor]:
    """A function `(q, k, v, padding=None, documents=None, index_queries=None, index_keys=None)` of
    the nodes' tensors that gives what `call.out.node` holds, attended as the plan says.

    `padding` is the model's input `[B, S]` that hides keys where it is 0, `documents` the table
    `[B or 1, S]` of the numbers of the tokens' documents. `examples` are the sizes of the capture,
    by which the memory order of the old result is read.
    """
    memory = _memory_order(call.out.node, examples)
    heads = site.heads

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        index_queries: Tensor | None = None,
        index_keys: Tensor | None = None,
    ) -> Tensor:
        q_BHTD = _canonical(q, call.q, heads.q_heads)
        k_BGSD, v_BGSD = (
            _grouped(_canonical(x, operand, heads.q_heads), q_BHTD.shape[0], heads.kv_heads)
            for x, operand in ((k, call.k), (v, call.v))
        )
        mask_BS = None if padding is None else _key_mask(padding, k_BGSD)
        out_BHTV = planned_attention(
            plan,
            q_BHTD,
            k_BGSD,
            v_BGSD,
            documents=documents,
            key_mask=mask_BS,
            scale=site.scale,
            index=_pair(index_queries, index_keys),
        )
        return _laid_out(_as_written(out_BHTV, call.out), memory)

    return run


def _pair(one: Tensor | None, two: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if one is None or two is None else (one, two)


def _canonical(x: Tensor, operand: Operand, heads: int) -> Tensor:
    """The operand as `[B, heads, length, size]`; flattened heads of rank 3 are taken apart."""
    if operand.permuted:
        x = x.permute(operand.order)
    if x.dim() == 2:
        return x[None, None]
    if x.dim() == 3:
        return x.reshape(x.shape[0] // heads, heads, *x.shape[1:])
    return x


def _grouped(x_BGSD: Tensor, batch: int | torch.SymInt, kv_heads: int) -> Tensor:
    """One head of every group of equal ones; a batch of one is broadcast."""
    step = x_BGSD.shape[1] // kv_heads
    if step > 1:
        x_BGSD = x_BGSD[:, ::step]
    if not statically_known_true(x_BGSD.shape[0] == batch):
        x_BGSD = x_BGSD.expand(batch, -1, -1, -1)
    return x_BGSD


def _key_mask(padding: Tensor, k_BGSD: Tensor) -> Tensor:
    real = padding if padding.dtype == torch.bool else padding != 0
    if not statically_known_true(real.shape[1] == k_BGSD.shape[2]):
        real = real[:, : k_BGSD.shape[2]]
    return real


def _as_written(out_BHTV: Tensor, operand: Operand) -> Tensor:
    """The result in the rank and the axes of the node that held it."""
    if operand.rank == 2:
        out_BHTV = out_BHTV[0, 0]
    elif operand.rank == 3:
        out_BHTV = out_BHTV.flatten(0, 1)
    if not operand.permuted:
        return out_BHTV
    own = sorted(range(operand.rank), key=lambda axis: operand.order[axis])
    return out_BHTV.permute(own)


def _memory_order(node: Node, examples: Mapping[str, int]) -> Order:
    """Axes of a captured tensor from the slowest to the fastest in memory."""
    strides = [_size(stride, examples) for stride in node.meta["val"].stride()]
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))


def _size(value: Any, examples: Mapping[str, int]) -> int:
    known = expression(value)
    return int(known.subs({s: examples.get(str(s), 2) for s in known.free_symbols}))


def _laid_out(out: Tensor, memory: Order) -> Tensor:
    """The tensor with its axes in that order in memory."""
    if memory == tuple(range(len(memory))):
        return out.contiguous()
    own = sorted(range(len(memory)), key=lambda axis: memory[axis])
    return out.permute(memory).contiguous().permute(own)
