"""The operations of one layer of a model, and of what stands before and behind all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sparsify.cost_model.activations import most_activation_bytes
from sparsify.cost_model.calibration import Calibration
from sparsify.cost_model.configuration import DENSE, Configuration
from sparsify.cost_model.hardware import Gpu
from sparsify.cost_model.layer_cost import LayerCost, StageCost
from sparsify.cost_model.linear_cost import Operation, all_reduce, matrix_product, memory_read
from sparsify.cost_model.model_shape import LayerShape, ModelShape
from sparsify.cost_model.situation import Situation
from sparsify.cost_model.times import TimeEstimate
from sparsify.cost_model.workload import AttentionShape, ElementBytes, Phase, Workload
from sparsify.pair_counts import attended_pairs, dense_pairs

__all__ = ["LayerOperations", "LayerPricer"]

# Forward, gradient of the activations, gradient of the weights.
TRAINING_PASSES = 3
# Products with and into the state: one multiply-add each, per number of the state and token.
STATE_FLOPS = 4
ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class LayerOperations:
    """What a layer does, in order; `attention` is the cost of its attention, if it has any."""

    operations: tuple[Operation, ...]
    attention: LayerCost | None


class LayerPricer:
    """Costs layers of one model in one call; layers that are alike are costed once."""

    def __init__(
        self,
        model: ModelShape,
        workload: Workload,
        gpu: Gpu,
        element_bytes: ElementBytes,
        calibration: Calibration | None,
        degree: int,
        efficiency_scale: float,
    ) -> None:
        self.model, self.workload, self.gpu = model, workload, gpu
        self.element_bytes, self.calibration = element_bytes, calibration
        self.degree, self.efficiency_scale = degree, efficiency_scale
        self.tokens = workload.batch * workload.new_tokens
        self._priced: dict[tuple[LayerShape, Configuration], LayerOperations] = {}

    def price(self, layer: LayerShape, configuration: Configuration) -> LayerOperations:
        """The operations of `layer` with its attention computed as `configuration` says."""
        key = (layer.nameless, configuration)
        if key not in self._priced:
            self._priced[key] = self._price(*key)
        return self._priced[key]

    def embedding(self) -> Operation:
        """Reading one row per token."""
        n_bytes = self.tokens * self.model.hidden_size * ACTIVATION_BYTES
        return memory_read("embedding", n_bytes, self.gpu, self.calibration)

    def head(self) -> Operation:
        """Logits: of every token in training, else of the last one of each sequence."""
        training = self.workload.phase is Phase.TRAINING
        rows = self.tokens if training else self.workload.batch
        return self._product("LM head", self.model.head_params, rows)

    def _price(self, layer: LayerShape, configuration: Configuration) -> LayerOperations:
        attention = self._attention(layer, configuration)
        if layer.attention is None:
            mixer = self._recurrence(layer)
        else:
            assert attention is not None
            mixer = tuple(
                Operation(stage.name, "attention", stage.flops, stage.dram_bytes, stage.time)
                for stage in attention.stages
            )
        operations = []
        if layer.qkv_params:
            operations.append(self._product("qkv projection", layer.qkv_params))
        operations += mixer
        if layer.output_params:
            operations.append(self._product("output projection", layer.output_params))
            operations += self._all_reduce()
        operations.append(self._passes(layer))
        if layer.mlp_params_total:
            operations += [self._feed_forward(layer), *self._all_reduce()]
        return LayerOperations(tuple(operations), attention)

    def _product(self, name: str, params: float, rows: int | None = None) -> Operation:
        """`rows` activations (one per token) times `params` weights, all of them read."""
        return self._weighted(name, params, params, self.tokens if rows is None else rows)

    def _weighted(self, name: str, used: float, read: float, rows: int) -> Operation:
        """Each row is multiplied with `used` weights; together they read `read` of them."""
        passes = TRAINING_PASSES if self.workload.phase is Phase.TRAINING else 1
        flops = math.ceil(2 * rows * used * passes / self.degree)
        n_bytes = read * self.model.weight_bytes_per_param * passes / self.degree
        return matrix_product(name, flops, n_bytes, self.gpu, self.calibration)

    def _feed_forward(self, layer: LayerShape) -> Operation:
        if layer.experts is None:
            return self._product("MLP", layer.mlp_params)
        read = layer.mlp_params + layer.experts.expected_read(self.tokens) * layer.experts.params
        return self._weighted("MoE", layer.mlp_params_active, read, self.tokens)

    def _passes(self, layer: LayerShape) -> Operation:
        """Nothing when they are fused; at worst the time of all they move."""
        passes = TRAINING_PASSES if self.workload.phase is Phase.TRAINING else 1
        moved = most_activation_bytes(layer, self.model.hidden_size, self.degree)
        n_bytes = moved * self.tokens * passes
        time = memory_read("", n_bytes, self.gpu, self.calibration).time
        span = TimeEstimate(0.0, 0.0, 0.0, time.high_ms, time.source)
        return Operation("passes over activations", "linear", 0, 0.0, span)

    def _recurrence(self, layer: LayerShape) -> tuple[Operation, ...]:
        if not layer.state_elements:
            return ()
        flops = STATE_FLOPS * layer.state_elements * self.tokens // self.degree
        moved = 2 * layer.state_elements * self.workload.batch * self.element_bytes.key
        return (
            matrix_product("recurrence", flops, moved / self.degree, self.gpu, self.calibration),
        )

    def _all_reduce(self) -> list[Operation]:
        if self.degree == 1:
            return []
        passes = 2 if self.workload.phase is Phase.TRAINING else 1
        n_bytes = self.tokens * self.model.hidden_size * ACTIVATION_BYTES * passes
        return [all_reduce(n_bytes, self.degree, self.gpu)]

    def _attention(self, layer: LayerShape, configuration: Configuration) -> LayerCost | None:
        if layer.attention is None:
            return None
        shape = layer.attention.sharded(self.degree)
        if layer.window is not None:
            return self._window(shape, layer.window)
        return self._layer_cost(shape, self.workload, configuration)

    def _layer_cost(
        self, shape: AttentionShape, workload: Workload, configuration: Configuration
    ) -> LayerCost:
        situation = Situation(
            self.gpu,
            workload,
            self.calibration,
            self.element_bytes,
            self.model.hidden_size,
            self.efficiency_scale,
        )
        return situation.cost(shape, configuration)

    def _window(self, shape: AttentionShape, window: int) -> LayerCost:
        """Dense attention over the last `window` keys: its pairs at the rate of dense attention."""
        call = self.workload
        seen = replace(call, prefix_tokens=min(call.prefix_tokens, window - 1))
        cost = self._layer_cost(shape, seen, DENSE)
        pairs = attended_pairs(seen.new_tokens, seen.context_tokens, 1, window)
        share = pairs / dense_pairs(seen.new_tokens, seen.context_tokens)
        if share == 1:
            return cost
        stages = tuple(_scaled(stage, share, self.gpu) for stage in cost.stages)
        return replace(cost, stages=stages)


def _scaled(stage: StageCost, share: float, gpu: Gpu) -> StageCost:
    """A stage with that share of its products; reading the operands takes as long as before."""
    read_ms = 1e3 * stage.dram_bytes / gpu.dram_bytes_per_s
    time = stage.time
    return replace(
        stage,
        flops=math.ceil(stage.flops * share),
        time=TimeEstimate(
            max(time.bound_ms * share, read_ms),
            max(time.low_ms * share, read_ms),
            max(time.expected_ms * share, read_ms),
            max(time.high_ms * share, read_ms),
            time.source,
        ),
    )
