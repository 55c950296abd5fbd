"""Whole-model costs: shares, memory, mixtures, windows, several GPUs."""

from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest

from sparsify.cost_model import situation
from sparsify.cost_model.calibration import Calibration, FamilyEfficiency
from sparsify.cost_model.configuration import DENSE, PUBLISHED, Configuration
from sparsify.cost_model.hardware import load_gpu
from sparsify.cost_model.linear_cost import all_reduce, matrix_product
from sparsify.cost_model.model_config import read_config
from sparsify.cost_model.model_cost import model_cost
from sparsify.cost_model.model_shape import Experts, LayerShape
from sparsify.cost_model.times import Source
from sparsify.cost_model.workload import AttentionShape, ElementBytes, Phase, Workload
from sparsify.errors import UsageError

CONFIGS = Path(__file__).parent / "configs"
H200 = load_gpu("h200")
LEARNED = Configuration("msa", 128, 16, "learned", 128)
PROXY = Configuration("msa", 128, 16, "proxy")


def model(name="llama-3.1-8b"):
    return read_config(CONFIGS / f"{name}.json")


def prefill(context, batch=1):
    return Workload.of(Phase.PREFILL, context, batch)


def decode(context, batch=1):
    return Workload.of(Phase.DECODE, context, batch)


def calibrated(**efficiencies):
    """Every family named, at that share of its bound and without overheads."""
    families = tuple(
        FamilyEfficiency(family=name, efficiency=share, error=0, points=1, contexts=(1, 2**20))
        for name, share in efficiencies.items()
    )
    return Calibration.model_construct(gpu=H200.name, families=families)


@pytest.mark.parametrize(
    ("name", "context", "share"),
    [
        ("llama-3.1-8b", 2**15, 0.42),
        ("llama-3.1-8b", 2**17, 0.74),
        ("llama-3.1-8b", 2**20, 0.96),
        ("qwen3-32b", 2**15, 0.39),
        ("qwen3-32b", 2**17, 0.72),
        ("qwen3-32b", 2**20, 0.95),
    ],
)
def test_attentions_share_of_a_prefill(name, context, share):
    efficiencies = calibrated(gemm=0.70, dense_prefill=0.60, dense_decode=0.85)
    cost = model_cost(model(name), prefill(context), DENSE, H200, calibration=efficiencies)
    assert cost.attention_share == pytest.approx(share, abs=0.007)
    assert cost.total.source is Source.CALIBRATED
    # N / (N + N_half), with N_half = 2 P rho / (layers * query heads * head sizes).
    layers = cost.model.layers
    linear = sum(layer.gemm_params + layer.mlp_params for layer in layers)
    width = sum(layer.attention.q_heads * 256 for layer in layers)
    half = 2 * linear * (0.60 / 0.70) / width
    assert cost.attention_share == pytest.approx(context / (context + half), abs=0.005)


def test_without_calibration_there_is_a_range_around_it():
    cost = model_cost(model(), prefill(2**17), DENSE, H200)
    assert cost.total.source is Source.BOUND
    total = cost.total
    assert total.bound_ms < total.low_ms < total.expected_ms < total.high_ms
    assert cost.attention_share == pytest.approx(0.74, abs=0.02)


def test_the_whole_is_bounded_by_amdahls_law():
    dense = model_cost(model(), prefill(2**17), DENSE, H200)
    sparse = model_cost(model(), prefill(2**17), LEARNED, H200)
    attention = dense.attention.expected_ms / sparse.attention.expected_ms
    whole = dense.total.expected_ms / sparse.total.expected_ms
    share = dense.attention_share
    assert whole == pytest.approx(1 / ((1 - share) + share / attention), rel=1e-9)
    assert 1 < whole < attention
    assert sparse.linear == dense.linear


def test_flops_of_the_linear_part_are_two_per_weight_and_token():
    cost = model_cost(model(), prefill(1024, batch=2), DENSE, H200)
    layers = sum(layer.params_active - layer.other_params for layer in cost.model.layers)
    head = 2 * 2 * cost.model.head_params  # the last position of two sequences
    assert cost.flops - cost.attention_flops == 2 * 2048 * layers + head


