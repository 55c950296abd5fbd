"""What a whole model costs in one call on one GPU, or on each of several that share its layers.

The operations run one after the other, so the time is their sum; layers that are alike are costed
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from sparsify.cost_model.calibration import Calibration
from sparsify.cost_model.configuration import DENSE, Configuration
from sparsify.cost_model.hardware import Gpu
from sparsify.cost_model.linear_cost import Operation, OperationKind
from sparsify.cost_model.model_layers import LayerOperations, LayerPricer
from sparsify.cost_model.model_shape import LayerShape, ModelShape
from sparsify.cost_model.stages import runs_sparse
from sparsify.cost_model.times import TimeEstimate
from sparsify.cost_model.workload import BF16, ElementBytes, Phase, Workload

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["MemoryNeed", "ModelCost", "model_cost"]

Configurations = Mapping[str, Configuration] | Configuration


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on each GPU. Activations and, in training, gradients and optimiser are not in it."""

    weights_bytes: float
    kv_cache_bytes: float
    index_cache_bytes: float
    workspace_bytes: float

    @property
    def total_bytes(self) -> float:
        """All of it."""
        caches = self.kv_cache_bytes + self.index_cache_bytes
        return self.weights_bytes + caches + self.workspace_bytes


@dataclass(frozen=True)
class ModelCost:
    """One call of a model. `layers` has an entry for each layer of the model, in order; alike ones
    share it. `warnings` are sentences about what could not be counted."""

    model: ModelShape
    workload: Workload
    gpu: Gpu
    embedding: Operation
    layers: tuple[LayerOperations, ...]
    head: Operation
    memory: MemoryNeed
    warnings: tuple[str, ...] = ()

    @cached_property
    def attention(self) -> TimeEstimate:
        """Attention of all layers, windows and index included, projections not."""
        return self._time("attention")

    @cached_property
    def sparse_attention(self) -> TimeEstimate:
        """The part of `attention` that leaves something out."""
        return TimeEstimate.total(
            layer.attention.time * count
            for layer, count in self.distinct_layers()
            if layer.attention is not None
            and runs_sparse(layer.attention.configuration, self.workload)
        )

    @cached_property
    def attention_fixed_ms(self) -> float:
        """The part of the expected time of `attention` that does not grow with the work."""
        return sum(
            layer.attention.fixed_ms * count
            for layer, count in self.distinct_layers()
            if layer.attention is not None
        )

    @cached_property
    def linear(self) -> TimeEstimate:
        """Products with weights, the embedding, and recurrences."""
        return self._time("linear")

    @cached_property
    def communication(self) -> TimeEstimate:
        """All-reduces between GPUs."""
        return self._time("communication")

    @cached_property
    def total(self) -> TimeEstimate:
        """Everything."""
        return self.linear + self.attention + self.communication

    @property
    def attention_share(self) -> float:
        """Attention's share of the expected time."""
        return self.attention.expected_ms / self.total.expected_ms

    @cached_property
    def flops(self) -> int:
        """FLOP of everything, on one GPU."""
        return sum(count * operation.flops for operation, count in self._operations())

    @cached_property
    def attention_flops(self) -> int:
        """FLOP of attention, on one GPU."""
        return sum(count * op.flops for op, count in self._operations() if op.kind == "attention")

    @cached_property
    def attention_bytes(self) -> float:
        """Bytes that attention moves, on one GPU."""
        found = (pair for pair in self._operations() if pair[0].kind == "attention")
        return sum(count * operation.dram_bytes for operation, count in found)

    @cached_property
    def dram_bytes(self) -> float:
        """Bytes of device memory that everything moves, on one GPU."""
        found = (pair for pair in self._operations() if pair[0].kind != "communication")
        return sum(count * operation.dram_bytes for operation, count in found)

    @cached_property
    def graph(self) -> nx.DiGraph:
        """Operations as nodes, named by layer and operation, with flops, dram_bytes, ms and time.

        An edge leads to what has to wait; its weight `ms` is the expected time of what it leaves.
        """
        import networkx as nx  # here, since importing it takes longer than an estimate

        graph = nx.DiGraph()
        before: str | None = None
        for name, operation in self._in_order():
            graph.add_node(
                name,
                kind=operation.kind,
                flops=operation.flops,
                dram_bytes=operation.dram_bytes,
                ms=operation.time.expected_ms,
                time=operation.time,
            )
            if before is not None:
                graph.add_edge(before, name, ms=graph.nodes[before]["ms"])
            before = name
        return graph

    def _in_order(self) -> Iterator[tuple[str, Operation]]:
        yield self.embedding.name, self.embedding
        for shape, layer in zip(self.model.layers, self.layers, strict=True):
            for index, operation in enumerate(layer.operations):
                yield f"{shape.name}/{index} {operation.name}", operation
        yield self.head.name, self.head

    def distinct_layers(self) -> Iterator[tuple[LayerOperations, int]]:
        """Layers that were costed once, with how many of the model's layers they stand for."""
        counts: dict[int, tuple[LayerOperations, int]] = {}
        for layer in self.layers:
            counts[id(layer)] = (layer, counts.get(id(layer), (layer, 0))[1] + 1)
        yield from counts.values()

    def _operations(self) -> Iterator[tuple[Operation, int]]:
        """Operations with how often they run."""
        yield self.embedding, 1
        for layer, count in self.distinct_layers():
            for operation in layer.operations:
                yield operation, count
        yield self.head, 1

    def _time(self, kind: OperationKind) -> TimeEstimate:
        return TimeEstimate.total(
            operation.time * count
            for operation, count in self._operations()
            if operation.kind == kind
        )


