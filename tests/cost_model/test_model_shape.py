"""Whole models: their parameters, their caches, and how alike layers are."""

from dataclasses import replace
from pathlib import Path

import pytest

from sparsify.cost_model.model_config import read_config
from sparsify.cost_model.model_shape import Experts, LayerShape
from sparsify.cost_model.workload import AttentionShape, ElementBytes
from sparsify.errors import UsageError

CONFIGS = Path(__file__).parent / "configs"


def model(name):
    return read_config(CONFIGS / f"{name}.json")


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-32b", 32_762_123_264),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_dense_models_have_the_parameters_of_their_checkpoints(name, params):
    assert model(name).total_params == model(name).active_params == params


def test_minimax_m3_is_near_the_published_counts():
    m3 = model("minimax-m3-text")
    # Published: 428B-A23B with a vision tower, which this config of the language model leaves out
    # (-0.4 %). 23B is what a token uses of the layers; 26.0B with embedding and head (+12.9 %).
    assert m3.total_params == 426_174_565_632
    assert m3.total_params / 428e9 == pytest.approx(1, abs=0.005)
    assert m3.active_params / 23e9 == pytest.approx(1.129, abs=0.001)
    inside = m3.active_params - m3.embedding_params - m3.head_params
    assert inside / 23e9 == pytest.approx(1.022, abs=0.001)


def test_equal_layers_are_one_kind():
    assert [count for _, count in model("qwen3-32b").distinct_layers()] == [64]
    assert [count for _, count in model("minimax-m3-text").distinct_layers()] == [3, 57]


def test_a_layer_that_differs_is_a_kind_of_its_own():
    llama = model("llama-3.1-8b")
    wider = replace(llama.layers[7], mlp_params=1)
    other = replace(llama, layers=(*llama.layers[:7], wider, *llama.layers[8:]))
    assert [count for _, count in other.distinct_layers()] == [31, 1]


def test_a_tied_head_is_held_once():
    tied = model("smollm2-135m")
    untied = replace(tied, tied=False)
    assert untied.total_params - tied.total_params == 49_152 * 576


def test_cache_bytes_are_two_vectors_per_token_and_kv_head():
    llama = model("llama-3.1-8b")
    # 32 layers x 8 heads x (128 + 128) x 2 bytes: 128 KiB a token.
    assert llama.kv_cache_bytes(1) == 131_072
    assert llama.kv_cache_bytes(131_072, batch=3) == 3 * 2**34
    assert llama.kv_cache_bytes(1, element_bytes=ElementBytes(key=1, value=1)) == 65_536


def test_the_cache_is_split_over_gpus_until_heads_are_single():
    llama = model("llama-3.1-8b")
    assert llama.kv_cache_bytes(1024, tensor_parallel=8) == llama.kv_cache_bytes(1024) / 8
    assert llama.kv_cache_bytes(1024, tensor_parallel=16) == llama.kv_cache_bytes(1024) / 8
    with pytest.raises(UsageError, match="degree of 5"):
        llama.kv_cache_bytes(1024, tensor_parallel=5)


def test_a_window_bounds_the_cache_and_a_state_does_not_grow():
    heads = AttentionShape(4, 2, 8, 8)
    sliding = LayerShape("a", "sliding", heads, window=100)
    state = LayerShape("b", "recurrent", state_elements=500)
    one = replace(model("llama-3.1-8b"), layers=(sliding, state))
    assert one.kv_cache_bytes(50) == 50 * 2 * 16 * 2 + 1000
    assert one.kv_cache_bytes(10_000) == one.kv_cache_bytes(100)
    assert (one.count("sliding"), one.count("attention")) == (1, 0)
    assert len(one.attention_layers) == 1 and not one.full_attention_layers


def test_experts_read_lie_between_those_of_one_token_and_all():
    experts = Experts(128, 4, 10)
    assert experts.expected_read(1) == pytest.approx(4)
    assert experts.expected_read(2) == pytest.approx(128 * (1 - (124 / 128) ** 2))
    assert experts.expected_read(10_000) == pytest.approx(128)
    assert Experts(4, 4, 10).expected_read(1) == 4


def test_weights_are_split_over_gpus():
    llama = model("llama-3.1-8b")
    assert llama.weight_bytes() == 2 * llama.total_params
    assert llama.weight_bytes(4) == llama.weight_bytes() / 4
