"""What a plan is made for: a GPU, a workload, and a model's weights and caches on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparsify.cost_model.calibration import Calibration, calibration_for
from sparsify.cost_model.configuration import DENSE, Configuration
from sparsify.cost_model.hardware import Gpu, load_gpu
from sparsify.cost_model.model_cost import ModelCost, model_cost
from sparsify.cost_model.model_shape import ModelShape
from sparsify.cost_model.situation import Situation
from sparsify.cost_model.workload import (
    BF16,
    MOST_BATCH,
    MOST_GPUS,
    MOST_TOKENS,
    AttentionShape,
    Phase,
    Workload,
    check_count,
)
from sparsify.errors import InfeasibleError, UsageError
from sparsify.ir import HeadLayout

__all__ = ["Target"]


@dataclass(frozen=True)
class Target:
    """A GPU (or `tensor_parallel` of them) and one call; `model` is None where only the attention
    is known, and then nothing can be said of the rest."""

    gpu: Gpu
    workload: Workload
    tensor_parallel: int = 1
    calibration: Calibration | None = None
    model: ModelShape | None = None

    @classmethod
    def of(
        cls,
        gpu: str,
        context_tokens: int,
        *,
        phase: str = "prefill",
        batch: int = 1,
        tensor_parallel: int = 1,
        calibration: str | Path | None = None,
        model: ModelShape | None = None,
    ) -> Target:
        """From what the user says.

        Args:
            calibration: a file of efficiencies measured on that GPU; by default those that come
                with this package, if any.

        Raises:
            UnknownGpuError: no figures are known for that GPU.
            UsageError: an impossible number, no such phase, or a wrong calibration.
        """
        check_count("context", context_tokens, MOST_TOKENS)
        check_count("batch", batch, MOST_BATCH)
        check_count("tensor_parallel", tensor_parallel, MOST_GPUS)
        if phase not in list(Phase):
            raise UsageError(f"Unknown phase {phase!r:.40}; use {', '.join(Phase)}.")
        found = load_gpu(gpu)
        known = calibration_for(found, calibration)
        workload = Workload.of(Phase(phase), context_tokens, batch)
        return cls(found, workload, tensor_parallel, known, model)

    @property
    def situation(self) -> Situation:
        """Where one layer runs."""
        hidden = None if self.model is None else self.model.hidden_size
        return Situation(self.gpu, self.workload, self.calibration, BF16, hidden)

    def shape(self, heads: HeadLayout) -> AttentionShape:
        """One GPU's share of an attention.

        Raises:
            UsageError: the heads cannot be split over that many GPUs.
        """
        whole = AttentionShape(heads.q_heads, heads.kv_heads, heads.head_dim, heads.value_dim)
        return whole.sharded(self.tensor_parallel)

    def cost(
        self, configurations: Mapping[str, Configuration] | Configuration = DENSE
    ) -> ModelCost | None:
        """The whole model; None where it is not known."""
        if self.model is None:
            return None
        return model_cost(
            self.model,
            self.workload,
            configurations,
            self.gpu,
            element_bytes=BF16,
            calibration=self.calibration,
            tensor_parallel=self.tensor_parallel,
        )

    def free_bytes(self) -> float | None:
        """Memory beside weights and KV cache, for what sparse attention adds.

        Raises:
            InfeasibleError: they do not fit.
        """
        cost = self.cost()
        if cost is None:
            return None
        need, has = cost.memory, self.gpu.memory_bytes
        free = has - need.weights_bytes - need.kv_cache_bytes
        if free < 0:
            each = f" on each of {self.tensor_parallel} GPUs" if self.tensor_parallel > 1 else ""
            raise InfeasibleError(
                f"The memory of {self.gpu.name} ({_gb(has)}) does not hold the weights "
                f"({_gb(need.weights_bytes)}) and the KV cache of {self.workload.batch} x "
                f"{self.workload.context_tokens:,} tokens ({_gb(need.kv_cache_bytes)}){each}.",
                "Use more GPUs (--tensor-parallel), a shorter context or a smaller batch.",
            )
        return free


def _gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:,.1f} GB"
