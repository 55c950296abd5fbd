"""Heads and projections of the attention layers of a config."""

from __future__ import annotations

from sparsify.cost_model.config_fields import Fields
from sparsify.cost_model.config_kinds import LayerKind
from sparsify.cost_model.model_families import Family
from sparsify.cost_model.model_shape import LayerShape
from sparsify.cost_model.workload import AttentionShape

__all__ = ["attention_heads", "attention_layer"]


def attention_heads(fields: Fields, hidden: int) -> AttentionShape:
    """Head counts and sizes.

    Raises:
        UsageError: they are missing or impossible, or the attention is of a kind (MLA) whose cost
            these counts would not describe.
    """
    if fields.has("kv_lora_rank"):
        raise fields.fail(
            "multi-head latent attention (kv_lora_rank) is not modelled: it caches neither keys "
            "nor values, and decodes with other head sizes than it prefills with."
        )
    heads = fields.whole("num_attention_heads", "n_head", "num_heads", "n_heads")
    groups = _kv_heads(fields, heads)
    if heads % groups:
        raise fields.fail(
            f"num_attention_heads is {heads}, which is no multiple of num_key_value_heads {groups}."
        )
    if not fields.has("head_dim", "attention_head_dim", "kv_channels") and hidden % heads:
        raise fields.fail(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, "
            "and no head_dim is told."
        )
    size = fields.whole("head_dim", "attention_head_dim", "kv_channels", default=hidden // heads)
    return AttentionShape(heads, groups, size, fields.whole("v_head_dim", default=size))


def _kv_heads(fields: Fields, heads: int) -> int:
    if fields.has("num_key_value_heads"):
        return fields.whole("num_key_value_heads")
    if fields.flag("new_decoder_architecture", default=False):  # Falcon
        return fields.whole("num_kv_heads", default=heads)
    if fields.flag("multi_query", default=False):
        return fields.maybe("multi_query_group_num") or 1
    return fields.whole("num_kv_heads", "n_kv_heads", "multi_query_group_num", default=heads)


def attention_layer(
    fields: Fields,
    family: Family,
    heads: AttentionShape,
    hidden: int,
    *,
    name: str,
    kind: LayerKind,
) -> LayerShape:
    """The attention of one layer; MLP and the norms around it are the caller's."""
    queries = heads.q_heads * heads.head_dim
    keys, values = heads.kv_heads * heads.head_dim, heads.kv_heads * heads.value_dim
    outputs = heads.q_heads * heads.value_dim
    told = fields.flag("attention_bias", "use_bias", "enable_bias", default=False)
    qkv_bias = fields.flag("qkv_bias", "use_qkv_bias", default=family.qkv_bias) or told
    output_bias = family.output_bias or (told and not family.qkv_bias)
    gate = queries if fields.flag("attn_output_gate", default=family.query_gate) else 0
    other = qkv_bias * (queries + gate + keys + values) + output_bias * hidden
    other += _norms(family, heads) + family.sinks * heads.q_heads
    return LayerShape(
        name,
        kind.kind,
        heads,
        kind.window,
        qkv_params=hidden * (queries + gate + keys + values),
        output_params=outputs * hidden,
        other_params=other + _native_indexer(fields, kind, hidden),
    )


def _norms(family: Family, heads: AttentionShape) -> int:
    if family.qk_norm == "full":
        return (heads.q_heads + heads.kv_heads) * heads.head_dim
    return 2 * heads.head_dim if family.qk_norm else 0


def _native_indexer(fields: Fields, kind: LayerKind, hidden: int) -> int:
    """Weights of MiniMax-M3's indexer: held in memory; its work belongs to sparse attention."""
    if not kind.native or not fields.has("index_n_heads"):
        return 0
    size = fields.whole("index_head_dim")
    return hidden * (fields.whole("index_n_heads") + 1) * size + 2 * size
