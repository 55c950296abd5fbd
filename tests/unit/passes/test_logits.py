"""Logits of written-out attention: what is read of them, and their check by numbers."""

import pytest
import torch

from sparsify.passes.anchors import find_anchors
from sparsify.passes.capture import capture
from sparsify.passes.context import Context
from sparsify.passes.dominators import Dataflow
from sparsify.passes.frame import make_frame
from sparsify.passes.logits import read_logits
from sparsify.passes.logits_check import LogitsCheck
from sparsify.passes.mask_concrete import NotRunnable
from sparsify.passes.normalize import normalize
from sparsify.passes.refused import Refused
from tests._util.attention import Attention, padding, tokens

INF = float("-inf")


def upper(n):
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def read(mask, *inputs, length=20):
    """The frame and the logits of one layer whose scores `mask` changes."""

    def attend(self, q, k, v, x, *others):
        return mask(q @ k.mT * 0.3, *others).softmax(-1) @ v

    captured = normalize(capture(Attention(attend).eval(), (tokens(length=length), *inputs)))
    (anchor,) = find_anchors(captured).attention
    flow = Dataflow(captured.graph, captured.inputs, find_anchors(captured).calls)
    frame = make_frame(anchor.call, captured.ranges)
    context = Context(captured, flow)
    return captured, frame, read_logits(frame, context.evaluator(frame.space))


def causal(s):
    return s.masked_fill(upper(s.shape[-1]), INF)


def test_factor_and_visibility():
    _, frame, logits = read(lambda s: causal(s) / 2)
    assert logits.factor == pytest.approx(0.15)
    seen = logits.visibility.formula
    for i, j in ((3, 2), (3, 3), (3, 4), (0, 1)):
        assert bool(seen.subs({frame.i: i, frame.j: j})) == (j <= i)


def test_no_visible_key_has_no_factor():
    _, _, logits = read(lambda s: s.masked_fill(torch.ones_like(s, dtype=torch.bool), INF))
    assert not logits.visibility.formula


def test_what_is_assumed_of_a_fill():
    for mask, words in (
        (lambda s: s.masked_fill(upper(s.shape[-1]), -1e5), "filling with -100000"),
        (lambda s: s + upper(s.shape[-1]) * -1e5, "adding -100000"),
    ):
        (note,) = read(mask)[2].visibility.assumptions
        assert note.startswith(words)
    assert not read(lambda s: s.masked_fill(upper(s.shape[-1]), INF))[2].visibility.assumptions


def test_right_logits_have_no_counterexample():
    captured, frame, logits = read(causal)
    assert LogitsCheck(captured, frame, logits.factor).counterexample() is None


def test_a_wrong_factor_contradicts_the_numbers():
    captured, frame, logits = read(causal)
    check = LogitsCheck(captured, frame, logits.factor * 1.001)
    with pytest.raises(Refused, match="numbers of the scores contradict"):
        check.counterexample()


def test_a_key_too_many_is_found():
    captured, frame, logits = read(lambda s: s.masked_fill(upper(s.shape[-1]).roll(1, -1), INF))
    found = LogitsCheck(captured, frame, logits.factor).counterexample()
    assert found.startswith("query 0 ")


def test_padding_must_be_the_one_that_was_proved():
    captured, frame, logits = read(
        lambda s, pad: causal(s).masked_fill(pad[:, None, None] == 0, -1e9), padding()
    )
    check = LogitsCheck(captured, frame, logits.factor)
    assert check.counterexample("inputs_0") is None
    assert "misses" in check.counterexample()


def test_the_smallest_bias_is_one():
    with pytest.raises(Refused, match="LOGIT_BIAS"):
        read(lambda s: causal(s) + 1e-3 * upper(s.shape[-1]).mT)


def test_scores_too_large_to_check_are_no_proof():
    captured, frame, logits = read(causal)
    check = LogitsCheck(captured, frame, logits.factor)
    check.most_elements = 100
    with pytest.raises(NotRunnable, match="too large"):
        check.counterexample()
