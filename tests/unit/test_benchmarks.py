"""The GPU benchmarks as far as a CPU can run them: their tables, and small models."""

import importlib.util
import json

import pytest
import torch

from tests._util.commands import ROOT


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def beside_each_other(monkeypatch):
    """Scripts find what they share beside them, as Python lets them when they are run."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.fixture
def common():
    pytest.importorskip("triton")
    return load("common")


@pytest.fixture
def msa():
    pytest.importorskip("triton")
    return load("msa_h200")


@pytest.fixture
def moba():
    pytest.importorskip("triton")
    return load("moba_h200")


@pytest.fixture
def prefill():
    pytest.importorskip("transformers")
    return load("prefill_h200")


def row(case, ms, target, **more):
    met = None if target is None else ms <= target
    stages = {"stages_ms": {"gate": 0.5}, "extra_gib": 2.5, "graph_ms": ms / 2}
    return (
        {"case": case, "ms": ms, "target_ms": target, "target_of": "ms", "met": met} | stages | more
    )


def test_cases_have_targets_or_are_ones_own(moba):
    assert moba.named_case("128/8:512k").target_ms == 46.0
    assert moba.named_case("4096/12:1m").tokens == 1 << 20
    assert moba.named_case("4096/12:1m").heads == (32, 8)
    assert moba.named_case("256/4:64k").target_ms is None
    assert len({case.name for case in moba.CASES}) == len(moba.CASES) == 9


def test_the_table_says_what_was_missed(moba, capsys):
    dense = {"dense_best": "sdpa_cudnn", "speedup": 12.34, "dense_timed_once": True}
    rows = [row("128/8:512k", 47.0, 46.0, **dense), row("128/8:32k", 1.5, 1.7), row("x", 1, None)]
    hot = {"case": "128/8:128k", "ratio": 1.1, "most": 1.15, "met": True}
    check = {"shape": [4, 4], "error": 1e-3, "eager_error": 2e-3, "ok": True}
    moba.table({"rows": rows, "hot_blocks": hot, "checks": [check]})
    lines = capsys.readouterr().out.splitlines()
    assert any("128/8:512k" in x and "MISSED" in x and "timed once" in x for x in lines)
    assert any("128/8:32k" in x and " ok" in x for x in lines)
    assert any("extra" in x and "2.50 GiB" in x for x in lines)
    assert not any(x.startswith("x ") for x in lines)


def test_attention_written_out_is_that_of_the_reference(common):
    from sparsify.kernels import reference
    from sparsify.kernels.layout import Layout

    q, k, v = (torch.randn(1, heads, 50, 8, dtype=torch.float64) for heads in (4, 2, 2))
    blocks = reference.moba_select(q, k, Layout(), None, block_size=8, topk=3)
    exact, _ = reference.block_attention(q, k, v, blocks, Layout(), block_size=8)
    assert common.relative(common.eager(q, k, v, blocks, 8), exact) < 1e-6
    assert common.relative(common.eager(q, k, v, blocks[..., :1], 8), exact) > 1e-3


def test_memory_is_poisoned_only_inside(common):
    with common.poisoned():
        assert torch.empty(8).isnan().all() and torch.empty(8).new_empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_one_case_that_fails_does_not_stop_the_others(common, capsys):
    failed = []
    assert common.guarded("this", lambda: 1 // 0, failed) is None
    assert "this FAILED" in capsys.readouterr().out
    assert common.guarded("that", lambda: 5, failed) == 5
    assert failed == ["this: ZeroDivisionError: integer division or modulo by zero"]


def test_cases_of_msa_have_targets(msa):
    assert msa.named_case("whole:1m:fp8").target_ms == 930.0
    assert msa.named_case("chunk:128k").queries == 16_384
    assert msa.named_case("whole:8k").target_ms is None and msa.named_case("whole:8k").keys == 8192
    assert len({case.name for case in msa.CASES}) == len(msa.CASES) == 10


def test_the_table_of_msa_says_what_was_missed(msa, capsys):
    rows = [row("whole:1m", 1400.0, 1300.0), row("chunk:32k", 5.0, 5.3)]
    skewed = {"case": "whole:128k", "ratio": 1.5, "most": 1.3, "met": False}
    msa.table({"rows": rows, "skew": skewed, "checks": []})
    lines = capsys.readouterr().out.splitlines()
    assert any("whole:1m" in x and "MISSED" in x for x in lines)
    assert any("chunk:32k" in x and " ok" in x for x in lines)
    assert any("skew" in x and "MISSED" in x for x in lines)


def test_the_public_workload_is_complete(msa):
    public = json.loads(msa.WORKLOAD.read_text())
    assert sum(call["weight"] for call in public["prefill"]) == 10_434
    assert sum(call["weight"] for call in public["decode"]) == 10_000
    assert all(0 < call["queries"] <= call["keys"] for call in public["prefill"])


def test_long_calls_are_not_replayed(moba, capsys):
    moba.show(row("4096/12:1m", 1700.0, 1750.0, graph_ms=None))
    assert "graph         -" in capsys.readouterr().out


def test_a_small_model_on_two_devices(prefill, monkeypatch):
    monkeypatch.setattr(prefill, "DEVICE", "cpu")
    monkeypatch.setitem(prefill.SMOLLM2_135M, "num_hidden_layers", 2)
    monkeypatch.setitem(prefill.SMOLLM2_135M, "vocab_size", 256)
    monkeypatch.setitem(prefill.EQUALITY, "tokens", 300)
    found = prefill.equality()
    assert found["met"] and found["rows"] == 300 * 9 * 2 and found["rows_off"] == 0


def test_prefills_of_a_small_model(prefill, monkeypatch, capsys):
    monkeypatch.setattr(prefill, "DEVICE", "cpu")
    small = {"num_hidden_layers": 4, "vocab_size": 256, "intermediate_size": 64}
    small |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    for name, value in small.items():
        monkeypatch.setitem(prefill.LLAMA_8B, name, value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    kept = []
    rows = prefill.speed([1200], kept.append)
    assert kept == [rows] and [r["model"] for r in rows] == ["dense", "moba 128/8"]
    assert rows[1]["layers_rewritten"] == rows[1]["layers_run_sparse"] == 4
    assert rows[1]["speedup"] == pytest.approx(rows[0]["ms"] / rows[1]["ms"])
    assert "x over dense sdpa_flash" in capsys.readouterr().out
