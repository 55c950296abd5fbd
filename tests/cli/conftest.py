"""Model folders, made once."""

import pytest

from tests._util.commands import run_cli
from tests._util.tiny_folders import save_bert, save_llama


@pytest.fixture
def cli(capsys, monkeypatch):
    """Run one command in this process: exit code, stdout, stderr."""
    monkeypatch.delenv("COLUMNS", raising=False)  # runners of tests may set it
    return lambda *words: run_cli(capsys, *words)


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A tiny Llama of three layers, with a tokenizer."""
    return save_llama(tmp_path_factory.mktemp("llama") / "tiny-llama")


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """A tiny bidirectional encoder."""
    return save_bert(tmp_path_factory.mktemp("bert") / "tiny-bert")


MOBA = ("--method", "moba", "--block-size", "8", "--topk", "2")


@pytest.fixture(scope="session")
def rewritten(llama, tmp_path_factory):
    """The same Llama, rewritten to MoBA, its last layer dense."""
    from sparsify.cli.main import main

    folder = tmp_path_factory.mktemp("rewritten") / "tiny-moba"
    assert main(["rewrite", str(llama), *MOBA, "--dense-last", "1", "-o", str(folder)]) == 0
    return folder


@pytest.fixture
def factories(tmp_path, monkeypatch):
    """A module `cli_models` in the working directory with some factories."""
    import sys

    (tmp_path / "cli_models.py").write_text(
        """
import torch
import torch.nn.functional as F

class Attention(torch.nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)
        self.causal = causal
    def forward(self, x):
        print("printed by the model")
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return y.transpose(1, 2).flatten(2)

def attention(): return Attention(True), (torch.randn(2, 12, 16),)
def bidirectional(): return Attention(False), (torch.randn(2, 12, 16),)
def seeded():
    torch.manual_seed(0)
    return Attention(True), (torch.randn(2, 40, 16),)
def without_inputs(): return Attention(True)
def none(): return torch.nn.Linear(4, 4), (torch.randn(2, 4),)
"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("cli_models", None)
