"""The sites of a running program, as recorded selections and observers see them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from sparsify.hosts.calls import ALL_BLOCKS, SiteCall, current_observer
from sparsify.kernels import selection
from sparsify.kernels.dispatch import attends_every_block
from sparsify.kernels.layout import Layout
from sparsify.passes.retune import is_site, site_of
from sparsify.plans import LayerPlan, Plan

__all__ = ["WatchedSites"]


class WatchedSites(torch.fx.Interpreter):
    """Runs a program with the sites named for the recorder, and shown to the observer where they
    run sparse."""

    def __init__(self, plan: Plan) -> None:
        self.plans = plan.by_key()

    def __call__(self, module: GraphModule, values: list[Any]) -> Any:
        """Results of the module for flat values."""
        super().__init__(module)
        return self.run(*values)

    def run_node(self, n: Node) -> Any:
        if not is_site(n):
            return super().run_node(n)
        key, watch = site_of(n), current_observer()
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        named = _arguments(n, args, kwargs)
        if watch is not None and not _runs_dense(named):
            observer, run_dense = watch
            observer(_call(self.plans[key], named))
            kwargs = {**kwargs, "topk": ALL_BLOCKS} if run_dense else kwargs
        with selection.site(key):
            return n.target(*args, **kwargs)  # type: ignore[operator]


def _arguments(node: Node, args: Any, kwargs: Any) -> dict[str, Any]:
    """The op's arguments by name."""
    names = [entry.name for entry in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _layout(named: dict[str, Any]) -> Layout:
    return Layout(*(named.get(name) for name in Layout._fields))


def _runs_dense(named: dict[str, Any]) -> bool:
    rule = {name: named[name] for name in ("min_context", "decode_dense") if name in named}
    return attends_every_block(named["q"], named["k"], _layout(named), **rule)


def _call(plan: LayerPlan, named: dict[str, Any]) -> SiteCall:
    """The call as an observer sees it."""
    index = (named["iq"], named["ik"]) if plan.indexer == "learned" else None
    layout = _layout(named)
    return SiteCall(
        plan,
        named["q"],
        named["k"],
        named["v"],
        named.get("scale"),
        layout.q_start,
        layout.key_mask,
        _documents(layout, named["k"].shape[2]),
        index,
    )


def _documents(layout: Layout, keys: int) -> torch.Tensor | None:
    """The number of every token's document `[1, keys]` in a packed row."""
    if layout.cu_seqlens_k is None:
        return None
    slots = torch.arange(keys, device=layout.cu_seqlens_k.device)
    return torch.bucketize(slots, layout.cu_seqlens_k[1:].long(), right=True)[None]
