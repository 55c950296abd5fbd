"""Cache layers that keep block means."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from sparsify.hosts.caches import BlockMeans, SparseDynamicLayer, sparse_layer
from tests._util.tiny_models import build

SIZE = 4


def keys(length, batch=2, seed=0):
    return torch.randn(batch, 2, length, 3, generator=torch.Generator().manual_seed(seed))


def fresh(k, origins=None):
    return BlockMeans().extend(k, SIZE, origins)


def complete(means, length, origins=None):
    """The entries a query may choose: blocks complete in their own sequence."""
    count = [(length - o) // SIZE for o in (origins or (0,) * means.shape[0])]
    return [means[b, :, :n] for b, n in enumerate(count)]


@pytest.mark.parametrize("origins", [None, (0, 5), (3, 3), (9, 0)])
@pytest.mark.parametrize("steps", [[1] * 19, [7, 1, 1, 9, 1], [19], [4, 4, 4, 4, 3]])
def test_means_grown_step_by_step_equal_means_taken_at_once(steps, origins):
    k = keys(19)
    store, length = BlockMeans(), 0
    for step in steps:
        length += step
        grown = store.extend(k[:, :, :length], SIZE, origins)
        once = fresh(k[:, :, :length], origins)
        assert grown.shape == (2, 2, -(-length // SIZE), 3)
        for a, b in zip(
            complete(grown, length, origins), complete(once, length, origins), strict=True
        ):
            assert torch.equal(a, b)


def test_means_are_the_means_of_the_blocks_from_the_first_real_key():
    k = keys(19)
    means = fresh(k, (2, 7))
    assert torch.allclose(means[0, :, 1], k[0, :, 6:10].mean(1))
    assert torch.allclose(means[1, :, 2], k[1, :, 15:19].mean(1))


def test_a_change_of_origin_or_block_size_starts_anew():
    k, store = keys(19), BlockMeans()
    store.extend(k, SIZE, None)
    for size, origins in ((3, None), (SIZE, (1, 2)), (SIZE, None)):
        expected = BlockMeans().extend(k, size, origins)
        assert torch.equal(store.extend(k, size, origins), expected)


def layer_with(k, origins=None):
    layer = SparseDynamicLayer()
    stored, _ = layer.update(k, k.clone())
    layer.block_means_for(stored, SIZE, origins)
    return layer


def check_follows_keys(layer, origins):
    """After the operation, growing goes on as if the kept keys had been cached from the start."""
    more = keys(6, batch=layer.keys.shape[0], seed=9)
    stored, _ = layer.update(more, more)
    grown = layer.block_means_for(stored, SIZE, origins)
    once = fresh(stored, origins)
    n = stored.shape[2]
    for a, b in zip(complete(grown, n, origins), complete(once, n, origins), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("origins", [None, (0, 5)])
@pytest.mark.parametrize("removed", [1, 3, 4, 11, 18])
def test_crop_forgets_the_blocks_it_cuts(removed, origins):
    layer = layer_with(keys(19), origins)
    layer.crop(-removed)
    check_follows_keys(layer, origins)


def test_cropped_blocks_would_be_stale_if_they_were_kept():
    layer = layer_with(keys(19))
    stale = layer.block_means.means_BGND.clone()
    layer.crop(-7)
    layer.block_means.means_BGND = stale
    with pytest.raises(AssertionError):
        check_follows_keys(layer, None)


@pytest.mark.parametrize(
    ("operation", "rows"),
    [
        (lambda layer: layer.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda layer: layer.batch_repeat_interleave(3), [0, 0, 0, 1, 1, 1]),
        (lambda layer: layer.batch_select_indices(torch.tensor([1])), [1]),
        (lambda layer: layer.batch_select_indices(torch.tensor([False, True])), [1]),
    ],
)
@pytest.mark.parametrize("origins", [None, (0, 5)])
def test_batch_operations_carry_the_means_along(operation, rows, origins):
    layer = layer_with(keys(19), origins)
    operation(layer)
    check_follows_keys(layer, origins and tuple(origins[r] for r in rows))
    assert layer.block_means.means_BGND.shape[0] == len(rows)


def test_reset_forgets_everything():
    layer = layer_with(keys(19))
    layer.reset()
    assert layer.block_means.means_BGND is None
    check_again = keys(8, seed=3)
    stored, _ = layer.update(check_again, check_again)
    assert torch.equal(layer.block_means_for(stored, SIZE, None), fresh(stored))


def test_a_plain_growing_layer_is_replaced_once_and_keeps_its_content():
    cache = DynamicCache(config=build("llama").config)
    k = keys(5)
    cache.update(k, k, 1)
    layer = sparse_layer(cache, 1)
    assert isinstance(layer, SparseDynamicLayer)
    assert torch.equal(layer.keys, k)
    assert sparse_layer(cache, 1) is layer is cache.layers[1]


def test_layers_are_appended_to_a_lazy_cache_as_transformers_would():
    cache = DynamicCache()
    assert isinstance(sparse_layer(cache, 2), SparseDynamicLayer)
    assert [type(layer) for layer in cache.layers[:2]] == [DynamicLayer, DynamicLayer]


def test_other_kinds_of_layers_are_left_alone():
    config = build("llama").config
    assert sparse_layer(StaticCache(config=config, max_cache_len=8), 0) is None
    windowed = build("mistral", sliding_window=8).config
    assert sparse_layer(DynamicCache(config=windowed), 0) is None
    assert sparse_layer("not a cache", 0) is None

    class Custom(DynamicLayer):
        pass

    cache = DynamicCache()
    cache.layers.append(Custom())
    assert sparse_layer(cache, 0) is None


def test_a_cache_with_means_can_be_deep_copied():
    layer = layer_with(keys(19))
    twin = copy.deepcopy(layer)
    check_follows_keys(layer, None)
    check_follows_keys(twin, None)


def test_a_cache_edited_past_its_methods_starts_anew():
    layer = layer_with(keys(19))
    layer.keys = layer.keys.flip(0)
    assert torch.equal(layer.block_means_for(layer.keys, SIZE, None), fresh(layer.keys))
