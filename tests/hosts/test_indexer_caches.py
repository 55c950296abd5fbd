"""Cache layers that keep index keys: they always belong to the same tokens as the keys."""

import copy

import pytest
import torch
from transformers import StaticCache

from sparsify.hosts.caches import SparseDynamicLayer, SparseStaticLayer, cache_use
from sparsify.hosts.index_keys import IndexKeys
from tests._util.tiny_models import build


def values(length, batch=2, seed=0, heads=2):
    return torch.randn(batch, heads, length, 3, generator=torch.Generator().manual_seed(seed))


def index_of(k):
    """Index keys that tell which keys they belong to."""
    return k[:, :1] * 2


def add(layer, k):
    layer.index_keys.offer(index_of(k))
    keys, _ = layer.update(k, k.clone())
    return keys


def growing(length=9):
    layer = SparseDynamicLayer()
    add(layer, values(length))
    return layer


def static(length=9, room=16):
    layer = SparseStaticLayer(room)
    if length:
        add(layer, values(length))
    return layer


def check_follows_keys(layer):
    """They do now, and after more tokens."""
    batch = 2 if layer.keys is None else layer.keys.shape[0]
    add(layer, values(4, batch=batch, seed=5))
    n = int(layer.get_seq_length())
    found = layer.index_keys.take()
    assert torch.equal(found[:, :, :n], index_of(layer.keys[:, :, :n]))
    assert layer.index_keys.take() is None


OPERATIONS = {
    "nothing": lambda layer: None,
    "crop": lambda layer: layer.crop(-4),
    "crop all": lambda layer: layer.crop(-9),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
    "reset": lambda layer: layer.reset(),
    "offload": lambda layer: (layer.offload(), layer.prefetch()),
    "copy": copy.deepcopy,
}
GROWING = {
    "repeat": lambda layer: layer.batch_repeat_interleave(3),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([1])),
    "select by mask": lambda layer: layer.batch_select_indices(torch.tensor([False, True])),
}


@pytest.mark.parametrize("name", [*OPERATIONS, *GROWING])
def test_operations_of_a_growing_layer(name):
    layer = growing()
    check_follows_keys(_after(layer, name))


def _after(layer, name):
    if "crop" in name and not hasattr(layer, "crop"):
        pytest.skip("this version of transformers cannot crop it")
    made = {**OPERATIONS, **GROWING}[name](layer)
    return made if isinstance(made, type(layer)) else layer


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_a_static_layer(name):
    layer = static()
    check_follows_keys(_after(layer, name))


@pytest.mark.parametrize("make", [growing, static])
def test_an_operation_past_the_layer_shows(make):
    layer = make()
    layer.keys = layer.keys.flip(0)
    with pytest.raises(AssertionError):
        check_follows_keys(layer)


@pytest.mark.parametrize("make", [growing, static])
def test_keys_without_index_keys_end_it_until_a_reset(make):
    layer = make()
    layer.update(values(2), values(2))
    assert layer.index_keys.take() is None
    add(layer, values(2))
    assert layer.index_keys.take() is None
    layer.reset()
    if int(layer.get_seq_length()):
        pytest.skip("this version of transformers keeps zeros")
    check_follows_keys(layer)


@pytest.mark.parametrize("make", [growing, static])
def test_as_many_index_keys_as_keys_must_be_offered(make):
    layer = make()
    layer.index_keys.offer(index_of(values(3)))
    layer.update(values(2), values(2))
    assert layer.index_keys.take() is None


def test_an_offer_that_no_update_took_is_replaced():
    layer = growing()
    layer.index_keys.offer(index_of(values(3)))
    check_follows_keys(layer)


def test_index_keys_of_a_static_layer_stay_in_their_memory():
    layer = static()
    place = layer.index_keys.take().data_ptr()
    add(layer, values(1))
    layer.reset()
    add(layer, values(3))
    assert layer.index_keys.take().data_ptr() == place


def test_static_layers_are_replaced_where_an_indexer_is_in_use_only():
    config = build("llama").config
    plain = StaticCache(config=config, max_cache_len=8)
    use = cache_use(plain, 0)
    assert use.unfit is None and use.index_keys is None
    assert not isinstance(plain.layers[0], SparseStaticLayer)
    use = cache_use(plain, 0, indexed=True)
    assert use.index_keys is plain.layers[0].index_keys and use.index_keys.whole
    plain.update(values(3), values(3), 1)
    used = cache_use(plain, 1, indexed=True)
    assert int(plain.layers[1].cumulative_length) == 3 and not used.index_keys.whole


def test_nothing_is_known_at_first():
    assert IndexKeys().take() is None
