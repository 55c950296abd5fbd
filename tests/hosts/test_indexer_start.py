"""What a learned indexer starts with: as wide as all groups' keys it chooses as the proxy does, and
narrower still better than by chance."""

import logging
import os
from pathlib import Path

import pytest
import torch
import transformers as tf

from sparsify.errors import CaptureError
from sparsify.hosts import transformers as host
from sparsify.hosts.index_start import gain_of
from sparsify.hosts.indexers import indexers_of
from sparsify.hosts.rotary import Rotary, rotary_of
from sparsify.indexers import MSAIndexer, turning_columns
from sparsify.kernels.selection import record_selection
from sparsify.quality import measure_recall
from tests._util.planned import plan_for, rewrite
from tests._util.tiny_models import SMALL, build, tokens

PARTIAL = dict(partial_rotary_factor=0.5)
MODELS = {
    "llama": lambda: build("llama"),
    "with biases": lambda: build("qwen2"),
    "fused projections": lambda: build("phi3"),
    "half of a head turns": lambda: build("phi3", **PARTIAL),
    "no rotary, Conv1D": lambda: build("gpt2"),
    "no rotary": lambda: build("opt"),
    "interleaved tables": lambda: other(tf.CohereConfig),
    "neighbours, half of a head": lambda: other(tf.GlmConfig, head_dim=8, **PARTIAL),
}


