"""The state of exported programs: parameters and buffers by name, never copied."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from sparsify.passes.exported import rebuilt

__all__ = ["State", "copied", "owner_of", "state_of", "with_state"]


@dataclass(frozen=True)
class State:
    """Tensors by name. Parameters and `buffers` make up the `state_dict`; `volatile` are the
    buffers that are not saved."""

    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    volatile: dict[str, torch.Tensor]


def state_of(programs: Sequence[ExportedProgram]) -> State:
    """All state of programs of one model."""
    state = State({}, {}, {})
    for program in programs:
        for name, value in program.state_dict.items():
            if isinstance(value, torch.nn.Parameter):
                state.parameters.setdefault(name, value)
            else:
                state.buffers.setdefault(name, value)
        for spec in program.graph_signature.input_specs:
            value = program.constants.get(str(spec.target))
            if spec.kind == InputKind.BUFFER and isinstance(value, torch.Tensor):
                state.volatile.setdefault(str(spec.target), value)
    return state


def with_state(program: ExportedProgram, state: State) -> ExportedProgram:
    """The same program holding these tensors."""
    kept = {name: state.volatile.get(name, value) for name, value in program.constants.items()}
    saved = {**state.parameters, **state.buffers}
    return rebuilt(program, state_dict=saved, constants=kept)


def copied(state: State, memo: dict[int, Any]) -> State:
    """A deep copy; tensors that are shared stay shared."""
    return State(
        copy.deepcopy(state.parameters, memo),
        copy.deepcopy(state.buffers, memo),
        copy.deepcopy(state.volatile, memo),
    )


def owner_of(root: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """The module that holds a dotted name, made where it is missing, and the last part."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, torch.nn.Module())
        child = root._modules[part]
        assert child is not None
        root = child
    return root, leaf
