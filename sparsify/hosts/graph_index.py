"""Learned indexers of the graph host: what each layer's branch computes, with which weights.

Legend: B batch, T tokens, R width of the rotary tables, I index size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.errors import CaptureError
from sparsify.hosts.indexers import NAME, Known, new_indexer
from sparsify.hosts.rotary import Rotary, rotary_of, takes_tables
from sparsify.indexers import MSAIndexer
from sparsify.ir import AttentionSite, site_key
from sparsify.kernels.learned_index import index_heads
from sparsify.passes.capture import Captured
from sparsify.passes.detect import attention_calls
from sparsify.passes.index_branch import IndexBranch, rotary_tables
from sparsify.plans import LayerPlan, Plan

__all__ = ["branches", "cache_layers"]


def branches(
    model: nn.Module, captured: Captured, sites: Sequence[AttentionSite], plan: Plan
) -> dict[str, IndexBranch]:
    """The branches of the plan's learned indexers by site; one that the model has is taken.

    Raises:
        CaptureError: the rotary tables of a layer are not understood.
    """
    proved = {site_key(site.fqn, site.ordinal): site for site in sites}
    learned = (layer for layer in plan.rewritten if layer.indexer == "learned")
    return {
        layer.key: _branch(layer, _indexer(model, captured, proved[layer.key], layer))
        for layer in learned
        if layer.key in proved
    }


def cache_layers(model: nn.Module, plan: Plan) -> tuple[int, ...]:
    """Numbers of the cache layers that hold index keys, in the order of the plan.

    Raises:
        CaptureError: an attention module does not know its number.
    """
    found = []
    for layer in plan.rewritten:
        if layer.indexer == "learned":
            number = getattr(model.get_submodule(layer.fqn), "layer_idx", None)
            if not isinstance(number, int):
                raise CaptureError(f"{layer.key} does not know its layer of the cache.")
            found.append(number)
    return tuple(found)


def _indexer(
    model: nn.Module, captured: Captured, site: AttentionSite, layer: LayerPlan
) -> MSAIndexer:
    own = getattr(model.get_submodule(layer.fqn), NAME, None)
    if isinstance(own, MSAIndexer) and own.index_dim == layer.index_dim:
        return own
    heads = site.heads
    hidden = next(node for node in captured.graph.nodes if node.name == site.stream.source)
    size = int(hidden.meta["val"].shape[-1])
    rotary = _rotary(model, captured, site)
    return new_indexer(model, layer, Known(size, heads.kv_heads, heads.head_dim, rotary))


def _rotary(model: nn.Module, captured: Captured, site: AttentionSite) -> Rotary:
    """From the module that makes the tables, or from how the graph puts them together."""
    module = model.get_submodule(site.fqn)
    if takes_tables(module):
        return rotary_of(model, module, site.fqn, site.heads.head_dim)
    call = attention_calls(captured)[site.fqn, site.ordinal]
    hidden = next(node for node in captured.graph.nodes if node.name == site.stream.source)
    tables = rotary_tables(call.q.node, hidden)
    if tables is None:
        return Rotary()
    width, angles = tables[0].meta["val"].shape[-1], _angles(tables[0])
    parts = angles.args[0] if str(angles.target) == "aten.cat.default" else ()
    if not (isinstance(parts, list | tuple) and len(parts) == 2 and parts[0] is parts[1]):
        raise CaptureError(
            f"{site_key(site.fqn, site.ordinal)}: how its rotary tables are put together is not "
            "understood.",
            'Use indexer="proxy".',
        )
    return Rotary(int(width))


def _angles(table: Any) -> Any:
    """What the cosines are taken of."""
    while str(table.target) != "aten.cos.default":
        table = table.all_input_nodes[0]
    return table.all_input_nodes[0]


def _branch(layer: LayerPlan, indexer: MSAIndexer) -> IndexBranch:
    path = f"{layer.fqn}.{NAME}".lstrip(".")
    weights = {f"{path}.{name}": value for name, value in indexer.named_parameters()}
    names = [name for name, _ in indexer.named_parameters()]
    columns = tuple(indexer.columns.tolist())
    return IndexBranch(
        weights,
        _side(indexer, "q", names, columns),
        _side(indexer, "k", names, columns),
        indexer.hidden_size,
        indexer.index_dim,
        bool(columns),
    )


def _side(
    indexer: MSAIndexer, side: str, names: Sequence[str], columns: tuple[int, ...]
) -> Callable[..., Tensor]:
    """Index queries or keys as a function of hidden states, tables and weights."""
    norm, index_dim = getattr(indexer, f"{side}_norm"), indexer.index_dim
    eps = 0.0 if norm is None else float(norm.eps)

    def run(hidden_BTC: Tensor, *rest: Tensor) -> Tensor:
        tables = rest[:2] if columns else ()
        own: Mapping[str, Tensor] = dict(zip(names, rest[len(tables) :], strict=True))
        turning = tuple(_picked(table, columns) for table in tables)
        return index_heads(
            hidden_BTC,
            own[f"{side}_proj.weight"],
            own.get(f"{side}_proj.bias"),
            own.get(f"{side}_norm.weight"),
            eps,
            (turning[0], turning[1]) if turning else None,
            index_dim,
        )

    return run


def _picked(table: Tensor, columns: tuple[int, ...]) -> Tensor:
    """Columns of a table, `[B or 1, T, len(columns)]`; without a tensor of their numbers, which a
    program would have to hold."""
    if table.dim() == 2:
        table = table.unsqueeze(0)
    if columns == tuple(range(table.shape[-1])):
        return table
    return torch.cat([table[..., a:b:step] for a, b, step in _runs(columns)], -1)


def _runs(columns: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """The columns as slices, of step 1 or 2."""
    runs: list[tuple[int, int, int]] = []
    for number in columns:
        first, end, step = runs[-1] if runs else (0, -2, 1)
        gap = number - (end - 1)
        single = runs and end == first + 1
        if runs and (gap == step or (single and gap in (1, 2))):
            runs[-1] = (first, number + 1, gap)
        else:
            runs.append((number, number + 1, 1))
    return runs
