"""Tiny random transformers models: every site with the right facts, at other sizes too."""

import dataclasses
import functools

import pytest
import torch
import transformers as tf

from sparsify.ir import HeadLayout, MaskKind, Phase
from sparsify.passes.capture import capture, example_inputs
from sparsify.passes.detect import attention_nodes, detect
from tests._util import facts
from tests._util.tiny_models import FAMILIES, SMALL, build, tokens

HEADS = {"gpt2": HeadLayout(6, 6, 8, 8)}
LAYERS = {"gpt2": "transformer.h.{}.attn"}


@functools.cache
def judged(name, **changes):
    model = build(name, **changes)
    captured = capture(model, (), example_inputs(model))
    return model, captured, detect(captured)


def other_inputs(batch=3, length=29):
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, :7] = 0
    mask[1, -5:] = 0
    return {"input_ids": tokens(batch, length), "attention_mask": mask, "use_cache": False}


@pytest.mark.parametrize("name", FAMILIES)
def test_all_sites_are_proved(name):
    _, captured, found = judged(name)
    assert not found.refusals and not captured.notes and not captured.specialised
    wanted = [LAYERS.get(name, "model.layers.{}.self_attn").format(n) for n in range(3)]
    assert [site.fqn for site in found.sites] == wanted
    assert list(found.order) == [f"{fqn}#0" for fqn in wanted]
    for site in found.sites:
        assert site.heads == HEADS.get(name, HeadLayout(6, 2, 8, 8))
        assert site.scale == pytest.approx(8**-0.5)
        assert (site.mask.kind, site.mask.padding) == (MaskKind.CAUSAL, "attention_mask")
        assert (site.mask.q_offset, site.mask.assumptions) == (0, ())
        assert site.phase == Phase.PREFILL and site.q_len == site.kv_len
        assert site.stream.source and not site.stream.cached and not site.stream.assumptions
        assert "/modeling_" in site.source  # of transformers, however it is installed
    sources = [site.stream.source for site in found.sites]
    assert len(set(sources)) == 3  # each layer has its own hidden state


@pytest.mark.parametrize("name", FAMILIES)
def test_the_facts_give_the_models_numbers_at_another_size(name):
    model, captured, found = judged(name)
    inputs = other_inputs()
    with torch.no_grad():
        wanted = model(**inputs).logits
    got = facts.run(captured, found.sites, (), inputs)[0]
    real = inputs["attention_mask"].bool()
    error = (got - wanted)[real].abs().max() / wanted[real].abs().max()
    assert error < 1e-5


EAGER = (*FAMILIES, "opt", "phi3")


def facts_alone(site):
    """A site without what names the nodes and the lines of its form."""
    mask = dataclasses.replace(site.mask, evidence="")
    stream = dataclasses.replace(site.stream, source="")
    return dataclasses.replace(site, pattern="", source="", mask=mask, stream=stream)


@pytest.mark.parametrize("name", EAGER)
def test_written_out_attention_has_the_facts_of_the_fused_one(name):
    _, _, fused = judged(name)
    _, _, eager = judged(name, attention="eager")
    assert not eager.refusals and len(eager.sites) == 3
    assert [site.pattern for site in eager.sites] == ["softmax"] * 3
    assert list(map(facts_alone, eager.sites)) == list(map(facts_alone, fused.sites))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EAGER)
def test_the_facts_of_written_out_attention_give_the_models_numbers(name, dtype):
    model, captured, found = judged(name, attention="eager", dtype=dtype)
    inputs = other_inputs()
    with torch.no_grad():
        wanted = model(**inputs).logits
    assert len(found.sites) == 3
    got = facts.run(captured, found.sites, (), inputs)[0]
    real = inputs["attention_mask"].bool()
    error = (got - wanted)[real].abs().max() / wanted[real].abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 5e-2)


