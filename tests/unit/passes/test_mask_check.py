"""The second reading of a mask: its own numbers, at sizes beyond its constants."""

import pytest
import torch

from sparsify.passes import mask_proof
from sparsify.passes.capture import capture
from sparsify.passes.context import Context
from sparsify.passes.dominators import Dataflow
from sparsify.passes.frame import make_frame
from sparsify.passes.mask_check import NumericCheck
from sparsify.passes.mask_concrete import NotRunnable
from sparsify.passes.matchers import sdpa as matcher
from sparsify.passes.refused import Refused
from tests._util.attention import Attention, masked, padding, sdpa, tokens


def framed(make, *inputs):
    captured = capture(Attention(masked(make)), (tokens(), *inputs))
    node = next(n for n in captured.graph.nodes if matcher.is_anchor(n))
    return captured, make_frame(matcher.read_call(node), captured.ranges)


def below(n):
    return torch.arange(n)[:, None] - torch.arange(n)


def causal(n):
    return below(n) >= 0


def test_a_right_mask_has_no_counterexample():
    captured, frame = framed(causal)
    assert NumericCheck(captured, frame).counterexample(None) is None


@pytest.mark.parametrize("width", [4, 100, 1000])
def test_a_window_is_found_however_long_it_is(width):
    captured, frame = framed(lambda n: (below(n) >= 0) & (below(n) < width))
    found = NumericCheck(captured, frame).counterexample(None)
    assert found.startswith(f"query {width} misses key 0")


def test_one_key_too_many_is_found():
    captured, frame = framed(lambda n: below(n) >= -1)
    assert NumericCheck(captured, frame).counterexample(None).startswith("query 0 sees key 1")


def test_padding_must_be_the_one_that_was_proved():
    def both(n, m):
        return causal(n) & m.bool()[:, None, None]

    captured, frame = framed(both, padding())
    check = NumericCheck(captured, frame)
    assert check.counterexample("inputs_0") is None
    assert check.counterexample(None) is not None
    assert check.counterexample(None, padded=False) is None


def test_a_formula_that_the_numbers_contradict_is_no_proof(monkeypatch):
    """As if the symbolic reading were wrong: the window is taken for plain causal."""
    captured, frame = framed(lambda n: (below(n) >= 0) & (below(n) < 300))
    right = mask_proof.decide

    def wrong(formula, frame, ranges):
        shape = right(formula, frame, ranges)
        return type(shape)(mask_proof.MaskKind.CAUSAL, shape.offset)

    monkeypatch.setattr(mask_proof, "decide", wrong)
    context = Context(captured, Dataflow(captured.graph, captured.inputs))
    with pytest.raises(Refused, match="contradict") as refused:
        mask_proof.prove_mask(frame, context)
    assert refused.value.code == "MASK_UNPROVED"
    assert "query 300 misses key 0" in refused.value.evidence


def test_a_mask_too_large_to_check_is_no_proof():
    captured, frame = framed(lambda n: causal(n) | (torch.arange(n) < -100_000))
    with pytest.raises(NotRunnable, match="too large"):
        NumericCheck(captured, frame).counterexample(None)


def test_changes_before_the_call_are_run_and_later_ones_are_not():
    class Written(Attention):
        def __init__(self):
            super().__init__(None)
            self.register_buffer("keep", torch.ones(20, 20, dtype=torch.bool))

        def forward(self, x):
            self.keep.tril_()
            out = sdpa(*self.heads(x), attn_mask=self.keep)
            self.keep.fill_(True)
            return out

    captured = capture(Written(), (tokens(),))
    node = next(n for n in captured.graph.nodes if matcher.is_anchor(n))
    frame = make_frame(matcher.read_call(node), captured.ranges)
    assert NumericCheck(captured, frame).counterexample(None) is None


def on_meta(n):
    place = torch.arange(n, device="meta")
    return place[:, None] >= place.to(torch.device("meta"), torch.int64)


def test_models_without_weights_are_checked_too():
    with torch.device("meta"):
        model = Attention(masked(on_meta))
    captured = capture(model, (tokens().to("meta"),))
    node = next(n for n in captured.graph.nodes if matcher.is_anchor(n))
    frame = make_frame(matcher.read_call(node), captured.ranges)
    assert NumericCheck(captured, frame).counterexample(None) is None
