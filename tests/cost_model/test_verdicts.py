"""The sentences of an estimate."""

import json
import re

import pytest

from sparsify.cost_model.configuration import PUBLISHED
from sparsify.estimates import estimate
from sparsify.policy import Policy, load_policy
from sparsify.verdicts import short_tokens
from tests._util.commands import ROOT
from tests._util.published_models import (
    LEARNED,
    LLAMA,
    M3,
    PROXY,
    QWEN,
)

NUMBER = r"(\d+\.\d\d)"


@pytest.mark.parametrize(
    ("gpu", "known"),
    [("H200-SXM-141GB", "is"), ("H100-SXM5-80GB", "is probably")],
    ids=["calibrated", "range"],
)
def test_the_verdict_says_what_the_row_holds(gpu, known):
    found = estimate(QWEN, PROXY, gpu=gpu, context=2**17)
    whole = found.rows[0].end_to_end
    said = re.fullmatch(
        rf"MSA proxy 128/16: dense {known} faster below [\d,]+ tokens on {gpu}; "
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


def ranges(block):
    return block["low"], block["expected" if "expected" in block else "speedup"], block["high"]


def test_steps_that_a_policy_leaves_dense_are_equal():
    found = estimate(LLAMA, load_policy("kimi-1m"), context=2**17, phase="decode")
    (row,) = found.rows
    assert row.layers["sparse"] == 0 and row.crossover_tokens is None
    assert ranges(row.to_json()["speedup"]) == ranges(row.to_json()["end_to_end"]) == (1, 1, 1)
    assert found.verdict == "Nothing is sparse in a decode step: all attention stays dense."


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
    text = (ROOT / "cost_model/gpus/h200-sxm-141gb.yaml").read_text()
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
