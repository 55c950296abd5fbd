"""Parameter counts from configs against models that transformers builds (on the meta device)."""

import json

import pytest

from sparsify.cost_model.model_config import read_config

tf = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

SMALL = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MIXTURE = dict(num_experts_per_tok=2, moe_intermediate_size=24)
GPT2 = dict(n_embd=64, n_head=8, n_layer=3, vocab_size=96, n_positions=128)
DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
)
MAMBA2 = dict(mamba_n_heads=16, mamba_d_head=8, mamba_d_state=8)
CASES = {
    "llama": {},
    "llama-biased": dict(attention_bias=True, mlp_bias=True),
    "llama-tied": dict(tie_word_embeddings=True, head_dim=16),
    "mistral": dict(sliding_window=16),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "phi3": {},
    "smollm3": {},
    "qwen2": {},
    "qwen2_moe": dict(num_experts=6, shared_expert_intermediate_size=40, **MIXTURE),
    "qwen2_moe-steps": dict(
        num_experts=6,
        shared_expert_intermediate_size=40,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        **MIXTURE,
    ),
    "qwen3": dict(head_dim=16),
    "qwen3_moe": dict(num_experts=6, **MIXTURE),
    "qwen3_next": dict(num_experts=6, shared_expert_intermediate_size=40, **DELTA, **MIXTURE),
    "gemma": dict(head_dim=16),
    "gemma2": dict(head_dim=16),
    "gemma3_text": dict(head_dim=16),
    "gpt2": GPT2,
    "gpt_neox": dict(num_key_value_heads=None),
    "opt": dict(
        vocab_size=96,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        word_embed_proj_dim=64,
        max_position_embeddings=128,
    ),
    "bloom": dict(vocab_size=96, hidden_size=64, n_layer=2, n_head=8),
    "phi": {},
    "starcoder2": {},
    "gpt_oss": dict(num_local_experts=6, num_experts_per_tok=2, head_dim=16),
    "glm4_moe": dict(n_routed_experts=6, n_shared_experts=2, first_k_dense_replace=2, **MIXTURE),
    "minimax_m2": dict(num_local_experts=6, num_experts_per_tok=2, head_dim=16),
    "minimax": dict(num_local_experts=6, num_experts_per_tok=2, head_dim=16),
    "llama4_text": dict(
        num_local_experts=4, intermediate_size_mlp=80, interleave_moe_layer_step=2, head_dim=16
    ),
    "olmo2": {},
    "olmo3": {},
    "cohere2": dict(head_dim=16),
    "exaone4": {},
    "jamba": dict(num_hidden_layers=6, num_experts=4, mamba_d_state=8, mamba_dt_rank=4),
    "bamba": dict(attn_layer_indices=[2], **MAMBA2),
    "granitemoehybrid": dict(
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=40,
        layer_types=["linear_attention", "full_attention"] * 2,
        **MAMBA2,
    ),
    "falcon": dict(
        vocab_size=96,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        ffn_hidden_size=96,
    ),
    "nemotron_h": dict(
        vocab_size=96,
        hidden_size=64,
        layers_block_type=["linear_attention", "mlp", "full_attention", "moe"],
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        mamba_num_heads=16,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40,
    ),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2, intermediate_size=512),
}

# These call their sizes otherwise.
OTHER_NAMES = ("gpt2", "opt", "bloom", "falcon", "nemotron_h")


def built(kind, changes):
    """A model on the meta device, and its config as save_pretrained writes it."""
    sizes = {} if kind in OTHER_NAMES else SMALL
    config = tf.CONFIG_MAPPING[kind](**{**sizes, **changes})
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config)
    return model, json.loads(config.to_json_string(use_diff=True))


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_that_transformers_builds(name):
    kind = name.partition("-")[0]
    if kind not in tf.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    model, config = built(kind, CASES[name])
    shape = read_config(config)
    assert shape.total_params == sum(p.numel() for p in model.parameters())
    assert not any("unknown" in sentence for sentence in shape.assumptions)
    paths = {path for path, _ in model.named_modules()}
    named = [layer.name for layer in shape.attention_layers]
    assert named and set(named) <= paths


def test_the_indexer_of_minimax_m3_is_counted():
    module = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    mixture = dict(num_local_experts=4, num_experts_per_tok=2)
    widths = dict(dense_intermediate_size=80, shared_intermediate_size=40)
    config = tf.CONFIG_MAPPING["minimax_m3_vl_text"](
        **{**SMALL, **mixture, **widths, "num_attention_heads": 8},
        head_dim=16,
        index_n_heads=2,
        index_head_dim=16,
        layer_types=["full_attention"] * 2 + ["minimax_m3_sparse"] * 2,
        mlp_layer_types=["dense"] * 2 + ["sparse"] * 2,
    )
    with torch.device("meta"):
        body = module.MiniMaxM3VLTextModel(config)
    shape = read_config(json.loads(config.to_json_string(use_diff=True)))
    held = sum(p.numel() for p in body.parameters())
    assert shape.total_params - shape.head_params == held


@pytest.mark.parametrize("change", [dict(qkv_bias=1), dict(intermediate_size=49)])
def test_one_change_of_the_config_changes_the_count(change):
    model, config = built("llama", {})
    config["attention_bias"] = "qkv_bias" in change
    config.update({k: v for k, v in change.items() if k != "qkv_bias"})
    assert read_config(config).total_params > sum(p.numel() for p in model.parameters())
