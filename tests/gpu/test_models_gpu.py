"""Models with learned indexers on a GPU, all their sparse calls through the kernels: transformers'
MiniMax-M3 beside its own path, and a Llama of ours in steps beside the whole."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
from transformers import DynamicCache, StaticCache

from sparsify.kernels.selection import record_selection, replay_selection
from tests._util import tiny_models
from tests._util.planned import relative
from tests._util.tiny_models import CACHE
from tests.hosts import test_indexer as llama
from tests.parity import test_minimax_m3 as m3

DEVICE = "cuda"
BLOCK = 16  # the kernels know no smaller ones
ENDS = (29, 60, 98, 99, 100)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("kernels_alone"),
]


def tokens(batch, length):
    return tiny_models.tokens(batch, length).to(DEVICE)


def cache_of(kind, model):
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=120)


def learned(name="llama", dtype=torch.float32, **fields):
    model = tiny_models.build(name).to(DEVICE, dtype)
    return llama.learned(model, block_size=BLOCK, topk=3, **fields)


# MiniMax-M3


def minimax(attention="eager", **changes):
    return m3.build(attention, index_block_size=BLOCK, **changes).to(DEVICE)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_minimax_m3_prefill(attention):
    model, ids = minimax(attention), tokens(2, 131)
    made = m3.ours(model, block_size=BLOCK)
    assert relative(m3.logits(made, ids), m3.logits(model, ids)) < 1e-4
    m3.check_ran(made)


def test_minimax_m3_with_fewer_blocks_is_another_model():
    ids, fewer = tokens(2, 131), minimax(index_topk_blocks=2)
    made = m3.ours(minimax(), block_size=BLOCK)
    assert relative(m3.logits(made, ids), m3.logits(fewer, ids)) > 1e-3


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_minimax_m3_in_steps(kind):
    model, ids = minimax(), tokens(2, 100)
    made = m3.ours(model, block_size=BLOCK)
    wanted = m3.logits(model, ids)
    assert relative(llama.in_steps(made, ids, ENDS, cache_of(kind, model)), wanted) < 1e-4


# A learned indexer of ours


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_equal_the_whole_with_its_choice(dtype, kind):
    model, ids = learned(dtype=dtype), tokens(2, 100)
    with record_selection() as whole:
        wanted = llama.logits(model, ids, use_cache=False)
    with replay_selection(whole):
        found = llama.in_steps(model, ids, ENDS, cache_of(kind, model))
    assert relative(found, wanted) < (1e-4 if dtype == torch.float32 else 3e-2)
    llama.check_sparse(model)


@pytest.mark.parametrize("kind", [None, "static"])
def test_generate_gives_the_tokens_of_whole_prefills(kind):
    model, ids = learned(), tokens(2, 67)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, cache_implementation=kind, disable_compile=True, **settings)
    assert torch.equal(found, model.generate(ids, use_cache=False, **settings))
    llama.check_sparse(model)


def test_a_cache_changes_no_bit_of_a_prefill_in_bfloat16():
    model, ids = learned(dtype=torch.bfloat16), tokens(2, 100)
    with_cache = {CACHE: cache_of("dynamic", model)}
    first = llama.logits(model, ids, use_cache=True, **with_cache)
    assert torch.equal(first, llama.logits(model, ids, use_cache=False))
