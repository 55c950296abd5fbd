"""What is read of a config.json, and the one sentence for what cannot be."""

import json
import subprocess
import sys

import pytest

from sparsify.cost_model.model_config import read_config
from sparsify.errors import UsageError

LLAMA = dict(
    model_type="llama",
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=100,
    max_position_embeddings=2048,
    torch_dtype="bfloat16",
)


def config(**changes):
    told = {**LLAMA, **changes}
    return {name: value for name, value in told.items() if value != "absent"}


def kinds(**changes):
    return [layer.kind[0] for layer in read_config(config(**changes)).layers]


def test_a_plain_config_is_read_without_assumptions():
    model = read_config(config())
    assert model.assumptions == ()
    assert model.layers[3].name == "model.layers.3.self_attn"
    heads = model.layers[0].attention
    assert (heads.q_heads, heads.kv_heads, heads.head_dim, heads.value_dim) == (8, 2, 8, 8)
    assert (model.max_context_tokens, model.weight_bytes_per_param) == (2048, 2)


def test_file_and_folder_are_one(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config()))
    assert read_config(folder) == read_config(folder / "config.json")
    assert read_config(folder).name == "tiny"
    assert read_config(folder, name="other").name == "other"


def test_an_explicit_head_dim_need_not_divide_the_hidden_size():
    heads = read_config(config(head_dim=24)).layers[0].attention
    assert (heads.head_dim, heads.value_dim) == (24, 24)


def test_without_kv_heads_every_query_head_has_its_own():
    assert read_config(config(num_key_value_heads="absent")).layers[0].attention.kv_heads == 8


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(num_hidden_layers="absent"), r"num_hidden_layers .*is missing"),
        (dict(num_hidden_layers=None), r"num_hidden_layers .*is missing"),
        (dict(num_hidden_layers=0), r"num_hidden_layers is 0"),
        (dict(num_hidden_layers=10**6), r"num_hidden_layers is 1000000"),
        (dict(num_attention_heads="absent"), r"num_attention_heads .*is missing"),
        (
            dict(num_attention_heads=7, num_key_value_heads=1),
            r"hidden_size 64 is no multiple of num_attention_heads 7",
        ),
        (dict(num_key_value_heads=3), r"no multiple of num_key_value_heads 3"),
        (dict(vocab_size="100"), r"vocab_size is '100'"),
        (dict(vocab_size=True), r"vocab_size is True"),
        (dict(hidden_size=-64), r"hidden_size is -64"),
        (dict(hidden_size=2**40), r"hidden_size is 1099511627776"),
        (dict(intermediate_size=[1, 2]), r"intermediate_size is \[1, 2\]"),
        (dict(tie_word_embeddings="yes"), r"tie_word_embeddings is 'yes'"),
        (dict(torch_dtype="float7"), r"dtype is 'float7'"),
        (dict(layer_types=["full_attention"]), r"layer_types has 1 entries for 4 layers"),
        (dict(layer_types="full_attention"), r"layer_types is 'full_attention'"),
        (dict(layer_types=["sliding_attention"] * 4), r"sliding_window .*is missing"),
        (dict(num_local_experts=8), r"num_experts_per_tok .*is missing"),
        (dict(num_local_experts=8, num_experts_per_tok=9), r"9 experts per token .* among 8"),
        (dict(kv_lora_rank=16), r"multi-head latent attention"),
        (dict(model_type="t5", is_encoder_decoder=True), r"encoder-decoder"),
        (dict(model_type="bert"), r"attends in both directions"),
        (
            dict(hybrid_override_pattern="M-*"),
            r"hybrid_override_pattern is 'M-\*'; expected 4 letters",
        ),
        (dict(hybrid_override_pattern="M-*X"), r"hybrid_override_pattern is 'M-\*X'"),
        (dict(moe_latent_size=8), r"latent space"),
    ],
)
def test_what_cannot_be_is_one_sentence(tmp_path, changes, said):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config(**changes)))
    with pytest.raises(UsageError, match=said) as caught:
        read_config(file)
    assert caught.value.message.startswith(str(file))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_files_that_are_none(tmp_path):
    with pytest.raises(UsageError, match="There is no config"):
        read_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="malformed: line 1"):
        read_config(tmp_path)


def test_an_unknown_family_is_read_and_said():
    model = read_config(config(model_type="brandnew"))
    assert model.layers == read_config(config()).layers
    assert "brandnew is unknown" in model.assumptions[0]


def test_a_missing_dtype_is_said():
    model = read_config(config(torch_dtype="absent"))
    assert model.weight_bytes_per_param == 2 and "dtype" in model.assumptions[0]
    assert read_config(config(torch_dtype="absent", dtype="float32")).weight_bytes_per_param == 4


@pytest.mark.parametrize(
    ("told", "size"),
    [
        (dict(quant_method="fp8"), 1),
        (dict(quant_method="gptq", bits=4), 0.5),
        (dict(quant_method="mxfp4"), 4.25 / 8),
        (dict(quant_method="bitsandbytes", load_in_4bit=True), 0.5),
        (dict(quant_method="brandnew"), 1),
    ],
)
def test_quantised_weights_are_smaller_and_said(told, size):
    model = read_config(config(quantization_config=told))
    assert model.weight_bytes_per_param == size
    assert "8 bits" in model.assumptions[0] or "bits" in model.assumptions[0]


