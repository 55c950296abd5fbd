"""One exported program that is called by the names of the model's forward.

The program's state is not in here: it is looked up by name at every call, so that several programs
(prefill, and chunks after a cache) run on the same tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from sparsify.errors import CaptureError, UsageError
from sparsify.hosts.inputs import Inputs, check_values
from sparsify.hosts.sizes import evaluate
from sparsify.passes.exported import moved

__all__ = ["Program"]

Lookup = Callable[[str], torch.Tensor]
_STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True)
class Program:
    """An exported program and how it is called.

    `args` and `kwargs` name the captured arguments, those given by position first. `padding` maps
    a padding input to its two sizes (batch, keys) as expressions over the sizes of the other
    inputs: when the caller leaves it out, no key is hidden. `guards` are conditions on the sizes
    under which the program holds; of the sizes that it leaves open, those named in `ones` may be 1.
    `values` says what an input may hold (see `sparsify.ir.MaskProof.padding_values`). A program
    with cache layers in `indexed` gives its result in a pair with the index keys of these layers.
    """

    exported: ExportedProgram
    args: tuple[str, ...]
    kwargs: tuple[str, ...]
    padding: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    guards: tuple[str, ...] = ()
    ones: frozenset[str] = frozenset()
    values: Mapping[str, str] = field(default_factory=dict)
    indexed: tuple[int, ...] = ()

    def call_document(self) -> dict[str, Any]:
        """How the program is called, as JSON."""
        return {
            "args": list(self.args),
            "kwargs": list(self.kwargs),
            "padding": {name: list(sizes) for name, sizes in self.padding.items()},
            "guards": list(self.guards),
            "ones": sorted(self.ones),
            "values": dict(self.values),
            **({"indexed": list(self.indexed)} if self.indexed else {}),
        }

    @classmethod
    def from_document(cls, exported: ExportedProgram, call: Mapping[str, Any]) -> Program:
        """Inverse of `call_document`."""
        padding = {name: (sizes[0], sizes[1]) for name, sizes in call["padding"].items()}
        names = tuple(call["args"]), tuple(call["kwargs"])
        guards, ones = tuple(call["guards"]), frozenset(call["ones"])
        indexed = tuple(int(number) for number in call.get("indexed", ()))
        return cls(exported, *names, padding, guards, ones, dict(call["values"]), indexed)

    @cached_property
    def module(self) -> GraphModule:
        """The program's graph; its placeholders are state first, inputs last."""
        module: GraphModule = self.exported.graph_module
        return module

    @property
    def names(self) -> tuple[str, ...]:
        """All captured arguments."""
        return (*self.args, *self.kwargs)

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Captured arguments that are no tensors, with the value they have in the program."""
        found: dict[str, Any] = {}
        for spec in self.exported.graph_signature.input_specs:
            if spec.kind == InputKind.USER_INPUT and not isinstance(spec.arg, TensorArgument):
                found[spec.arg.name] = getattr(spec.arg, "value", None)
        return {name: found[name] for name in self.names if name in found}

    @cached_property
    def _placeholders(self) -> list[Node]:
        """Placeholders of the user's inputs."""
        kinds = [spec.kind for spec in self.exported.graph_signature.input_specs]
        found = self.exported.graph.find_nodes(op="placeholder")
        return [n for n, kind in zip(found, kinds, strict=True) if kind == InputKind.USER_INPUT]

    @cached_property
    def _inputs(self) -> Inputs:
        ranges = self.exported.range_constraints
        return Inputs(self._placeholders, ranges, self.guards, self.ones)

    @property
    def required(self) -> frozenset[str]:
        """Arguments without which the program cannot be called."""
        return frozenset(n for n in self.names if n not in self.constants and n not in self.padding)

    def moved(self, device: torch.device) -> Program:
        """The program on another device; itself where it is there."""
        values = [node.meta.get("val") for node in self.exported.graph.nodes]
        devices = {value.device for value in values if isinstance(value, torch.Tensor)}
        if devices <= {device}:
            return self
        return dataclasses.replace(self, exported=moved(self.exported, device))

    def run(self, given: Mapping[str, Any], state: Lookup, runner: Any = None) -> Any:
        """Call the program.

        Args:
            given: arguments by name.
            state: gives the tensor of a parameter, buffer or constant.
            runner: runs the graph module on flat values, instead of calling it.

        Raises:
            UsageError: the arguments are not those that the program was captured with.
        """
        return self.run_flat(self._leaves(given), state, runner)

    def run_flat(self, leaves: list[Any], state: Lookup, runner: Any = None) -> Any:
        """Call the program on flat inputs, which are not checked."""
        own = self.exported.constants
        values = [own[name] if made else state(name) for name, made in self._state_names] + leaves
        out = self.module(*values) if runner is None else runner(self.module, values)
        return self._outputs(out, leaves, state)

    @cached_property
    def _state_names(self) -> list[tuple[str, bool]]:
        """Names of the state in order, and whether the model's code made it (a constant)."""
        specs = self.exported.graph_signature.input_specs
        unknown = [s.kind.name for s in specs if s.kind not in (*_STATE, InputKind.USER_INPUT)]
        if unknown:
            raise CaptureError(f"The program has inputs of the kind {unknown[0]}.")
        made = InputKind.CONSTANT_TENSOR
        return [(str(s.target), s.kind == made) for s in specs if s.kind in _STATE]

    def _leaves(self, given: Mapping[str, Any]) -> list[Any]:
        """Flat inputs in the order of the placeholders."""
        values = {name: given.get(name, self.constants.get(name)) for name in self.names}
        missing = [name for name, value in values.items() if self._is_missing(name, value)]
        unknown = [name for name in missing if name not in self.padding]
        if unknown:
            raise UsageError(f"{unknown[0]} is missing; the program was captured with it.")
        leaves = self._flat(values)
        sizes = self._inputs.sizes(leaves)
        for place, node in enumerate(self._placeholders):
            if node.name in missing:
                leaves[place] = self._no_padding(node, sizes)
        self._inputs.check(leaves)
        for node, leaf in zip(self._placeholders, leaves, strict=True):
            if node.name in self.padding:
                _check_rows(node.name, leaf, evaluate(self.padding[node.name][0], sizes))
            if node.name in self.values:
                check_values(node.name, leaf, self.values[node.name])
        return leaves

    def _is_missing(self, name: str, value: Any) -> bool:
        return value is None and name not in self.constants

    def _flat(self, values: Mapping[str, Any]) -> list[Any]:
        args = tuple(values[name] for name in self.args)
        kwargs = {name: values[name] for name in self.kwargs}
        try:
            return list(self.exported.call_spec.in_spec.flatten_up_to((args, kwargs)))
        except ValueError as error:
            reason = " ".join(str(error).rstrip(".").split())[:200]
            raise UsageError(
                f"The arguments are built otherwise than those of the capture: {reason}."
            ) from None

    def built_as_captured(self, name: str, value: Any) -> Any:
        """An argument's tensors in an object that is built as that of the capture; the argument
        itself where their numbers differ."""
        spec = self.exported.call_spec.in_spec
        args, kwargs = spec.unflatten([torch.empty(0)] * spec.num_leaves)
        wanted = pytree.tree_structure({**dict(zip(self.args, args, strict=True)), **kwargs}[name])
        leaves = pytree.tree_leaves(value)
        return wanted.unflatten(leaves) if len(leaves) == wanted.num_leaves else value

    def _no_padding(self, node: Node, sizes: Mapping[str, int]) -> torch.Tensor:
        shape = [evaluate(size, sizes) for size in self.padding[node.name]]
        value = node.meta["val"]
        return torch.ones(shape, dtype=value.dtype, device=value.device)

    def _outputs(self, out: Any, leaves: list[Any], state: Lookup) -> Any:
        """Write back what the program changes, and give the results the form of the model's."""
        results = []
        inputs = {node.name: leaf for node, leaf in zip(self._placeholders, leaves, strict=True)}
        for spec, value in zip(self.exported.graph_signature.output_specs, out, strict=True):
            if spec.kind == OutputKind.USER_OUTPUT:
                results.append(value)
            elif spec.kind == OutputKind.BUFFER_MUTATION:
                state(str(spec.target)).copy_(value)
            elif spec.kind == OutputKind.USER_INPUT_MUTATION:
                inputs[str(spec.target)].copy_(value)
            else:
                raise CaptureError(f"The program has outputs of the kind {spec.kind.name}.")
        return pytree.tree_unflatten(results, self.exported.call_spec.out_spec)


def _check_rows(name: str, mask: torch.Tensor, rows: int) -> None:
    """A padding mask of one row is not taken for all rows."""
    if mask.shape[0] != rows:
        raise UsageError(f"{name} has {mask.shape[0]} rows; the other inputs have {rows}.")
