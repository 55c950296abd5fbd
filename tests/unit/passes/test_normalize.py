"""Normalised graphs: fewer operators, the same bits."""

import pytest
import torch
import torch.nn.functional as F

from sparsify.errors import CaptureError
from sparsify.passes import normalize as module
from sparsify.passes.capture import capture
from sparsify.passes.graphs import op_name
from sparsify.passes.invariants import check, run_passes
from sparsify.passes.normalize import normalize
from tests._util import facts
from tests._util.graphs import traced


def operators(captured):
    return [op_name(node) for node in captured.graph.nodes if node.op == "call_function"]


def noisy(x):
    y = x[:, 0:].to(torch.float32).detach()
    y = F.dropout(y, 0.1, False) + F.dropout(y, 0.0, True)
    return (y.type_as(x)[:, :, :] * 2).transpose(0, 1).contiguous()


def test_what_does_nothing_goes():
    x = torch.randn(2, 3, 4)
    captured, _ = traced(noisy, x)
    wanted = facts.original(captured, (x,))[0]
    normalize(captured)
    assert operators(captured) == ["aten.add", "aten.mul", "aten.transpose", "aten.contiguous"]
    assert torch.equal(facts.original(captured, (x,))[0], wanted)


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x: x[:, 1:] + 0, "aten.slice"),
        (lambda x: x[:, ::2] + 0, "aten.slice"),
        (lambda x: x.to(torch.float64) + 0, "aten.to"),
        (lambda x: x.to(torch.float32, copy=True) + 0, "aten.to"),
        (lambda x: F.dropout(x, 0.1, True) + 0, "aten.dropout"),
        (lambda x: x.clone() + 0, "aten.clone"),
    ],
    ids=["slice", "step", "cast", "copy", "dropout", "clone"],
)
def test_what_does_something_stays(function, kept):
    captured, _ = traced(function, torch.randn(2, 3, 4))
    assert kept in operators(normalize(captured))


def test_results_keep_their_names():
    captured, node = traced(lambda x: (x + 1)[:, 0:], torch.randn(2, 3))
    normalize(captured)
    assert captured.graph.output_node().all_input_nodes == [node]


def test_normalising_twice_changes_nothing():
    captured, _ = traced(noisy, torch.randn(2, 3, 4))
    once = str(normalize(captured).graph)
    assert str(normalize(captured).graph) == once


def test_gradient_switches_and_disabled_autocast_are_inlined():
    class Wrapped(torch.nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                y = x * 2
            with torch.enable_grad():
                z = y + 1
            return F.scaled_dot_product_attention(z, z, y)

    x = torch.randn(2, 3, 4)
    captured = capture(Wrapped(), (x,))
    before = facts.original(captured, (x,))[0]
    normalize(captured)
    assert "aten.mul" in operators(captured)
    assert not any(name.startswith("wrap_with") for name in operators(captured))
    assert torch.equal(facts.original(captured, (x,))[0], before)


def test_an_active_autocast_stays_and_its_attention_is_reported():
    from sparsify.passes.detect import detect

    class Wrapped(torch.nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = F.scaled_dot_product_attention(x @ x.mT, x, x, is_causal=True)
            return y + 1

    captured = capture(Wrapped(), (torch.randn(2, 8, 8),))
    found = detect(captured)
    assert not found.sites
    assert [r.code for r in found.refusals] == ["FORM_UNSUPPORTED"]


def breaks_the_graph(graph):
    node = next(n for n in graph.nodes if n.op == "call_function")
    graph.output_node().args = ((node, node),)
    with graph.inserting_after(node):
        graph.call_function(torch.ops.aten.relu.default, (node,))
    return graph, True


def raises(graph):
    raise ValueError("it was a bad day")


@pytest.mark.parametrize("broken", [breaks_the_graph, raises])
def test_a_failing_pass_is_named(broken):
    captured, _ = traced(noisy, torch.randn(2, 3, 4))
    with pytest.raises(CaptureError, match=broken.__name__):
        run_passes(captured.graph_module, (module.drop_checks, broken), "noisy")


def test_graphs_are_written_after_every_pass(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSIFY_DEBUG_DIR", str(tmp_path))
    captured, _ = traced(noisy, torch.randn(2, 3, 4))
    normalize(captured)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[0] == "Function_00_captured.txt"
    assert len(names) == 1 + len(module.PASSES)
    assert "drop_noise" in "".join(names)


def test_a_lost_shape_is_an_error():
    captured, node = traced(lambda x: x + 1, torch.randn(2, 3))
    del node.meta["val"]
    with pytest.raises(RuntimeError, match="lost its shape"):
        check(captured.graph)
