"""A GPU and a call, so that layers and configurations can be compared under the same conditions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparsify.cost_model.calibration import Calibration
from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.crossover import crossover_tokens
from sparsify.cost_model.hardware import Gpu
from sparsify.cost_model.layer_cost import LayerCost, layer_cost
from sparsify.cost_model.workload import BF16, AttentionShape, ElementBytes, Workload

__all__ = ["Situation"]


@dataclass(frozen=True, slots=True)
class Situation:
    """Where and on what a layer runs; shapes are those of one GPU's share."""

    gpu: Gpu
    workload: Workload
    calibration: Calibration | None = None
    element_bytes: ElementBytes = BF16
    hidden_size: int | None = None
    efficiency_scale: float = 1.0

    def scaled(self, efficiency_scale: float) -> Situation:
        """The same with sparse kernels so many times as efficient."""
        return replace(self, efficiency_scale=efficiency_scale)

    def cost(self, shape: AttentionShape, configuration: Configuration) -> LayerCost:
        """Cost of one layer."""
        return layer_cost(
            shape,
            self.workload,
            configuration,
            self.gpu,
            element_bytes=self.element_bytes,
            hidden_size=self.hidden_size,
            calibration=self.calibration,
            efficiency_scale=self.efficiency_scale,
        )

    def threshold_tokens(self, shape: AttentionShape, configuration: Configuration) -> int | None:
        """Keys from which on the configuration is expected to be faster than dense."""
        return crossover_tokens(
            shape,
            configuration,
            self.gpu,
            phase=self.workload.phase,
            batch=self.workload.batch,
            element_bytes=self.element_bytes,
            hidden_size=self.hidden_size,
            calibration=self.calibration,
            efficiency_scale=self.efficiency_scale,
        )
