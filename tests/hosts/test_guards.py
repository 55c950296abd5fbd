"""Sizes that a program holds for: paths of the model's code are never mixed up."""

import dataclasses

import pytest
import sympy
import torch
from torch import nn

import sparsify as sp
from sparsify.errors import CaptureError, UsageError
from sparsify.hosts.guards import _holds_from_two_on
from sparsify.hosts.sizes import Unknown, evaluate
from sparsify.plans import Plan
from tests._util.tiny_models import CACHE, build, tokens

POLICY = sp.Policy.moba(block_size=4, topk=2)


class Branching(nn.Module):
    """Attention whose result depends on a question about a size."""

    def __init__(self, asks):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.asks = nn.Linear(16, 48), asks

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).flatten(2)
        return y * 3 if self.asks(x) else y


def built(asks, batch=2, length=24):
    model = Branching(asks).eval()
    return model, sp.sparsify(model, POLICY, (torch.randn(batch, length, 16),)).model


def same(model, graph, *shape):
    """Whether the graph, with all blocks, computes what the model does."""
    layers = tuple(dataclasses.replace(p, topk=99) for p in graph.sparsify_plan)
    full, x = graph.sparsify_retuned(Plan(layers)), torch.randn(*shape, 16)
    return torch.allclose(full(x), model(x), atol=1e-5)


ASKS = {
    "one token": lambda x: x.shape[1] == 1,
    "more than one token": lambda x: x.shape[1] > 1,
    "one sequence": lambda x: x.shape[0] == 1,
}


@pytest.mark.parametrize("asks", [ASKS["one token"], ASKS["more than one token"]])
def test_a_model_with_a_path_of_its_own_for_one_token_is_not_run_with_one(asks):
    model, graph = built(asks)
    assert same(model, graph, 2, 9) and same(model, graph, 1, 9)
    with pytest.raises(UsageError, match=r"dim 1 of x is 1; the program holds for 2 and more"):
        graph(torch.randn(2, 1, 16))


def test_a_model_with_a_path_of_its_own_for_one_sequence_is_not_run_with_one():
    model, graph = built(ASKS["one sequence"])
    assert same(model, graph, 3, 1)
    with pytest.raises(UsageError, match=r"dim 0 of x is 1"):
        graph(torch.randn(1, 9, 16))


def test_a_model_without_such_paths_is_run_with_one_of_everything():
    model, graph = built(lambda x: False)
    assert same(model, graph, 1, 1)
    with pytest.raises(UsageError, match=r"dim 1 of x is 0"):
        graph(torch.randn(2, 0, 16))


def test_a_path_for_one_of_everything_is_found_although_no_single_one_shows_it():
    model, graph = built(lambda x: x.shape[0] == 1 and x.shape[1] == 1)
    assert same(model, graph, 1, 9)
    with pytest.raises(UsageError, match="the program holds for 2 and more"):
        graph(torch.randn(1, 1, 16))