def other(config, **changes):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config(**{**SMALL, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


def uneven(model):
    """In float64, its norms and biases no longer at ones and zeros."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.double().parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.3 * noise)
    return model


def first_choice(model, ids):
    """Blocks that the first layer chooses; the layers behind it see other hidden states."""
    with record_selection() as chosen, torch.no_grad():
        model(ids, use_cache=False)
    return chosen


def differing(model, width, change=lambda indexer: None):
    ids = tokens(1, 120)
    wanted = first_choice(rewrite(model, "msa"), ids)
    made = rewrite(model, "msa", indexer="learned", index_dim=width)
    for indexer in indexers_of(made).values():
        change(indexer)
    return next(iter(wanted.diff(first_choice(made, ids)).values())).differing


def full_width(model):
    config = model.config
    heads = config.num_attention_heads
    return (getattr(config, "num_key_value_heads", None) or heads) * (config.hidden_size // heads)


@pytest.mark.parametrize("name", MODELS)
def test_with_room_for_all_groups_it_chooses_as_the_proxy_does(name):
    model = uneven(MODELS[name]())
    assert differing(model, full_width(model)) == 0


@pytest.mark.parametrize("name", ["llama", "no rotary"])
def test_with_less_room_it_does_not_always(name):
    model = uneven(MODELS[name]())
    assert differing(model, full_width(model) // 2) > 0


@torch.no_grad()
def test_channels_in_another_order_would_choose_otherwise():
    def swap(indexer):
        indexer.k_proj.weight.copy_(indexer.k_proj.weight.flip(0))

    assert differing(uneven(build("llama")), 16, swap) > 20


def recall(model, ids):
    found = [row.score_recall for row in measure_recall(model, ids)]
    return sum(found) / len(found)


def at_random(model):
    torch.manual_seed(1)
    for indexer in indexers_of(model).values():
        indexer.q_proj.reset_parameters()
        indexer.k_proj.reset_parameters()
    return model


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("width", [24, 32])
def test_recall_is_better_than_by_chance(name, width):
    heads = dict(n_head=2) if name == "gpt2" else dict(num_attention_heads=2, num_key_value_heads=2)
    heads |= dict(head_dim=24) if name == "qwen3" else {}
    model, ids = build(name, **heads), tokens(1, 200)
    made = rewrite(model, "msa", indexer="learned", index_dim=width)
    started, proxy = recall(made, ids), recall(rewrite(model, "msa"), ids)
    chance = recall(at_random(made), ids)
    assert chance + (proxy - chance) / 4 < started < proxy + 0.02


REAL = Path(os.environ.get("SPARSIFY_CACHE_DIR") or Path.home() / ".cache/sparsify") / "demo"


@pytest.mark.slow
@pytest.mark.parametrize(("width", "least", "chance"), [(32, 0.68, 0.55), (128, 0.78, 0.53)])
def test_recall_on_a_pretrained_model(width, least, chance):
    """SmolLM2-135M, blocks of 32, top 4, 1,024 tokens of the licence: 0.82 by the proxy, 0.71 at
    width 32, 0.78 at 64, 0.81 at 128, and 0.47 to 0.50 by random projections."""
    files = list(REAL.glob("SmolLM2-135M*.gguf"))
    if not files:
        pytest.skip("the model of `make demo` is not there")
    from sparsify.sources import load_model

    loaded = load_model(str(files[0]))
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"][:, :1024]
    sizes = dict(block_size=32, topk=4, indexer="learned", index_dim=width)
    model = rewrite(loaded.model, "msa", dense=range(1, 30, 2), **sizes)
    assert recall(model, ids) > least
    assert recall(at_random(model), ids) < chance


def test_unknown_projections_start_at_random_with_a_warning(caplog):
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.k_proj = torch.nn.Sequential(layer.self_attn.k_proj)
    with caplog.at_level(logging.WARNING):
        host.apply(model, plan_for(model, "msa", indexer="learned", index_dim=8))
    assert "starts at random" in caplog.text
    assert not any("starts at random" in text for text in _told(caplog, build("llama")))


def _told(caplog, model):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        host.apply(model, plan_for(model, "msa", indexer="learned", index_dim=8))
    return [record.getMessage() for record in caplog.records]


def test_rotary_tables_are_known_by_their_numbers():
    found = {}
    for name in ("llama", "half of a head turns", "no rotary", "interleaved tables"):
        model = MODELS[name]()
        (fqn, module), *_ = [
            (n, m) for n, m in model.named_modules() if n.endswith(("self_attn", ".attn"))
        ]
        found[name] = rotary_of(model, module, fqn, 8)
    assert found == {
        "llama": Rotary(8),
        "half of a head turns": Rotary(4),
        "no rotary": Rotary(),
        "interleaved tables": Rotary(8, True, True),
    }


@pytest.mark.parametrize("fault", ["other numbers", "none", "no table"])
def test_rotary_tables_that_are_not_understood(fault):
    class Odd(torch.nn.Module):
        def forward(self, x, position_ids):
            numbers = torch.rand(1, position_ids.shape[1], 8)
            return None if fault == "none" else (numbers, numbers)

    model = build("llama")
    model.model.rotary_emb = None if fault == "no table" else Odd()
    with pytest.raises(CaptureError, match="rotary tables"):
        host.apply(model, plan_for(model, "msa", indexer="learned", index_dim=8))
    assert indexers_of(model) == {}


def test_columns_are_the_slowest_frequencies_once_or_more():
    assert turning_columns(8, 16, 16, 2) == [4, 5, 6, 7, 12, 13, 14, 15]
    assert turning_columns(16, 16, 16, 2) == [
        4,
        5,
        6,
        7,
        4,
        5,
        6,
        7,
        12,
        13,
        14,
        15,
        12,
        13,
        14,
        15,
    ]
    assert turning_columns(4, 16, 16, 2, interleaved=True) == [12, 14, 13, 15]
    assert turning_columns(8, 16, 8, 1) == [2, 3, 6, 7]
    assert turning_columns(8, 16, 0, 2) == turning_columns(1, 16, 16, 2) == []


def test_an_indexer_loads_the_weights_of_minimax_m3():
    module = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    config = tf.CONFIG_MAPPING["minimax_m3_vl_text"](
        hidden_size=48, index_n_heads=2, index_head_dim=8, num_hidden_layers=1
    )
    theirs = module.MiniMaxM3VLIndexer(config, 0)
    torch.nn.init.normal_(theirs.q_norm.weight)
    ours = MSAIndexer(48, 2, 8, columns=range(4), norm=True)
    ours.load_state_dict(theirs.state_dict())
    x, angles = torch.randn(2, 5, 48), torch.randn(2, 5, 2).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    queries = theirs.q_norm(theirs.q_proj(x).view(2, 5, 2, 8)).transpose(1, 2)
    keys = theirs.k_norm(theirs.k_proj(x).view(2, 5, 1, 8)).transpose(1, 2)
    wanted = module.apply_rotary_pos_emb(queries, keys, cos, sin)
    assert all(map(torch.equal, ours(x, (cos, sin)), wanted))


def test_the_gain_of_a_norm_is_seen_from_outside():
    class Gemma(torch.nn.RMSNorm):
        def forward(self, x):
            return torch.nn.functional.rms_norm(x, (6,)) * (1 + self.weight)

    weight = torch.tensor([1.0, 2, -3, 4, 5, 0.5])
    for norm, gain in ((torch.nn.LayerNorm(6), 0), (torch.nn.RMSNorm(6), 0), (Gemma(6), 1)):
        norm.weight.data.copy_(weight)
        assert torch.allclose(gain_of(norm, 6), weight + gain, rtol=1e-4)
    assert gain_of(torch.nn.LayerNorm(6), 8) is None and gain_of(None, 6) is None
