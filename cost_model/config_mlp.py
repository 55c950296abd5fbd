"""What stands behind the attention of each layer: an MLP, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparsify.cost_model.config_fields import Fields
from sparsify.cost_model.model_families import Family
from sparsify.cost_model.model_shape import Experts

__all__ = ["FeedForward", "feed_forward", "feed_forwards"]

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Weights that every token passes, routed experts, and biases."""

    params: int
    experts: Experts | None = None
    other_params: int = 0


def feed_forwards(fields: Fields, family: Family, hidden: int, count: int) -> list[FeedForward]:
    """What stands behind the attention of each of `count` layers.

    Raises:
        UsageError: a size is missing or impossible.
    """
    if (fields.maybe(*_EXPERTS, least=0) or 0) <= 1:
        return [_dense(fields, family, hidden, _inner(fields, hidden))] * count
    mixture = _mixture(fields, family, hidden)
    routed = list(_routed(fields, count))
    if all(routed):
        return [mixture] * count
    plain = _dense(fields, family, hidden, _dense_inner(fields, hidden))
    return [mixture if is_routed else plain for is_routed in routed]


def feed_forward(
    fields: Fields, family: Family, hidden: int, kind: str, told: FeedForward
) -> FeedForward:
    """What stands behind a layer of which the list of layers says that it is an "mlp", a "moe", or
    "nothing"; "any" leaves it at `told`."""
    if kind == "any":
        return told
    if kind == "moe":
        return _mixture(fields, family, hidden)
    if kind == "mlp":
        return _dense(fields, family, hidden, _inner(fields, hidden))
    return FeedForward(0)


def _inner(fields: Fields, hidden: int) -> int:
    if fields.text("model_type") in ("gpt2", "gpt_bigcode", "bloom", "gptj"):
        return fields.whole("n_inner", default=4 * hidden)
    if fields.text("model_type") == "falcon":
        return fields.whole("ffn_hidden_size", default=4 * hidden)
    inner = fields.whole("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
    if fields.flag("block_auto_adjust_ff_dim", default=False):  # LFM2: two thirds, rounded up
        step = fields.whole("block_multiple_of", default=256)
        return step * -(-(2 * inner // 3) // step)
    return inner


def _dense_inner(fields: Fields, hidden: int) -> int:
    """Width of the plain MLPs between mixtures."""
    if fields.has("dense_intermediate_size", "intermediate_size_mlp"):
        return fields.whole("dense_intermediate_size", "intermediate_size_mlp")
    return _inner(fields, hidden)


def _dense(fields: Fields, family: Family, hidden: int, inner: int) -> FeedForward:
    products = (3 if family.gated_mlp else 2) * hidden * inner
    told = fields.flag("mlp_bias", "use_bias", "enable_bias", default=family.mlp_bias)
    # In front a bias per inner channel (of gate and up), behind it one per hidden channel.
    bias = told * (inner * (2 if family.gated_mlp else 1) + hidden)
    return FeedForward(products, other_params=bias)


def _mixture(fields: Fields, family: Family, hidden: int) -> FeedForward:
    count, chosen = fields.whole(*_EXPERTS), fields.whole(*_CHOSEN)
    if chosen > count:
        raise fields.fail(f"{chosen} experts per token are chosen among {count}.")
    inner = fields.whole("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    matrices = 3 if family.gated_mlp else 2
    shared = _shared_inner(fields, inner)
    always = matrices * hidden * shared + hidden * count
    always += hidden if shared and family.shared_gate else 0
    # The biases of experts are as many whether used or not; they are no products.
    bias = family.expert_bias * count * (2 * inner + hidden) + family.router_bias * count
    return FeedForward(always, Experts(count, chosen, matrices * hidden * inner), bias)


def _shared_inner(fields: Fields, inner: int) -> int:
    """Width of the experts that every token passes, together."""
    named = ("shared_expert_intermediate_size", "shared_intermediate_size")
    if fields.has(*named):
        return fields.whole(*named, least=0)
    if fields.has("moe_shared_expert_intermediate_size"):
        inner = fields.whole("moe_shared_expert_intermediate_size")
    one = 1 if fields.text("model_type").startswith("llama4") else 0
    return inner * fields.whole(*_SHARED, default=one, least=0)


def _routed(fields: Fields, count: int) -> Iterator[bool]:
    """Whether each layer is a mixture."""
    kinds = fields.sequence("mlp_layer_types", count, str)
    listed = fields.indices("moe_layers")
    frequency = fields.value("moe_layer_freq")
    plain = fields.indices("mlp_only_layers") or frozenset()
    first = fields.whole("first_k_dense_replace", "num_dense_layers", default=0, least=0)
    first = max(first, fields.whole("moe_layer_start_index", default=0, least=0))
    last = fields.maybe("moe_layer_end_index", least=-1)
    step, offset = _period(fields)
    for index in range(count):
        if kinds is not None:
            yield kinds[index] != "dense"
        elif listed is not None:
            yield index in listed
        elif isinstance(frequency, list):
            yield index < len(frequency) and bool(frequency[index])
        else:
            within = last is None or last < 0 or index <= last
            yield index >= first and within and index not in plain and index % step == offset


def _period(fields: Fields) -> tuple[int, int]:
    """Mixtures stand at every `step`-th layer, at that offset."""
    if fields.has("expert_layer_period"):  # Jamba
        step = fields.whole("expert_layer_period")
        return step, fields.whole("expert_layer_offset", default=0, least=0) % step
    step = fields.whole("decoder_sparse_step", "interleave_moe_layer_step", default=1)
    return step, step - 1