def test_sizes_at_which_a_condition_divides_by_zero_are_refused():
    model, graph = built(lambda x: x.shape[1] % (x.shape[1] // 4 - 2) == 0)
    assert same(model, graph, 2, 24)
    with pytest.raises(UsageError, match="do not fit each other"):
        graph(torch.randn(2, 8, 16))


class Counting(Branching):
    """A forward that counts its calls, in a buffer or in Python."""

    def __init__(self, python):
        super().__init__(lambda x: False)
        self.python, self.calls = python, 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1.0)
        self.calls += 1
        return super().forward(x) * (self.calls if self.python else self.count)


def test_what_a_forward_counts_in_python_is_no_program():
    with pytest.raises(CaptureError, match="do not agree on the example inputs"):
        sp.sparsify(Counting(python=True).eval(), POLICY, (torch.randn(2, 24, 16),))


def test_what_a_forward_counts_in_a_buffer_goes_on_counting():
    model = Counting(python=False).eval()
    graph = sp.sparsify(model, POLICY, (torch.randn(2, 24, 16),)).model
    assert graph.count == 0.0
    x = torch.randn(1, 1, 16)
    first, second = graph(x), graph(x)
    assert graph.count == 2.0 and torch.allclose(second, 2 * first)


class Growing(Branching):
    """A table of positions that grows with the inputs, as rotary embeddings keep one."""

    def __init__(self):
        super().__init__(lambda x: False)
        self.size = 8
        self.register_buffer("table", torch.arange(8.0)[:, None])

    def forward(self, x):
        if x.shape[1] > self.size:
            self.size = x.shape[1]
            self.table = torch.arange(float(self.size))[:, None]
        return super().forward(x) * self.table[: x.shape[1]]


@pytest.mark.parametrize("length", [6, 24])
def test_a_model_that_keeps_a_growing_table_still_runs_afterwards(length):
    model, x = Growing().eval(), torch.randn(2, length, 16)
    try:
        graph = sp.sparsify(model, sp.Policy.moba(block_size=4, topk=99), (x,)).model
        assert torch.allclose(graph(x), model(x), atol=1e-4)
    except CaptureError:
        assert length > 8  # the program would have to change the size of a buffer
    assert (model.size, len(model.table)) == ((8, 8) if length == 6 else (model.size, model.size))
    assert model(torch.randn(2, 24, 16)).shape == (2, 24, 16)


class Masked(Branching):
    """Attention that may be causal only while it is given a mask."""

    def __init__(self, always_causal):
        super().__init__(lambda x: False)
        self.always_causal = always_causal

    def forward(self, x, mask=None):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if mask is not None:
            visible = visible & mask[:, None, None, :]
        elif not self.always_causal:
            visible = None
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("always_causal", [True, False])
def test_a_padding_mask_may_be_left_out_where_the_model_then_hides_nothing(always_causal):
    model, x = Masked(always_causal).eval(), torch.randn(2, 24, 16)
    mask = torch.ones(2, 24, dtype=torch.bool)
    graph = sp.sparsify(model, sp.Policy.moba(block_size=4, topk=99), (x, mask)).model
    assert torch.allclose(graph(x, mask), model(x, mask), atol=1e-5)
    if always_causal:
        assert torch.allclose(graph(x), model(x), atol=1e-5)
    else:
        with pytest.raises(UsageError, match="mask is missing"):
            graph(x)


def test_example_inputs_stay_as_they_are():
    class Changing(Branching):
        def forward(self, x, calls):
            return super().forward(x) * calls.add_(1.0)

    calls = torch.zeros(1)
    graph = sp.sparsify(Changing(lambda x: False).eval(), POLICY, (torch.randn(2, 24, 16), calls))
    assert calls == 0.0
    graph.model(torch.randn(2, 24, 16), calls)
    assert calls == 1.0


def test_a_longer_path_is_not_taken_for_a_shorter_one():
    model, graph = built(lambda x: x.shape[1] >= 20)
    assert same(model, graph, 2, 20)
    with pytest.raises(UsageError, match=r"x.shape\[1\]|dim 1 of x is 19"):
        graph(torch.randn(2, 19, 16))


def test_a_relation_between_two_sizes_is_held_to():
    class Two(Branching):
        def forward(self, x, y):
            return super().forward(x) + (y.sum() if y.shape[0] > x.shape[1] else 0.0)

    model = Two(lambda x: False).eval()
    graph = sp.sparsify(model, POLICY, (torch.randn(2, 24, 16), torch.randn(30))).model
    graph(torch.randn(2, 10, 16), torch.randn(11))
    with pytest.raises(UsageError, match="do not fit each other"):
        graph(torch.randn(2, 10, 16), torch.randn(10))


@pytest.mark.parametrize(
    ("condition", "vacuous"),
    [
        (lambda a, b: sympy.Ne(a, 1), True),
        (lambda a, b: a * b >= 2, True),
        (lambda a, b: a + b > 3, True),
        (lambda a, b: sympy.Ne(a, 2), False),
        (lambda a, b: a * b >= 5, False),
        (lambda a, b: a <= b, False),
        (lambda a, b: sympy.Eq(a, 2), False),
    ],
)
def test_conditions_that_only_tell_one_apart_are_known(condition, vacuous):
    a, b = sympy.symbols("a b", integer=True, positive=True)
    assert _holds_from_two_on(condition(a, b)) == vacuous


def test_a_decode_step_of_one_token_is_served_where_only_its_memory_layout_differs():
    model = build("opt")
    graph = sp.sparsify(model, POLICY, host="graph").model
    ids = tokens(2, 12)
    past = graph(ids[:, :-1])
    last = graph(ids[:, -1:], **{CACHE: past[CACHE]}).logits
    wanted = graph(ids).logits[:, -1:]
    assert (last - wanted).abs().max() / wanted.abs().max() < 1e-5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("s0 + 4 <= s1", True),
        ("-s1 + 2*s0 < 0", False),
        ("Eq((s1//2), 5)", True),
        ("Ne(Mod(s1, 4), 2)", False),
        ("(s0 > 1) & (s1 > 100)", False),
        ("(s0 > 100) | ~(s1 > 100)", True),
        ("Min(s0, Max(s1, 3)) + CeilDiv(s1, 4)", 9),
    ],
)
def test_texts_about_sizes_are_evaluated(text, value):
    assert evaluate(text, {"s0": 6, "s1": 10}) == value


