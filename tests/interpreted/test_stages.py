"""The stages that benchmarks time are those of the op: together they give its results."""

from __future__ import annotations

import pytest
import torch

from sparsify.benches import stages as module
from sparsify.benches.stages import by_family, moba_stages, moba_stages_ms, msa_stages_ms
from sparsify.kernels import accelerated, decoding
from sparsify.kernels.layout import Layout
from sparsify.timing import time_call
from tests._util.parity import inputs

SIZES = {"block_size": 7, "topk": 3}
PREFILL = {"moba_means", "moba_gate", "reverse_index", "moba_attention", "combine"}
DECODE = {"moba_decode_gate", "moba_decode_attention"}


def op(x, **options):
    return accelerated.moba_attention(*x, Layout(), None, **SIZES, **options)


def timer(run):
    return time_call(run, device="cpu", repeats=1, warm_up=0).median_ms


def test_stages_of_a_prefill(by_block):
    found = moba_stages_ms(*inputs(queries=20, keys=40), **SIZES, timer=timer)
    assert set(found) == PREFILL and min(found.values()) > 0


def test_stages_of_a_decode_step():
    found = moba_stages_ms(*inputs(queries=1, keys=40), **SIZES, timer=timer)
    assert set(found) == DECODE and min(found.values()) > 0


@pytest.mark.parametrize(("workspace", "slices"), [(None, 1), (1, 2)])
def test_all_slices_together_are_the_op(by_block, workspace, slices):
    x = inputs(queries=130, keys=140)
    stages = moba_stages(*x, 7, 3, workspace)
    assert len(stages.slices) >= slices
    stages.attend(stages.by_block, combine=True)
    out, lse = op(x, workspace_bytes=workspace)
    assert torch.equal(stages.out, out) and torch.equal(stages.lse, lse)


def test_without_the_combine_nothing_is_written(by_block):
    stages = moba_stages(*inputs(queries=20, keys=40), 7, 3, None)
    stages.out.fill_(7.0)
    stages.attend(stages.by_block, combine=False)
    assert bool((stages.out == 7.0).all())


def test_a_decode_step_is_the_op():
    x = inputs(queries=1, keys=40)
    stages = moba_stages(*x, 7, 3, None)
    stages.attend(stages.by_query, combine=True)
    assert torch.equal(stages.out, op(x)[0])


MSA_SIZES = {"block_size": 16, "topk": 3}
MSA_PREFILL = {"msa_index", "msa_topk", "reverse_index", "msa_attention", "msa_combine"}
MSA_DECODE = {"msa_decode_scores", "msa_decode_attention"}


def msa_inputs(queries, keys, index_keys=1):
    """Two groups of two heads."""
    x = inputs(heads=4, groups=2, queries=queries, keys=keys)
    index = inputs(heads=2, groups=index_keys, queries=queries, keys=keys, seed=1)
    return (*x, index.q, index.k)


def msa_op(x, **options):
    return accelerated.msa_attention(*x, Layout(), **MSA_SIZES, **options)


def test_stages_of_msa():
    found = msa_stages_ms(*msa_inputs(40, 80), **MSA_SIZES, timer=timer)
    assert set(found) == MSA_PREFILL and min(found.values()) > 0 and by_family(found) == found
    proxy = msa_stages_ms(*msa_inputs(40, 80, 2), **MSA_SIZES, timer=timer, proxy=True)
    assert set(proxy) == MSA_PREFILL - {"msa_index"} | {"msa_proxy_index"}


@pytest.fixture(params=[True, False], ids=["ranked with attention", "ranked before"])
def topk_stage(request, monkeypatch):
    """The stage of a decode step that ranks blocks, if it is one."""
    if request.param:
        return set()
    monkeypatch.setattr(decoding, "MOST_RANKED", 0)
    return {"msa_decode_topk"}


@pytest.mark.parametrize("proxy", [False, True])
def test_stages_of_a_decode_step_of_msa(proxy, topk_stage):
    x = msa_inputs(1, 80, 2 if proxy else 1)
    found = msa_stages_ms(*x, **MSA_SIZES, timer=timer, proxy=proxy)
    assert set(found) == MSA_DECODE | topk_stage and min(found.values()) > 0
    choice = "msa_decode_proxy_index" if proxy else "msa_decode_index"
    families = by_family(found, proxy)
    assert set(families) == {choice, "msa_decode_attention"}
    assert sum(families.values()) == pytest.approx(sum(found.values()))


def test_stages_of_a_few_queries_of_msa(topk_stage):
    """8 are attended by the decode kernels, 20 query by query."""
    few = msa_stages_ms(*msa_inputs(8, 80), **MSA_SIZES, timer=timer)
    assert set(few) == {"msa_index", "msa_short_attention"} | {"msa_topk" for _ in topk_stage}
    more = msa_stages_ms(*msa_inputs(20, 80), **MSA_SIZES, timer=timer)
    assert set(more) == {"msa_index", "msa_topk", "msa_short_attention"}


def test_the_choice_alone(topk_stage):
    for queries, names in ((40, {"msa_index", "msa_topk"}), (1, MSA_DECODE | topk_stage)):
        x = msa_inputs(queries, 80)
        found = msa_stages_ms(*x, **MSA_SIZES, timer=timer, choice_alone=True)
        assert set(found) == names - {"msa_decode_attention"}


@pytest.mark.parametrize(("workspace", "slices"), [(None, 1), (1, 2)])
def test_all_slices_together_are_msa(workspace, slices):
    x = msa_inputs(130, 140)
    stages = module._msa_stages(x, 16, 3, workspace)
    assert len(stages.slices) >= slices and stages.shape.share == 2
    stages.attend(stages.by_block, combine=True)
    out, lse = msa_op(x, workspace_bytes=workspace)
    assert torch.equal(stages.out, out) and torch.equal(stages.lse, lse)


def test_a_decode_step_is_msa():
    x = msa_inputs(1, 80)
    step = module._decode_step(x, 16, 3)
    assert torch.equal(step.run()[0], msa_op(x)[0])
    assert module._decode_step(msa_inputs(17, 80), 16, 3) is None
