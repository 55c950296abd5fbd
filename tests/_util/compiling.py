"""Compile the kernels that a call would start, for GPUs that are not there.

`launches` runs a call with every kernel launch recorded instead of done; `compiled` builds one of
them for a target, with the argument types and specialisations that a launch would have.
"""

import contextlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["SHARED_BYTES", "TARGETS", "Launch", "compiled", "key", "launches", "resources"]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
OPTIONS = ("num_warps", "num_stages", "maxnreg")
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.bool: "*i1",
}


class Launch(NamedTuple):
    kernel: JITFunction
    values: dict
    options: dict

    @property
    def name(self):
        return self.kernel.fn.__name__


@contextlib.contextmanager
def launches():
    """Record launches instead of doing them; yields the list."""
    found = []

    def record(self, *args, grid, warmup, **kwargs):
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        found.append(Launch(self, values, options))

    with mock.patch.object(JITFunction, "run", record):
        yield found


def _kind(value):
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if hasattr(value, "block_shape"):  # in Gluon a descriptor has a layout too
        layout = "" if isinstance(value, TensorDescriptor) else f",{value.layout!r}"
        return f"tensordesc<{POINTERS[value.base.dtype][1:]}{list(value.block_shape)}{layout}>"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_divisible(value):
    """Whether a launch would find 16 to divide a pointer or a whole number."""
    if isinstance(value, torch.Tensor):
        return True
    integer = isinstance(value, int) and not isinstance(value, bool)
    return integer and value % 16 == 0


def compiled(launch, target):
    """The compiled kernel, as a launch with these arguments would build it."""
    kernel, values = launch.kernel, launch.values
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        integer = isinstance(value, int) and not isinstance(value, bool)
        specialised = not parameter.do_not_specialize
        unit = specialised and integer and value == 1
        if parameter.is_constexpr or value is None or unit:
            signature[parameter.name], constants[(index,)] = "constexpr", value
            continue
        signature[parameter.name] = _kind(value)
        if specialised and _is_divisible(value):
            attributes[(index,)] = [["tt.divisibility", 16]]
    of_kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = of_kind(kernel, signature, constants, attributes)
    options = {name: value for name, value in launch.options.items() if value is not None}
    return triton.compile(source, target=TARGETS[target], options=options)


def key(launch):
    """Launches with equal keys compile to one kernel."""
    values = []
    for parameter in launch.kernel.params:
        value = launch.values[parameter.name]
        if parameter.is_constexpr or value is None:
            values.append(value)
        elif parameter.do_not_specialize:
            values.append(_kind(value))
        else:
            unit = isinstance(value, int) and value == 1
            values.append((_kind(value), _is_divisible(value), unit))
    return (launch.name, *values, *sorted(launch.options.items()))


def resources(kernel):
    """Registers of a CUDA kernel and bytes of its stack, where registers are spilled to."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", path]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    return {"registers": int(found[1]), "stack_bytes": int(found[2])}
