"""Model and example inputs in, one FX graph out: `torch.export`, non-strict, without gradients.

The graph is captured before any decomposition, so that attention is still one operator where the
model wrote one.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx import GraphModule

from sparsify.errors import CaptureError
from sparsify.passes.dims import (
    Attempt,
    attempts,
    doubled,
    example_sizes,
    found_dims,
    fresh,
    own_shapes,
    specialised,
)
from sparsify.passes.examples import example_inputs, is_transformers_model
from sparsify.passes.modes import evaluating
from sparsify.passes.signatures import spelt_out

__all__ = ["Captured", "capture", "example_inputs", "is_transformers_model"]

LOGGERS = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.export",
    "torch._export",
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
)


@dataclass(frozen=True)
class Captured:
    """A captured model.

    `parameters`, `buffers` and `constants` map a placeholder's name to the name of the state it
    stands for; `inputs` are the placeholders of the user's tensors, in order. `dynamic` maps an
    input to its dynamic dims and their symbols; `specialised` says which tried dims became fixed.
    `ranges` maps a symbol's name to its smallest and largest size (None: unlimited), `examples` to
    its size in the example. `flags` are the true boolean inputs, which the capture froze.
    """

    name: str
    program: ExportedProgram
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, str]
    inputs: tuple[str, ...]
    dynamic: Mapping[str, Mapping[int, str]]
    specialised: tuple[str, ...]
    ranges: Mapping[str, tuple[int, int | None]]
    examples: Mapping[str, int]
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def graph_module(self) -> GraphModule:
        """The graph module of the exported program (parameters are placeholders)."""
        module: GraphModule = self.program.graph_module
        return module

    @property
    def graph(self) -> torch.fx.Graph:
        """The captured graph."""
        return self.graph_module.graph

    def value(self, placeholder: str) -> torch.Tensor | None:
        """The tensor behind a parameter, buffer or constant placeholder; None if there is none."""
        state = self.parameters.get(placeholder) or self.buffers.get(placeholder)
        name = self.constants.get(placeholder) if state is None else state
        value: Any = self.program.state_dict.get(name)
        if value is None:  # constants and buffers that are not saved
            value = self.program.constants.get(name)
        return value if isinstance(value, torch.Tensor) else None


def capture(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Any = None,
) -> Captured:
    """Capture `model` for inference on the given example inputs.

    Args:
        model: any module; its training flags, parameters and buffers stay as they are.
        args, kwargs: example inputs. Examples of batch 1 are doubled for the capture.
        dynamic: `dynamic_shapes` of torch.export, instead of the dims that are tried by default
            (batch and length of every input); False for none.

    Raises:
        CaptureError: torch.export takes the model in none of the stated ways.
    """
    named, training = dict(kwargs or {}), model.training
    tried: list[tuple[Attempt, Exception]] = []
    with evaluating(model), torch.no_grad():
        for attempt in attempts(tuple(args), named, dynamic):
            try:
                with _silence():
                    program, inputs = _export(model, attempt)
            except Exception as error:  # torch.export raises whatever the model's code raises
                tried.append((attempt, error))
                continue
            notes = _notes(attempt, tried, training)
            return _captured(model, program, attempt, inputs, notes)
    raise CaptureError(_failure(model, tried)) from (tried[-1][1] if tried else None)


def _export(model: torch.nn.Module, attempt: Attempt) -> tuple[ExportedProgram, Any]:
    args, kwargs = fresh(attempt.args, attempt.kwargs)
    if attempt.double:
        args, kwargs = doubled(args, kwargs)
    with spelt_out(model, args, kwargs):
        program = torch.export.export(
            model,
            args,
            kwargs,
            dynamic_shapes=own_shapes(model, attempt.shapes, args, kwargs),
            strict=False,
        )
    return program, (args, kwargs)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """torch.export warns, logs and prints graphs when a way of capturing fails; the notes and the
    error say it once. What the model itself prints comes through when the capture succeeds."""
    out, err = io.StringIO(), io.StringIO()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            warnings.simplefilter("ignore")
            yield
        sys.stdout.write(out.getvalue())
        sys.stderr.write(err.getvalue())
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _captured(
    model: torch.nn.Module,
    program: ExportedProgram,
    attempt: Attempt,
    inputs: Any,
    notes: list[str],
) -> Captured:
    state, users, flags = _inputs_by_kind(program)
    fixed = specialised(program, attempt, inputs)
    return Captured(
        name=type(model).__name__,
        program=program,
        parameters=state[InputKind.PARAMETER],
        buffers=state[InputKind.BUFFER],
        constants=state[InputKind.CONSTANT_TENSOR],
        inputs=users,
        dynamic=found_dims(program, users),
        specialised=fixed,
        ranges=_ranges(program),
        examples=example_sizes(program, inputs),
        flags=flags,
        notes=(*notes, *fixed),
    )


def _notes(attempt: Attempt, tried: list[tuple[Attempt, Exception]], training: bool) -> list[str]:
    notes = [f"{other.label} was not possible: {_first_line(error)}" for other, error in tried]
    if tried:
        notes.append(f"captured with {attempt.label}")
    if training:
        notes.append("the model is in training mode; it was captured in eval mode")
    return notes


def _inputs_by_kind(
    program: ExportedProgram,
) -> tuple[dict[InputKind, dict[str, str]], tuple[str, ...], tuple[str, ...]]:
    """State by kind (placeholder -> name), the user's tensors, and the true boolean inputs."""
    state: dict[InputKind, dict[str, str]] = {kind: {} for kind in InputKind}
    users, flags = [], []
    for spec in program.graph_signature.input_specs:
        if not isinstance(spec.arg, TensorArgument):
            if getattr(spec.arg, "value", None) is True:
                flags.append(f"{spec.arg.name} is True, as captured")
        elif spec.kind == InputKind.USER_INPUT:
            users.append(spec.arg.name)
        else:
            state[spec.kind][spec.arg.name] = str(spec.target)
    return state, tuple(users), tuple(flags)


def _ranges(program: ExportedProgram) -> dict[str, tuple[int, int | None]]:
    out = {}
    for symbol, interval in program.range_constraints.items():
        upper = interval.upper
        limited = getattr(upper, "is_Integer", False) and int(upper) < 2**31
        lower = interval.lower
        low = int(lower) if getattr(lower, "is_Integer", False) else 0
        out[str(symbol)] = (low, int(upper) if limited else None)
    return out


def _failure(model: torch.nn.Module, tried: list[tuple[Attempt, Exception]]) -> str:
    name = type(model).__name__
    if not tried:
        return f"{name} cannot be captured: there are no example inputs."
    return f"{name} cannot be captured by torch.export: {_first_line(tried[-1][1])}."


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text[:200].rstrip(".")