def test_training_computes_all_logits_and_three_products():
    cost = model_cost(model(), Workload.of(Phase.TRAINING, 1024), DENSE, H200)
    layers = sum(layer.params_active - layer.other_params for layer in cost.model.layers)
    assert cost.flops - cost.attention_flops == 6 * 1024 * (layers + cost.model.head_params)
    assert cost.memory.kv_cache_bytes == 0


def test_decode_reads_weights_once_and_the_cache_once():
    one = model_cost(model(), decode(2**15), DENSE, H200)
    many = model_cost(model(), decode(2**15, batch=32), DENSE, H200)
    read = one.model.weight_bytes() - 2 * (one.model.embedding_params + 32 * 8192 + 4096)
    weights = one.dram_bytes - one.attention_bytes - 2 * 4096
    assert weights == pytest.approx(read)
    assert many.dram_bytes - many.attention_bytes - 32 * 2 * 4096 == pytest.approx(read)
    assert many.attention_bytes == 32 * one.attention_bytes
    assert one.attention_bytes == pytest.approx(one.memory.kv_cache_bytes, rel=0.001)


@pytest.mark.parametrize(
    ("name", "context", "batch", "whole"),
    [
        ("llama-3.1-8b", 2**17, 1, 1.85),
        ("llama-3.1-8b", 2**17, 8, 5.58),
        ("llama-3.1-8b", 2**17, 32, 9.47),
        ("qwen3-32b", 2**17, 1, 1.44),
        ("qwen3-32b", 2**17, 8, 3.85),
        ("qwen3-32b", 2**17, 32, 7.62),
    ],
)
def test_decode_of_whole_models_by_bytes(name, context, batch, whole):
    dense = model_cost(model(name), decode(context, batch), DENSE, H200)
    sparse = model_cost(model(name), decode(context, batch), LEARNED, H200)
    # The published figures have launches in them, and read the embedding.
    assert dense.total.bound_ms / sparse.total.bound_ms == pytest.approx(whole, rel=0.07)


@pytest.mark.parametrize(("heads", "share"), [(4, 0.125), (8, 0.0625)])
def test_the_index_cache_is_an_eighth_of_four_heads(heads, share):
    one = model("minimax-m3-text" if heads == 4 else "llama-3.1-8b")
    memory = model_cost(one, decode(2**17), LEARNED, H200).memory
    assert memory.index_cache_bytes == share * memory.kv_cache_bytes
    assert model_cost(one, decode(2**17), PROXY, H200).memory.index_cache_bytes == 0


def test_memory_adds_up():
    memory = model_cost(model(), prefill(2**17), LEARNED, H200).memory
    assert memory.weights_bytes == model().weight_bytes()
    assert memory.kv_cache_bytes == 2**34
    assert memory.workspace_bytes > 0
    parts = memory.weights_bytes + memory.kv_cache_bytes + memory.index_cache_bytes
    assert memory.total_bytes == parts + memory.workspace_bytes


def test_the_longest_path_is_the_sum():
    cost = model_cost(model("minimax-m3-text"), prefill(2**15), LEARNED, H200)
    graph = cost.graph
    assert nx.is_directed_acyclic_graph(graph)
    last = graph.nodes["LM head"]["ms"]
    length = nx.dag_longest_path_length(graph, weight="ms") + last
    assert length == pytest.approx(cost.total.expected_ms)
    assert sum(data["flops"] for _, data in graph.nodes(data=True)) == cost.flops
    first = [name for name in graph if name.startswith("model.layers.0.self_attn/")]
    assert first[0].endswith("qkv projection") and first[-1].endswith("MLP")
    assert any(name.endswith("MoE") for name in graph)


