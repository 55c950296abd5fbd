"""Learned indexers in the attention modules of a model: put in, kept, taken out.

An indexer is the child `indexer` of its attention module. One that the model has of its own
(transformers' MiniMax-M3) is replaced, while a plan is applied, by ours on the very same
parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.errors import CaptureError
from sparsify.hosts.index_start import Projections, projections_of, start
from sparsify.hosts.native_sparse import NativeIndexer, is_native, on_parameters_of
from sparsify.hosts.rotary import Rotary, rotary_of
from sparsify.indexers import MSAIndexer, turning_columns
from sparsify.plans import LayerPlan

__all__ = ["NAME", "Known", "check_room", "indexers_of", "insert", "new_indexer", "take_out"]

NAME = "indexer"

_log = logging.getLogger(__name__)


def indexers_of(model: nn.Module) -> dict[str, MSAIndexer]:
    """The learned indexers in a model by the paths of their attention modules."""
    ends = f".{NAME}"
    return {
        name.removesuffix(ends): module
        for name, module in model.named_modules()
        if isinstance(module, MSAIndexer)
    }


def check_room(model: nn.Module, layers: Iterable[LayerPlan]) -> None:
    """MiniMax-M3's dense layers say `indexer = None`, and call whatever is put there as one of
    their own.

    Raises:
        CaptureError: layers that are to get a learned indexer have such an attribute.
    """
    taken = [layer.fqn for layer in layers if NAME in vars(model.get_submodule(layer.fqn))]
    if taken:
        more = f" (and {len(taken) - 1} more)" if len(taken) > 1 else ""
        raise CaptureError(
            f"{taken[0]}{more} has an attribute {NAME!r} that is no indexer, so a learned one "
            "cannot be put there.",
            "Keep it dense by a layer rule, or use indexer: proxy there.",
        )


def insert(
    model: nn.Module,
    layer: LayerPlan,
    known: MSAIndexer | None = None,
    *,
    start_it: bool = True,
) -> None:
    """Put a learned indexer into the attention module of a layer.

    Args:
        known: one with weights already; it is taken if its sizes fit.
        start_it: whether a new one gets weights from the layer's projections.

    Raises:
        CaptureError: the module has no place for one, or its rotary tables cannot be read.
    """
    module = model.get_submodule(layer.fqn)
    own = getattr(module, NAME, None)
    if own is None:
        fits = known is not None and known.index_dim == layer.index_dim
        new = known if fits else new_indexer(model, layer, start_it=start_it)
        module.add_module(NAME, new)
        return
    if not is_native(own):
        raise CaptureError(
            f"{layer.fqn} has an indexer of its own, of a kind that is not known.",
            "Keep it dense by a layer rule, or use indexer: proxy there.",
        )
    _check_native(own, layer)
    module.add_module(NAME, on_parameters_of(own))


def take_out(module: nn.Module) -> None:
    """Undo `insert`; nothing happens without an indexer of ours."""
    indexer = module._modules.get(NAME)
    if isinstance(indexer, NativeIndexer):
        module.add_module(NAME, indexer.replaced)
    elif isinstance(indexer, MSAIndexer):
        del module._modules[NAME]


def _check_native(native: Any, layer: LayerPlan) -> None:
    wanted = (layer.index_dim, *layer.budget, layer.local)
    there = (native.head_dim, native.block_size, native.topk_blocks, "inside")
    if wanted != there:
        raise CaptureError(
            f"{layer.key} is sparse by itself: index_dim {there[0]}, block size {there[1]}, "
            f"top-k {there[2]}; the plan has {wanted[0]}, {wanted[1]} and {wanted[2]}.",
            "Plan it with its own sizes, or keep it as it is by a layer rule.",
        )
    if native.local_blocks != 1:
        raise CaptureError(
            f"{layer.key} always attends {native.local_blocks} local blocks; only 1 is supported.",
            "Keep it as it is by a layer rule.",
        )


@dataclass(frozen=True)
class Known:
    """What a proof says of a layer: channels of its hidden state, key/value heads, head size, and
    how its heads turn."""

    hidden_size: int
    groups: int
    head_dim: int
    rotary: Rotary


def new_indexer(
    model: nn.Module, layer: LayerPlan, known: Known | None = None, *, start_it: bool = True
) -> MSAIndexer:
    """An untrained indexer for a layer, its weights from the layer's own projections.

    Args:
        known: sizes that were proved; by default the module's configuration tells them.

    Raises:
        CaptureError: the rotary tables cannot be read, or sizes are unknown.
    """
    assert layer.index_dim is not None
    module = model.get_submodule(layer.fqn)
    head_dim = _head_dim(module, layer) if known is None else known.head_dim
    above = layer.fqn.rpartition(".")[0]
    own = projections_of(module, model.get_submodule(above), head_dim)
    if known is None:
        rotary = rotary_of(model, module, layer.fqn, head_dim)
        known = Known(*_sizes(module, own, layer), head_dim, rotary)
    elif own is not None and not _fits(own, known):
        own = None
    indexer = _empty(module, layer.index_dim, known, bias=own is not None and own.bias)
    if start_it and own is None:
        _log.warning("the projections of %s are not known; its indexer starts at random", layer.key)
    elif start_it and own is not None and not indexer.k_proj.weight.is_meta:
        step = 2 if known.rotary.tables_interleaved else 1
        columns = indexer.columns.tolist()
        pairs = [column // step for column in columns[: len(columns) // 2]]
        _write(indexer, *start(own, layer.index_dim, pairs, known.rotary))
    return indexer.train(module.training)


def _empty(module: nn.Module, index_dim: int, known: Known, *, bias: bool) -> MSAIndexer:
    """An indexer without weights of use, of the dtype and on the device of the layer's."""
    rotary, norm = known.rotary, _norm_of(module, known.head_dim)
    sizes = (index_dim, known.head_dim, rotary.width, known.groups)
    weight = next(module.parameters())
    wanted = weight.dtype if weight.dtype.is_floating_point else torch.get_default_dtype()
    return MSAIndexer(
        known.hidden_size,
        known.groups,
        index_dim,
        columns=turning_columns(*sizes, interleaved=rotary.tables_interleaved),
        norm=norm is not None,
        bias=bias,
        eps=_eps_of(norm),
        dtype=wanted,
        device=weight.device,
    )


