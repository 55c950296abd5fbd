"""Capturing: what is dynamic, what is tried when that fails, and what stays untouched."""

import copy

import pytest
import torch

from sparsify.errors import CaptureError
from sparsify.passes.capture import capture
from tests._util import facts
from tests._util.attention import Attention, sdpa, tokens
from tests._util.graphs import traced


def plain():
    return Attention(lambda self, q, k, v, x: sdpa(q, k, v, is_causal=True)).eval()


def test_batch_and_length_are_dynamic():
    captured = capture(plain(), (tokens(),))
    assert set(captured.dynamic["x"]) == {0, 1}
    assert captured.specialised == captured.notes == ()
    assert sorted(captured.examples.values()) == [2, 20]
    assert captured.inputs == ("x",)
    assert set(captured.parameters.values()) == set(dict(plain().named_parameters()))


def test_the_captured_program_takes_other_sizes():
    model, x = plain(), tokens(3, 33)
    captured = capture(model, (tokens(),))
    with torch.no_grad():
        assert torch.allclose(facts.original(captured, (x,))[0], model(x), atol=1e-6)


def test_tensors_of_four_axes_have_their_length_third():
    captured, _ = traced(lambda q: q * 2, torch.randn(2, 4, 20, 8))
    (dims,) = captured.dynamic.values()
    assert set(dims) == {0, 2}


def test_a_batch_of_one_is_doubled_for_the_capture():
    captured = capture(plain(), (tokens(batch=1),))
    assert set(captured.dynamic["x"]) == {0, 1}
    with torch.no_grad():
        got = facts.original(captured, (tokens(batch=5),))[0]
    assert got.shape[0] == 5


def test_a_batch_that_cannot_be_doubled_is_captured_as_it_is():
    def function(x, y):
        return x.reshape(20, 32) + y

    captured, _ = traced(function, tokens(batch=1), torch.randn(20, 32))
    assert any("was not possible" in note for note in captured.notes)


def test_what_the_model_fixes_is_reported():
    captured, _ = traced(lambda x: x + torch.arange(20.0)[:, None], tokens())
    assert captured.specialised == ("dim 1 of inputs_0 is fixed at 20 by the model's code",)
    assert captured.specialised[0] in captured.notes


def test_steps_are_told_when_dynamic_dims_fail():
    def no_length(x):
        if isinstance(x.shape[1], torch.SymInt):
            raise TypeError("a number, please")
        return x * 2

    def no_batch(x):
        if isinstance(x.shape[0], torch.SymInt):
            raise TypeError("a number, please")
        return no_length(x)

    captured, _ = traced(no_length, tokens())
    assert captured.notes == (
        "dynamic batch and length was not possible: a number, please",
        "captured with a dynamic batch only",
    )
    assert set(captured.dynamic["inputs_0"]) == {0}
    captured, _ = traced(no_batch, tokens())
    assert captured.notes[-1] == "captured with static shapes" and not captured.dynamic


def test_examples_stay_unmarked():
    x = tokens()
    before = set(vars(x))
    capture(plain(), (x,))
    assert set(vars(x)) == before


def test_given_dims_win():
    captured = capture(plain(), (tokens(),), dynamic={"x": {1: torch.export.Dim("length", min=4)}})
    assert set(captured.dynamic["x"]) == {1}
    assert next(iter(captured.ranges.values()))[0] == 4
    assert capture(plain(), (tokens(),), dynamic=False).dynamic == {}


def test_given_dims_that_the_model_fixes_are_an_error():
    class Fixed(torch.nn.Module):
        def forward(self, x):
            return x + torch.arange(20.0)[:, None]

    with pytest.raises(CaptureError, match="Fixed cannot be captured"):
        capture(Fixed(), (tokens(),), dynamic={"x": {1: torch.export.Dim.DYNAMIC}})


def test_nothing_of_the_model_changes():
    model = torch.nn.Sequential(plain(), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(20))
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    flags = [module.training for module in model.modules()]
    captured = capture(model, (tokens(),))
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert "the model is in training mode; it was captured in eval mode" in captured.notes


def test_the_flags_come_back_after_a_failure():
    class Failing(torch.nn.Module):
        def forward(self, x):
            raise ValueError("no\nsuch thing")

    model = Failing().train()
    with pytest.raises(CaptureError) as error:
        capture(model, (tokens(),))
    assert model.training
    assert str(error.value) == "Failing cannot be captured by torch.export: no."


def test_nothing_is_printed_when_a_capture_fails(capfd, caplog):
    class Data(torch.nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError):
        capture(Data(), (tokens(),))
    out, err = capfd.readouterr()
    assert out == "" and "forward" not in err


def test_collected_arguments_get_names():
    class Collecting(torch.nn.Module):
        def forward(self, x, *rest, **others):
            return x + rest[0] + others["y"]

    model = Collecting().eval()
    captured = capture(model, (tokens(), tokens()), {"y": tokens()})
    assert captured.notes == ()
    assert all(set(dims) == {0, 1} for dims in captured.dynamic.values())
    assert captured.inputs == ("x", "rest_0", "y")
    assert "forward" not in model.__dict__


def test_values_of_state():
    captured, _ = traced(
        lambda x, table: x + table + torch.tensor([1.0, 2.0]), torch.ones(2, 2), table=torch.eye(2)
    )
    (buffer,) = captured.buffers
    assert torch.equal(captured.value(buffer), torch.eye(2))
    assert [captured.value(name).tolist() for name in captured.constants] == [[1.0, 2.0]]
    assert captured.value(captured.inputs[0]) is None


def test_true_flags_are_kept():
    class Flagged(torch.nn.Module):
        def forward(self, x, double=False, half=True):
            return x * (2 if double else 1)

    captured = capture(Flagged(), (tokens(),), {"double": True, "half": False})
    assert captured.flags == ("double is True, as captured",)
