"""What the kernels' launches ask about a GPU and about tensors that it is to fetch in bulk."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "capability",
    "gluon",
    "has_float8",
    "is_bulk",
    "is_hopper",
    "is_hopper_or_newer",
    "processors",
]

_log = logging.getLogger(__name__)


@functools.cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Of an NVIDIA GPU; None for any other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def is_hopper(device: torch.device) -> bool:
    """Whether `device` has compute capability 9.0, for which Gluon kernels are written."""
    return capability(device) == (9, 0)


def is_hopper_or_newer(device: torch.device) -> bool:
    """Whether a kernel may start before the one in front of it ends, and fetch by descriptors."""
    return (capability(device) or (0, 0)) >= (9, 0)


def has_float8(device: torch.device) -> bool:
    """Whether there are products of float8_e4m3fn; where there is no GPU nothing is in the way."""
    return device.type != "cuda" or (capability(device) or (0, 0)) >= (8, 9)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; an H200's where there is none."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def is_bulk(x: Tensor) -> bool:
    """Whether the tensor memory accelerator can fetch rows of `x`: strides and start that 16 bytes
    divide."""
    size = x.element_size()
    strides = [stride > 0 and stride * size % 16 == 0 for stride in x.stride()[:3]]
    return x.stride(3) == 1 and all(strides) and x.data_ptr() % 16 == 0


@functools.cache
def gluon(module: str) -> Any:
    """The module `module` of kernels in Gluon, or None, told once, where Triton's Gluon is not as
    it was: it is marked experimental. Plain kernels do the work then."""
    try:
        return importlib.import_module(module)
    except (ImportError, AttributeError) as error:
        _log.warning("Hopper kernels of %s are not to be had, plain ones run: %s", module, error)
        return None