def test_layer_types_are_taken_as_told():
    named = ["full_attention", "sliding_attention", "linear_attention", "minimax_m3_sparse"]
    model = read_config(config(layer_types=named, sliding_window=16))
    assert [layer.kind for layer in model.layers] == [
        "attention",
        "sliding",
        "recurrent",
        "attention",
    ]
    assert model.layers[1].window == 16
    assert any("natively sparse" in sentence for sentence in model.assumptions)
    assert any("gated linear attention" in sentence for sentence in model.assumptions)


def test_unknown_layer_types_are_said():
    model = read_config(config(layer_types=["full_attention", "wormhole"] * 2))
    assert model.count("attention") == 4
    assert "unknown type wormhole" in model.assumptions[0]


def test_types_of_more_layers_than_there_are_are_cut():
    assert kinds(layer_types=["full_attention"] * 9) == ["a"] * 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(model_type="mistral", sliding_window=16), "ssss"),
        (dict(model_type="mistral", sliding_window=None), "aaaa"),
        (dict(model_type="gemma2", sliding_window=16, head_dim=8), "sasa"),
        (dict(model_type="gemma3_text", sliding_window=16, sliding_window_pattern=3), "ssas"),
        (dict(model_type="qwen2", sliding_window=16), "aaaa"),
        (dict(model_type="qwen2", sliding_window=16, use_sliding_window=False), "aaaa"),
        (
            dict(
                model_type="qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=3
            ),
            "aaas",
        ),
        (dict(model_type="exaone4", sliding_window=16, sliding_window_pattern="LLG"), "ssas"),
        (dict(full_attention_interval=2), "rara"),
        (dict(attn_layer_period=4, attn_layer_offset=1), "rarr"),
        (dict(attn_layer_indices=[0, 3]), "arra"),
        (dict(attn_type_list=[0, 1, 0, 1]), "rara"),
        (dict(full_attn_idxs=[1]), "rarr"),
        (dict(hybrid_override_pattern="M-*-", mamba_num_heads=4, ssm_state_size=8), "rfaf"),
        (dict(model_type="llama4_text", attention_chunk_size=16), "sssa"),
        (dict(model_type="llama4_text", attention_chunk_size=None), "aaaa"),
        (
            dict(model_type="llama4_text", attention_chunk_size=16, no_rope_layers=[0, 1, 1, 0]),
            "assa",
        ),
    ],
)
def test_patterns_of_families(changes, expected):
    assert "".join(kinds(**changes)) == expected


def test_chunked_attention_is_said():
    model = read_config(config(layer_types=["chunked_attention"] * 4, attention_chunk_size=32))
    assert model.layers[0].window == 32 and "Chunked" in model.assumptions[0]


MIXTURE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "1111"),
        (dict(first_k_dense_replace=2), "0011"),
        (dict(decoder_sparse_step=2), "0101"),
        (dict(decoder_sparse_step=2, mlp_only_layers=[3]), "0100"),
        (dict(mlp_layer_types=["dense", "sparse", "dense", "sparse"]), "0101"),
        (dict(interleave_moe_layer_step=2), "0101"),
        (dict(moe_layers=[0, 3]), "1001"),
        (dict(moe_layer_freq=[0, 1, 1, 1]), "0111"),
        (dict(expert_layer_period=2, expert_layer_offset=0), "1010"),
        (dict(moe_layer_start_index=1, moe_layer_end_index=2), "0110"),
    ],
)
def test_which_layers_are_mixtures(changes, expected):
    layers = read_config(config(**MIXTURE, **changes)).layers
    assert "".join(str(int(layer.experts is not None)) for layer in layers) == expected


def test_the_weights_of_a_mixture():
    layer = read_config(config(**MIXTURE, n_shared_experts=3)).layers[0]
    one = 3 * 64 * 16
    assert layer.experts.params == one
    assert layer.mlp_params == 3 * one + 64 * 8  # shared experts and the router
    assert layer.mlp_params_active == layer.mlp_params + 2 * one
    assert layer.mlp_params_total == layer.mlp_params + 8 * one


def test_expert_counts_of_one_or_none_are_no_mixture():
    assert read_config(config(num_experts=0)).layers == read_config(config()).layers


def test_a_nested_text_config_is_the_model():
    outer = dict(model_type="gemma3", text_config=config(), torch_dtype="float16")
    model = read_config(outer)
    assert model.layers[1].name == "model.language_model.layers.1.self_attn"
    assert model.total_params == read_config(config()).total_params
    assert "language model" in model.assumptions[0]


def test_gemma_3_configs_leave_out_what_transformers_fills_in():
    # As google/gemma-3-4b-it publishes it.
    text = dict(
        hidden_size=2560,
        intermediate_size=10_240,
        model_type="gemma3_text",
        num_hidden_layers=34,
        sliding_window=1024,
    )
    model = read_config(dict(model_type="gemma3", text_config=text, torch_dtype="bfloat16"))
    assert model.total_params == 3_880_263_168  # 4.3B less the vision tower of 0.4B
    assert (model.count("attention"), model.count("sliding")) == (5, 29)


def test_names_of_gpt2():
    model = read_config(
        dict(
            model_type="gpt2", n_embd=768, n_head=12, n_layer=12, n_positions=1024, vocab_size=50257
        )
    )
    assert model.total_params == 124_439_808
    assert model.layers[11].name == "transformer.h.11.attn"


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from sparsify.cost_model.model_config import read_config; "
        "print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
