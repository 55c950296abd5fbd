"""What a method can gain at most."""

import pytest

from sparsify.cost_model.configuration import DENSE, Configuration
from sparsify.cost_model.hardware import load_gpu
from sparsify.cost_model.limits import speedup_limit
from sparsify.cost_model.workload import AttentionShape, ElementBytes, Phase
from tests._util.published_models import H200, LEARNED, LLAMA_HEADS, PROXY, QWEN_HEADS


@pytest.mark.parametrize(
    ("configuration", "heads", "phase", "limit"),
    [
        (LEARNED, LLAMA_HEADS, Phase.PREFILL, 8),
        (PROXY, LLAMA_HEADS, Phase.PREFILL, 8),
        (LEARNED, QWEN_HEADS, Phase.PREFILL, 16),
        (PROXY, QWEN_HEADS, Phase.PREFILL, 16),
        (Configuration("msa", 128, 16, "learned", 64), LLAMA_HEADS, Phase.PREFILL, 16),
        (LEARNED, AttentionShape(64, 4, 128, 128), Phase.PREFILL, 32),
        (LEARNED, AttentionShape(64, 4, 128, 128), Phase.DECODE, 8),
        (LEARNED, LLAMA_HEADS, Phase.DECODE, 16),
        (PROXY, LLAMA_HEADS, Phase.DECODE, 2),
        (Configuration("moba", 128, 8), LLAMA_HEADS, Phase.PREFILL, 256),
        (Configuration("moba", 4096, 12, decode="dense"), LLAMA_HEADS, Phase.DECODE, 1),
        (LEARNED, LLAMA_HEADS, Phase.TRAINING, 28),
        (Configuration("moba", 128, 8), LLAMA_HEADS, Phase.TRAINING, 896),
        (LEARNED, AttentionShape(64, 64, 192, 64), Phase.TRAINING, 2 * 3.75),
        (DENSE, LLAMA_HEADS, Phase.PREFILL, float("inf")),
    ],
)
def test_limits_of_methods(configuration, heads, phase, limit):
    assert speedup_limit(configuration, heads, phase, H200, ElementBytes()) == limit


def test_small_index_elements_raise_the_limit_where_the_gpu_has_fp8():
    small = ElementBytes(index=1)
    shape = AttentionShape(64, 4, 128, 128)
    assert speedup_limit(LEARNED, shape, Phase.DECODE, H200, small) == 16
    fast = speedup_limit(LEARNED, shape, Phase.PREFILL, H200, small)
    assert fast == pytest.approx(64, rel=0.001)
    a100 = load_gpu("a100")
    assert speedup_limit(LEARNED, shape, Phase.PREFILL, a100, small) == 32
    assert speedup_limit(PROXY, shape, Phase.PREFILL, H200, small) == 32
