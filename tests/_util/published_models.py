"""Configs of published models, and what tests ask of them."""

from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.hardware import load_gpu
from sparsify.cost_model.workload import AttentionShape
from tests._util.commands import ROOT

CONFIGS = ROOT / "tests" / "cost_model" / "configs"
LLAMA, QWEN, M3 = (
    CONFIGS / f"{name}.json" for name in ("llama-3.1-8b", "qwen3-32b", "minimax-m3-text")
)
LLAMA_HEADS, QWEN_HEADS = AttentionShape(32, 8, 128, 128), AttentionShape(64, 8, 128, 128)
PROXY = Configuration("msa", 128, 16, "proxy")
LEARNED = Configuration("msa", 128, 16, "learned", 128)
H200 = load_gpu("h200")
