"""Layers that are sparse by themselves: those of transformers' MiniMax-M3.

Its attention module calls its child `indexer`, which keeps index keys in the cache and chooses
blocks, and hands the choice to the attention function. While a plan is applied the child is one of
ours on the very same parameters, which hands on index tensors instead, so that nothing of the size
queries times keys is ever held. Where such a layer is not planned, or cannot run our ops, it
attends the blocks that it chooses through a mask, never all keys.

Legend: B batch, G index heads, H query heads, T queries, S keys, N blocks, K list places.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.hosts.calls import SiteCall
from sparsify.hosts.index_keys import IndexUse
from sparsify.indexers import MSAIndexer
from sparsify.ir import Refusal
from sparsify.kernels import reference, selection
from sparsify.kernels.layout import Layout

__all__ = [
    "NativeIndexer",
    "chosen_only",
    "from_slot_0",
    "is_native",
    "named",
    "native_layers",
    "on_parameters_of",
]


def is_native(indexer: object) -> bool:
    """Whether it is the indexer of a MiniMax-M3 layer, as transformers made it."""
    return type(indexer).__name__ == "MiniMaxM3VLIndexer"


def native_layers(model: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Block size, top-k and index size of the layers that are sparse by themselves, by the paths of
    their attention modules."""
    found = {}
    for name, module in model.named_modules():
        own: Any = module.replaced if isinstance(module, NativeIndexer) else module
        if is_native(own):
            fqn = name.rpartition(".")[0]
            found[fqn] = (own.block_size, own.topk_blocks, own.head_dim)
    return found


def named(refusals: Iterable[Refusal], model: nn.Module, host: str) -> tuple[Refusal, ...]:
    """The refusals, those of layers that are sparse by themselves called by that name, and on the
    transformers host with the sizes by which they can be planned."""
    native, runs = native_layers(model), host != "graph"
    return tuple(_named(r, native[r.fqn], runs) if r.fqn in native else r for r in refusals)


def _named(refusal: Refusal, sizes: tuple[int, int, int], runs: bool) -> Refusal:
    size, topk, index_dim = sizes
    method = f"block_size: {size}, topk: {topk}, indexer: learned, index_dim: {index_dim}"
    hint = f"MSA of these sizes runs on its own indexer: {{name: msa, {method}}}"
    return dataclasses.replace(
        refusal,
        code="NATIVELY_SPARSE",
        message=f"the layer chooses blocks by itself (size {size}, top {topk})",
        hint=hint if runs else "The transformers host runs it on its own indexer.",
        facts={"native": sizes} if runs else {},
    )


class NativeIndexer(MSAIndexer):
    """Our indexer in the place of a layer's own one, called as that is called."""

    def __init__(self, native: Any, **sizes: Any) -> None:
        super().__init__(native.config.hidden_size, native.num_heads, native.head_dim, **sizes)
        self.__dict__["native"] = [native]  # in a list, so that it is no child

    @property
    def replaced(self) -> Any:
        """The layer's own indexer."""
        return self.__dict__["native"][0]

    def forward(  # type: ignore[override]
        self, hidden_BTC: Tensor, tables: Any, cache: Any = None, position_ids: Any = None
    ) -> Any:
        """Index tensors of the call; under another attention than ours, what the layer's own
        indexer chooses."""
        native = self.replaced
        if native.config._attn_implementation != "sparsify":
            return native(hidden_BTC, tables, cache, position_ids)
        with torch.no_grad():
            queries, keys = super().forward(hidden_BTC, tables)
            if cache is not None:
                keys = cache.layers[native.layer_idx].update_index(keys)
        return IndexUse(queries, keys)

    def build_block_mask(self, *args: Any) -> Any:
        """The layer's own mask, which it asks for under eager and sdpa attention."""
        return self.replaced.build_block_mask(*args)


def on_parameters_of(native: Any) -> NativeIndexer:
    """Ours on the parameters of a MiniMax-M3 layer's own: the first channels turn, as far as the
    tables reach, and blocks are counted from slot 0 of the cache."""
    turning = min(_table_width(native.config), native.head_dim)
    own = native.q_proj.weight
    indexer = NativeIndexer(
        native, columns=range(turning), norm=True, eps=native.q_norm.eps, device="meta"
    )
    indexer.columns = torch.arange(turning, device=own.device)
    for name, parameter in native.named_parameters():
        owner, _, leaf = name.rpartition(".")
        indexer.get_submodule(owner).register_parameter(leaf, parameter)
    return indexer.train(native.training)


def _table_width(config: Any) -> int:
    parameters = getattr(config, "rope_parameters", None) or {}
    return int(config.head_dim * parameters.get("partial_rotary_factor", 1.0))


def from_slot_0(call: SiteCall) -> SiteCall:
    """The call with blocks counted from slot 0 of the cache, as MiniMax-M3 counts them."""
    origin_B = torch.zeros(call.q.shape[0], dtype=torch.long, device=call.q.device)
    return dataclasses.replace(call, block_origin=origin_B)


def chosen_only(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, chosen: Any, position_ids: Any
) -> Tensor:
    """The additive mask `[B, H, T, S]` under which a natively sparse layer attends its blocks.

    Args:
        mask: dense, as the layer's attention would get it without blocks, or None.
        chosen: the layer's own choice of blocks `[B, G, T, K]`, or index tensors to choose by.
        position_ids: `[B or 1, T]`, or None where the queries are the last tokens.
    """
    indexer: Any = module.indexer
    native = indexer.replaced if isinstance(indexer, NativeIndexer) else indexer
    n_B, n_T, n_S = query.shape[0], query.shape[2], key.shape[2]
    if position_ids is None:
        position_ids = torch.arange(n_S - n_T, n_S, device=query.device)
    positions_BT = position_ids.reshape(-1, n_T).expand(n_B, -1)
    if isinstance(chosen, IndexUse):
        plan = getattr(module, "sparsify_plan", None)
        origin_B = positions_BT.new_zeros(n_B)
        layout = Layout(q_start=positions_BT[:, 0].contiguous(), block_origin=origin_B)
        sizes = {"block_size": native.block_size, "topk": native.topk_blocks}
        # not through the op, which takes every block under SPARSIFY_DISABLE
        with contextlib.nullcontext() if plan is None else selection.site(plan.key):
            chosen = reference.msa_select(chosen.queries, chosen.keys, layout, **sizes).long()
    where = n_S, query.dtype, query.device, positions_BT
    found: Tensor = native.build_block_mask(chosen, mask, *where)
    return found
