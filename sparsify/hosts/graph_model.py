"""Rewritten exported programs as a module, for inference."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sparsify.errors import UsageError
from sparsify.hosts.calls import current_observer
from sparsify.hosts.graph_sites import WatchedSites
from sparsify.hosts.inputs import same_option
from sparsify.hosts.program import Program
from sparsify.hosts.signature import Signature
from sparsify.hosts.state import State, copied, owner_of
from sparsify.kernels import selection
from sparsify.passes.retune import retuned
from sparsify.plans import Plan

__all__ = ["GraphModel"]


class GraphModel(torch.nn.Module):
    """Rewritten programs of one model. It computes without gradients.

    `forward` runs the last program whose arguments are all given, so the one with a cache where a
    cache is passed that is not empty.

    Args:
        programs: the programs, the prefill first.
        plan: what was done at every site.
        signature: of the original forward.
        state: the tensors of the programs.
        config: the original's configuration object, if it has one.

    Raises:
        UsageError: by `train()`, by a change of the dtype, and by calls that do not fit.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        plan: Plan,
        signature: Signature,
        state: State,
        config: Any = None,
    ) -> None:
        super().__init__()
        self.training = False
        self.sparsify_programs = tuple(programs)
        self.sparsify_plan = plan
        self.sparsify_signature = signature
        if config is not None:
            self.config = config
        for name, parameter in state.parameters.items():
            owner, leaf = owner_of(self, name)
            owner.register_parameter(leaf, parameter)
        for tensors, saved in ((state.buffers, True), (state.volatile, False)):
            for name, buffer in tensors.items():
                owner, leaf = owner_of(self, name)
                owner.register_buffer(leaf, buffer, persistent=saved)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the original forward.

        Raises:
            UsageError: the arguments do not fit the original forward, or the captured programs.
        """
        given = self._given(args, kwargs)
        asked = self._to_program(given)
        program = self._program(asked)
        watched = current_observer() is not None or selection.is_active()
        runner = WatchedSites(self.sparsify_plan) if watched else None
        out = program.run(asked, self._tensor, runner)
        out, keys = out if program.indexed else (out, ())
        return self._finished(given, out, dict(zip(program.indexed, keys, strict=True)))

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments by name, the defaults of the forward for those that are left out."""
        signature = self.sparsify_signature
        return {**signature.defaults, **signature.named(args, kwargs)}

    def _to_program(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return dict(given)

    def _program(self, given: Mapping[str, Any]) -> Program:
        """The last program all of whose arguments are given.

        Raises:
            UsageError: an argument is given that no program takes.
        """
        there = {name for name, value in given.items() if value is not None}
        fitting = [p for p in self.sparsify_programs if p.required <= there]
        program = fitting[-1] if fitting else self.sparsify_programs[0]
        defaults = self.sparsify_signature.defaults
        for name, value in given.items():
            harmless = name in defaults and same_option(value, defaults[name])
            if name not in program.names and not harmless:
                raise UsageError(
                    f"The program does not take {name}; it was captured with "
                    f"{', '.join(program.names)}."
                )
        return program

    def _finished(
        self, given: Mapping[str, Any], out: Any, index_keys: Mapping[int, torch.Tensor]
    ) -> Any:
        """The result for the caller, with index keys by the number of their cache layer."""
        return out

    def sparsify_example(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Example arguments of the original as this model takes them."""
        return kwargs

    def _tensor(self, name: str) -> torch.Tensor:
        owner, leaf = owner_of(self, name)
        tensor: torch.Tensor = getattr(owner, leaf)
        return tensor

    def sparsify_takes(self, name: str) -> bool:
        """Whether a program has an input of that name."""
        return any(name in program.names for program in self.sparsify_programs)

    def sparsify_retuned(self, plan: Plan) -> GraphModel:
        """A model on the same tensors with the sizes of another plan of the same sites."""
        programs = [
            dataclasses.replace(program, exported=retuned(program.exported, plan))
            for program in self.sparsify_programs
        ]
        signature, config = self.sparsify_signature, getattr(self, "config", None)
        return type(self)(programs, plan, signature, self.sparsify_state, config)

    @property
    def sparsify_state(self) -> State:
        """The tensors as they are now."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        buffers = dict(self.named_buffers(remove_duplicate=False))
        saved = self.state_dict(keep_vars=True).keys()
        return State(
            parameters,
            {name: value for name, value in buffers.items() if name in saved},
            {name: value for name, value in buffers.items() if name not in saved},
        )

    def train(self, mode: bool = True) -> GraphModel:
        """Exported programs are for inference.

        Raises:
            UsageError: for `train(True)`.
        """
        if mode:
            raise UsageError(
                "A model of the graph host is for inference; it has no training mode.",
                "Train the original model.",
            )
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> GraphModel:
        """Moves to another device; the programs name devices, so they are moved too."""
        for tensor in (*self.parameters(), *self.buffers()):
            if fn(tensor.new_empty(0)).dtype != tensor.dtype:
                raise UsageError(
                    "The dtype of an exported program is fixed.",
                    "Convert the original model, then rewrite it.",
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = next((p.device for p in (*self.parameters(), *self.buffers())), None)
        if device is not None:
            self.sparsify_programs = tuple(p.moved(device) for p in self.sparsify_programs)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphModel:
        return type(self)(
            self.sparsify_programs,
            self.sparsify_plan,
            self.sparsify_signature,
            copied(self.sparsify_state, memo),
            copy.deepcopy(getattr(self, "config", None), memo),
        )

    def __reduce__(self) -> Any:
        from sparsify.hosts.archive import from_bytes, to_bytes

        return from_bytes, (to_bytes(self), getattr(self, "config", None))
