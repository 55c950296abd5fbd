"""`sparsify bench --tune`: its table, its file, its refusals; the GPU and its times are faked."""

import json
from dataclasses import replace

import pytest
import torch

from sparsify.cli import bench_tune
from sparsify.kernels import tiling, tuned
from sparsify.kernels.attend.tuning import Trial, Tuning
from sparsify.kernels.tuned import Sizes

SHAPE = "heads=4/2,dim=128,block=128,topk=4"
SIZES = Sizes(128, 128, 128, 2, 1)
DEVICE = torch.device("cuda:0")


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU that is told of, times that are invented, and a folder for tiles; returns the file."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(tuned, "_gpu", lambda _: "NVIDIA H200")
    monkeypatch.setattr(tiling, "shared_bytes", lambda _: tiling.HOPPER_SHARED)
    about = {"gpu": "NVIDIA H200", "date": "2026-12-01", "software": {"torch": "2.11"}}
    monkeypatch.setattr(bench_tune, "machine", lambda _: about)
    monkeypatch.setattr(bench_tune, "measured", invented(3.0))
    monkeypatch.setenv("SPARSIFY_CACHE_DIR", str(tmp_path / "cache"))
    tuned.forget()
    yield tmp_path / "cache" / "tiles.json"
    tuned.forget()


def invented(ms):
    """Longer work items take `ms`, the default ones 4 ms, other tiles fail."""

    def measured(question, say):
        default = tuned.untuned(DEVICE, SIZES)
        longer = replace(default, chunk=2048)
        best = longer if ms < 4.0 else default
        say("attention, chunk 2048")
        trials = (
            Trial("attention", default, 4.0),
            Trial("attention", replace(default, rows=128), None, "out of resources"),
            Trial("attention", longer, ms),
            Trial("combine", best, 1.5),
        )
        return Tuning(best, default, trials), 3, SIZES

    return measured


def tune(cli, *words):
    return cli("bench", "--shape", SHAPE, "--tune", *words)


def test_a_table_and_a_file(cli, gpu):
    code, out, err = tune(cli, "--context", "8k")
    assert code == 0, err
    assert "NVIDIA H200, 8,192 tokens, batch 1, bf16" in out and "attention, chunk 2048" in err
    lines = [line for line in out.splitlines() if "rows" in line]
    assert ["out of resources" in line for line in lines] == [False, True, False, False]
    assert ["chosen" in line for line in lines] == [False, False, True, True]
    assert "Both stages: 4.50 ms, 5.50 ms with the default tiles." in out
    assert f"Written to {gpu}" in out.replace("\n", "")
    assert tuned.attention_tiles(DEVICE, SIZES).chunk == 2048
    assert "8192 queries, 3 past blocks each: 4.5 ms, 5.5 ms by default" in gpu.read_text()


def test_default_tiles_that_stay_are_kept_too(cli, gpu, monkeypatch):
    monkeypatch.setattr(bench_tune, "measured", invented(5.0))
    code, out, err = tune(cli)
    assert code == 0, err
    assert "The default tiles stay" in out and "32,768 tokens" in out
    assert tuned.is_measured(DEVICE, SIZES)
    assert tuned.attention_tiles(DEVICE, SIZES) == tuned.untuned(DEVICE, SIZES)


def test_json_is_one_document_and_goes_into_a_file_too(cli, gpu, tmp_path):
    target = tmp_path / "out.json"
    code, out, err = tune(cli, "--json", "-o", target)
    assert code == 0, err
    data = json.loads(out)
    assert data == json.loads(target.read_text())
    assert (
        data["schema"] == 1 and data["chosen"]["chunk"] == 2048 and data["context_tokens"] == 32768
    )
    assert [row["ms"] for row in data["trials"]] == [4.0, None, 3.0, 1.5]
    assert data["trials"][1]["why_not"] == "out of resources" and data["chosen_ms"] == 4.5


def test_without_a_folder_it_says_what_to_set(cli, gpu, monkeypatch):
    monkeypatch.delenv("SPARSIFY_CACHE_DIR")
    code, out, err = tune(cli)
    assert code == 2 and out == "" and "Set SPARSIFY_CACHE_DIR to a folder" in err
    assert len(err.strip().splitlines()) == 1 and "attention" not in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("words", [(), ("--device", "cpu")])
def test_without_a_gpu_it_says_so(cli, words):
    code, out, err = tune(cli, *words)
    assert code == 2 and out == "" and "Tiles are measured on a GPU" in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--shape", SHAPE, "--tune", "--calibrate", "--json"), "--tune is for --shape alone"),
        (("DIR", "--against", "m", "--tune"), "--tune is for --shape alone"),
        (("--tune",), "Nothing to measure"),
        (("--shape", SHAPE, "--tune", "--context", "8k,16k"), "--tune measures one"),
        (("--shape", SHAPE, "--tune", "--context", "512"), "top-k covers every block"),
        (("--shape", SHAPE, "--tune", "--context", "1000"), "say nothing of longer calls"),
        (("--shape", SHAPE, "--tune", "--device", "cuda:7"), "There is no cuda:7"),
        (("--shape", SHAPE, "--tune", "--into", "f"), "--into is for --calibrate"),
    ],
)
def test_wrong_options_are_one_sentence(cli, gpu, words, part):
    code, out, err = cli("bench", *words)
    assert code == 2 and out == "" and part in err
    assert len(err.strip().splitlines()) == 1 and not gpu.exists()


@pytest.mark.parametrize(
    ("text", "part"), [("{", "it is no JSON"), ('{"schema": 2}', "written by a newer version")]
)
def test_a_file_that_cannot_be_used_is_told_before_any_work(cli, gpu, text, part):
    gpu.parent.mkdir()
    gpu.write_text(text)
    code, out, err = tune(cli)
    assert code == 2 and out == "" and part in err and "attention" not in err
    assert gpu.read_text() == text


def test_a_folder_that_is_a_file_is_told(cli, gpu):
    gpu.parent.write_text("mine")
    code, out, err = tune(cli)
    assert code == 2 and out == "" and len(err.strip().splitlines()) == 1
    assert "attention" not in err and gpu.parent.read_text() == "mine"


def test_a_wrong_setting_is_told(cli, gpu, monkeypatch):
    monkeypatch.setenv("SPARSIFY_AUTOTUNE", "maybe")
    code, _, err = tune(cli)
    assert code == 2 and "SPARSIFY_AUTOTUNE is 'maybe'" in err
