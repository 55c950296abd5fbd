"""Timing on a GPU: events, graphs, memory, and what a call finds in the L2 cache.

Other tests may share the GPU, so the shortest of many times are compared.
"""

import pytest
import torch

from sparsify import timing
from sparsify.timing import extra_bytes, time_call

REPEATS = 50

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("graph", [False, True])
def test_a_call_stands_between_events(graph):
    x = torch.randn(2048, 2048, device="cuda")
    found = time_call(lambda: x @ x, device="cuda", repeats=5, graph=graph)
    assert len(found.samples_ms) == 5 and 0 < found.median_ms < 100
    assert "CUDA events" in found.method and ("graph" in found.method) is graph


def test_memory_beyond_the_result_is_counted():
    x = torch.randn(2048, 2048, device="cuda")
    extra = extra_bytes(lambda: (x @ x).sum(), "cuda")
    assert extra is not None and extra >= x.nbytes


@pytest.fixture
def reading():
    """A call that reads half an L2 cache, and nothing else of note."""
    half = torch.cuda.get_device_properties().L2_cache_size // 2
    x = torch.zeros(half // 8, dtype=torch.int64, device="cuda")
    return lambda: x.sum()


def shortest(run, **options):
    return time_call(run, device="cuda", repeats=REPEATS, graph=True, **options).min_ms


def test_what_a_call_reads_is_not_in_the_cache(reading):
    assert shortest(reading) > shortest(reading, flush_l2=False)


def test_a_call_does_not_wait_for_what_leaves_the_cache(reading, monkeypatch):
    alone = shortest(reading)
    monkeypatch.setattr(timing, "_flush", lambda scratch: scratch.zero_())
    assert alone < shortest(reading)