def model_cost(
    model: ModelShape,
    workload: Workload,
    configurations: Configurations,
    gpu: Gpu,
    *,
    element_bytes: ElementBytes = BF16,
    calibration: Calibration | None = None,
    tensor_parallel: int = 1,
    efficiency_scale: float = 1.0,
) -> ModelCost:
    """Cost of one call.

    Args:
        configurations: of the attention layers by name (those left out stay dense), or one for
            all. Windows and recurrences stay as they are.
        tensor_parallel: GPUs that share heads and weights; costs are those of each of them.
        efficiency_scale: as in `layer_cost`.

    Raises:
        UsageError: the heads cannot be split over that many GPUs.
    """
    pricer = LayerPricer(
        model, workload, gpu, element_bytes, calibration, tensor_parallel, efficiency_scale
    )
    layers = tuple(pricer.price(layer, _choice(layer, configurations)) for layer in model.layers)
    return ModelCost(
        model,
        workload,
        gpu,
        pricer.embedding(),
        layers,
        pricer.head(),
        _memory(model, workload, layers, tensor_parallel, element_bytes),
        tuple(_warnings(gpu, tensor_parallel)),
    )


def _choice(layer: LayerShape, configurations: Configurations) -> Configuration:
    if layer.kind != "attention" or layer.fixed:
        return DENSE
    if isinstance(configurations, Configuration):
        return configurations
    return configurations.get(layer.name, DENSE)


def _memory(
    model: ModelShape,
    workload: Workload,
    layers: Iterable[LayerOperations],
    degree: int,
    sizes: ElementBytes,
) -> MemoryNeed:
    costs = [layer.attention for layer in layers if layer.attention is not None]
    training = workload.phase is Phase.TRAINING
    caches = 0.0
    if not training:
        caches = model.kv_cache_bytes(workload.context_tokens, workload.batch, degree, sizes)
    return MemoryNeed(
        model.weight_bytes(degree),
        caches,
        0 if training else sum(cost.index_cache_bytes for cost in costs),
        max((cost.workspace_bytes for cost in costs), default=0),
    )


def _warnings(gpu: Gpu, degree: int) -> Iterator[str]:
    if degree > 1 and not gpu.link_bytes_per_s:
        what = "is not known" if gpu.link_bytes_per_s is None else "is 0"
        yield (
            f"The NVLink bandwidth of {gpu.name} {what}: all-reduces between the "
            f"{degree} GPUs are not counted, real times are longer."
        )
