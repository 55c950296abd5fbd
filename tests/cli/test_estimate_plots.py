"""The plots of `sparsify estimate`."""

import json
import sys

import pytest

from tests._util.published_models import LLAMA, QWEN


def test_a_plot(cli, tmp_path):
    path = tmp_path / "out.svg"
    words = ("--gpu", "b200", "--context", "128k", "--policy", "msa-m3", "--plot", path)
    code, out, err = cli("estimate", QWEN, *words)
    assert code == 0 and "verdict" not in out and f"the plot was written to {path}" in err
    said = path.read_text()
    for part in (
        "qwen3-32b on B200-SXM-180GB, prefill: dense attention against MSA learned 128/16",
        "Attention of all 64 layers",
        "crossover at ",
        "shaded: what published measurements",
        "weights and caches exceed the GPU",
        "not a measurement",
    ):
        assert part in said, part
    code, out, err = cli("estimate", QWEN, *words)
    assert (code, out) == (2, "") and "--force" in err
    assert cli("estimate", QWEN, *words, "--force")[0] == 0


@pytest.mark.parametrize(("memory", "marked"), [(140, True), (160, False)])
def test_a_plot_marks_the_last_contexts_when_they_do_not_fit(cli, tmp_path, memory, marked):
    """153 GB at 1m, 134 at the point of the curve before it."""
    gpu = tmp_path / "gpu.yaml"
    gpu.write_text(
        "{name: Mine, vendor: me, architecture: own, bf16_dense_tflops: 1000, "
        f"memory_gb: {memory}, memory_bandwidth_gbs: 4000}}"
    )
    path = tmp_path / "out.svg"
    words = ("--gpu", gpu, "--context", "128k,1m", "--policy", "kimi-1m", "--plot", path)
    assert cli("estimate", LLAMA, *words)[0] == 0
    assert ("exceed the GPU" in path.read_text()) is marked


def test_a_plot_says_what_has_to_be_trained_and_what_stays_dense(cli, tmp_path):
    path = tmp_path / "out.svg"
    words = ("--gpu", "h200", "--context", "128k", "--plot", path, "--force", "--policy")
    cli("estimate", LLAMA, *words, "msa-m3")
    assert "dense attention against MSA learned 128/16 (once trained)" in path.read_text()
    cli("estimate", LLAMA, *words, "kimi-1m", "--phase", "decode")
    assert "MoBA 4096/12 keeps all attention dense here" in path.read_text()
    assert "(once trained)" not in path.read_text()


def test_a_plot_does_not_spoil_json(cli, tmp_path):
    words = ("--gpu", "h200", "--context", "2k,64k", "--plot", tmp_path / "a.png", "--json")
    code, out, _ = cli("estimate", LLAMA, *words)
    assert code == 0 and json.loads(out)["rows"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_any_work(cli, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = cli("estimate", LLAMA, "--gpu", "h200", "--plot", tmp_path / "a.png")
    assert (code, out) == (6, "") and 'pip install "sparsify-attention[plot]"' in err
    assert cli("estimate", LLAMA, "--gpu", "h200", "--context", "32k")[0] == 0
