"""A rewritten transformers model is a module like any other: dtype, hooks, ties, state dicts."""

import copy

import pytest
import torch

import sparsify as sp
from sparsify.hosts import transformers as host
from tests._util.tiny_models import build, tokens

POLICY = sp.Policy.moba(block_size=8, topk=2)


@torch.no_grad()
def logits(model, ids):
    return model(ids, use_cache=False).logits


def sparse_calls(model):
    return sum(counts.get("sparse", 0) for counts in host.call_counts(model).values())


def test_a_change_of_dtype_keeps_the_plan():
    model, ids = sp.sparsify(build("llama"), POLICY).model, tokens(1, 40)
    twin = copy.deepcopy(model).to(torch.float64)
    before = sparse_calls(twin)
    out = logits(twin, ids)
    assert out.dtype == torch.float64 and sparse_calls(twin) == before + 3
    near = (out - logits(model, ids)).abs().max() / out.abs().max()
    assert near < 1e-3  # float32 against float64, the same blocks


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_move_to_another_device_keeps_the_plan():
    here, ids = sp.sparsify(build("llama"), POLICY).model, tokens(1, 40)
    there = copy.deepcopy(here).to("cuda")
    before = sparse_calls(there)
    out = logits(there, ids.to("cuda")).cpu()
    assert sparse_calls(there) == before + 3
    assert (out - logits(here, ids)).abs().max() / out.abs().max() < 1e-3


@pytest.mark.parametrize("on", ["model", "attention"])
def test_the_users_hooks_run_and_stay_after_restore(on):
    model, seen = build("llama"), []
    place = model if on == "model" else model.model.layers[0].self_attn
    handle = place.register_forward_hook(lambda *_: seen.append(on))
    result = sp.sparsify(model, POLICY, inplace=True)
    seen.clear()
    logits(result.model, tokens(1, 20))
    assert seen == [on]
    logits(result.restore(), tokens(1, 20))
    assert seen == [on, on]
    handle.remove()


def test_tied_weights_stay_tied_and_keys_stay():
    model = build("llama", tie_word_embeddings=True)
    twin = sp.sparsify(model, POLICY).model
    assert twin.lm_head.weight is twin.model.embed_tokens.weight is model.lm_head.weight
    assert list(twin.state_dict()) == list(model.state_dict())


def test_a_loaded_state_dict_takes_effect():
    twin, other = copy.deepcopy(sp.sparsify(build("llama"), POLICY).model), build("llama", seed=1)
    ids = tokens(1, 40)
    before = logits(twin, ids)
    twin.load_state_dict(other.state_dict())
    assert not torch.allclose(logits(twin, ids), before, atol=1e-2)
    assert torch.equal(logits(twin, ids), logits(sp.sparsify(other, POLICY).model, ids))
