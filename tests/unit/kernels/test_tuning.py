"""What tuning chooses, and when it is let; times are invented, kernels do not run."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from sparsify.errors import UsageError
from sparsify.kernels import tiling, tuned
from sparsify.kernels.attend import candidates, tuning
from sparsify.kernels.attend.tuning import Trial, Tuning, choose
from sparsify.kernels.tuned import Sizes

GPU = torch.device("cuda:0")
SIZES = Sizes(128, 128, 128, 2, 1)
DEFAULT = tiling.attention_tiles(128, 128, 128, 2)
TILES = [replace(DEFAULT, chunk=chunk) for chunk in (128, 256, 512)]


def measured(times, failing=None):
    """Times by the entries of a work item; a list of times is used up one by one."""

    def measure(tiles):
        if tiles.chunk == failing:
            raise OutOfResources(300_000, 232_448, "shared memory")
        found = times[tiles.chunk]
        return found.pop(0) if isinstance(found, list) else found

    return measure


def test_the_fastest_is_chosen():
    tiles, trials = choose(
        "attention", DEFAULT, TILES, measured({1024: 4.0, 128: 3.5, 256: 3.0, 512: 3.2})
    )
    assert tiles.chunk == 256
    assert [trial.ms for trial in trials] == [4.0, 3.5, 3.0, 3.2]


@pytest.mark.parametrize(("ms", "chunk"), [(3.93, 1024), (4.0, 1024), (3.91, 256)])
def test_less_than_two_percent_is_a_tie(ms, chunk):
    times = {1024: 4.0, 128: 4.5, 256: ms, 512: 4.5}
    assert choose("attention", DEFAULT, TILES, measured(times))[0].chunk == chunk


def test_luck_is_not_enough():
    times = {1024: 4.0, 128: 4.5, 256: [3.0, 4.0], 512: 4.5}
    assert choose("attention", DEFAULT, TILES, measured(times))[0] == DEFAULT


def test_candidates_that_fail_are_passed_over(caplog):
    caplog.set_level(logging.DEBUG, logger="sparsify")
    times = {1024: 4.0, 128: 3.5, 512: 3.9}
    tiles, trials = choose("attention", DEFAULT, TILES, measured(times, failing=256))
    assert tiles.chunk == 128
    assert trials[2].ms is None and "out of resource: shared memory" in trials[2].why
    assert "chunk 256" in caplog.text and "is out: " in caplog.text


def test_a_default_that_fails_is_an_error():
    with pytest.raises(OutOfResources):
        choose("attention", DEFAULT, TILES, measured({}, failing=1024))


@pytest.mark.parametrize("block", [16, 96, 128, 512, 4096])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("share", [1, 7, 16])
def test_there_are_candidates_for_every_kind_of_shape(block, size, item, share):
    sizes = Sizes(block, size, size, item, share)
    default = tiling.attention_tiles(block, size, size, item, share=share)
    for many in (
        list(candidates.shapes(default, sizes)),
        list(candidates.combines(default)),
    ):
        fitting = [x for x in many if tuned.misfit(x, sizes, tiling.HOPPER_SHARED) is None]
        assert len(set(fitting) - {default}) >= 2
        assert len(set(many)) == len(many)


# Inside a call


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A GPU that is told of, and tuning that finds longer work items; counts how often."""
    monkeypatch.setattr(tuned, "_gpu", lambda _: "NVIDIA H200")
    monkeypatch.setattr(tiling, "shared_bytes", lambda _: tiling.HOPPER_SHARED)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tuning, "TunedSlice", lambda *given: given)
    monkeypatch.delenv("SPARSIFY_CACHE_DIR", raising=False)
    tuned.forget()
    state = SimpleNamespace(count=0, error=None, file=tmp_path / tuned.FILE)

    def tune(call, timer):
        state.count += 1
        if state.error is not None:
            raise state.error
        trials = (Trial("attention", DEFAULT, 4.0), Trial("attention", TILES[0], 2.0))
        return Tuning(TILES[0], DEFAULT, (*trials, Trial("combine", DEFAULT, 1.0)))

    monkeypatch.setattr(tuning, "tune", tune)
    yield state
    tuned.forget()


def call(queries=4096, device=GPU, chosen=7, blocks=32):
    """The tiles that a call has after the hook."""
    q = SimpleNamespace(shape=(1, 2, queries, 128), device=device, element_size=lambda: 2)
    sizes = {"block": 128, "head_dim": 128, "value_dim": 128, "share": 1}
    shape = SimpleNamespace(**sizes, tiles=tuned.attention_tiles(GPU, SIZES))
    shape._replace = lambda tiles: SimpleNamespace(tiles=tiles)
    place, chooser = SimpleNamespace(blocks=blocks), SimpleNamespace(chosen=chosen)
    return tuning.in_request(q, None, None, place, shape, chooser, 1 << 30, (None, None)).tiles


def test_the_first_call_of_a_shape_tunes_and_later_ones_do_not(machine):
    assert [call().chunk for _ in range(3)] == [128, 128, 128] and machine.count == 1
    assert not machine.file.exists()


def test_what_a_call_finds_is_written_where_a_folder_is_given(machine, monkeypatch):
    monkeypatch.setenv("SPARSIFY_CACHE_DIR", str(machine.file.parent))
    call()
    tuned.forget()
    assert call().chunk == 128 and machine.count == 1
    assert "4096 queries, 7 past blocks each: 3 ms, 5 ms by default" in machine.file.read_text()


@pytest.mark.parametrize(
    "given", [{"queries": 1}, {"queries": 1000}, {"chosen": 0}, {"blocks": 1}, {"device": "cpu"}]
)
def test_calls_that_tell_nothing_do_not_tune(machine, given):
    if "device" in given:
        given = {"device": torch.device("cpu")}
    assert call(**given) == DEFAULT and machine.count == 0
    assert call().chunk == 128 and machine.count == 1


def test_a_capture_does_not_tune(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert call() == DEFAULT and machine.count == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), OutOfResources(9, 8, "smem")])
def test_what_tuning_fails_for_is_a_warning(machine, caplog, error):
    machine.error = error
    assert call() == DEFAULT and call() == DEFAULT and machine.count == 1
    assert "tiles were not measured, the default ones stay" in caplog.text


def test_a_folder_that_cannot_be_written_is_a_warning(machine, monkeypatch, caplog):
    def save(*_):
        raise UsageError("Cannot write tiles.json: Read-only file system.")

    monkeypatch.setattr(tuned, "save", save)
    assert call().chunk == 128 and call().chunk == 128 and machine.count == 1
    assert "hold for this process only" in caplog.text and "Read-only" in caplog.text
