"""The learned indexer in models of the transformers host: the module, calls, caches' phases."""

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from sparsify.errors import CaptureError
from sparsify.hosts import transformers as host
from sparsify.hosts.calls import observing
from sparsify.hosts.indexers import indexers_of
from sparsify.indexers import MSAIndexer
from sparsify.kernels.selection import record_selection, replay_selection
from tests._util.planned import plan_for, relative, rewrite
from tests._util.tiny_models import CACHE, build, tokens

LEARNED = {"indexer": "learned", "index_dim": 8}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2", "opt")


def learned(model, **fields):
    return rewrite(model, "msa", **{**LEARNED, **fields})


@torch.no_grad()
def logits(model, ids, **kwargs):
    return model(ids, **kwargs).logits


@torch.no_grad()
def in_steps(model, ids, ends, cache):
    parts, start = [], 0
    for end in ends:
        parts.append(model(ids[:, start:end], use_cache=True, **{CACHE: cache}).logits)
        start = end
    return torch.cat(parts, 1)


def check_sparse(model):
    assert host.fallbacks(model) == {}
    assert all(counts["sparse"] for counts in host.call_counts(model).values())


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_in_chunks_and_decode_equal_the_whole_prefill(name):
    model, ids = learned(build(name)), tokens(2, 61)
    with record_selection() as whole:
        wanted = logits(model, ids, use_cache=False)
    with record_selection() as own:
        found = in_steps(model, ids, (13, 40, 59, 60, 61), DynamicCache(config=model.config))
    assert relative(found, wanted) < 1e-4
    assert all(d.differing == d.unmatched == 0 for d in whole.diff(own).values())
    check_sparse(model)


def test_steps_without_index_keys_would_not_choose_alike():
    """The negative twin: index keys of other tokens show."""
    model, ids = learned(build("llama")), tokens(1, 61)
    wanted = logits(model, ids, use_cache=False)
    cache = DynamicCache(config=model.config)
    in_steps(model, ids[:, :59], (59,), cache)
    for layer in cache.layers:
        layer.index_keys.keys_B1SI = layer.index_keys.keys_B1SI.flip(2)
    found = in_steps(model, ids[:, 59:], (1, 2), cache)
    assert relative(found, wanted[:, 59:]) > 1e-2


def test_static_caches():
    model, ids = learned(build("llama")), tokens(2, 61)
    with record_selection() as whole:
        wanted = logits(model, ids, use_cache=False)
    cache = StaticCache(config=model.config, max_cache_len=80)
    for _ in range(2):
        with replay_selection(whole):
            found = in_steps(model, ids, (13, 40, 60, 61), cache)
        assert relative(found, wanted) < 1e-4
        cache.reset()
    check_sparse(model)


def test_a_cropped_static_cache_goes_on_from_there():
    model, ids = learned(build("llama")), tokens(1, 61)
    cache = StaticCache(config=model.config, max_cache_len=80)
    wrong = torch.cat([ids[:, :40], ids[:, 41:50]], 1)
    in_steps(model, wrong, (49,), cache)
    if not hasattr(cache.layers[0], "crop"):
        pytest.skip("this version of transformers cannot crop it")
    cache.crop(-9)
    found = in_steps(model, ids[:, 40:], (20, 21), cache)
    assert relative(found, logits(model, ids, use_cache=False)[:, 40:]) < 1e-4
    check_sparse(model)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("fields", [{"min_context": 30}, {"decode": "dense"}])
def test_index_keys_are_kept_while_calls_run_dense_by_wish(kind, fields):
    model, ids = learned(build("llama"), **fields), tokens(1, 61)
    sizes = dict(config=model.config)
    cache = DynamicCache(**sizes) if kind == "dynamic" else StaticCache(**sizes, max_cache_len=80)
    in_steps(model, ids, (20, 21, 22, 61), cache)
    check_sparse(model)
    counts = host.call_counts(model)["model.layers.1.self_attn"]
    assert counts["sparse"] == (1 if "min_context" in fields else 2) and sum(counts.values()) == 4


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_filled_without_index_keys_runs_dense_and_says_so(kind):
    original, ids = build("llama"), tokens(1, 40)
    if kind == "dynamic":
        cache = DynamicCache(config=original.config)
    else:
        cache = StaticCache(config=original.config, max_cache_len=50)
    wanted = in_steps(original, ids, (39, 40), copy.deepcopy(cache))[:, 39:]
    in_steps(original, ids[:, :39], (39,), cache)
    model = learned(original)
    assert relative(in_steps(model, ids[:, 39:], (1,), cache), wanted) < 1e-4
    assert "index key" in next(iter(host.fallbacks(model).values()))


def test_other_layers_of_caches_run_dense():
    class Custom(DynamicLayer):
        pass

    model, cache = learned(build("llama")), DynamicCache()
    cache.layers += [Custom() for _ in range(3)]
    in_steps(model, tokens(1, 40), (39, 40), cache)
    assert "kind Custom" in next(iter(host.fallbacks(model).values()))
    assert not any(counts.get("sparse") for counts in host.call_counts(model).values())


@pytest.mark.parametrize("mask", ["left", "right"])
def test_padding_changes_nothing(mask):
    model, ids = learned(build("llama")), tokens(1, 50)
    alone = logits(model, ids)
    pad = torch.zeros(1, 7, dtype=torch.long)
    parts = (pad, ids) if mask == "left" else (ids, pad)
    real = torch.cat([torch.zeros_like(x) if x is pad else torch.ones_like(x) for x in parts], 1)
    positions = (real.cumsum(1) - 1).clamp(min=0)
    out = logits(model, torch.cat(parts, 1), attention_mask=real, position_ids=positions)
    assert relative(out[real.bool()], alone[0]) < 1e-4
    check_sparse(model)