def test_products_of_float32_in_a_narrow_model_take_the_narrow_operands():
    changes = dict(reorder_and_upcast_attn=True, dtype=torch.bfloat16)
    model, captured, found = judged("gpt2", attention="eager", **changes)
    assert [site.scale for site in found.sites] == [pytest.approx(8**-0.5)] * 3
    inputs = other_inputs()
    with torch.no_grad():
        wanted = model(**inputs).logits
    got = facts.run(captured, found.sites, (), inputs)[0]
    real = inputs["attention_mask"].bool()
    assert (got - wanted)[real].abs().max() / wanted[real].abs().max() < 5e-2


def test_twins_of_eager_models_are_refused():
    _, _, found = judged("mistral", attention="eager", sliding_window=8)
    assert not found.sites and codes(found) == ["SLIDING_WINDOW"] * 3
    model = build("llama", attention="eager", num_hidden_layers=1)
    inputs = {**example_inputs(model), "output_attentions": True}
    assert codes(detect(capture(model, (), inputs))) == ["WEIGHTS_USED"]


def test_the_normalised_program_still_runs_and_is_bit_equal():
    model, captured, _ = judged("llama")
    inputs = other_inputs()
    with torch.no_grad():
        got = captured.program.module()(**inputs)
        wanted = model(**inputs)
    assert torch.equal(got.logits if hasattr(got, "logits") else got[0], wanted.logits)


def codes(found):
    return [refusal.code for refusal in found.refusals]


def test_a_sliding_window_is_told():
    _, _, found = judged("mistral", sliding_window=8)
    assert not found.sites and codes(found) == ["SLIDING_WINDOW"] * 3
    assert "last 8 keys" in found.refusals[0].message


def test_a_window_longer_than_any_example_is_told():
    _, _, found = judged("mistral", sliding_window=4096, num_hidden_layers=1)
    assert codes(found) == ["SLIDING_WINDOW"]


def from_config(config, auto=tf.AutoModelForCausalLM, implementation="sdpa"):
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation=implementation).eval()
    return detect(capture(model, (), example_inputs(model)))


def small(**changes):
    return {**SMALL, "num_hidden_layers": 2, **changes}


def test_a_hybrid_model_keeps_its_windows():
    kinds = ["sliding_attention", "full_attention"]
    config = tf.Gemma3TextConfig(**small(head_dim=8, sliding_window=8, layer_types=kinds))
    found = from_config(config)
    assert [site.fqn for site in found.sites] == ["model.layers.1.self_attn"]
    assert [(r.fqn, r.code) for r in found.refusals] == [
        ("model.layers.0.self_attn", "SLIDING_WINDOW")
    ]


def test_chunks_are_told():
    kinds = ["chunked_attention", "full_attention"]
    config = tf.Llama4TextConfig(
        **small(head_dim=8, attention_chunk_size=8, num_local_experts=2, layer_types=kinds),
        intermediate_size_mlp=32,
        no_rope_layers=[1, 0],
    )
    found = from_config(config)
    assert len(found.sites) == 1 and codes(found) == ["MASK_UNSUPPORTED"]


