"""The stages that benchmarks time are those of the op: together they give its results."""

from __future__ import annotations

import pytest
import torch

from sparsify.benches.stages import DECODE_STAGES, PREFILL_STAGES, _Stages, moba_stages_ms
from sparsify.kernels import accelerated
from sparsify.kernels.layout import Layout
from sparsify.timing import time_call
from tests._util.parity import inputs

SIZES = {"block_size": 7, "topk": 3}


def op(x, **options):
    return accelerated.moba_attention(*x, Layout(), None, **SIZES, **options)


def timer(run):
    return time_call(run, device="cpu", repeats=1, warm_up=0).median_ms


def test_stages_of_a_prefill(by_block):
    found = moba_stages_ms(*inputs(queries=20, keys=40), **SIZES, timer=timer)
    assert set(found) == set(PREFILL_STAGES) and min(found.values()) > 0


def test_stages_of_a_decode_step():
    found = moba_stages_ms(*inputs(queries=1, keys=40), **SIZES, timer=timer)
    assert set(found) == set(DECODE_STAGES) and min(found.values()) > 0


@pytest.mark.parametrize(("workspace", "slices"), [(None, 1), (1, 2)])
def test_all_slices_together_are_the_op(by_block, workspace, slices):
    x = inputs(queries=130, keys=140)
    stages = _Stages(*x, 7, 3, workspace)
    assert len(stages.slices) >= slices
    stages.attend(stages.by_block, combine=True)
    out, lse = op(x, workspace_bytes=workspace)
    assert torch.equal(stages.out, out) and torch.equal(stages.lse, lse)


def test_without_the_combine_nothing_is_written(by_block):
    stages = _Stages(*inputs(queries=20, keys=40), 7, 3, None)
    stages.out.fill_(7.0)
    stages.attend(stages.by_block, combine=False)
    assert bool((stages.out == 7.0).all())


def test_a_decode_step_is_the_op():
    x = inputs(queries=1, keys=40)
    stages = _Stages(*x, 7, 3, None)
    stages.attend(stages.by_query, combine=True)
    assert torch.equal(stages.out, op(x)[0])
