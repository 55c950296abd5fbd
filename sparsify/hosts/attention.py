"""The attention function of a rewritten transformers model: sparse where its plan says so.

It is stateless: the plan of a site sits on its attention module (`module.sparsify_plan`), what is
known of the mask arrives as a `SparsityMask`, and what is known of the cache and of the learned
indexer as the keywords `sparsify_cache` and `sparsify_index`. Everything else goes to the model's
previous attention, and is counted.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparsify import settings
from sparsify.errors import CaptureError, StrictError
from sparsify.hosts.caches import CacheUse
from sparsify.hosts.calls import SiteCall, current_observer, run_sparse
from sparsify.hosts.index_keys import IndexUse
from sparsify.hosts.masks import SparsityMask, dense_implementation
from sparsify.hosts.native_sparse import chosen_only, from_slot_0
from sparsify.plans import LayerPlan

__all__ = ["FALLBACK", "sparsify_attention"]

# How the counts of calls that should have been sparse begin.
FALLBACK = "fallback, "

_log = logging.getLogger(__name__)


def sparsify_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sparsify_cache: CacheUse | None = None,
    sparsify_index: IndexUse | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention function for `AttentionInterface`: sparse where the module's plan says so.

    It goes sparse only on a `SparsityMask` that is known to be causal, and on keys that are known
    to be exact. Whatever else arrives (a user's 4-D mask, no mask at all, active dropout, a
    softcap, a quantised cache) goes to the model's previous attention and is counted, or raises
    `StrictError` under SPARSIFY_STRICT=1.
    """
    plan: LayerPlan | None = getattr(module, "sparsify_plan", None)
    chosen = kwargs.pop("block_indices", None)  # of a layer that is sparse by itself
    native = isinstance(chosen, IndexUse)
    index = _index(chosen if native else sparsify_index)
    reason = _planned_dense(plan, query, key, attention_mask)
    if reason is None and plan is not None:
        fallback = _fallback(query, key, attention_mask, dropout, kwargs)
        fallback = fallback or _unfit_cache(query, key, sparsify_cache)
        fallback = fallback or _unfit_index(plan, key, index)
        if fallback is not None and settings.strict():
            raise StrictError(f"{plan.fqn} would run dense: {fallback}.")
        if fallback is None:
            call = _site_call(plan, query, key, value, scaling, attention_mask, index)
            call = from_slot_0(call) if native else call
            watch = current_observer()
            if watch is not None:
                watch[0](call)
            if watch is None or not watch[1]:
                _count(module, "sparse")
                means = _block_means(plan, key, attention_mask, sparsify_cache)
                return run_sparse(call, means).transpose(1, 2).contiguous(), None
        reason = "observed" if fallback is None else FALLBACK + fallback
    _count(module, f"{'dense' if chosen is None else 'sparse by itself'}: {reason}")
    kwargs |= {"dropout": dropout, "scaling": scaling}
    return _dense(module, query, key, value, attention_mask, chosen, kwargs)


def _dense(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    chosen: Any,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's previous attention, over the blocks that a layer chose itself if it did."""
    mask = mask.dense() if isinstance(mask, SparsityMask) else mask
    if chosen is not None:
        mask = chosen_only(module, query, key, mask, chosen, kwargs.get("position_ids"))
    out: tuple[torch.Tensor, torch.Tensor | None] = _dense_function(module)(
        module, query, key, value, mask, **kwargs
    )
    return out


def _site_call(
    plan: LayerPlan,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    mask: SparsityMask,
    index: tuple[torch.Tensor, torch.Tensor] | None,
) -> SiteCall:
    return SiteCall(plan, query, key, value, scaling, *mask.on(query.device), index)


def _index(use: IndexUse | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Index queries, and index keys of all tokens, where both are there."""
    keys = None if use is None else use.all_keys()
    return None if use is None or keys is None else (use.queries, keys)


def _planned_dense(
    plan: LayerPlan | None, query: torch.Tensor, key: torch.Tensor, mask: Any
) -> str | None:
    """Why this call is dense by the user's own wish, or None."""
    if plan is None:
        return "no plan for this module"
    if not plan.sparse:
        return "by plan"
    if settings.disabled():
        return "SPARSIFY_DISABLE"
    # A static cache hands over room for more keys than there are.
    keys = mask.keys_in_use if isinstance(mask, SparsityMask) else key.shape[2]
    if keys < plan.min_context:
        return "shorter than min_context"
    if plan.decode == "dense" and query.shape[2] == 1 and keys > 1:
        return "decode is dense by policy"
    return None


def _fallback(
    query: torch.Tensor, key: torch.Tensor, mask: Any, dropout: float, kwargs: dict[str, Any]
) -> str | None:
    """Why this call cannot be sparse although the plan says so, or None."""
    if not isinstance(mask, SparsityMask):
        return "no mask object" if mask is None else "a mask tensor from outside"
    if not mask.causal:
        return "mask is not plain causal"
    if mask.kv_offset != 0 or mask.kv_length != key.shape[2]:
        return "the cache does not hold all keys"
    if mask.q_length != query.shape[2]:
        return "mask and queries differ in length"
    if mask.documents is not None and not mask.holds_whole_documents:
        return "packed documents with a cache"
    if dropout > 0:
        return "dropout is active"
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            return f"{name} is set"
    if kwargs.get("is_causal") is False:
        return "is_causal is False"
    return None


def _unfit_cache(query: torch.Tensor, key: torch.Tensor, cache: CacheUse | None) -> str | None:
    """Why the keys may not be all keys as they were computed, or None."""
    if cache is not None:
        return cache.unfit
    return "the keys come from a cache that is not seen" if key.shape[2] > query.shape[2] else None


def _unfit_index(plan: LayerPlan, key: torch.Tensor, index: Any) -> str | None:
    """Why a learned indexer cannot choose, or None."""
    if plan.indexer != "learned":
        return None
    if index is None:
        return "the cache does not hold an index key for every key"
    return None if index[1].shape[2] == key.shape[2] else "keys and index keys differ in number"


def _block_means(
    plan: LayerPlan, key: torch.Tensor, mask: SparsityMask, cache: CacheUse | None
) -> torch.Tensor | None:
    """Cached block means, where the cache keeps them and blocks are contiguous."""
    layer = None if cache is None else cache.layer
    if plan.method != "moba" or layer is None or mask.documents is not None:
        return None
    if not mask.left_padded_only:
        return None
    return layer.block_means_for(key, plan.budget[0], mask.origins)


def _dense_function(module: torch.nn.Module) -> Callable[..., Any]:
    name = dense_implementation(getattr(module, "config", None))
    if name == "eager":
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise CaptureError(f"{type(module).__name__} has no eager attention to fall back to.")
        return eager  # type: ignore[no-any-return]
    return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]


def _count(module: torch.nn.Module, what: str) -> None:
    """Count a call; the first fallback of a kind is also told to the user."""
    counts = module.__dict__.get("sparsify_counts")
    if counts is None:
        return
    if FALLBACK in what and not counts[what]:
        name = module.__dict__["sparsify_plan"].fqn
        _log.warning("%s is planned sparse and runs %s", name, what)
    counts[what] += 1
