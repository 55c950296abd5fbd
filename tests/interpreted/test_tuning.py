"""Tiles are measured with the real kernels and an invented clock."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sparsify.kernels import lists, tuned
from sparsify.kernels.attend import forward, tuning
from sparsify.kernels.layout import Layout
from sparsify.kernels.placement import place
from sparsify.kernels.select.moba import Gate
from tests._util.parity import inputs

BLOCK, TOPK = 16, 3


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch, by_block):
    """The interpreter is slow."""
    monkeypatch.setattr(tuning, "shapes", lambda tiles, _: [changed(tiles, rows=32, warps=8)])
    monkeypatch.setattr(tuning, "lengths", lambda tiles: [changed(tiles, chunk=7)])
    monkeypatch.setattr(
        tuning, "combines", lambda tiles: [changed(tiles, combine_rows=32, combine_columns=16)]
    )


def changed(tiles, **fields):
    return dataclasses.replace(tiles, **fields)


def call_of(x, share=1):
    placement = place(Layout(), x.q.shape[0], x.q.shape[2], x.k.shape[2], BLOCK)
    shape = forward.shape_of(*x, BLOCK, None, share)
    if share == 1:
        chooser = Gate(x.q, x.k, placement, None, BLOCK, TOPK - 1)
    else:
        own = torch.arange(x.q.shape[2]) // BLOCK
        blocks = torch.stack([own.clamp(max=1) * 0, own], -1).int().expand(1, 1, -1, -1)
        chooser = lists.Given(blocks, placement, BLOCK)
    return tuning.TunedSlice(*x, placement, shape, chooser, 1 << 30)


def clock(*times):
    """A timer that runs the call and says these times, the last one for ever."""
    left = list(times)

    def time(run):
        run()
        return left.pop(0) if len(left) > 1 else left[0]

    return time


@pytest.mark.parametrize("share", [1, 2])
def test_the_fastest_tiles_of_both_stages_are_chosen(share):
    call = call_of(inputs(heads=2, groups=1, keys=75, dtype=torch.float16), share)
    found = tuning.tune(call, clock(4.0, 2.0, 2.0, 4.0, 2.0, 2.0, 3.0, 1.0, 1.0, 3.0))
    assert found.tiles == changed(
        found.default, rows=32, warps=8, combine_rows=32, combine_columns=16
    )
    assert [(x.stage, x.ms) for x in found.trials] == [
        ("attention", 4.0),
        ("attention", 2.0),
        ("attention", 2.0),
        ("combine", 3.0),
        ("combine", 1.0),
    ]
    assert found.times_ms() == (7.0, 3.0)


def test_times_within_two_percent_leave_the_default():
    call = call_of(inputs(keys=75, dtype=torch.float16))
    found = tuning.tune(call, clock(1.0, 0.99, 1.0, 0.985, 1.0))
    assert found.tiles == found.default == tuned.untuned(call.device, call.sizes)


def test_what_leaves_rows_out_is_no_candidate(monkeypatch):
    """Entries beyond a tile of the large kernel are never read."""
    monkeypatch.setattr(tuned, "misfit", lambda *_: None)
    x = inputs(keys=75, dtype=torch.float32)
    call = call_of(x)
    monkeypatch.setattr(tuning, "lengths", lambda tiles: [changed(tiles, chunk=64)])
    monkeypatch.setattr(tuning, "shapes", lambda *_: [])
    monkeypatch.setattr(tuning, "combines", lambda _: [])
    found = tuning.tune(call, clock(3.0, 1.0))
    assert found.tiles == found.default
    assert [(trial.ms, trial.why) for trial in found.trials[1:2]] == [
        (None, "its result is another one")
    ]


def test_values_that_are_not_finite_are_no_difference(monkeypatch):
    monkeypatch.setattr(tuning, "shapes", lambda *_: [])
    x = inputs(keys=75, dtype=torch.float16)
    x.v[0, 0, 5], x.v[0, 0, 20], x.k[0, 0, 40] = float("nan"), float("inf"), float("nan")
    found = tuning.tune(call_of(x), clock(4.0, 4.0, 2.0, 2.0, 4.0, 3.0))
    assert found.tiles == changed(found.default, chunk=7)
    assert not [trial for trial in found.trials if trial.why]


def test_nothing_is_tuned_off_a_gpu(monkeypatch):
    monkeypatch.setenv("SPARSIFY_AUTOTUNE", "1")
    monkeypatch.setattr(tuning, "tune", lambda *_: pytest.fail("tuned"))
    x = inputs(keys=75, dtype=torch.float16)
    call = call_of(x)
    gate = Gate(x.q, x.k, call.placement, None, BLOCK, TOPK - 1)
    forward.sparse(*x, call.placement, call.shape, gate, 1 << 30)