def test_latent_attention_has_its_own_sizes():
    config = tf.DeepseekV3Config(
        **small(num_key_value_heads=6, first_k_dense_replace=2),
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    found = from_config(config)
    assert [site.heads for site in found.sites] == [HeadLayout(6, 6, 24, 16)] * 2
    assert found.sites[0].scale == pytest.approx(24**-0.5)


def test_one_key_head():
    config = tf.FalconConfig(
        vocab_size=97, hidden_size=48, num_hidden_layers=1, num_attention_heads=6, multi_query=True
    )
    config.new_decoder_architecture = False
    config.alibi = False
    assert from_config(config).sites[0].heads == HeadLayout(6, 1, 8, 8)


def test_a_scale_of_its_own():
    config = tf.GraniteConfig(**small(attention_multiplier=0.05))
    assert from_config(config).sites[0].scale == 0.05


def test_bidirectional_and_biased_models_are_refused():
    sizes = {k: v for k, v in small().items() if k != "num_key_value_heads"}
    assert codes(from_config(tf.BertConfig(**sizes), tf.AutoModel)) == ["NOT_CAUSAL"] * 2
    t5 = tf.T5Config(vocab_size=97, d_model=48, d_kv=8, d_ff=64, num_layers=2, num_heads=6)
    found = from_config(t5, tf.AutoModelForSeq2SeqLM)
    assert not found.sites
    assert codes(found) == [*["LOGIT_BIAS"] * 2, *["LOGIT_BIAS", "CROSS_ATTENTION"] * 2]


@pytest.mark.parametrize(
    ("config", "code"),
    [
        (lambda: tf.Gemma2Config(**small(head_dim=8)), "SOFTCAP"),
        (
            lambda: tf.GptOssConfig(
                **small(head_dim=8, num_local_experts=2, num_experts_per_tok=1)
            ),
            "ATTENTION_SINK",
        ),
        (lambda: tf.BloomConfig(vocab_size=97, hidden_size=48, n_layer=2, n_head=6), "LOGIT_BIAS"),
    ],
    ids=["softcap", "sinks", "alibi"],
)
def test_eager_models_are_found_and_refused(config, code):
    found = from_config(config(), implementation="eager")
    assert not found.sites and codes(found) == [code] * 2


def captured_llama(**inputs):
    model = build("llama", num_hidden_layers=1)
    return detect(capture(model, (), {"use_cache": False, **inputs}))


def test_without_a_padding_mask():
    site = captured_llama(input_ids=tokens(2, 16)).sites[0]
    assert (site.mask.kind, site.mask.padding) == (MaskKind.CAUSAL, None)


def test_positions_given_by_the_user_may_be_documents():
    positions = torch.arange(16).expand(2, 16).clone()
    (site,) = captured_llama(input_ids=tokens(2, 16), position_ids=positions).sites
    assert site.mask.kind == MaskKind.DOCUMENT and not site.mask.assumptions
    assert "cumsum" in site.mask.documents
    padded = captured_llama(
        input_ids=tokens(2, 16), position_ids=positions, attention_mask=torch.ones_like(positions)
    )
    assert padded.sites[0].mask.padding == "attention_mask"


def test_a_mask_of_four_axes_is_not_known():
    mask = torch.ones(2, 1, 16, 16, dtype=torch.bool).tril()
    assert codes(captured_llama(input_ids=tokens(2, 16), attention_mask=mask)) == ["MASK_UNPROVED"]


def test_a_batch_of_one():
    site = captured_llama(
        input_ids=tokens(1, 16), attention_mask=torch.ones(1, 16, dtype=torch.int64)
    ).sites[0]
    assert site.mask.padding == "attention_mask"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("length", "phase"), [(1, Phase.DECODE), (5, Phase.CHUNKED_PREFILL)])
def test_a_cache_before_the_tokens(length, phase, attention):
    dynamo = pytest.importorskip("transformers.exporters.exporter_dynamo")
    model = build("llama", num_hidden_layers=1, attention=attention)
    dynamo.register_cache_pytrees_for_model(model)
    cache = tf.DynamicCache(config=model.config)
    name = "cache" if "cache" in model.forward.__code__.co_varnames else "past_key_values"
    with torch.no_grad():
        model(input_ids=tokens(2, 16), use_cache=True, **{name: cache})
    inputs = {
        "input_ids": tokens(2, length),
        "attention_mask": torch.ones(2, 16 + length, dtype=torch.int64),
        "use_cache": True,
        name: cache,
    }
    (site,) = detect(capture(model, (), inputs)).sites
    assert (site.phase, site.stream.cached) == (phase, True)
    assert site.mask.padding == "attention_mask" and site.heads == HeadLayout(6, 2, 8, 8)


def test_nodes_and_sites_have_the_same_keys():
    _, captured, found = judged("llama")
    assert [f"{fqn}#{n}" for fqn, n in attention_nodes(captured)] == list(found.order)
