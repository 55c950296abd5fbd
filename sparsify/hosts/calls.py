"""One sparse attention call, as it is run and as an observer sees it; the same on every host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from sparsify.kernels import selection
from sparsify.kernels.planned import planned_attention
from sparsify.plans import LayerPlan

__all__ = ["ALL_BLOCKS", "Observer", "SiteCall", "current_observer", "observing", "run_sparse"]

ALL_BLOCKS = 2**31 - 1  # a top-k beyond every number of blocks


@dataclass(frozen=True)
class SiteCall:
    """The arguments of one call.

    q `[B, Hq, T, D]`, k and v `[B, Hkv, S, *]`; `q_start` `[B]`, `key_mask` `[B, S]` and
    `block_origin` `[B]` are the op's arguments of these names, None at their defaults; `scale` None
    means D ** -0.5. `documents` `[B, T]` are the numbers of the tokens' documents, None where every
    row is one document. `index` are the index queries `[B, Hkv, T, I]` and keys `[B, 1, S, I]` of a
    learned indexer.
    """

    plan: LayerPlan
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float | None
    q_start: torch.Tensor | None
    key_mask: torch.Tensor | None
    documents: torch.Tensor | None = None
    index: tuple[torch.Tensor, torch.Tensor] | None = None
    block_origin: torch.Tensor | None = None


Observer = Callable[[SiteCall], None]
_observer: ContextVar[tuple[Observer, bool] | None] = ContextVar("sparsify_observer", default=None)


@contextlib.contextmanager
def observing(observer: Observer, *, run_dense: bool = False) -> Iterator[None]:
    """Show every call of a sparse site to `observer`; with `run_dense` the sites then run dense."""
    token = _observer.set((observer, run_dense))
    try:
        yield
    finally:
        _observer.reset(token)


def current_observer() -> tuple[Observer, bool] | None:
    """The observer in force and whether sites are to run dense; None without one."""
    return _observer.get()


def run_sparse(call: SiteCall, block_means: torch.Tensor | None = None) -> torch.Tensor:
    """Output `[B, Hq, T, Dv]` of the op that the plan names."""
    with selection.site(call.plan.key):
        return planned_attention(
            call.plan,
            call.q,
            call.k,
            call.v,
            q_start=call.q_start,
            key_mask=call.key_mask,
            documents=call.documents,
            block_means=block_means,
            block_origin=call.block_origin,
            index=call.index,
            scale=call.scale,
        )
