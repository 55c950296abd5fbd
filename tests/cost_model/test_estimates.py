"""Estimates: their JSON, what they never claim, and the sentences they say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparsify.cost_model.calibration import Calibration, FamilyEfficiency
from sparsify.cost_model.configuration import DENSE, PUBLISHED, Configuration
from sparsify.cost_model.hardware import load_gpu
from sparsify.cost_model.layer_cost import crossover_tokens
from sparsify.cost_model.limits import speedup_limit
from sparsify.cost_model.workload import AttentionShape, ElementBytes, Phase
from sparsify.errors import NothingToDoError, UnknownGpuError, UsageError
from sparsify.estimates import estimate
from sparsify.model_files import read_model
from sparsify.plans import LayerPlan, Plan
from sparsify.policy import Policy, load_policy
from sparsify.verdicts import short_tokens

CONFIGS = Path(__file__).parent / "configs"
LLAMA, QWEN, M3 = (
    CONFIGS / f"{name}.json" for name in ("llama-3.1-8b", "qwen3-32b", "minimax-m3-text")
)
PROXY = Configuration("msa", 128, 16, "proxy")
LEARNED = Configuration("msa", 128, 16, "learned", 128)
DOCUMENT = [
    "schema",
    "model",
    "gpu",
    "rows",
    "crossover_tokens",
    "verdict",
    "assumptions",
    "warnings",
    "sensitivity",
    "versions",
]
ROW = [
    "context",
    "phase",
    "batch",
    "method",
    "block_size",
    "topk",
    "indexer",
    "label",
    "needs_training",
    "dense",
    "sparse",
    "speedup",
    "end_to_end",
    "memory",
    "dense_memory",
    "layers",
    "crossover_tokens",
]
PHASES = ("prefill", "decode", "training")


def ranges(block):
    return block["low"], block["expected" if "expected" in block else "speedup"], block["high"]


def test_the_json_has_these_fields_and_no_others():
    document = estimate(LLAMA, context=131_072).to_json()
    assert json.loads(json.dumps(document)) == document
    assert list(document) == DOCUMENT
    assert document["schema"] == 1 and document["gpu"] == "H200-SXM-141GB"
    assert len(document["rows"]) == len(PUBLISHED)
    row = document["rows"][4]
    assert list(row) == ROW
    assert set(row["dense"]) == {"flops", "bytes", "ms", "source", "low_ms", "high_ms"}
    assert set(row["sparse"]) == {*row["dense"], "stages"}
    assert set(row["speedup"]) == {"flops", "bound", "expected", "low", "high"}
    assert set(row["end_to_end"]) == {"attention_share", "speedup", "low", "high"}
    assert (row["method"], row["block_size"], row["topk"]) == ("msa", 128, 16)
    assert row["indexer"] == "learned"
    assert row["layers"] == dict(sparse=32, dense=0, sliding=0, recurrent=0, feed_forward=0)
    assert sum(stage["flops"] for stage in row["sparse"]["stages"]) == row["sparse"]["flops"]
    memory = row["memory"]
    assert memory["gpu_bytes"] == 141e9 and memory["fits"] is True


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("path", [LLAMA, QWEN, M3])
@pytest.mark.parametrize("gpu", ["h200", "a100", "mi300x"])
def test_nothing_promised_is_above_the_bound_or_the_methods_limit(phase, path, gpu):
    found = estimate(path, gpu=gpu, context=[4096, 2**15, 2**20], phase=phase)
    shape, device = read_model(path).layers[-1].attention, load_gpu(gpu)
    for row in found.rows:
        gain, whole = row.speedup, row.end_to_end
        limit = speedup_limit(row.configuration, shape, Phase(phase), device, ElementBytes())
        assert gain.low <= gain.expected <= gain.high <= gain.bound
        assert gain.high <= limit
        assert whole.low <= whole.speedup <= whole.high <= whole.bound + 1e-12
        assert 0 < whole.attention_share < 1
        assert row.dense.time.bound_ms <= row.dense.time.low_ms
        assert row.dense.time.low_ms <= row.dense.time.expected_ms <= row.dense.time.high_ms


H200 = load_gpu("h200")
LLAMA_HEADS, QWEN_HEADS = AttentionShape(32, 8, 128, 128), AttentionShape(64, 8, 128, 128)


@pytest.mark.parametrize(
    ("configuration", "heads", "phase", "limit"),
    [
        (LEARNED, LLAMA_HEADS, Phase.PREFILL, 8),
        (PROXY, LLAMA_HEADS, Phase.PREFILL, 8),
        (LEARNED, QWEN_HEADS, Phase.PREFILL, 16),
        (PROXY, QWEN_HEADS, Phase.PREFILL, 16),
        (Configuration("msa", 128, 16, "learned", 64), LLAMA_HEADS, Phase.PREFILL, 16),
        (LEARNED, AttentionShape(64, 4, 128, 128), Phase.PREFILL, 32),
        (LEARNED, AttentionShape(64, 4, 128, 128), Phase.DECODE, 8),
        (LEARNED, LLAMA_HEADS, Phase.DECODE, 16),
        (PROXY, LLAMA_HEADS, Phase.DECODE, 2),
        (Configuration("moba", 128, 8), LLAMA_HEADS, Phase.PREFILL, 256),
        (Configuration("moba", 4096, 12, decode="dense"), LLAMA_HEADS, Phase.DECODE, 1),
        (LEARNED, LLAMA_HEADS, Phase.TRAINING, 28),
        (Configuration("moba", 128, 8), LLAMA_HEADS, Phase.TRAINING, 896),
        (LEARNED, AttentionShape(64, 64, 192, 64), Phase.TRAINING, 2 * 3.75),
        (DENSE, LLAMA_HEADS, Phase.PREFILL, float("inf")),
    ],
)
def test_limits_of_methods(configuration, heads, phase, limit):
    assert speedup_limit(configuration, heads, phase, H200, ElementBytes()) == limit


def test_small_index_elements_raise_the_limit_where_the_gpu_has_fp8():
    small = ElementBytes(index=1)
    shape = AttentionShape(64, 4, 128, 128)
    assert speedup_limit(LEARNED, shape, Phase.DECODE, H200, small) == 16
    fast = speedup_limit(LEARNED, shape, Phase.PREFILL, H200, small)
    assert fast == pytest.approx(64, rel=0.001)
    a100 = load_gpu("a100")
    assert speedup_limit(LEARNED, shape, Phase.PREFILL, a100, small) == 32
    assert speedup_limit(PROXY, shape, Phase.PREFILL, H200, small) == 32


def test_a_claim_above_the_limit_is_cut():
    # Sparse kernels near their bound, dense ones far from it: the ratio alone would be 37.
    stages = estimate(LLAMA, LEARNED, context=2**20).rows[0].sparse.stages
    names = {stage.family for stage in stages}
    shares = {**dict.fromkeys(names, 1.0), "dense_prefill": 0.2, "dense_decode": 1.0}
    entries = tuple(
        FamilyEfficiency(family=name, efficiency=share, error=0, points=1, contexts=(1, 2**20))
        for name, share in shares.items()
    )
    eager = Calibration.model_construct(gpu=H200.name, families=entries)
    row = estimate(LLAMA, LEARNED, context=2**20, calibration=eager).rows[0]
    assert row.dense.time.expected_ms / row.sparse.time.expected_ms > row.speedup.bound
    assert row.speedup.expected == min(row.speedup.bound, 8)


def test_rows_are_contexts_times_configurations_in_order():
    found = estimate(LLAMA, context=[2**17, 2**15])
    assert [row.context_tokens for row in found.rows] == [2**17] * 5 + [2**15] * 5
    assert [row.configuration for row in found.rows] == [*PUBLISHED, *PUBLISHED]
    assert {row.batch for row in found.rows} == {1}


def test_ratios_are_of_what_is_shown():
    row = estimate(QWEN, PROXY, context=2**17).rows[0]
    assert row.speedup.flops == row.dense.flops / row.sparse.flops
    assert row.speedup.bound == row.dense.time.bound_ms / row.sparse.time.bound_ms
    share, gain = row.end_to_end.attention_share, row.speedup.expected
    assert row.end_to_end.speedup == pytest.approx(1 / (1 - share + share / gain))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("gpu", ["h200", "l4"])
def test_speedups_agree_with_the_times_beside_them(phase, gpu):
    """From one token to ten million; only what goes beyond a limit is cut."""
    sizes = [1, 2, 129, 4097, 2**15, 2**20, 10 * 2**20]
    for row in estimate(LLAMA, gpu=gpu, phase=phase, context=sizes).rows:
        ratio = row.dense.time.expected_ms / row.sparse.time.expected_ms
        assert row.speedup.expected == pytest.approx(min(ratio, row.speedup.bound), rel=1e-9)
        if row.context_tokens < 1000:
            assert 0.03 < row.speedup.expected <= row.speedup.bound <= 1.05


def test_dense_attention_has_its_own_memory():
    found = estimate(LLAMA, context=[2**15, 2**17])
    for row in found.rows:
        dense = estimate(LLAMA, DENSE, context=row.context_tokens).rows[0].memory
        assert row.dense_memory == dense
        assert dense.workspace_bytes == dense.index_cache_bytes == 0
    assert {row.memory.workspace_bytes > 0 for row in found.rows} == {True}


def test_what_is_not_known_of_attentions_share_is_in_the_range(tmp_path):
    text = (Path(__file__).parents[2] / "cost_model/gpus/h200-sxm-141gb.yaml").read_text()
    bare = tmp_path / "bare.yaml"
    bare.write_text(text[: text.index("measured:")])
    known, unknown = (estimate(QWEN, PROXY, gpu=gpu, context=2**17) for gpu in ("h200", str(bare)))
    spans = [row.end_to_end.high / row.end_to_end.low for row in (*known.rows, *unknown.rows)]
    assert spans[1] > 1.05 * spans[0]
    # With an equal range of attention's gain, only the share makes the difference.
    gains = [row.speedup.high / row.speedup.low for row in (*known.rows, *unknown.rows)]
    assert gains[1] == pytest.approx(gains[0], rel=0.02)


def test_rules_keep_layers_dense():
    policy = Policy.msa(block_size=128, topk=16, dense_last=3)
    some, full = (estimate(LLAMA, p, context=2**17).rows[0] for p in (policy, PROXY))
    assert some.layers["sparse"] == 29 and some.layers["dense"] == 3
    dense = full.dense.flops
    assert some.sparse.flops == full.sparse.flops * 29 // 32 + dense * 3 // 32
    assert 1 < some.speedup.expected < full.speedup.expected
    assert {stage.family for stage in some.sparse.stages} > {"dense_prefill"}


def test_globs_match_the_names_of_layers():
    policy = Policy.moba(
        block_size=128,
        topk=8,
        layers=[{"match": "model.layers.[0-4].*", "method": "dense"}],
    )
    assert estimate(LLAMA, policy, context=2**15).rows[0].layers["sparse"] == 27
    with pytest.raises(UsageError, match="matches none of the 32 attention sites"):
        wrong = Policy.dense(layers=[{"match": "transformer.*", "method": "dense"}])
        estimate(LLAMA, wrong, context=2**15)


def test_a_policy_that_is_dense_changes_nothing():
    found = estimate(LLAMA, Policy.dense(), context=2**15)
    (row,) = found.rows
    assert row.speedup.expected == row.speedup.bound == row.end_to_end.speedup == 1
    assert row.crossover_tokens is None
    assert "Nothing is sparse" in found.verdict


def test_below_min_context_a_policy_is_dense():
    policy = Policy.msa(block_size=128, topk=16, min_context=2**16)
    short, long = estimate(QWEN, policy, context=[2**15, 2**17]).rows
    assert short.layers["sparse"] == 0 and short.speedup.expected == 1
    assert long.layers["sparse"] == 64 and long.speedup.flops > 1
    assert short.crossover_tokens >= 2**16


def test_the_published_policies():
    kimi = estimate(LLAMA, load_policy("kimi-1m"), context=2**20).rows[0]
    assert (kimi.configuration.block_size, kimi.layers["dense"]) == (4096, 3)
    step = estimate(LLAMA, load_policy("kimi-1m"), context=2**20, phase="decode").rows[0]
    assert step.speedup.expected == 1


def test_auto_has_no_sizes():
    with pytest.raises(UsageError, match="auto"):
        estimate(LLAMA, Policy.auto(), context=2**15)


def plan(**changes):
    layer = dict(
        fqn="model.layers.3.self_attn",
        ordinal=0,
        method="moba",
        status="rewritten",
        reason="",
        block_size=128,
        topk=8,
    )
    return Plan((LayerPlan(**{**layer, **changes}),), {}, "x")


def test_a_plan_is_estimated_by_its_layers():
    row = estimate(LLAMA, plan(), context=2**17).rows[0]
    assert (row.layers["sparse"], row.layers["dense"]) == (1, 31)
    with pytest.raises(UsageError, match=r"rewrites h\.3\.attn, which llama.* does not have"):
        estimate(LLAMA, plan(fqn="h.3.attn"), context=2**17)


def test_the_crossover_is_that_of_a_layer():
    found = estimate(QWEN, PROXY, context=2**17)
    alone = crossover_tokens(
        QWEN_HEADS, PROXY, H200, phase=Phase.PREFILL, hidden_size=5120, calibration=None
    )
    assert found.crossover_tokens == found.rows[0].crossover_tokens
    assert 2**10 < found.crossover_tokens < 2**20
    assert found.crossover_tokens == pytest.approx(alone, rel=0.35)  # without the calibration


def test_below_the_crossover_dense_is_faster_and_above_it_is_not():
    tokens = estimate(QWEN, PROXY, context=2**17).crossover_tokens
    below, above = estimate(QWEN, PROXY, context=[tokens - 1, tokens]).rows
    assert below.speedup.expected <= 1 < above.speedup.expected * (1 + 1e-9)
    assert below.end_to_end.speedup <= 1


NUMBER = r"(\d+\.\d\d)"


def test_the_verdict_says_what_the_row_holds():
    found = estimate(QWEN, PROXY, context=2**17)
    whole = found.rows[0].end_to_end
    said = re.fullmatch(
        rf"MSA proxy 128/16: dense is probably faster below [\d,]+ tokens on H200-SXM-141GB; "
        rf"at 128K expect {NUMBER}-{NUMBER}x end to end \(bound {NUMBER}x\)(.*)\.",
        found.verdict,
    )
    assert said is not None, found.verdict
    shown = [float(number) for number in said.groups()[:3]]
    assert shown == pytest.approx([whole.low, whole.high, whole.bound], abs=0.005)
    assert (said[4] == ", so it may be slower") == (whole.low < 1)


def test_the_verdict_names_the_best_of_several():
    found = estimate(QWEN, context=[2**15, 2**20])
    longest = [row for row in found.rows if row.context_tokens == 2**20]
    best = max(longest, key=lambda row: row.end_to_end.speedup)
    assert found.verdict.startswith(f"{best.configuration.label}, the fastest of 5 at 1M: ")
    assert found.crossover_tokens == best.crossover_tokens
    assert any("speed only" in sentence for sentence in found.assumptions)


def test_the_verdict_never_calls_a_loss_a_gain():
    for context in (1024, 8192, 2**15):
        for configuration in PUBLISHED:
            found = estimate(LLAMA, configuration, context=context)
            whole = found.rows[0].end_to_end
            assert ("no gain" in found.verdict) == (whole.high <= 1)
            assert ("may be slower" in found.verdict) == (whole.low < 1 < whole.high)


def test_a_mixed_policy_is_named_by_all_that_is_in_it():
    learned = {"name": "msa", "block_size": 128, "topk": 16, "indexer": "learned"}
    policy = Policy.moba(
        block_size=128, topk=8, layers=[{"match": "-3:", "method": learned | {"index_dim": 128}}]
    )
    found = estimate(LLAMA, policy, context=2**16)
    (row,) = found.rows
    assert row.configuration.label == "MoBA 128/8"
    assert row.label == "MoBA 128/8 and MSA learned 128/16" and row.needs_training
    assert found.verdict.startswith(f"{row.label} (once its indexer is trained): dense is")
    assert any("learned indexer" in text for text in found.assumptions)
    plain = estimate(LLAMA, Policy.moba(block_size=128, topk=8), context=2**16).rows[0]
    assert plain.label == "MoBA 128/8" and not plain.needs_training


def test_an_untrained_indexer_is_named_in_the_verdict():
    said = estimate(QWEN, LEARNED, context=2**17).verdict
    assert said.startswith("MSA learned 128/16 (once its indexer is trained): dense ")
    assert "trained" not in estimate(QWEN, PROXY, context=2**17).verdict


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (900, "900"),
        (1024, "1K"),
        (17_613, "17,600"),
        (2**17, "128K"),
        (2**20, "1M"),
        (2**30, "1,024M"),
        (1_000_000, "1,000,000"),
    ],
)
def test_contexts_are_short(tokens, said):
    assert short_tokens(tokens) == said


def test_where_dense_always_wins_the_verdict_says_so():
    config = dict(json.loads(LLAMA.read_text()), num_key_value_heads=32)
    # One query head per key head: scoring with the keys costs half of what attention does.
    found = estimate(config, PROXY, context=2**17)
    assert found.crossover_tokens is None
    assert "dense is probably faster at every context on H200" in found.verdict


def test_steps_that_a_policy_leaves_dense_are_equal():
    found = estimate(LLAMA, load_policy("kimi-1m"), context=2**17, phase="decode")
    (row,) = found.rows
    assert row.layers["sparse"] == 0 and row.crossover_tokens is None
    assert ranges(row.to_json()["speedup"]) == ranges(row.to_json()["end_to_end"]) == (1, 1, 1)
    assert found.verdict == "Nothing is sparse in a decode step: all attention stays dense."


def test_layers_that_stay_dense_have_no_range_of_their_own():
    one = dict(json.loads(LLAMA.read_text()), num_hidden_layers=2)
    policy = Policy.msa(block_size=128, topk=16, dense_last=1)
    (row,) = estimate(one, policy, context=2**20).rows
    # Half the attention stays: no gain of the other half makes more than 2 of the whole.
    assert 0.5 < row.speedup.low < row.speedup.expected < row.speedup.high < 2


def test_what_does_not_fit_is_warned_of_with_figures():
    found = estimate(LLAMA, PROXY, context=[2**15, 2**20], batch=2)
    said = [sentence for sentence in found.warnings if "do not fit" in sentence]
    assert len(said) == 1 and said[0].startswith("At 1M with a batch of 2, weights (16.1 GB)")
    assert "caches (274.9 GB)" in said[0] and "141 GB" in said[0]
    assert [row.fits for row in found.rows] == [True, False]


def test_contexts_beyond_the_model_are_warned_of():
    said = estimate(LLAMA, PROXY, context=2**20).warnings
    assert any("made for 128K tokens; 1M are beyond" in sentence for sentence in said)
    assert not any("beyond" in s for s in estimate(LLAMA, PROXY, context=2**17).warnings)


def test_unverified_figures_are_warned_of_only_where_used(tmp_path):
    text = (Path(__file__).parents[2] / "cost_model/gpus/h200-sxm-141gb.yaml").read_text()
    rough = re.sub(
        r"memory_bandwidth_gbs:\n  value: 4800\n  source: .*", "\\g<0>\n  verified: false", text
    )
    file = tmp_path / "mine.yaml"
    file.write_text(rough)
    said = estimate(LLAMA, PROXY, gpu=str(file), context=2**15).warnings
    assert any("not traced to its vendor: memory_bandwidth_gbs" in s for s in said)
    assert not any("traced" in s for s in estimate(LLAMA, PROXY, context=2**15).warnings)


def test_sensitivity_names_winners_and_warns_when_they_change():
    found = estimate(QWEN, PROXY, context=[2048, 2**20])
    table = {(row.context_tokens, row.scale): row.winner for row in found.sensitivity}
    assert {table[2048, scale] for scale in (0.5, 1, 2)} == {"dense"}
    assert {table[2**20, scale] for scale in (0.5, 1, 2)} == {"MSA proxy 128/16"}
    assert not any("times the efficiency" in sentence for sentence in found.warnings)
    near = estimate(QWEN, PROXY, context=int(found.crossover_tokens * 1.1))
    assert near.sensitivity[0].winner == "dense"
    assert near.sensitivity[0].speedup == 1
    assert any("dense at 0.5 times the efficiency" in sentence for sentence in near.warnings)


def test_assumptions_are_said():
    m3 = estimate(M3, context=2**15)
    for part in ("natively sparse", "last position only", "experts evenly", "what-if"):
        assert any(part in sentence for sentence in m3.assumptions), part
    assert len(set(m3.assumptions)) == len(m3.assumptions)
    llama = estimate(LLAMA, PROXY, context=2**15, phase="decode", tensor_parallel=2)
    for part in ("every weight once", "each of 2 GPUs"):
        assert any(part in sentence for sentence in llama.assumptions), part
    for part in ("last position", "experts", "what-if"):
        assert not any(part in sentence for sentence in llama.assumptions), part


def test_fp8_without_fp8_units_is_said():
    said = "A100-SXM4-80GB has no fp8 products: elements of one byte are multiplied as bf16."
    small = {"context": 2**15, "index_bytes": 1}
    assert said in estimate(LLAMA, LEARNED, gpu="a100", **small).assumptions
    for other in (
        estimate(LLAMA, LEARNED, gpu="h100", **small),
        estimate(LLAMA, LEARNED, gpu="a100", context=2**15),
    ):
        assert not any("fp8" in text for text in other.assumptions)


def test_native_sparse_models_are_estimated_as_if_dense():
    row = estimate(M3, LEARNED, context=2**20).rows[0]
    assert row.layers["sparse"] == 60
    assert row.speedup.flops == pytest.approx(256 / 9, rel=0.02)


def test_index_bytes_shrink_the_index():
    wide, narrow = (
        estimate(M3, LEARNED, context=2**17, phase="decode", index_bytes=size).rows[0]
        for size in (2, 1)
    )
    assert narrow.memory.index_cache_bytes == wide.memory.index_cache_bytes / 2
    assert narrow.speedup.bound > wide.speedup.bound


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(context=0), "The context is 0"),
        (dict(context=-5), "The context is -5"),
        (dict(context=2**31), "The context is 2147483648"),
        (dict(context=[]), "No context"),
        (dict(context=[1024, "x"]), "The context is 'x'"),
        (dict(context=True), "The context is True"),
        (dict(batch=0), "The batch is 0"),
        (dict(tensor_parallel=0), "tensor_parallel is 0"),
        (dict(tensor_parallel=7), "degree of 7"),
        (dict(phase="warmup"), "The phase is 'warmup'"),
        (dict(phase=None), "The phase is None"),
        (dict(context="32k"), "The context is '32k'"),
        (dict(context=None), "The context is None"),
        (dict(context=32768.0), "The context is 32768.0"),
        (dict(index_bytes=0), "The bytes of an element (index) are 0;"),
        (dict(index_bytes=float("nan")), "The bytes of an element (index) are nan;"),
        (dict(index_bytes="fp8"), "The bytes of an element (index) are 'fp8';"),
        (dict(element_bytes=1), "element_bytes is a int; it must be an ElementBytes."),
        (dict(calibration=3), "The calibration is a int; it must be a file."),
        (dict(gpu=None), "The GPU is a NoneType; it must be a name or a file."),
    ],
)
def test_what_makes_no_sense_is_one_sentence(options, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        estimate(LLAMA, PROXY, **{"context": 1024, **options})


@pytest.mark.parametrize("what", ["msa-m3", 7, [], [PROXY, "x"], Path("policy.yaml")])
def test_what_is_no_policy_is_refused(what):
    with pytest.raises(UsageError, match=r"^policy is a "):
        estimate(LLAMA, what, context=1024)


def test_what_is_no_model_is_refused():
    with pytest.raises(UsageError, match="model is a int"):
        estimate(7, PROXY, context=1024)


def test_unknown_gpus_and_models():
    with pytest.raises(UnknownGpuError, match="h2000"):
        estimate(LLAMA, gpu="h2000")
    with pytest.raises(UsageError, match="no file or folder"):
        estimate("missing.json")


def test_a_context_of_one_token_is_a_context():
    for phase in PHASES:
        for row in estimate(LLAMA, context=1, phase=phase).rows:
            assert row.end_to_end.low > 0


def test_a_model_of_recurrences_only_has_nothing_to_do():
    config = dict(json.loads(LLAMA.read_text()), layer_types=["linear_attention"] * 32)
    with pytest.raises(NothingToDoError, match="no full attention"):
        estimate(config)


def test_hybrids_gain_in_their_attention_only():
    kinds = ["full_attention", "sliding_attention", "linear_attention", "sliding_attention"] * 8
    config = dict(json.loads(LLAMA.read_text()), layer_types=kinds, sliding_window=1024)
    found = estimate(config, PROXY, context=2**17)
    (row,) = found.rows
    assert row.layers == dict(sparse=8, dense=0, sliding=16, recurrent=8, feed_forward=0)
    full = estimate(LLAMA, PROXY, context=2**17).rows[0]
    assert row.speedup.flops < full.speedup.flops
    assert row.end_to_end.attention_share < full.end_to_end.attention_share
    for part in ("Sliding windows", "Recurrent layers"):
        assert any(part in sentence for sentence in found.assumptions)


def test_index_rules_count_windows_but_no_recurrences():
    kinds = ["linear_attention", "sliding_attention", "full_attention", "full_attention"] * 8
    config = dict(json.loads(LLAMA.read_text()), layer_types=kinds, sliding_window=1024)
    policy = Policy.moba(block_size=128, topk=8, dense_last=3)
    assert estimate(config, policy, context=2**17).rows[0].layers["sparse"] == 14


def test_it_is_quick_and_brings_in_nothing_heavy():
    code = (
        "import sys, time; start = time.process_time(); "
        "from sparsify.estimates import estimate; "
        f"found = estimate({str(M3)!r}); "
        "assert len(found.rows) == 15; "
        "heavy = [m for m in ('torch', 'transformers', 'triton', 'networkx') if m in sys.modules]; "
        "print(heavy, time.process_time() - start < 3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] True"
