"""Kinds of KV caches, and what generation does to them: the tokens are those of no cache at all."""

import functools
import inspect

import pytest
import torch
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    QuantizedCache,
    QuantizedLayer,
    StaticSlidingWindowLayer,
)

from sparsify.errors import StrictError
from sparsify.hosts import offering
from sparsify.hosts import transformers as host
from sparsify.hosts.caches import SparseDynamicLayer, cache_use
from sparsify.plans import LayerPlan, Plan
from tests._util.tiny_models import CACHE, build, tokens

METHODS = ("moba", "msa")
PROMPT, NEW = 40, 8


def llama(method=None, seed=0):
    """A model whose rows are sparse from token 16 on; the original without a method."""
    model = build("llama", seed=seed, dtype=torch.float64)
    if method is not None:
        index = {"indexer": "proxy"} if method == "msa" else {}
        sizes = dict(block_size=8, topk=2, **index)
        names = [n for n, _ in model.named_modules() if n.endswith(".self_attn")]
        layers = [LayerPlan(n, 0, method, "rewritten", "by rule", **sizes) for n in names]
        host.apply(model, Plan(tuple(layers)))
    return model


def prompt(batch):
    """Random tokens, the second sequence padded on the left by 13."""
    ids, mask = tokens(batch, PROMPT), torch.ones(batch, PROMPT, dtype=torch.long)
    mask[1:2, :13] = 0
    return ids * mask, mask


