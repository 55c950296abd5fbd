"""Shapes of captured models: equal to those of their configs, and those of models without one."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers as tf

import sparsify
from sparsify.cost_model.model_config import read_config
from sparsify.cost_model.workload import AttentionShape
from sparsify.errors import NothingToDoError, UsageError
from sparsify.graph_shape import graph_shape
from tests._util.tiny_folders import tiny_llama
from tests._util.tiny_models import SMALL, build


def by_graph(model, *args):
    found = sparsify.inspect(model, args or None)
    return graph_shape(found.programs[0].captured, found.sites, found.refusals, name="x")


def by_config(model):
    """What the config says, less what a graph cannot know."""
    told = json.loads(model.config.to_json_string(use_diff=True))
    shape = read_config({**told, "dtype": "float32"}, name="x")
    return replace(shape, max_context_tokens=None)


def mixture(experts="grouped_mm"):
    sizes = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
    config = tf.Qwen3MoeConfig(**{**SMALL, **sizes})
    return tf.AutoModelForCausalLM.from_config(config, experts_implementation=experts).eval()


MODELS = {
    "llama": tiny_llama,
    "llama, tied": lambda: build("llama", tie_word_embeddings=True),
    "qwen2, with biases": lambda: build("qwen2"),
    "qwen3, with norms": lambda: build("qwen3"),
    "phi3, fused projections": lambda: build("phi3"),
    "gpt2, positions": lambda: build("gpt2"),
    "opt": lambda: build("opt"),
    "mistral, sliding": lambda: build("mistral", sliding_window=16),
    "experts": mixture,
    "experts, chosen by index": lambda: mixture("batched_mm"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_of_a_model_says_what_its_config_says(name):
    model = MODELS[name]()
    graph, config = by_graph(model), by_config(model)
    assert graph.layers == config.layers
    assert replace(graph, assumptions=()) == replace(config, assumptions=())
    assert graph.total_params == sum(p.numel() for p in model.parameters())


def test_soft_caps_and_sinks_cost_what_attention_costs():
    """Refused in a form that is not read: sizes come from the two products around the softmax."""
    model = build_gemma2()
    graph, config = by_graph(model), by_config(model)
    assert [layer.attention for layer in graph.layers] == [
        layer.attention for layer in config.layers
    ]
    assert all(layer.fixed for layer in graph.layers) and not graph.full_attention_layers
    assert not any("not counted" in sentence for sentence in graph.assumptions)
    assert graph.total_params == config.total_params


def build_gemma2():
    config = tf.Gemma2Config(**{**SMALL, "head_dim": 8, "sliding_window": 4096})
    return tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


class Shared(torch.nn.Module):
    """One projection used by two attentions."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96, bias=False)

    def forward(self, x):
        for _ in range(2):
            q, k, v = (p.unflatten(-1, (4, 8)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + y.transpose(1, 2).flatten(2)
        return x


def test_shared_weights_are_held_once_and_used_twice():
    shape = by_graph(Shared(), torch.randn(2, 8, 32))
    assert shape.total_params == 32 * 96
    assert sum(layer.gemm_params for layer in shape.layers) == 2 * 32 * 96


def test_another_width_is_another_shape():
    wider = by_graph(build("llama", intermediate_size=65))
    assert wider.layers[0].mlp_params == by_config(build("llama")).layers[0].mlp_params + 3 * 48


def test_without_a_captured_program_there_is_no_shape():
    bare = replace(sparsify.inspect(tiny_llama(1)), programs=())
    with pytest.raises(UsageError, match="no captured program"):
        sparsify.estimate(bare)


class Block(torch.nn.Module):
    """Attention between two products, of which one runs once per sequence."""

    def __init__(self, width=32, heads=4, causal=True, labels=5):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before = torch.nn.Linear(16, width)
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(width))
        self.label = torch.nn.Linear(width, labels)

    def forward(self, x):
        x = self.before(x) * self.scale
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        y = self.out(y.transpose(1, 2).flatten(2))
        return self.label(y.mean(dim=1))


def test_a_module_without_config():
    shape = by_graph(Block(), torch.randn(2, 8, 16))
    (layer,) = shape.layers
    assert layer.name == "(root)" and layer.kind == "attention" and not layer.fixed
    assert layer.attention == AttentionShape(4, 4, 8, 8)
    assert (layer.qkv_params, layer.output_params) == (3 * 32 * 32, 32 * 32)
    assert layer.mlp_params == 16 * 32  # what stands in front; the labels are no work per token
    assert (shape.head_params, shape.embedding_params) == (0, 0)
    assert shape.hidden_size == 32
    assert shape.total_params == sum(p.numel() for p in Block().parameters())
    assert shape.weight_bytes_per_param == 4


def test_refused_attention_costs_time_and_stays_dense():
    block = Block(causal=False)
    shape = by_graph(block, torch.randn(2, 8, 16))
    assert shape.layers[0].fixed and shape.layers[0].attention == AttentionShape(4, 4, 8, 8)
    assert not shape.full_attention_layers
    assert any("as if it were causal" in sentence for sentence in shape.assumptions)
    with pytest.raises(NothingToDoError, match="no full attention"):
        sparsify.estimate(block, args=(torch.randn(2, 8, 16),))


def test_a_model_without_attention():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    with pytest.raises(NothingToDoError, match="No attention of known size"):
        by_graph(model, torch.randn(2, 8))


def test_estimate_takes_a_module_its_inspection_or_its_config(tmp_path):
    model = tiny_llama()
    model.config.dtype = torch.float32
    model.config.save_pretrained(tmp_path)
    options = dict(gpu="h200", context=[4096, 32_768])
    whole = sparsify.estimate(model, **options)
    found = sparsify.estimate(sparsify.inspect(model), **options)
    told = sparsify.estimate(tmp_path, **options)
    assert [row.to_json() for row in whole.rows] == [row.to_json() for row in told.rows]
    assert [row.to_json() for row in found.rows] == [row.to_json() for row in told.rows]
    assert whole.model == "LlamaForCausalLM" and told.model == tmp_path.name
    assert any("made for 512 tokens" in sentence for sentence in whole.warnings)


def test_a_policy_and_a_plan_of_a_module_make_the_same_rows():
    model = tiny_llama()
    policy = sparsify.Policy.moba(block_size=128, topk=8, dense_last=1)
    found = sparsify.inspect(model)
    plan = sparsify.plan(found, policy)
    rows = [sparsify.estimate(found, what, context=2**15).rows for what in (policy, plan)]
    assert rows[0][0].to_json() == rows[1][0].to_json()
    assert rows[0][0].layers["sparse"] == 2
