"""`sparsify bench` on a GPU: its stages, chunks and decode steps, and a calibration of MSA.

Times are compared loosely: what is tested is that the parts are those of the whole.
"""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")

from sparsify.benches.dense import BACKENDS, dense_call, dense_times
from sparsify.cost_model.calibration import load_calibration
from tests._util.commands import run_cli

SHAPE = "heads=16/1,dim=128,block=128,topk=16"
PREFILL = {"scores", "top-k", "index", "attention", "combine"}
FEW = {"scores", "top-k", "attention"}
DECODE = FEW - {"top-k"}  # programs of the attention rank the blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def bench(capsys, monkeypatch):
    """Run the command and read its document; the kernels or an error."""
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")
    monkeypatch.delenv("SPARSIFY_DISABLE", raising=False)

    def run(*words):
        code, out, err = run_cli(capsys, "bench", *words, "--json")
        assert code == 0, err
        return json.loads(out)

    return run


@pytest.mark.parametrize(
    ("more", "words", "names"),
    [
        (",index=128", (), PREFILL),
        (",index=128", ("--index-dtype", "fp8"), PREFILL),
        (",keys=group", (), PREFILL),
        (",index=128", ("--queries", "512"), PREFILL),
        (",index=128", ("--queries", "1"), DECODE),
        (",keys=group", ("--queries", "1", "--batch", "4"), DECODE),
        (",index=128", ("--queries", "20"), FEW),
    ],
)
def test_msa_and_its_stages(bench, more, words, names):
    if "fp8" in words and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no products of eight bits")
    words = ("--context", "16k", "--repeats", "5", *words)
    (row,) = bench("--method", "msa", "--shape", SHAPE + more, *words)["rows"]
    assert row["implementation"] == "triton" and row["extra_bytes"] >= 0
    assert set(row["stages_ms"]) == names and min(row["stages_ms"].values()) > 0
    # Each stage alone has a cold L2 cache, and launches of its own.
    assert 0.4 < sum(row["stages_ms"].values()) / row["sparse_graph"]["median_ms"] < 3
    assert row["speedup"] > 0 and row["dense"]
    if "512" in words:
        assert set(row["dense"]) == {"sdpa_flash"}


def test_chunks_and_decode_steps_of_moba(bench):
    shape = "heads=16/4,dim=128,block=128,topk=8"
    for queries, names in (("512", PREFILL - {"scores", "top-k"} | {"gate"}), ("1", None)):
        words = ("--context", "16k", "--repeats", "3", "--queries", queries)
        (row,) = bench("--shape", shape, *words)["rows"]
        assert set(row["stages_ms"]) == (names or {"gate", "attention"})


@pytest.mark.parametrize(("queries", "keys"), [(300, 1000), (1, 1000), (512, 512)])
def test_dense_queries_are_the_last_of_the_keys(queries, keys):
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    q, k = torch.randn(1, 8, queries, 128, **options), torch.randn(1, 2, keys, 128, **options)
    wide = k.repeat_interleave(4, 1).double()
    seen = torch.ones(queries, keys, dtype=torch.bool, device="cuda").tril(keys - queries)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double(), wide, wide, attn_mask=seen
    )
    ran = dense_times(q, k, k, lambda run: run())
    assert "sdpa_flash" in ran
    for name in ran:
        out = dense_call(q, k, k, BACKENDS[name])()
        assert (out - wanted).abs().max() < 0.02, name


@pytest.mark.slow
def test_a_calibration_of_one_shape(bench, tmp_path):
    target = tmp_path / "calibration.json"
    words = ("--shape", SHAPE + ",index=128", "--method", "msa", "--context", "4k,8k,16k,32k")
    bench("--calibrate", *words, "-o", target)
    found = {(entry.family, entry.dtype) for entry in load_calibration(target).families}
    # What fits badly on a GPU that others use is left out.
    assert {("msa_attention", "bf16"), ("msa_combine", "bf16"), ("msa_index", "bf16")} <= found
    if torch.cuda.get_device_capability() >= (8, 9):
        assert ("msa_index", "fp8") in found