def test_the_graph_of_one_operation_less_is_shorter():
    graph = model_cost(model(), prefill(2**15), DENSE, H200).graph
    before = nx.dag_longest_path_length(graph, weight="ms")
    graph.remove_node(next(name for name in graph if name.endswith("attention")))
    assert nx.dag_longest_path_length(graph, weight="ms") < before


def test_alike_layers_are_costed_once(monkeypatch):
    calls = []
    real = situation.layer_cost

    def counting(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(situation, "layer_cost", counting)
    names = [layer.name for layer in model("minimax-m3-text").layers]
    model_cost(model("minimax-m3-text"), prefill(2**15), dict.fromkeys(names[5:], PROXY), H200)
    assert len(calls) == 3  # dense with an MLP, dense with experts, sparse with experts


def test_configurations_go_by_name_and_others_stay_dense():
    one = model()
    names = [layer.name for layer in one.layers]
    some = model_cost(one, prefill(2**17), dict.fromkeys(names[:8], PROXY), H200)
    chosen = [layer.attention.configuration for layer in some.layers]
    assert chosen == [PROXY] * 8 + [DENSE] * 24
    dense = model_cost(one, prefill(2**17), DENSE, H200).attention_flops
    full = model_cost(one, prefill(2**17), PROXY, H200).attention_flops
    assert some.attention_flops == dense - 8 * (dense - full) // 32


def with_layers(*layers):
    return replace(model(), layers=layers)


HEADS = AttentionShape(32, 8, 128, 128)


def test_a_window_costs_its_pairs_and_is_never_sparse():
    sliding = LayerShape("w", "sliding", HEADS, window=1024)
    cost = model_cost(with_layers(sliding), prefill(2**17), PROXY, H200)
    (attention,) = (layer.attention for layer in cost.layers)
    pairs = 1024 * 1025 // 2 + (2**17 - 1024) * 1024
    assert attention.configuration == DENSE
    assert attention.flops == 2 * 32 * 256 * pairs
    full = model_cost(
        with_layers(replace(sliding, kind="attention", window=None)), prefill(2**17), DENSE, H200
    )
    assert attention.time.expected_ms < full.attention.expected_ms / 30


def test_a_window_longer_than_the_context_is_full_attention():
    sliding = LayerShape("w", "sliding", HEADS, window=4096)
    full = replace(sliding, kind="attention", window=None)
    for call in (prefill(4096), decode(4096)):
        costs = [model_cost(with_layers(one), call, DENSE, H200) for one in (sliding, full)]
        assert costs[0].attention == costs[1].attention
        assert costs[0].attention_flops == costs[1].attention_flops


def test_decode_reads_no_more_than_the_window():
    sliding = with_layers(LayerShape("w", "sliding", HEADS, window=1024))
    short, long = (model_cost(sliding, decode(n), DENSE, H200) for n in (1024, 2**17))
    assert short.attention == long.attention
    assert short.memory.kv_cache_bytes == long.memory.kv_cache_bytes


def test_a_recurrence_grows_with_the_tokens_and_not_with_their_pairs():
    recurrent = LayerShape("r", "recurrent", qkv_params=10**6, state_elements=10**6)
    short, long = (model_cost(with_layers(recurrent), prefill(n), PROXY, H200) for n in (64, 6400))
    assert short.attention_flops == long.attention_flops == 0
    head = 2 * model().head_params
    assert long.flops - head == 100 * (short.flops - head)


def test_experts_cost_what_is_used_and_decode_reads_what_is_hit():
    experts = Experts(64, 4, 10**6)
    mixture = with_layers(LayerShape("m", "attention", HEADS, mlp_params=10**5, experts=experts))
    many = model_cost(mixture, prefill(2**12), DENSE, H200)
    (used,) = (op for op in many.layers[0].operations if op.name == "MoE")
    assert used.flops == 2 * 2**12 * (4 * 10**6 + 10**5)
    assert used.dram_bytes == pytest.approx(2 * (64 * 10**6 + 10**5))
    for batch in (1, 8, 64):
        step = model_cost(mixture, decode(2**12, batch), DENSE, H200)
        (hit,) = (op for op in step.layers[0].operations if op.name == "MoE")
        expected = 64 * (1 - (1 - 4 / 64) ** batch) * 10**6 + 10**5
        assert hit.dram_bytes == pytest.approx(2 * expected)


def test_several_gpus_share_the_work_and_talk():
    one = model_cost(model(), prefill(2**15), DENSE, H200)
    four = model_cost(model(), prefill(2**15), DENSE, H200, tensor_parallel=4)
    assert four.attention_flops == one.attention_flops / 4
    assert four.flops == pytest.approx(one.flops / 4)
    assert four.memory.kv_cache_bytes == one.memory.kv_cache_bytes / 4
    assert one.communication.expected_ms == 0 and not one.warnings
    # Two all-reduces a layer, 1.5 times the activations each, over 450 GB/s in one direction.
    sent_ms = 64 * 1.5 * 2**15 * 4096 * 2 / 450e9 * 1e3
    assert four.communication.bound_ms == pytest.approx(sent_ms)
    assert four.dram_bytes == pytest.approx(one.dram_bytes / 4, rel=0.03)
    assert sum(name.endswith("all-reduce") for name in four.graph) == 64


def test_an_unknown_link_is_said():
    for link, said in ((None, "is not known"), ({"value": 0, "source": "none"}, "is 0")):
        gpu = type(H200)(**{**H200.model_dump(), "nvlink_gbs_total_bidirectional": link})
        cost = model_cost(model(), prefill(2**15), DENSE, gpu, tensor_parallel=2)
        assert cost.communication.expected_ms == 0
        assert said in cost.warnings[0] and "not counted" in cost.warnings[0]


def test_heads_that_cannot_be_split():
    with pytest.raises(UsageError, match="degree of 3"):
        model_cost(model(), prefill(1024), DENSE, H200, tensor_parallel=3)


def test_a_product_is_limited_by_computing_or_by_reading():
    large = matrix_product("x", 10**15, 1e6, H200)
    small = matrix_product("x", 10**6, 1e10, H200)
    assert large.time.bound_ms == pytest.approx(1e18 / H200.flops_per_s("bf16"))
    assert small.time.bound_ms == pytest.approx(1e13 / 4.8e12)
    for time in (large.time, small.time):
        assert time.bound_ms < time.low_ms < time.expected_ms < time.high_ms
        assert time.source is Source.CALIBRATED  # measured rates of this GPU


def test_a_product_on_a_gpu_without_measurements_is_a_bound_with_a_range():
    bare = type(H200)(**{**H200.model_dump(), "measured": {}})
    time = matrix_product("x", 10**15, 1e6, bare).time
    assert time.source is Source.BOUND and time.ms == time.bound_ms
    assert time.high_ms / time.low_ms == pytest.approx(0.85 / 0.5, rel=0.001)
    most = {"bf16_matmul_efficiency": {"value": 0.6, "source": "a test"}}
    slow = type(H200)(**{**H200.model_dump(), "measured": most})
    assert matrix_product("x", 10**15, 1e6, slow).time.low_ms > time.low_ms


def test_a_ring_of_two_sends_everything_once():
    assert all_reduce(900e9, 2, H200).time.bound_ms == pytest.approx(2000)
    assert all_reduce(900e9, 1, H200).time.bound_ms == 0


def test_small_caches_of_small_elements():
    sizes = ElementBytes(key=1, value=1)
    half = model_cost(model(), decode(2**17), DENSE, H200, element_bytes=sizes)
    assert half.memory.kv_cache_bytes == 2**33


def test_nothing_is_faster_than_its_bound():
    for configuration in PUBLISHED:
        for call in (prefill(2**15), decode(2**17), Workload.of(Phase.TRAINING, 2**14)):
            cost = model_cost(model("qwen3-32b"), call, configuration, H200)
            assert cost.total.bound_ms <= cost.total.low_ms <= cost.total.expected_ms
