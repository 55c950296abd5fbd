"""What a config.json leaves to the code of its family: biases, norms, gates, paths of modules.

Read from the modelling files of transformers 5.24; tests hold the resulting parameter counts
against models built by transformers itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

__all__ = ["ENCODERS", "FAMILIES", "UNKNOWN", "Family"]


@dataclass(frozen=True)
class Family:
    """One way to write a decoder; the defaults are Llama's.

    `qkv_bias` and the like are what holds when the config does not tell; `attention_path` takes
    the number of the layer. `defaults` are what transformers fills in for fields that published
    configs leave out.
    """

    gated_mlp: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["", "head", "full"] = ""
    norms: int = 2
    norm_bias: bool = False
    learned_positions: bool = False
    extra_positions: int = 0
    embedding_norm: bool = False
    head_bias: bool = False
    tied: bool = False
    sinks: bool = False
    query_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    shared_gate: bool = False
    attention_path: str = "model.layers.{}.self_attn"
    defaults: Mapping[str, Any] = field(default_factory=dict)


LLAMA = Family()
UNKNOWN = LLAMA
_QWEN2 = Family(qkv_bias=True)
_QWEN3 = Family(qk_norm="head")
_GEMMA2 = Family(
    norms=4,
    tied=True,
    defaults={"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
)
# Published Gemma 3 configs leave out what equals the defaults of transformers' Gemma3TextConfig.
_GEMMA3 = replace(
    _GEMMA2,
    qk_norm="head",
    defaults={
        **_GEMMA2.defaults,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131_072,
    },
)
_GPT2 = Family(
    gated_mlp=False,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    norm_bias=True,
    learned_positions=True,
    tied=True,
    attention_path="transformer.h.{}.attn",
)

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "ministral": LLAMA,
    "mixtral": replace(LLAMA, defaults={"num_key_value_heads": 8}),
    "phi3": LLAMA,
    "smollm3": replace(LLAMA, tied=True),
    "granite": LLAMA,
    "qwen2": _QWEN2,
    "qwen2_moe": replace(_QWEN2, shared_gate=True),
    "qwen3": replace(_QWEN3, defaults={"head_dim": 128}),
    "qwen3_moe": _QWEN3,
    "qwen3_next": replace(_QWEN3, query_gate=True, shared_gate=True),
    "qwen3_5_text": replace(_QWEN3, query_gate=True),
    "qwen3_5_moe_text": replace(_QWEN3, query_gate=True, shared_gate=True),
    "gemma": Family(tied=True),
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": replace(
        _GPT2, learned_positions=False, tied=False, attention_path="gpt_neox.layers.{}.attention"
    ),
    "opt": replace(_GPT2, extra_positions=2, attention_path="model.decoder.layers.{}.self_attn"),
    "bloom": replace(
        _GPT2,
        learned_positions=False,
        embedding_norm=True,
        attention_path="transformer.h.{}.self_attention",
    ),
    "falcon": replace(
        _GPT2,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        norms=1,
        learned_positions=False,
        attention_path="transformer.h.{}.self_attention",
    ),
    "nemotron_h": Family(gated_mlp=False, norms=1, attention_path="model.layers.{}.mixer"),
    "phi": replace(
        _GPT2,
        learned_positions=False,
        tied=False,
        norms=1,
        head_bias=True,
        attention_path=LLAMA.attention_path,
    ),
    "starcoder2": replace(_GPT2, learned_positions=False, attention_path=LLAMA.attention_path),
    "gpt_oss": Family(
        qkv_bias=True,
        output_bias=True,
        sinks=True,
        router_bias=True,
        expert_bias=True,
        defaults={"sliding_window_pattern": 2},
    ),
    "glm4_moe": LLAMA,
    "minimax_m2": Family(qk_norm="full"),
    "minimax_m3": Family(qk_norm="head"),
    "minimax_m3_vl_text": Family(qk_norm="head"),
    "minimax": LLAMA,
    "llama4_text": LLAMA,
    "olmo2": Family(qk_norm="full"),
    "olmo3": Family(qk_norm="full", defaults={"sliding_window_pattern": 4}),
    "cohere2": Family(norms=1, tied=True, defaults={"sliding_window_pattern": 4}),
    "exaone4": Family(qk_norm="head"),
    "jamba": LLAMA,
    "bamba": LLAMA,
    "granitemoehybrid": LLAMA,
    "lfm2": Family(qk_norm="head", tied=True),
    "lfm2_moe": Family(qk_norm="head", tied=True),
}

# Attention in both directions: nothing that could be made sparse, and no decoding.
ENCODERS = frozenset(
    [
        "albert",
        "bert",
        "camembert",
        "clip_text_model",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "esm",
        "modernbert",
        "mpnet",
        "nomic_bert",
        "roberta",
        "siglip_text_model",
        "vit",
        "xlm-roberta",
    ]
)