def _fits(own: Projections, known: Known) -> bool:
    return (own.size_C.shape[0] - 1, own.k_GDC.shape[0]) == (known.hidden_size, known.groups)


@torch.no_grad()
def _write(indexer: MSAIndexer, iq_GIC: Tensor, ik_IC: Tensor) -> None:
    for side, both in ((indexer.q_proj, iq_GIC.flatten(0, 1)), (indexer.k_proj, ik_IC)):
        side.weight.copy_(both[:, :-1])
        if side.bias is not None:
            side.bias.copy_(both[:, -1])


def _head_dim(module: Any, layer: LayerPlan) -> int:
    config = getattr(module, "config", None)
    found = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
    heads = getattr(config, "num_attention_heads", None)
    if found is None and heads:
        found = getattr(config, "hidden_size", 0) // heads
    if not isinstance(found, int) or found < 1:
        raise CaptureError(f"{layer.key}: its head size is not known.", 'Use indexer="proxy".')
    return found


def _sizes(module: Any, own: Projections | None, layer: LayerPlan) -> tuple[int, int]:
    """Channels of the hidden state, and key/value heads."""
    if own is not None:
        return own.size_C.shape[0] - 1, own.k_GDC.shape[0]
    config = getattr(module, "config", None)
    hidden = getattr(config, "hidden_size", None)
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(hidden, int) or not isinstance(groups, int):
        raise CaptureError(f"{layer.key}: its sizes are not known.", 'Use indexer="proxy".')
    return hidden, groups


def _norm_of(module: Any, head_dim: int) -> Any:
    """The layer's norm of each head's keys, if it has one."""
    norm = getattr(module, "k_norm", None)
    weight = getattr(norm, "weight", None)
    return norm if isinstance(weight, Tensor) and weight.shape == (head_dim,) else None


def _eps_of(norm: Any) -> float:
    names = ("variance_epsilon", "eps")
    return float(next((e for n in names if (e := getattr(norm, n, None)) is not None), 1e-6))
