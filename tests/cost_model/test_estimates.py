"""Estimates: their JSON, and what they never claim."""

import json
import re
import subprocess
import sys

import pytest

from sparsify.cost_model.calibration import (
    Calibration,
    FamilyEfficiency,
    packaged_calibration,
)
from sparsify.cost_model.configuration import DENSE, PUBLISHED
from sparsify.cost_model.crossover import crossover_tokens
from sparsify.cost_model.hardware import load_gpu
from sparsify.cost_model.limits import speedup_limit
from sparsify.cost_model.workload import ElementBytes, Phase
from sparsify.errors import NothingToDoError, UnknownGpuError, UsageError
from sparsify.estimates import estimate
from sparsify.model_files import read_model
from tests._util.commands import ROOT
from tests._util.published_models import (
    H200,
    LEARNED,
    LLAMA,
    M3,
    PROXY,
    QWEN,
    QWEN_HEADS,
)

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
    text = (ROOT / "cost_model/gpus/h200-sxm-141gb.yaml").read_text()
    whole, bare = tmp_path / "whole.yaml", tmp_path / "bare.yaml"  # no calibration serves either
    whole.write_text(text)
    bare.write_text(text[: text.index("measured:")])
    known, unknown = (estimate(QWEN, PROXY, gpu=str(gpu), context=2**17) for gpu in (whole, bare))
    spans = [row.end_to_end.high / row.end_to_end.low for row in (*known.rows, *unknown.rows)]
    assert spans[1] > 1.05 * spans[0]
    # With an equal range of attention's gain, only the share makes the difference.
    gains = [row.speedup.high / row.speedup.low for row in (*known.rows, *unknown.rows)]
    assert gains[1] == pytest.approx(gains[0], rel=0.02)


def test_the_crossover_is_that_of_a_layer():
    found = estimate(QWEN, PROXY, context=2**17)
    alone = crossover_tokens(
        QWEN_HEADS,
        PROXY,
        H200,
        phase=Phase.PREFILL,
        hidden_size=5120,
        calibration=packaged_calibration(H200),
    )
    assert found.crossover_tokens == found.rows[0].crossover_tokens == alone
    assert 2**10 < alone < 2**20


def test_below_the_crossover_dense_is_faster_and_above_it_is_not():
    tokens = estimate(QWEN, PROXY, context=2**17).crossover_tokens
    below, above = estimate(QWEN, PROXY, context=[tokens - 1, tokens]).rows
    assert below.speedup.expected <= 1 < above.speedup.expected * (1 + 1e-9)
    assert below.end_to_end.speedup <= 1


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("configuration", [PROXY, LEARNED], ids=lambda c: c.label)
@pytest.mark.parametrize("model", [LLAMA, QWEN, M3], ids=["group 4", "group 8", "group 16"])
def test_msa_is_calibrated_on_an_h200_and_nowhere_else(model, configuration, phase):
    options = {"context": 2**17, "phase": phase}
    known = estimate(model, configuration, gpu="h200", **options).rows[0]
    unknown = estimate(model, configuration, gpu="h100", **options).rows[0]
    assert (known.sparse.time.source, unknown.sparse.time.source) == ("calibrated", "bound")
    assert known.speedup.expected > 1


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
