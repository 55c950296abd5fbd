"""Running a model without leaving traces: its modes and its buffers are what they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["evaluating", "trying"]


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Within it the model is in eval mode; afterwards every module is back in its own mode, so that
    parts that the user froze stay frozen."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def trying(model: torch.nn.Module) -> Iterator[None]:
    """Within it the model runs in eval mode and without gradients; afterwards its buffers are the
    same tensors and hold what they held before, whatever its forward counts in them, and its
    modules have the attributes that they had."""
    kept = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    attributes = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    with torch.no_grad():
        try:
            with evaluating(model):
                yield
        finally:
            for now, before in attributes:
                now.update(before)
                for name in now.keys() - before.keys():
                    del now[name]
            for module, name, buffer, value in kept:
                module._buffers[name] = buffer
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
