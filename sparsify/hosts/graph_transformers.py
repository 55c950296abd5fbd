"""transformers language models on the graph host: two programs, and caches as objects.

The first program takes whole prompts and returns a cache, the second takes a cache that is not
empty and one token or more; caches travel as transformers' own `DynamicCache`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model

from sparsify.errors import CaptureError, UsageError
from sparsify.hosts.caches import SparseDynamicLayer, sparse_layer
from sparsify.hosts.graph_model import GraphModel
from sparsify.hosts.program import Program
from sparsify.passes.examples import example_inputs
from sparsify.passes.index_branch import INDEX_KEYS
from sparsify.passes.modes import trying

__all__ = ["LanguageGraphModel", "example_programs", "register_caches"]

CACHE_NAMES = ("cache", "past_key_values")  # today's name, and that of older versions
NEW_TOKENS = 5  # of the example with a cache; other numbers work as well


class LanguageGraphModel(GraphModel):
    """A language model of the graph host. A cache that is passed is updated in place, as the
    original does; without one, `use_cache=False` leaves it out of the result."""

    def generate(self, *_: Any, **__: Any) -> Any:
        """Exported programs compute logits; sampling belongs to transformers' own classes.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "A model of the graph host has no generate().",
            'Use host="transformers", or call the model token by token with its cache.',
        )

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        given = super()._given(args, kwargs)
        if given.pop("return_dict", None) is False:
            raise UsageError("The program returns an output object.", "Leave return_dict out.")
        return given

    def _to_program(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A cache is always computed, also when the result is to be without it; an empty one is
        as good as none."""
        computed = self.sparsify_programs[0].constants.get("use_cache") is True
        left_out = {"use_cache"} if computed or given.get("use_cache") is None else set()
        left_out |= {n for n in CACHE_NAMES if n in given and _is_empty(given[n])}
        asked = {n: value for n, value in given.items() if n not in left_out}
        later = self.sparsify_programs[-1]
        for name in CACHE_NAMES:
            if name in later.names and _grows(asked.get(name)):
                if INDEX_KEYS in later.names:
                    asked[INDEX_KEYS] = _index_keys(asked[name], later.indexed)
                asked[name] = later.built_as_captured(name, _plain(asked[name]))
        return asked

    def sparsify_example(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """With a cache that holds index keys (zeros), where one is given that holds none."""
        later = self.sparsify_programs[-1]
        cache = next((kwargs[n] for n in CACHE_NAMES if _grows(kwargs.get(n))), None)
        if cache is not None and INDEX_KEYS in later.names:
            for number, size in zip(later.indexed, _index_sizes(later), strict=True):
                keys = cache.layers[number].keys
                _indexed(cache, number, keys.new_zeros(keys.shape[0], 1, keys.shape[2], size))
        return kwargs

    def _finished(
        self, given: Mapping[str, Any], out: Any, index_keys: Mapping[int, torch.Tensor]
    ) -> Any:
        name = next((name for name in CACHE_NAMES if out.get(name) is not None), None)
        if name is None:
            return out
        for number, keys in index_keys.items():
            _indexed(out[name], number, keys)
        own = next((given[n] for n in CACHE_NAMES if given.get(n) is not None), None)
        if own is None and given.get("use_cache") is False:
            return type(out)(**{key: value for key, value in out.items() if key != name})
        if own is not None:
            own.__dict__.update(out[name].__dict__)
            out[name] = own
        return out


def _grows(cache: Any) -> bool:
    """Whether a cache is nothing but its keys and values; a sliding one counts besides."""
    return (
        type(cache) is DynamicCache
        and not getattr(cache, "offloading", False)
        and all(type(layer) in (DynamicLayer, SparseDynamicLayer) for layer in cache.layers)
    )


def _is_empty(cache: Any) -> bool:
    if _grows(cache):
        return all(layer.keys is None for layer in cache.layers)
    return not pytree.tree_leaves(cache)


def _plain(cache: Any) -> list[torch.Tensor]:
    """Keys and values of all layers, in the order in which a program takes them."""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _indexed(cache: Any, number: int, keys: torch.Tensor) -> None:
    """Let a layer of the cache keep index keys, too."""
    layer = sparse_layer(cache, number)
    assert layer is not None
    layer.index_keys.keys_B1SI = keys


def _index_keys(cache: Any, numbers: Sequence[int]) -> list[torch.Tensor]:
    found = []
    for number in numbers:
        layer = cache.layers[number]
        known = layer.index_keys.keys_B1SI if isinstance(layer, SparseDynamicLayer) else None
        if known is None or known.shape[2] != layer.keys.shape[2]:
            raise UsageError(
                f"Layer {number} of the cache does not hold an index key for every key.",
                "Let this model fill the cache from the first token on.",
            )
        found.append(known)
    return found


def _index_sizes(program: Program) -> list[int]:
    """Sizes of the index vectors that a program takes."""
    nodes = program.exported.graph.find_nodes(op="placeholder")
    return [int(n.meta["val"].shape[3]) for n in nodes if n.name.startswith(f"{INDEX_KEYS}_")]


def example_programs(model: torch.nn.Module, *, seq_len: int | None = None) -> list[dict[str, Any]]:
    """Example inputs of the programs of a language model: a prompt, and tokens after a cache.

    Both with a 2-D padding mask. A model without a growing cache has the first only, without one.
    """
    register_caches()
    prompt = example_inputs(model, seq_len=seq_len)
    accepted = inspect.signature(model.forward).parameters
    name = next((name for name in CACHE_NAMES if name in accepted), None)
    if name is None or "use_cache" not in accepted or "decoder_input_ids" in prompt:
        return [prompt]
    prompt["use_cache"] = True
    cache = _run(model, prompt).get(name)
    if not _grows(cache):
        return [{**prompt, "use_cache": False}]
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    more = mask.new_ones(mask.shape[0], NEW_TOKENS)
    step = {
        "input_ids": ids[:, -1:].repeat(1, NEW_TOKENS),
        "attention_mask": torch.cat([mask, more], 1),
        name: cache,
        "use_cache": True,
    }
    return [prompt, step]


def _run(model: torch.nn.Module, inputs: Mapping[str, Any]) -> Any:
    try:
        with trying(model):
            return model(**inputs)
    except Exception as error:  # the model's own code
        lines = str(error).splitlines() or [type(error).__name__]
        said = f"{type(model).__name__} does not run on example inputs: {lines[0].rstrip('.')}."
        raise CaptureError(said, "The graph host needs a model with its weights.") from error


def register_caches() -> None:
    """Let torch.export take transformers' caches apart and put them together."""
    register_cache_pytrees_for_model(DynamicCache)
