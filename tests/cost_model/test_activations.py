"""Passes over activations: what they move at most, and that they widen ranges only."""

import dataclasses
import json

import pytest

from sparsify.cost_model.activations import most_activation_bytes
from sparsify.cost_model.configuration import DENSE
from sparsify.cost_model.hardware import load_gpu
from sparsify.cost_model.model_config import read_config
from sparsify.cost_model.model_cost import model_cost
from sparsify.cost_model.workload import Phase, Workload
from sparsify.estimates import estimate
from sparsify.policy import Policy
from tests._util.commands import ROOT
from tests._util.published_models import LLAMA

H200 = load_gpu("h200")
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "prefill_h200.json").read_text())["rows"]


def layer():
    return read_config(LLAMA).layers[0]


def test_bytes_of_a_layer_of_llama():
    norms, rotary, output, gate = 84 * 4096, 20 * (32 + 8) * 128, 4 * 32 * 128, 10 * 14336
    assert most_activation_bytes(layer(), 4096, 1) == norms + rotary + output + gate
    assert most_activation_bytes(layer(), 4096, 2) == norms + (rotary + output + gate) / 2


def test_a_layer_without_attention_turns_no_heads():
    bare = dataclasses.replace(layer(), kind="feed_forward", attention=None)
    assert most_activation_bytes(bare, 4096, 1) == 84 * 4096 + 10 * 14336


@pytest.mark.parametrize("phase", Phase)
def test_they_are_in_the_end_of_the_range_and_nowhere_else(phase, monkeypatch):
    def linear():
        call = Workload.of(phase, 2**15)
        return model_cost(read_config(LLAMA), call, DENSE, H200).linear

    with_them = linear()
    monkeypatch.setattr("sparsify.cost_model.model_layers.most_activation_bytes", lambda *_: 0)
    without = linear()
    assert with_them.high_ms > without.high_ms
    assert dataclasses.replace(with_them, high_ms=without.high_ms) == without


POLICIES = {
    "moba 128/8": Policy.moba(block_size=128, topk=8),
    "moba 512/3": Policy.moba(block_size=512, topk=3),
    "kimi-1m": Policy.moba(block_size=4096, topk=12, dense_last=3),
}


def least_speedup(policy):
    (row,) = estimate(LLAMA, policy, gpu="h200", context=2**17).rows
    return row.end_to_end.low


@pytest.mark.parametrize("name", POLICIES)
def test_eager_transformers_gains_no_less_than_the_range_says(name):
    """A whole model on an H200 at 128K tokens. (The upper end is not held against it: dense
    attention of torch is slower than the kernel that is calibrated.)"""
    runs = {row["model"].split(" (")[0]: row for row in MEASURED if row["context_tokens"] == 2**17}
    assert least_speedup(POLICIES[name]) < runs[name]["speedup"]


def test_without_them_the_range_would_promise_too_much(monkeypatch):
    with_them = least_speedup(POLICIES["moba 128/8"])
    monkeypatch.setattr("sparsify.cost_model.model_layers.most_activation_bytes", lambda *_: 0)
    (measured,) = (
        row["speedup"]
        for row in MEASURED
        if (row["model"], row["context_tokens"]) == ("moba 128/8", 2**17)
    )
    assert with_them < measured < least_speedup(POLICIES["moba 128/8"])
