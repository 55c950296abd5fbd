"""A transformers config.json as the shape of a model, read without transformers or torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsify.cost_model.config_attention import attention_heads, attention_layer
from sparsify.cost_model.config_fields import Fields
from sparsify.cost_model.config_kinds import LayerKind, layer_kinds
from sparsify.cost_model.config_mlp import FeedForward, feed_forward, feed_forwards
from sparsify.cost_model.config_recurrent import recurrent_layer
from sparsify.cost_model.config_weights import weight_bytes
from sparsify.cost_model.model_families import ENCODERS, FAMILIES, UNKNOWN, Family
from sparsify.cost_model.model_shape import LayerShape, ModelShape
from sparsify.documents import read_document

__all__ = ["read_config"]

MOST_LAYERS = 10_000
_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "model_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def read_config(source: str | Path | Mapping[str, Any], name: str = "") -> ModelShape:
    """The model that a config describes.

    Args:
        source: a config.json, a folder that holds one, or its fields.
        name: how to call the model; by default by its folder, or its `model_type`.

    Raises:
        UsageError: there is no such file, a field is missing or impossible, or the architecture is
            one that the cost model does not describe (encoders, latent attention).
    """
    if isinstance(source, Mapping):
        return _read(source, "The config", name or str(source.get("model_type") or "model"))
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    named = file.resolve().parent.name if file.name == "config.json" else file.stem
    return _read(read_document(file, "config"), str(file), name or named)


def _read(data: Mapping[str, Any], origin: str, name: str) -> ModelShape:
    _refuse_encoders(Fields(data, origin))
    inner = next((data[k] for k in ("text_config", "llm_config") if data.get(k)), None)
    if isinstance(inner, Mapping):
        outer = {k: data[k] for k in ("torch_dtype", "dtype", "quantization_config") if data.get(k)}
        shared = {k: data[k] for k in ("tie_word_embeddings",) if k in data}
        data = {**outer, **shared, **inner}
        family = _family(data)
        fields = Fields({**family.defaults, **data}, origin)
        fields.assume("Only the language model is counted, none of its other towers.")
        nested = family.attention_path.replace("model.", "model.language_model.", 1)
        return _model(fields, replace(family, attention_path=nested), name)
    family = _family(data)
    return _model(Fields({**family.defaults, **data}, origin), family, name)


def _refuse_encoders(fields: Fields) -> None:
    kind = fields.text("model_type")
    if fields.flag("is_encoder_decoder", default=False):
        raise fields.fail(f"{kind or 'it'} is an encoder-decoder; only decoders are modelled.")
    if kind in ENCODERS and not fields.flag("is_decoder", default=False):
        raise fields.fail(f"{kind} attends in both directions; only causal decoders are modelled.")


def _family(data: Mapping[str, Any]) -> Family:
    return FAMILIES.get(str(data.get("model_type")), UNKNOWN)


def _model(fields: Fields, family: Family, name: str) -> ModelShape:
    kind = fields.text("model_type")
    if kind not in FAMILIES:
        fields.assume(f"The model type {kind or '(none)'} is unknown and read as Llama's kind.")
    hidden, vocabulary = fields.whole(*_HIDDEN), fields.whole("vocab_size")
    layers = _layers(fields, family, hidden)
    tied = fields.flag("tie_word_embeddings", default=family.tied)
    context = fields.maybe(*_CONTEXT)
    norm = hidden * (2 if family.norm_bias else 1)
    positions = 0
    if family.learned_positions:
        positions = hidden * (fields.whole(*_CONTEXT) + family.extra_positions)
    other = norm * (2 if family.embedding_norm else 1) + positions + family.head_bias * vocabulary
    return ModelShape(
        name=name,
        hidden_size=hidden,
        layers=tuple(layers),
        embedding_params=vocabulary * hidden,
        head_params=vocabulary * hidden,
        tied=tied,
        other_params=other,
        max_context_tokens=context,
        weight_bytes_per_param=weight_bytes(fields),
        assumptions=fields.assumptions,
    )


def _layers(fields: Fields, family: Family, hidden: int) -> list[LayerShape]:
    listed = fields.value("layers_block_type")  # Nemotron-H tells its layers by listing them
    count = fields.whole(*_LAYERS, default=len(listed) if isinstance(listed, list) else None)
    if count > MOST_LAYERS:
        raise fields.fail(f"num_hidden_layers is {count}; more than {MOST_LAYERS} make no sense.")
    if fields.has("moe_latent_size"):
        raise fields.fail("experts in a latent space (moe_latent_size) are not modelled.")
    kinds = layer_kinds(fields, count)
    told = feed_forwards(fields, family, hidden, count)
    behind = [
        feed_forward(fields, family, hidden, k.behind, t) for k, t in zip(kinds, told, strict=True)
    ]
    return [
        _layer(fields, family, hidden, index, kind, feed)
        for index, (kind, feed) in enumerate(zip(kinds, behind, strict=True))
    ]


def _layer(
    fields: Fields, family: Family, hidden: int, index: int, kind: LayerKind, feed: FeedForward
) -> LayerShape:
    name = family.attention_path.format(index)
    if kind.kind == "recurrent":
        mixer = recurrent_layer(fields, name, hidden)
    elif kind.kind == "feed_forward":
        mixer = LayerShape(name, "feed_forward")
    else:
        heads = attention_heads(fields, hidden)
        mixer = attention_layer(fields, family, heads, hidden, name=name, kind=kind)
    norms = family.norms * hidden * (2 if family.norm_bias else 1)
    return replace(
        mixer,
        mlp_params=feed.params,
        experts=feed.experts,
        other_params=mixer.other_params + feed.other_params + norms,
    )