def generated(model, batch=2, **options):
    ids, mask = prompt(batch)
    given = dict(attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    return model.generate(ids, **given | options)


@functools.cache
def without_cache(method, batch=2, **options):
    """Tokens of the model, or of the original without a method, without a cache."""
    return generated(llama(method), batch, use_cache=False, **options)


KINDS = {
    "growing": {},
    "static": {"cache_implementation": "static"},
    "growing in chunks": {"prefill_chunk_size": 7},
    "static in chunks": {"prefill_chunk_size": 16, "cache_implementation": "static"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_equal_those_without_a_cache(method, kind):
    model = llama(method)
    got = generated(model, **KINDS[kind])
    assert torch.equal(got, without_cache(method))
    assert not torch.equal(got, without_cache(None))  # sparse rows count
    assert not host.fallbacks(model)


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_beams_equal_those_without_a_cache(method, sequences):
    model = llama(method)
    options = dict(num_beams=3, num_return_sequences=sequences)
    got = generated(model, **options)
    assert torch.equal(got, without_cache(method, **options))
    assert not torch.equal(got[::sequences], without_cache(method))  # beams moved
    assert not host.fallbacks(model)


@pytest.mark.parametrize("helper", ["lookup", "same", "other"])
@pytest.mark.parametrize("method", METHODS)
def test_assisted_generation_crops_what_was_guessed_wrong(method, helper):
    model = llama(method)
    options = {
        "lookup": {"prompt_lookup_num_tokens": 3},
        "same": {"assistant_model": llama()},
        "other": {"assistant_model": llama(seed=3)},
    }[helper]
    got = generated(model, batch=1, **options)
    assert torch.equal(got, without_cache(method, batch=1))
    assert not host.fallbacks(model)


class Stream:
    """What offloading asks of a stream, on a machine without a GPU."""

    def wait_stream(self, other):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("method", METHODS)
def test_offloaded_caches(method, kind, monkeypatch):
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    offloads = []
    original = DynamicLayer.offload
    monkeypatch.setattr(
        "transformers.cache_utils.CacheLayerMixin.offload",
        lambda layer: (offloads.append(layer), original(layer))[1],
    )
    model = llama(method)
    got = generated(model, cache_implementation=kind)
    assert torch.equal(got, without_cache(method))
    assert offloads and not host.fallbacks(model)


@torch.no_grad()
def step(model, ids, cache):
    return model(ids, use_cache=True, **{CACHE: cache}).logits


@torch.no_grad()
def whole(model, ids):
    return model(ids, use_cache=False).logits


def close(a, b):
    return bool((a - b).abs().max() <= 1e-12 * b.abs().max())


def caches(model):
    return (
        DynamicCache(config=model.config),
        DynamicCache(),
        StaticCache(config=model.config, max_cache_len=64),
    )


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("removed", [1, 8, 23])
@pytest.mark.parametrize("method", METHODS)
def test_a_cropped_cache_goes_on_as_if_the_rest_had_never_been_there(method, removed, kind):
    model, ids = llama(method), tokens(2, 40)
    cache = caches(model)[kind]
    step(model, ids, cache)
    if kind == 2 and not hasattr(cache.layers[0], "crop"):
        pytest.skip("static caches of this version of transformers cannot be cropped")
    cache.crop(-removed)
    other = torch.cat([ids[:, : 40 - removed], tokens(2, 12, seed=5)], 1)
    got = step(model, other[:, 40 - removed :], cache)
    assert close(got, whole(model, other)[:, 40 - removed :])
    assert not host.fallbacks(model)


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("method", METHODS)
def test_a_cache_that_is_reset_serves_another_text(method, kind):
    model, ids, other = llama(method), tokens(2, 40), tokens(2, 40, seed=5)
    cache = caches(model)[kind]
    step(model, ids, cache)
    cache.reset()
    if cache.get_seq_length():
        pytest.skip("this version of transformers fills growing caches with zeros instead")
    step(model, other[:, :30], cache)
    assert close(step(model, other[:, 30:], cache), whole(model, other)[:, 30:])


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_sequences_of_a_cache_are_moved_with_their_means(method, change, rows):
    model, ids = llama(method), tokens(2, 40)
    cache = DynamicCache(config=model.config)
    step(model, ids[:, :30], cache)
    change(cache)
    moved = torch.cat([ids[rows, :30], tokens(len(rows), 10, seed=5)], 1)
    assert close(step(model, moved[:, 30:], cache), whole(model, moved)[:, 30:])


class RoundedLayer(QuantizedLayer):
    """A quantised layer whose back end is rounding to multiples of 1/8."""

    def _quantize(self, tensor, axis):
        return (tensor * 8).round().to(torch.int32), tensor.dtype

    def _dequantize(self, quantised):
        return quantised[0].to(quantised[1]) / 8


def rounded(model):
    return Cache(layers=[RoundedLayer(residual_length=8) for _ in range(3)])


def in_eight_bits(model):
    if "fp8" not in inspect.getsource(QuantizedCache):
        pytest.skip("this version of transformers has no fp8 cache")
    return QuantizedCache(backend="fp8", config=model.config)


def windowed(model):
    return Cache(layers=[DynamicSlidingWindowLayer(sliding_window=128) for _ in range(3)])


def windowed_static(model):
    layers = [StaticSlidingWindowLayer(max_cache_len=64, sliding_window=128) for _ in range(3)]
    return Cache(layers=layers)


class UserLayer(DynamicLayer):
    pass


class UserCache(DynamicCache):
    def update(self, *args, **kwargs):
        return super().update(*args, **kwargs)


UNFIT = {
    "group-wise": (rounded, r"rounds its keys"),
    "fp8": (in_eight_bits, r"rounds its keys"),
    "window": (windowed, "a window of the keys"),
    "static window": (windowed_static, "a window of the keys"),
    "layer of the user": (lambda m: Cache(layers=[UserLayer() for _ in range(3)]), "UserLayer"),
    "cache of the user": (lambda m: UserCache(config=m.config), "UserCache"),
}


@pytest.mark.parametrize("kind", UNFIT)
@pytest.mark.parametrize("method", METHODS)
def test_caches_with_other_keys_run_dense_and_are_counted(method, kind, monkeypatch):
    make, words = UNFIT[kind]
    original, model = llama(), llama(method)
    wanted = generated(original, **{CACHE: make(original)})
    assert torch.equal(generated(model, **{CACHE: make(model)}), wanted)
    reasons = host.fallbacks(model)
    assert len(reasons) == 3 and all(words in reason for reason in reasons.values())
    assert not any("sparse" in counts for counts in host.call_counts(model).values())
    monkeypatch.setenv("SPARSIFY_STRICT", "1")
    with pytest.raises(StrictError, match=words):
        generated(model, **{CACHE: make(model)})


def test_quantised_keys_are_not_the_keys():
    """Why: sparse attention on rounded keys would choose other blocks than the prefill did."""
    original = llama()
    cache, ids = rounded(original), tokens(1, 40)
    step(original, ids[:, :39], cache)
    assert not close(step(original, ids[:, 39:], cache), whole(original, ids)[:, 39:])


@pytest.mark.parametrize("method", METHODS)
def test_keys_of_a_cache_that_is_not_seen_run_dense(method):
    model, ids = llama(method), tokens(1, 40)
    for module in model.modules():
        hook = module.__dict__.pop("sparsify_hook", None)
        if hook is not None:
            hook.remove()
    cache = DynamicCache(config=model.config)
    step(model, ids[:, :39], cache)
    assert not host.fallbacks(model)
    step(model, ids[:, 39:], cache)
    assert set(host.fallbacks(model).values()) == {"the keys come from a cache that is not seen"}


def test_what_a_cache_is_good_for():
    config = llama().config
    growing = DynamicCache(config=config)
    use = cache_use(growing, 0)
    assert use.unfit is None and isinstance(use.layer, SparseDynamicLayer)
    static = cache_use(StaticCache(config=config, max_cache_len=8), 0)
    assert (static.unfit, static.layer) == (None, None)
    assert "no layer" in cache_use(growing, 7).unfit
    assert "str" in cache_use("a cache", 0).unfit


def test_the_cache_is_found_by_its_names_and_by_its_type():
    cache = DynamicCache()
    for args, kwargs in (
        ((), {"cache": cache}),
        ((), {"cache": None, "past_key_values": cache}),
        ((), {"layer_past": cache}),
        ((torch.ones(1), None, cache), {}),
    ):
        assert offering._cache_among(args, kwargs) is cache
    assert offering._cache_among((torch.ones(1),), {"cache": None}) is None
