"""A forward with `*args` or `**kwargs`, given names for the time of a capture.

torch.export takes dynamic dims by the names of the forward's parameters and cannot name what a
forward collects; with a signature that spells every given input out, it can.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from inspect import Parameter, Signature
from typing import Any

import torch

__all__ = ["spelt_out"]

_COLLECTING = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@contextlib.contextmanager
def spelt_out(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Within the block, the model's forward names every input of this call."""
    forward = model.forward
    signature = inspect.signature(forward)
    bound = signature.bind(*args, **kwargs).arguments
    if not any(signature.parameters[name].kind in _COLLECTING for name in bound):
        yield
        return

    def named(*inputs: Any, **others: Any) -> Any:
        return forward(*inputs, **others)

    named.__signature__ = _spelt(signature, bound)  # type: ignore[attr-defined]
    own = model.__dict__.get("forward")
    model.__dict__["forward"] = named
    try:
        yield
    finally:
        if own is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = own


def _spelt(signature: Signature, bound: Mapping[str, Any]) -> Signature:
    parameters: list[Parameter] = []
    for name, value in bound.items():
        parameter = signature.parameters[name]
        if parameter.kind == Parameter.VAR_POSITIONAL:
            kind = Parameter.POSITIONAL_ONLY
            parameters = [p.replace(kind=kind) for p in parameters]
            parameters += [Parameter(f"{name}_{n}", kind) for n in range(len(value))]
        elif parameter.kind == Parameter.VAR_KEYWORD:
            parameters += [Parameter(key, Parameter.KEYWORD_ONLY) for key in value]
        else:
            parameters.append(parameter.replace(default=Parameter.empty))
    return Signature(parameters)