@pytest.mark.parametrize(
    "text", ["s2", "__import__('os')", "s0.real", "[s0]", "'a'", "1 +", "f(s0)", "s0 // 0", "1.5"]
)
def test_anything_but_arithmetic_on_known_sizes_is_refused(text):
    with pytest.raises(Unknown):
        evaluate(text, {"s0": 6})


class TwiceAsLong(nn.Module):
    """Attention over tokens of which the second input has half as many, twice."""

    def __init__(self):
        super().__init__()
        self.inner = Branching(lambda x: False)

    def forward(self, x, y):
        return self.inner(x + torch.cat([y, y], 1))


def test_a_size_told_by_a_later_input_is_checked_in_the_earlier_one():
    model = TwiceAsLong().eval()
    inputs = torch.randn(2, 24, 16), torch.randn(2, 12, 16)
    graph = sp.sparsify(model, sp.Policy.moba(block_size=4, topk=99), inputs).model
    x, y = torch.randn(2, 20, 16), torch.randn(2, 10, 16)
    assert torch.allclose(graph(x, y), model(x, y), atol=1e-5)
    with pytest.raises(UsageError, match="dim 1 of x is 22; the program was captured for 20, as"):
        graph(torch.randn(2, 22, 16), y)


class Separate(nn.Module):
    """Attention over queries, keys and values that are given apart."""

    def forward(self, q, k, v):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_queries_and_keys_that_are_assumed_equally_many_have_to_be():
    model, policy = Separate().eval(), sp.Policy.moba(block_size=4, topk=99)
    graph = sp.sparsify(model, policy, tuple(torch.randn(3, 2, 12, 16))).model
    same_length = torch.randn(3, 2, 9, 16)
    assert torch.allclose(graph(*same_length), model(*same_length), atol=1e-5)
    short, long = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    for inputs in ((short, long, long), (long, short, short), (short, short, long)):
        with pytest.raises(UsageError, match="do not fit each other"):
            graph(*inputs)


@pytest.mark.parametrize(
    ("hides", "wrong"),
    [
        (lambda mask: mask > 0.5, torch.full((2, 24), 0.3)),
        (lambda mask: mask > 0, torch.full((2, 24), -1.0)),
        (lambda mask: mask == 1, torch.full((2, 24), 2.0)),
        (lambda mask: mask != 0, None),
    ],
)
def test_a_padding_mask_holds_the_numbers_that_its_proof_assumes(hides, wrong):
    class Padded(Masked):
        def forward(self, x, mask):
            return super().forward(x, hides(mask)) * hides(mask)[..., None]

    model, x = Padded(True).eval(), torch.randn(2, 24, 16)
    mask = torch.ones(2, 24)
    mask[0, 20:] = 0.0
    graph = sp.sparsify(model, sp.Policy.moba(block_size=4, topk=99), (x, mask)).model
    assert torch.allclose(graph(x, mask), model(x, mask), atol=1e-5)
    if wrong is None:
        assert torch.allclose(graph(x, -0.3 * mask), model(x, -0.3 * mask), atol=1e-5)
    else:
        with pytest.raises(UsageError, match="mask must hold only 0 and 1"):
            graph(x, wrong)