def test_packed_documents_are_chosen_for_one_by_one():
    model = learned(build("llama"))
    one, two = tokens(1, 30), tokens(1, 41, seed=1)
    both = torch.cat([one, two], 1)
    positions = torch.cat([torch.arange(30), torch.arange(41)])[None]
    out = logits(model, both, position_ids=positions, use_cache=False)
    assert relative(out[:, :30], logits(model, one)) < 1e-4
    assert relative(out[:, 30:], logits(model, two)) < 1e-4
    check_sparse(model)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
@pytest.mark.parametrize("kind", [None, "static"])
def test_generate_gives_the_tokens_of_whole_prefills(options, kind):
    model, ids = learned(build("llama")), tokens(2, 37)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **options}
    found = model.generate(ids, cache_implementation=kind, **settings)
    assert torch.equal(found, model.generate(ids, use_cache=False, **settings))
    check_sparse(model)


def test_assisted_generation_crops_the_index_keys():
    model, ids = learned(build("llama")), tokens(1, 37)
    assistant = build("llama", seed=0, num_hidden_layers=1)
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **settings), wanted)
    check_sparse(model)


def test_weights_are_seen_and_kept_by_everything():
    original = build("qwen3")
    model, ids = learned(original), tokens(1, 40)
    added = model.state_dict().keys() - original.state_dict().keys()
    assert len(added) == 4 * 3 and all(".self_attn.indexer." in name for name in added)
    with torch.no_grad():
        for indexer in indexers_of(model).values():
            indexer.q_proj.weight.normal_()
    wanted = logits(model, ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other, ids), wanted)
    fresh = learned(original)
    assert not torch.equal(logits(fresh, ids), wanted)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits(fresh, ids), wanted)
    half = copy.deepcopy(model).to(torch.float16)
    assert {p.dtype for p in indexers_of(half)["model.layers.0.self_attn"].parameters()} == {
        torch.float16
    }


def test_another_plan_keeps_the_weights_and_restoring_takes_them_out():
    model = build("llama")
    names = set(model.state_dict())
    host.apply(model, plan_for(model, "msa", **LEARNED))
    with torch.no_grad():
        indexers_of(model)["model.layers.1.self_attn"].k_proj.weight.fill_(0.5)
    handle = host.apply(model, plan_for(model, "msa", topk=3, **LEARNED))
    kept = indexers_of(model)["model.layers.1.self_attn"]
    assert bool((kept.k_proj.weight == 0.5).all())
    wider = {**LEARNED, "index_dim": 16}
    handle = host.apply(model, plan_for(model, "msa", **wider))
    assert not bool((indexers_of(model)["model.layers.1.self_attn"].k_proj.weight == 0.5).all())
    handle.restore()
    assert set(model.state_dict()) == names and indexers_of(model) == {}


def test_the_loss_of_the_model_gives_an_indexer_no_gradient():
    model, ids = learned(build("llama")), tokens(1, 40)
    model(ids, labels=ids).loss.backward()
    indexer = indexers_of(model)["model.layers.1.self_attn"]
    assert all(parameter.grad is None for parameter in indexer.parameters())
    assert model.model.layers[1].self_attn.q_proj.weight.grad is not None
    queries, keys = indexer(torch.randn(1, 5, 48), _tables(model, 5))
    (queries.sum() + keys.sum()).backward()  # its own loss does
    assert all(parameter.grad is not None for parameter in indexer.parameters())


def _tables(model, length):
    return model.model.rotary_emb(torch.zeros(1), torch.arange(length)[None])


def test_an_observer_sees_what_the_blocks_are_chosen_by():
    model, ids, seen = learned(build("llama")), tokens(2, 40), []
    with observing(seen.append), torch.no_grad():
        model(ids)
    assert [tuple(x.shape) for x in seen[0].index] == [(2, 2, 40, 8), (2, 1, 40, 8)]
    proxy = rewrite(build("llama"), "msa")
    with observing(seen.append), torch.no_grad():
        proxy(ids)
    assert seen[-1].index is None


def test_a_module_with_another_indexer_is_refused_and_left_alone():
    model = build("llama")
    model.model.layers[1].self_attn.indexer = torch.nn.Linear(2, 2)
    with pytest.raises(CaptureError, match="of a kind that is not known"):
        host.apply(model, plan_for(model, "msa", **LEARNED))
    assert model.config._attn_implementation == "sdpa" and indexers_of(model) == {}


def test_a_module_that_passes_nothing_on_is_refused(monkeypatch):
    model = build("llama")
    monkeypatch.setattr(host, "passes_keywords", lambda module: False)
    with pytest.raises(CaptureError, match="does not pass on"):
        host.apply(model, plan_for(model, "msa", **LEARNED))


@pytest.mark.parametrize(
    "sizes", [dict(hidden_size=0), dict(groups=0), dict(index_dim=0), dict(columns=(0, 1, 2))]
)
def test_sizes_that_make_no_indexer(sizes):
    with pytest.raises(ValueError, match=r"at least 1|in pairs"):
        MSAIndexer(**{"hidden_size": 8, "groups": 2, "index_dim": 4, **sizes})


def test_an_indexer_that_turns_needs_tables():
    with pytest.raises(ValueError, match="rotary tables"):
        MSAIndexer(8, 2, 4, columns=(0, 1))(torch.randn(1, 3, 8))
