"""Small captured graphs for the tests of the passes, and numbers for symbolic results."""

import itertools

import sympy
import torch

from sparsify.passes.capture import capture
from sparsify.passes.graphs import expression, shape_of
from sparsify.passes.index_space import IndexSpace
from sparsify.passes.index_values import Cases


class Function(torch.nn.Module):
    """A function as a module; keyword arguments become buffers that it gets by name."""

    def __init__(self, function, **buffers):
        super().__init__()
        self.function, self.names = function, tuple(buffers)
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *inputs):
        return self.function(*inputs, **{name: getattr(self, name) for name in self.names})


def traced(function, *inputs, static=False, **buffers):
    """The captured function and its output node."""
    model = Function(function, **buffers).eval()
    captured = capture(model, inputs, dynamic=False if static else None)
    result = captured.graph.output_node().all_input_nodes[0]
    return captured, result


def free_index(node, space=None):
    """A space and one free symbol for every axis of the node."""
    space = space or IndexSpace()
    sizes = enumerate(shape_of(node))
    return space, tuple(space.index(f"x{axis}", size) for axis, size in sizes)


def places(shape):
    """All indices of a tensor."""
    return itertools.product(*(range(size) for size in shape))


def at(index, place, sizes=None):
    """Numbers for the symbols of a free index, and for the sizes of a dynamic capture."""
    numbers = {s: n for s, n in zip(index, place, strict=True) if getattr(s, "is_Symbol", False)}
    return {**numbers, **(sizes or {})}


def sizes_of(captured, inputs):
    """Shape symbols with the sizes of these inputs."""
    out = {}
    nodes = captured.graph.find_nodes(op="placeholder")
    users = [node for node in nodes if node.name in captured.inputs]
    for node, tensor in zip(users, inputs, strict=True):
        for size, number in zip(node.meta["val"].shape, tensor.shape, strict=True):
            if expression(size).is_Symbol:
                out[expression(size)] = number
    return out


def number(value, numbers, tensors=None):
    """A symbolic value as a Python number; `tensors` gives the contents of named leaves."""
    if isinstance(value, Cases):
        held = [v for c, v in value.items if number(c, numbers, tensors)]
        assert len(held) == 1, "exactly one case must hold"
        return number(held[0], numbers, tensors)
    value = sympy.sympify(value).subs(numbers)
    for function in value.atoms(sympy.core.function.AppliedUndef):
        tensor = (tensors or {})[function.func.__name__]
        place = tuple(int(argument) for argument in function.args)
        value = value.subs(function, expression(tensor[place].item()))
    if value in (sympy.true, sympy.false):
        return bool(value)
    return float(value)
