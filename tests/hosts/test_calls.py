"""Calls of a rewritten program: what differs from the capture is refused, never ignored."""

import collections

import pytest
import torch
from torch import nn

import sparsify as sp
from sparsify.errors import CaptureError, UsageError
from tests._util.tiny_models import CACHE, build, tokens

FULL = sp.Policy.moba(block_size=8, topk=10**6)
Pair = collections.namedtuple("Pair", "x y")


class Causal(nn.Module):
    """Causal attention, whose forward the tests write."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(16, 48)

    def attend(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(2)


class Options(Causal):
    def forward(self, x, double=True, scale=2.0, shifts=(1.0,), more=None):
        y = self.attend(x)
        y = y * 2 if double else y
        y = y * scale if scale is not None else y
        return y + sum(shifts) if more is None else y * 3


class Tree(Causal):
    def forward(self, inputs):
        return self.attend(inputs["x"]) - inputs["y"]


class Named(Causal):
    def forward(self, pair):
        return self.attend(pair.x) - pair.y


class Mixed(Causal):
    def forward(self, x, y, *, shift=0.0):
        return self.attend(x) - y + shift


X, Y = torch.randn(2, 20, 16), torch.randn(2, 20, 16)


def rewritten(kind, *args, **kwargs):
    model = kind().eval()
    return model, sp.sparsify(model, FULL, args, kwargs).model


def same(found, wanted):
    return torch.allclose(found, wanted, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize(
    ("captured", "called", "said"),
    [
        ({}, {"double": None}, "does not take double"),
        ({}, {"scale": None}, "does not take scale"),
        ({}, {"shifts": None}, "does not take shifts"),
        ({}, {"shifts": ()}, "does not take shifts"),
        ({}, {"more": []}, "does not take more"),
        ({"double": True}, {"double": None}, "double is None"),
        ({"double": True}, {"double": 1}, "double is 1"),
        ({"scale": 2.0}, {"scale": torch.tensor(2.0)}, "scale is a Tensor;"),
        ({"double": None}, {}, "double is True"),
        ({"scale": None}, {}, "scale is 2.0"),
    ],
)
def test_an_option_that_differs_from_the_capture_is_refused(captured, called, said):
    _, graph = rewritten(Options, X, **captured)
    with pytest.raises(UsageError, match=said):
        graph(X, **called)


@pytest.mark.parametrize(
    ("captured", "called"),
    [
        ({}, {"double": True, "scale": 2.0, "more": None}),
        ({"double": True, "scale": 2.0}, {}),
        ({"double": None, "more": None}, {"double": None}),
    ],
)
def test_an_option_that_is_as_captured_may_be_given_or_left_out(captured, called):
    model, graph = rewritten(Options, X, **captured)
    assert same(graph(X, **called), model(X, **called))


def test_entries_of_a_dict_go_by_their_keys():
    model, graph = rewritten(Tree, {"x": X, "y": Y})
    assert same(graph({"y": Y, "x": X}), model({"x": X, "y": Y}))
    for inputs in ({"x": X, "z": Y}, {"x": X}, [X, Y], {"x": X, "y": [Y]}):
        with pytest.raises(UsageError, match=r"built otherwise|must be a tensor"):
            graph(inputs)


def test_a_tuple_is_not_taken_for_a_named_one():
    model, graph = rewritten(Named, Pair(X, Y))
    assert same(graph(Pair(y=Y, x=X)), model(Pair(X, Y)))
    with pytest.raises(UsageError, match="built otherwise"):
        graph((X, Y))


def test_arguments_captured_in_both_ways_may_be_given_in_any():
    model, graph = rewritten(Mixed, X, y=Y)
    wanted = model(X, Y)
    assert same(graph(X, Y), wanted) and same(graph(y=Y, x=X), wanted)


def test_a_cache_of_another_kind_is_refused():
    from transformers import DynamicCache, StaticCache

    model = build("llama")
    graph = sp.sparsify(model, FULL, host="graph").model
    static = StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(UsageError, match="built otherwise"):
        graph(tokens(1, 4), **{CACHE: static})
    made = [DynamicCache(), DynamicCache(config=model.config)]
    with torch.no_grad():
        for cache in made:
            graph(tokens(1, 8), **{CACHE: cache})
        step = [graph(tokens(1, 3), **{CACHE: cache}).logits for cache in made]
        wanted = model(torch.cat([tokens(1, 8), tokens(1, 3)], 1)).logits[:, 8:]
    assert all(torch.allclose(logits, wanted, atol=1e-3, rtol=1e-4) for logits in step)


def test_a_cache_given_with_use_cache_false_is_updated_as_by_the_original():
    from transformers import DynamicCache

    model = build("llama")
    graph = sp.sparsify(model, FULL, host="graph").model
    found, wanted = DynamicCache(), DynamicCache()
    with torch.no_grad():
        for runs, cache in ((graph, found), (model, wanted)):
            runs(tokens(1, 8), use_cache=True, **{CACHE: cache})
            runs(tokens(1, 3), use_cache=False, **{CACHE: cache})
    assert found.get_seq_length() == wanted.get_seq_length() == 11
    assert CACHE not in graph(tokens(1, 8), use_cache=False)


@pytest.mark.parametrize("kinds", [["full"] * 3, ["sliding", "full", "full"]])
def test_caches_with_sliding_layers_have_no_program(kinds):
    kinds = [f"{kind}_attention" for kind in kinds]
    model = build("qwen2", use_sliding_window=True, sliding_window=8, layer_types=kinds)
    graph = sp.sparsify(model, FULL, host="graph").model
    ids, more = tokens(2, 30), tokens(2, 1, seed=1)
    with torch.no_grad():
        wanted = model(ids, use_cache=True)
        following = model(more, **{CACHE: wanted.get(CACHE)}).logits
    found = graph(ids)
    assert same(found.logits, wanted.logits)
    if "sliding_attention" in kinds:
        assert CACHE not in found
        with pytest.raises(UsageError, match=f"does not take {CACHE}"):
            graph(more, **{CACHE: wanted.get(CACHE)})
    else:
        assert same(graph(more, **{CACHE: found.get(CACHE)}).logits, following)


def test_a_model_without_weights_is_refused_in_one_sentence():
    model = build("llama").to("meta")
    with pytest.raises(CaptureError, match="does not run on example inputs"):
        sp.sparsify(model, FULL, host="graph")


def test_a_padding_mask_has_a_row_for_every_sequence():
    model = build("llama")
    graph = sp.sparsify(model, FULL, host="graph").model
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    with torch.no_grad():
        assert same(graph(ids, attention_mask=mask).logits, model(ids).logits)
    with pytest.raises(UsageError, match="attention_mask has 1 rows; the other inputs have 2"):
        graph(ids, attention_mask=mask[:1])


class Short(Causal):
    def forward(self, x):
        y = self.attend(x)
        y = y * 3 if x.shape[1] < 8 else y
        return y + 1 if x.shape[1] <= 40 else y


@pytest.mark.parametrize("least", [2, 8])
def test_the_smallest_size_that_the_caller_names_is_held_to(least):
    auto = torch.export.Dim.AUTO
    model = Short().eval()
    graph = sp.sparsify(model, FULL, (X,), dynamic=({0: auto, 1: auto(min=least)},)).model
    assert same(graph(X[:, :8]), model(X[:, :8]))
    with pytest.raises(UsageError, match="dim 1 of x is 7; the program holds for 8 to 40"):
        graph(X[:, :7])
