"""One way to compute an attention layer, as the cost model sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparsify.plans import LayerPlan
from sparsify.policy import MSA, Auto, Dense, MoBA

__all__ = ["DENSE", "PUBLISHED", "Configuration"]

Name = Literal["dense", "moba", "msa"]


@dataclass(frozen=True, slots=True)
class Configuration:
    """A method with its sizes; `topk` counts the own block, as everywhere.

    `indexer`, `index_dim` and `local` belong to MSA. The learned indexer has one shared index key;
    the proxy scores with the layer's own keys.
    """

    method: Name = "dense"
    block_size: int = 0
    topk: int = 0
    indexer: Literal["proxy", "learned"] | None = None
    index_dim: int | None = None
    local: Literal["inside", "union"] = "inside"
    decode: Literal["sparse", "dense"] = "sparse"

    @property
    def sparse(self) -> bool:
        """Whether anything is left out at all."""
        return self.method != "dense"

    @property
    def budget_tokens(self) -> int:
        """Tokens of the blocks that a query reads."""
        return self.block_size * self.topk

    @property
    def needs_training(self) -> bool:
        """Whether it means nothing before its own weights are trained."""
        return self.indexer == "learned"

    @property
    def label(self) -> str:
        """A short name for tables, such as "MoBA 128/8" or "MSA learned 128/16"."""
        if not self.sparse:
            return "dense"
        name = "MoBA" if self.method == "moba" else f"MSA {self.indexer}"
        union = " union" if self.local == "union" else ""
        return f"{name} {self.block_size}/{self.topk}{union}"

    @classmethod
    def of(cls, method: MoBA | MSA | Dense | LayerPlan) -> Configuration:
        """The configuration that a policy's method or a plan's decision stands for."""
        if isinstance(method, LayerPlan):
            return cls._of_layer(method)
        if isinstance(method, Dense):
            return DENSE
        if isinstance(method, MoBA):
            return cls("moba", method.block_size, method.topk, decode=method.decode)
        if isinstance(method, Auto):  # pragma: no cover - the planner resolves it first
            raise TypeError("auto is no configuration")
        return cls(
            "msa",
            method.block_size,
            method.topk,
            method.indexer,
            method.index_dim,
            method.local,
            method.decode,
        )

    @classmethod
    def _of_layer(cls, layer: LayerPlan) -> Configuration:
        if not layer.sparse:
            return DENSE
        size, topk = layer.budget
        return cls(
            layer.method, size, topk, layer.indexer, layer.index_dim, layer.local, layer.decode
        )


DENSE = Configuration()

# What the papers and public kernels use: FlashMoBA (arXiv 2511.11571), the MoBA report's 1M setting
# (arXiv 2502.13189), MiniMax-M3's sizes (arXiv 2606.13392) with either indexer.
PUBLISHED = (
    Configuration("moba", 128, 8),
    Configuration("moba", 512, 3),
    Configuration("moba", 4096, 12, decode="dense"),
    Configuration("msa", 128, 16, "proxy"),
    Configuration("msa", 128, 16, "learned", 128),
)
