"""Trial runs leave a model as it was."""

import pytest
import torch
from torch import nn

import sparsify as sp
from sparsify.passes.modes import evaluating, trying
from tests._util.tiny_models import build


class Counting(nn.Module):
    """Attention that counts its calls, in place and by a new tensor."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.calls.add_(1)
        self.last = self.last + 1
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(2) * self.calls


def partly_frozen():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())
    model.train()
    model[0].eval()
    return model


@pytest.mark.parametrize("context", [evaluating, trying])
def test_every_module_is_back_in_its_own_mode(context):
    model = partly_frozen()
    with context(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, False, True]


def test_the_mode_comes_back_after_an_error():
    model = partly_frozen()
    with pytest.raises(KeyError), trying(model):
        raise KeyError
    assert [module.training for module in model.modules()] == [True, False, True]


def test_buffers_that_a_trial_changes_are_put_back_and_those_of_a_real_run_are_not():
    model, x = Counting(), torch.randn(1, 4, 16)
    before = dict(model.named_buffers())
    with trying(model):
        model(x)
        assert model.calls == 1
    assert all(tensor is before[name] for name, tensor in model.named_buffers())
    assert not model.calls and not model.last.any()
    model(x)
    assert model.calls == 1 and model.last.all()


def test_rewriting_counts_no_call_of_the_model():
    model = Counting().eval()
    policy = sp.Policy.moba(block_size=4, topk=99)
    graph = sp.sparsify(model, policy, (torch.randn(2, 24, 16),)).model
    assert model.calls == graph.calls == 0
    graph(torch.randn(1, 1, 16))
    assert graph.calls == 1


def test_an_inplace_rewrite_leaves_parts_that_were_frozen():
    model = build("llama")
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    sp.sparsify(model, sp.Policy.moba(block_size=8, topk=2), inplace=True)
    assert [module.training for module in model.modules()] == modes
