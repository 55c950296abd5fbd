"""What kernels reach where nothing was calibrated: ranges, each with its source.

Dense kernels and matrix products have a range of the share of their bound. For sparse attention the
range is of the *speed-up*: what public kernels, this package's among them, made of the ratio of
FLOPs (prefill, training) or bytes (decode). A kernel that nobody has written may lie outside.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.workload import Phase

__all__ = ["LAUNCH_US", "SCALES", "Range", "share_of_bound", "share_of_speedup"]

# One kernel of a CUDA graph from start to start of the next, H200 (attention of a short decode
# step: two kernels in 5.8 us, vLLM's Triton kernels, 2026-11-30).
LAUNCH_US = 2.9

LARGE_BLOCK = 1024

# How many times as efficient the sparse kernels may turn out, for questions of sensitivity.
SCALES = (0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class Range:
    """A range of shares, and where it comes from."""

    low: float
    high: float
    source: str

    @property
    def middle(self) -> float:
        """The geometric middle."""
        return float((self.low * self.high) ** 0.5)


_BOUNDS = {
    "dense_prefill": Range(
        0.50,
        0.70,
        "FlashAttention-2 and -3: 0.52-0.58 of the bf16 peak on L40S, 0.60-0.67 on H100 and H200, "
        "0.58 on B200 (tables of NVIDIA aiconfigurator @095f58a); 0.70 on one H200, 2026-11-30",
    ),
    "dense_decode": Range(
        0.50,
        0.95,
        "0.80-0.86 of the bandwidth on H100, H200 and B200, 0.50 for one sequence of 32K "
        "(aiconfigurator @095f58a); 0.93 on H800 (InferSim); 0.95 on one H200, 2026-11-30",
    ),
    "dense_backward": Range(
        0.32, 0.60, "torch's FlashAttention-2 0.32-0.33, cuDNN 0.54 on one H200, 2026-11-30"
    ),
    "copy": Range(
        0.60, 0.90, "0.86 of the bandwidth for a copy on one H200, 2026-11-30; small ones less"
    ),
    "gemm": Range(
        0.50, 0.85, "0.51 on MI300X to 0.87 on A100 (stas00/ml-engineering @744d01e, MAMF)"
    ),
}

_PREFILL_LARGE_BLOCKS = Range(
    0.24,
    0.58,
    "FlashMoBA 0.25-0.30 on one H200 against FlashAttention-3, 2026-11-30; 0.57 at 1M tokens "
    "(arXiv 2502.13189), 0.58 on A800 (MoonshotAI/MoBA issue 14); "
    "this package's kernels do better, 0.72 at 128K tokens on one H200",
)
_PREFILL_SMALL_BLOCKS = Range(
    0.07,
    0.58,
    "FlashMoBA 0.07-0.11 against FlashAttention-2 on H100 (arXiv 2511.11571), this package's "
    "kernels 0.25-0.40 against FlashAttention-3 on one H200, 2026-11-30, where FlashMoBA reaches "
    "0.02-0.04; high end as for large blocks",
)
_PREFILL_MSA = Range(
    0.08,
    0.50,
    "Triton kernels of SGLang 0.08-0.24, of vLLM 0.26-0.44 (aiconfigurator @095f58a); 0.50 at 1M "
    "tokens on H800 (arXiv 2606.13392); this package's kernels do better, 0.55 at 128K and 0.86 at "
    "1M tokens on one H200 against FlashAttention-3",
)
_DECODE = Range(
    0.65,
    0.97,
    "SGLang 0.65 at 1M tokens, vLLM 0.96 with a batch of 64 on H200 (aiconfigurator @095f58a); "
    "0.96 (arXiv 2606.13392); launches come on top",
)


def share_of_bound(family: str) -> Range:
    """What dense kernels reach of their bound.

    Raises:
        KeyError: a family of sparse kernels; they have `share_of_speedup`.
    """
    return _BOUNDS[family]


def share_of_speedup(configuration: Configuration, phase: Phase) -> Range:
    """What sparse kernels make of the ratio of FLOPs or bytes."""
    if phase is Phase.DECODE:
        return _DECODE
    if configuration.method == "msa":
        return _PREFILL_MSA
    large = configuration.block_size >= LARGE_BLOCK
    return _PREFILL_LARGE_BLOCKS if large else _PREFILL_SMALL_BLOCKS
