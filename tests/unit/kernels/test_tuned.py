"""The file of measured tiles, and what is in force in a process. A GPU is made believe."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from sparsify.errors import UsageError
from sparsify.kernels import tiling, tuned
from sparsify.kernels.tuned import Sizes

GPU = torch.device("cuda:0")
SMALL = Sizes(128, 128, 128, 2, 1)
LARGE = Sizes(4096, 128, 128, 2, 1)
SHARED = Sizes(512, 128, 128, 2, 16)
HOW = "8192 queries"


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """An H200 with Triton 3.6.0, and a folder for the file; returns its path."""
    monkeypatch.setattr(tuned, "_gpu", lambda device: "NVIDIA H200")
    monkeypatch.setattr(tuned, "_triton", lambda: "3.6.0")
    monkeypatch.setattr(tiling, "shared_bytes", lambda device: tiling.HOPPER_SHARED)
    monkeypatch.setenv("SPARSIFY_CACHE_DIR", str(tmp_path))
    tuned.forget()
    yield tmp_path / tuned.FILE
    tuned.forget()


def changed(sizes, **fields):
    return replace(tuned.untuned(GPU, sizes), **fields)


def put(path, change=lambda data: None, sizes=SMALL, **fields):
    """A file with one entry, changed by hand, seen by a process that starts now."""
    tuned.save(GPU, sizes, changed(sizes, **fields), HOW)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    tuned.forget()


def tiles(sizes=SMALL):
    return tuned.attention_tiles(GPU, sizes)


def test_what_was_saved_is_in_force_in_the_next_process(machine):
    wanted = changed(SMALL, rows=128, warps=8, chunk=512)
    assert tuned.save(GPU, SMALL, wanted, HOW) == machine
    tuned.forget()
    assert tiles() == wanted and tuned.is_measured(GPU, SMALL)
    assert tiles(LARGE) == tuned.untuned(GPU, LARGE) and not tuned.is_measured(GPU, LARGE)
    entry = json.loads(machine.read_text())["tiles"][0]
    assert entry["measured"] == HOW and entry["gpu"] == "NVIDIA H200"


def test_entries_of_other_shapes_stay(machine):
    for sizes, fields in ((SMALL, {"chunk": 256}), (LARGE, {"stages": 1}), (SMALL, {"chunk": 64})):
        tuned.save(GPU, sizes, changed(sizes, **fields), HOW)
    tuned.forget()
    assert tiles() == changed(SMALL, chunk=64) and tiles(LARGE) == changed(LARGE, stages=1)


def test_without_the_variable_nothing_is_read_or_written(machine, monkeypatch):
    put(machine, chunk=64)
    monkeypatch.delenv("SPARSIFY_CACHE_DIR")
    before = machine.read_text()
    assert tiles() == tuned.untuned(GPU, SMALL) and tuned.cache_file() is None
    assert tuned.save(GPU, SMALL, changed(SMALL, chunk=32), HOW) is None
    assert machine.read_text() == before
    with pytest.raises(UsageError, match="Set SPARSIFY_CACHE_DIR"):
        tuned.check_writable()


def test_without_a_file_the_tiles_are_those_of_tiling(machine):
    assert tiles() == tiling.attention_tiles(128, 128, 128, 2) and not machine.exists()


def test_a_cpu_is_never_looked_up(machine):
    machine.write_text("damaged")
    cpu = torch.device("cpu")
    assert tuned.attention_tiles(cpu, SMALL) == tuned.untuned(cpu, SMALL)


def test_tiles_stay_whatever_becomes_of_the_file(machine, monkeypatch):
    first = tiles()
    tuned.save(GPU, SMALL, changed(SMALL, chunk=64), HOW)
    assert tiles() == first
    monkeypatch.setattr(tuned, "_looked_up", lambda *_: pytest.fail("looked up again"))
    assert tiles() == first


def test_tuning_in_this_process_changes_them(machine):
    before = tiles()
    tuned.keep(GPU, SMALL, changed(SMALL, chunk=64))
    assert tiles() == replace(before, chunk=64) and tuned.is_measured(GPU, SMALL)
    other = torch.device("cuda:1")
    assert tuned.attention_tiles(other, SMALL) == tiles()
    assert tiles(LARGE) == tuned.untuned(GPU, LARGE) and not machine.exists()


@pytest.mark.parametrize(
    ("field", "value"), [("gpu", "NVIDIA L40S"), ("triton", "3.9.0"), ("sparsify", "0.0.9")]
)
def test_entries_of_other_machines_are_not_used(machine, field, value):
    put(machine, lambda data: data["tiles"][0].update({field: value}), chunk=64)
    assert tiles() == tuned.untuned(GPU, SMALL)
    put(machine, chunk=64)
    assert tiles().chunk == 64


def test_fields_that_are_not_told_are_those_of_tiling(machine):
    put(machine, lambda data: data["tiles"][0].update(tiles={"chunk": 32}))
    assert tiles() == changed(SMALL, chunk=32)


def entry(**fields):
    return lambda data: data["tiles"][0].update(fields)


def tile(**fields):
    return lambda data: data["tiles"][0]["tiles"].update(fields)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda data: data.pop("schema"), "no number of its schema"),
        (lambda data: data.update(schema=True), "no number of its schema"),
        (lambda data: data.update(more=1), "does not hold a list"),
        (lambda data: data.update(tiles={}), "does not hold a list"),
        (lambda data: data["tiles"].append(3), "entry 2 does not hold"),
        (entry(block="128"), "block of entry 1"),
        (entry(block=True), "block of entry 1"),
        (entry(gpu=5), "gpu of entry 1"),
        (entry(head_dims=5), "entry 1 does not hold"),
        (entry(tiles=[]), "tiles of entry 1"),
        (tile(rows=64.0), "rows of entry 1"),
        (tile(rows="64"), "rows of entry 1"),
        (tile(rows=None), "rows of entry 1"),
        (tile(rows=96), "no power of two"),
        (tile(rows=1 << 20), "rows of entry 1"),
        (tile(stages=0), "stages of entry 1"),
        (tile(small=False), "unknown field 'small'"),
        (tile(row=64), "unknown field 'row'"),
    ],
)
def test_a_file_that_is_wrong_is_one_sentence(machine, change, part):
    put(machine, change)
    for use in (tiles, tuned.check_writable):
        with pytest.raises(UsageError) as caught:
            use()
        assert part in str(caught.value) and str(machine) in str(caught.value)
        assert "Delete the file, or measure again" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "\xff", '{"schema": 1, "schema": 1}', "[" * 99999])
def test_a_damaged_file_is_one_sentence_and_stays(machine, text):
    machine.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match="it is no JSON"):
        tiles()
    with pytest.raises(UsageError, match="it is no JSON"):
        tuned.save(GPU, SMALL, changed(SMALL), HOW)
    assert machine.read_bytes() == text.encode("latin-1")


def test_a_newer_file_is_refused_and_stays(machine):
    put(machine, lambda data: data.update(schema=2))
    before = machine.read_text()
    for use in (tiles, lambda: tuned.save(GPU, SMALL, changed(SMALL), HOW)):
        with pytest.raises(UsageError, match=r"newer version of sparsify\. Update this one"):
            use()
    assert machine.read_text() == before


@pytest.mark.parametrize(
    ("sizes", "fields", "part"),
    [
        (SMALL, {"columns": 64}, "a whole block takes 128"),
        (LARGE, {"chunk": 256}, "a tile holds 128 entries"),
        (SHARED, {"chunk": 8}, "a tile holds 4 entries"),
        (LARGE, {"columns": 256, "stages": 4}, "bytes of shared memory"),
        (LARGE, {"combine_columns": 256, "combine_stages": 3}, "bytes of shared memory"),
        (LARGE, {"warps": 16, "max_registers": 255}, "registers are too many"),
    ],
)
def test_tiles_that_the_kernels_cannot_take_are_refused(machine, sizes, fields, part):
    put(machine, sizes=sizes, **fields)
    with pytest.raises(UsageError, match="do not fit NVIDIA H200") as caught:
        tiles(sizes)
    assert part in str(caught.value)


@pytest.mark.parametrize("block", [16, 96, 128, 512, 4096])
@pytest.mark.parametrize("size", [32, 128, 256])
@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("share", [1, 7, 16])
def test_the_tiles_of_tiling_fit(block, size, item, share):
    sizes = Sizes(block, size, size, item, share)
    assert tuned.misfit(tuned.untuned(GPU, sizes), sizes, tiling.HOPPER_SHARED) is None


def test_writing_is_atomic(machine, monkeypatch):
    put(machine, chunk=64)
    before = machine.read_text()

    def full(self, text, encoding):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(UsageError, match="No space left"):
        tuned.save(GPU, SMALL, changed(SMALL, chunk=32), HOW)
    assert machine.read_text() == before
    assert [path.name for path in machine.parent.iterdir()] == [tuned.FILE]


def test_a_file_is_read_once(machine, monkeypatch):
    put(machine, chunk=64)
    tiles()
    monkeypatch.setattr(tuned, "_parsed", lambda *_: pytest.fail("read again"))
    assert not tuned.is_measured(GPU, LARGE)
