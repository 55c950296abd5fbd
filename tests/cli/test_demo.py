"""The script behind `make demo`, on a tiny random model."""

import subprocess
import sys

import pytest

from tests._util.commands import ROOT, environment
from tests._util.tiny_folders import save_llama

TEXT = "The quick brown fox jumps over the lazy dog; so does the slow one, in the end. " * 5


@pytest.mark.slow
def test_the_demo_inspects_rewrites_verifies_and_generates(tmp_path):
    model = save_llama(tmp_path / "tiny")
    (tmp_path / "text.txt").write_text(TEXT)
    sizes = ["100", "8", "2", "1"]
    words = [str(model), str(tmp_path / "text.txt"), str(tmp_path / "out"), *sizes]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), *words],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("3 replaceable", "2 rewritten, 1 kept dense", "score recall", "Greedy", "msa: "):
        assert words in done.stdout
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"moba", "msa"}


@pytest.mark.slow
def test_both_hosts_give_the_same_logits(tmp_path):
    model = save_llama(tmp_path / "tiny")
    (tmp_path / "text.txt").write_text(TEXT)
    script = ROOT / "examples" / "two_hosts.py"
    words = [str(model), str(tmp_path / "text.txt"), "8", "2", "1"]
    done = subprocess.run(
        [sys.executable, str(script), *words],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LanguageGraphModel: 3 detected, 2 rewritten, 1 kept dense" in done.stdout
    for words in ("   15 tokens:", "   17 tokens:", "   64 tokens:", "  equal (allowed: 1e-04)"):
        assert words in done.stdout


def test_the_demo_stops_at_the_first_failure(tmp_path):
    script = ROOT / "examples" / "demo.py"
    words = [str(tmp_path / "nowhere"), str(ROOT / "LICENSE"), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, str(script), *words],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )
    assert done.returncode == 2
    assert "$ sparsify rewrite" not in done.stdout


def test_every_example_is_short():
    for script in (ROOT / "examples").glob("*.py"):
        assert len(script.read_text().splitlines()) <= 80
