"""Tables of `sparsify bench` in terminals of any width."""

import pytest
import torch
from rich.console import Console

from sparsify.benches.attention import AttentionRow, Question
from sparsify.cli import render_bench
from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.workload import AttentionShape
from sparsify.timing import Timing

ABOUT = {"gpu": "A GPU", "software": {"torch": "2.11"}, "date": "2026-11-30"}


def shown(width, *parts):
    console = Console(width=width)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


@pytest.mark.parametrize("width", [30, 40, 60, 100])
def test_no_number_of_an_op_is_cut(width):
    dense, sparse = Timing((1234.5,) * 2, "", 1), Timing((321.0,) * 2, "", 1)
    stages = {"gate": 123.4}
    row = AttentionRow(131_072, "triton", {"sdpa_flash": dense}, sparse, None, stages, 2**30, False)
    configuration = Configuration("moba", 128, 8)
    shape = AttentionShape(16, 16, 128, 128)
    question = Question(shape, configuration, (131_072,), torch.device("cpu"))
    text = shown(width, *render_bench.attention(question, [row], ABOUT))
    for number in ("131,072", "1,230", "321", "123", "3.85x", "1.07"):
        assert number in text, number


@pytest.mark.parametrize("width", [30, 40, 60, 100])
def test_no_number_of_models_is_cut(width):
    side = {"prefill": {"median_ms": 1234.5}, "decode": None, "extra_bytes": 123_456_789_000}
    row = {"tokens": 131_072, "dense": side, "rewritten": side, "prefill_speedup": 1.0}
    data = {"rewritten": "out", "against": "in", "batch": 1, "rows": [row], "notes": []} | ABOUT
    text = shown(width, *render_bench.models(data))
    for number in ("131,072", "1,230", "1.00x", "123 123"):
        assert number in text, number
