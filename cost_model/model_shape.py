"""What a whole model computes and holds: its layers, their weights, and the caches they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from sparsify.cost_model.workload import BF16, AttentionShape, ElementBytes

__all__ = ["Experts", "Kind", "LayerShape", "ModelShape"]

# "attention" sees all earlier tokens, "sliding" the last `window` of them, "recurrent" keeps a
# state of fixed size, "feed_forward" mixes no tokens at all (some hybrids have such layers).
Kind = Literal["attention", "sliding", "recurrent", "feed_forward"]


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts of one layer: `count` of them with `params` weights each."""

    count: int
    per_token: int
    params: int

    def expected_read(self, tokens: int) -> float:
        """Experts that at least one of `tokens` tokens is sent to, if routing is even.

        Expected number of distinct experts, E * (1 - (1 - k/E)^tokens).
        """
        unused: float = (1 - self.per_token / self.count) ** tokens
        return self.count * (1 - unused)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer. `name` is the path of its attention, such as "model.layers.3.self_attn".

    Counts of weights: `qkv_params` of the projections in front of the attention, `output_params` of
    the one behind it, `mlp_params` of what every token passes (MLP, shared experts, router),
    `other_params` of what costs no products (norms, biases). A recurrent layer holds
    `state_elements` numbers per sequence instead of keys and values. A `fixed` layer cannot be made
    sparse although it attends to everything: nothing was proved of it.
    """

    name: str
    kind: Kind
    attention: AttentionShape | None = None
    window: int | None = None
    qkv_params: int = 0
    output_params: int = 0
    mlp_params: int = 0
    experts: Experts | None = None
    other_params: int = 0
    state_elements: int = 0
    fixed: bool = False

    @property
    def gemm_params(self) -> int:
        """Weights of the projections around the attention or recurrence."""
        return self.qkv_params + self.output_params

    @property
    def mlp_params_active(self) -> int:
        """Weights behind the attention that one token is multiplied with."""
        routed = self.experts.per_token * self.experts.params if self.experts else 0
        return self.mlp_params + routed

    @property
    def mlp_params_total(self) -> int:
        """Weights behind the attention that are held in memory."""
        routed = self.experts.count * self.experts.params if self.experts else 0
        return self.mlp_params + routed

    @property
    def params_total(self) -> int:
        """All parameters of the layer."""
        return self.gemm_params + self.mlp_params_total + self.other_params

    @property
    def params_active(self) -> int:
        """Parameters that one token uses."""
        return self.gemm_params + self.mlp_params_active + self.other_params

    @property
    def nameless(self) -> LayerShape:
        """The same layer without its name: equal layers cost the same."""
        return replace(self, name="")

    def cached_tokens(self, context_tokens: int) -> int:
        """Tokens whose keys and values a sequence of that length keeps."""
        if self.attention is None:
            return 0
        return context_tokens if self.window is None else min(context_tokens, self.window)

    def kv_cache_bytes(
        self, context_tokens: int, batch: int, degree: int, element_bytes: ElementBytes
    ) -> float:
        """Bytes of keys and values, or of the recurrent state, on one of `degree` GPUs."""
        if self.attention is None:
            return batch * self.state_elements * element_bytes.key / degree
        heads = self.attention.sharded(degree)
        key, value = heads.head_dim * element_bytes.key, heads.value_dim * element_bytes.value
        return batch * self.cached_tokens(context_tokens) * heads.kv_heads * (key + value)


@dataclass(frozen=True)
class ModelShape:
    """A decoder of `layers`, between an embedding and a head that computes logits.

    `head_params` is the weight that logits are computed with; when it is `tied`, it is the
    embedding and held once. `other_params` are those outside the layers (the final norm, learned
    positions), less those that several layers share. `assumptions` are sentences about what was
    not told.
    """

    name: str
    hidden_size: int
    layers: tuple[LayerShape, ...]
    embedding_params: int
    head_params: int
    tied: bool = False
    other_params: int = 0
    max_context_tokens: int | None = None
    weight_bytes_per_param: float = 2
    assumptions: tuple[str, ...] = ()

    @cached_property
    def total_params(self) -> int:
        """All parameters, a tied embedding once."""
        head = 0 if self.tied else self.head_params
        outside = self.embedding_params + head + self.other_params
        return outside + sum(layer.params_total for layer in self.layers)

    @cached_property
    def active_params(self) -> int:
        """Parameters that one token uses; of routed experts only its own."""
        idle = sum(layer.params_total - layer.params_active for layer in self.layers)
        return self.total_params - idle

    @property
    def attention_layers(self) -> tuple[LayerShape, ...]:
        """Layers with attention of whatever reach, as `inspect` counts them."""
        return tuple(layer for layer in self.layers if layer.attention is not None)

    @property
    def full_attention_layers(self) -> tuple[LayerShape, ...]:
        """Layers that a policy can make sparse: attention to all earlier tokens."""
        return tuple(
            layer for layer in self.layers if layer.kind == "attention" and not layer.fixed
        )

    def count(self, kind: Kind) -> int:
        """How many layers are of that kind."""
        return sum(layer.kind == kind for layer in self.layers)

    def distinct_layers(self) -> Iterator[tuple[LayerShape, int]]:
        """Layers that differ in more than their name, and how often each is there."""
        counts: dict[LayerShape, int] = {}
        for layer in self.layers:
            counts[layer.nameless] = counts.get(layer.nameless, 0) + 1
        yield from counts.items()

    def weight_bytes(self, tensor_parallel: int = 1) -> float:
        """Bytes of the weights on each GPU; norms, which every GPU holds, are split like the rest.

        A GPU that shares its KV heads with others holds their projections too, which is left out.
        """
        return self.total_params * self.weight_bytes_per_param / tensor_parallel

    def kv_cache_bytes(
        self,
        context_tokens: int,
        batch: int = 1,
        tensor_parallel: int = 1,
        element_bytes: ElementBytes = BF16,
    ) -> float:
        """Bytes of keys, values and recurrent states on each GPU.

        Raises:
            UsageError: the heads cannot be split over that many GPUs.
        """
        return sum(
            count * layer.kv_cache_bytes(context_tokens, batch, tensor_parallel, element_bytes)
            for layer, count in self.distinct_layers()
        )
