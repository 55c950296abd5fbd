"""Timing on a CPU; `tests/gpu/test_timing_gpu.py` has what a GPU adds."""

import time

import pytest
import torch

from sparsify.errors import UsageError
from sparsify.timing import Timing, extra_bytes, find_device, machine, time_call


def timed(*samples_ms):
    return Timing(samples_ms, "wall clock", 0)


def test_figures_of_samples():
    found = timed(4.0, 1.0, 2.0, 3.0, 5.0)
    assert (found.median_ms, found.min_ms, found.once) == (3.0, 1.0, False)
    assert found.percentile_ms(50) == 3.0
    assert found.percentile_ms(95) == pytest.approx(4.8)
    assert found.percentile_ms(0) == 1.0 and found.percentile_ms(100) == 5.0
    assert timed(2.0, 4.0).median_ms == 3.0


def test_one_sample_says_so():
    found = timed(7.0)
    assert found.once and found.median_ms == found.percentile_ms(99) == 7.0


def test_a_call_on_the_cpu_is_timed_by_the_wall_clock():
    calls = []
    found = time_call(lambda: calls.append(time.sleep(0.002)), device="cpu", repeats=5, warm_up=2)
    assert len(calls) == 7 and len(found.samples_ms) == 5
    assert found.method == "wall clock" and found.warm_up == 2
    assert found.min_ms >= 2.0
    told = found.to_json()
    assert told["samples"] == 5 and told["min_ms"] <= told["p50_ms"] <= told["p99_ms"]


def test_slow_calls_are_repeated_as_often_as_the_budget_allows():
    def run():
        time.sleep(0.02)

    assert len(time_call(run, device="cpu", repeats=50, budget_s=0.1).samples_ms) in (3, 4, 5)
    assert time_call(run, device="cpu", repeats=50, budget_s=0.001).once
    # without a warm-up nothing is known of the call
    found = time_call(run, device="cpu", repeats=3, warm_up=0, budget_s=0.001)
    assert len(found.samples_ms) == 3


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"repeats": 0}, "0 repeats after 3 warm-up calls"),
        ({"warm_up": -1}, "after -1 warm-up calls"),
        ({"graph": True}, "CUDA graphs need a CUDA device"),
    ],
)
def test_what_cannot_be_timed(options, part):
    with pytest.raises(UsageError, match=part):
        time_call(lambda: None, device="cpu", **options)


def test_errors_of_the_call_are_not_swallowed():
    def run():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        time_call(run, device="cpu")


def test_devices():
    assert find_device("cpu") == torch.device("cpu")
    for name in ("gpu", "", "cuda:x"):
        with pytest.raises(UsageError, match="is no device"):
            find_device(name)
    with pytest.raises(UsageError, match="Nothing can be timed"):
        find_device("meta")


def test_a_missing_gpu_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="There is no CUDA device here") as caught:
        find_device("cuda:0")
    assert "--device cpu" in str(caught.value)


def test_devices_are_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("cuda") == torch.device("cuda:0")
    assert find_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UsageError, match="There is no cuda:2: CUDA devices here are 0 to 1"):
        find_device("cuda:2")


def test_memory_is_not_known_on_a_cpu():
    assert extra_bytes(lambda: torch.zeros(1000), "cpu") is None


def test_what_was_measured_on():
    found = machine("cpu")
    assert "gpu" not in found and found["cpu"]
    assert found["software"]["torch"] == torch.__version__
    assert len(found["date"]) == 10
