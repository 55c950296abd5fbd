"""Reading FX nodes: operator names, arguments by name, shapes as sympy expressions, origins."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.fx import Node

__all__ = [
    "argument",
    "aten",
    "behind",
    "data_sources",
    "dtype_of",
    "expression",
    "holds_data",
    "is_shape_only",
    "is_tensor",
    "module_path",
    "number",
    "op_name",
    "shape_of",
    "source_of",
]

Expr = Any  # sympy has no types of its own


def aten(names: str) -> frozenset[str]:
    """The operators of a blank-separated list, as `op_name` gives them."""
    return frozenset(f"aten.{name}" for name in names.split())


def op_name(node: Node) -> str:
    """The operator without overload, e.g. "aten.view"; the function's name for Python functions;
    "" for anything that is not a call."""
    if node.op != "call_function":
        return ""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).replace("::", ".")
    return str(getattr(target, "__name__", target))


def argument(node: Node, name: str, default: Any = None) -> Any:
    """The argument called `name` in the operator's schema, however it was spelt in the call."""
    if name in node.kwargs:
        return node.kwargs[name]
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return default
    for position, entry in enumerate(schema.arguments):
        if entry.name == name:
            if position < len(node.args):
                return node.args[position]
            return entry.default_value if entry.has_default_value() else default
    return default


def is_tensor(value: Any) -> bool:
    """Whether `value` is a node that holds one tensor."""
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)


def holds_data(node: Node) -> bool:
    """Whether the node holds a tensor or several; sizes and numbers say nothing of values."""
    value = node.meta.get("val")
    return not isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)


def is_shape_only(node: Node) -> bool:
    """Whether the operator looks at its first tensor's shape and type, not at its values."""
    name = op_name(node)
    return name.endswith("_like") or name.startswith("aten.new_") or name == "aten.sym_size"


def data_sources(node: Node) -> list[Node]:
    """The inputs that hold data."""
    return [source for source in node.all_input_nodes if holds_data(source)]


def behind(node: Node, sources: Callable[[Node], Iterable[Node]] = data_sources) -> list[Node]:
    """The node and everything it depends on, as far as the `sources` of each lead."""
    todo, seen, found = [node], {node}, []
    while todo:
        found.append(todo.pop())
        new = [source for source in sources(found[-1]) if source not in seen]
        seen.update(new)
        todo += new
    return found


def shape_of(node: Node) -> tuple[Expr, ...]:
    """Sizes of the node's tensor as sympy expressions over the capture's symbols."""
    return tuple(expression(size) for size in node.meta["val"].shape)


def dtype_of(node: Node) -> torch.dtype:
    """dtype of the node's tensor."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def expression(value: Any) -> Expr:
    """A size, a SymInt, a number or a node that holds one of them, as a sympy expression.

    Raises:
        TypeError: for anything else (a tensor, None).
    """
    if isinstance(value, Node):
        value = value.meta.get("val")
    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if isinstance(value, int):
        return sympy.Integer(value)
    if isinstance(value, float):
        return _from_float(value)
    if isinstance(value, torch.SymInt):
        return _plain(value.node.expr)
    raise TypeError(f"{type(value).__name__} is not a size or a number")


def number(expr: Expr) -> int | None:
    """The integer that `expr` is, or None when it depends on a symbol."""
    return int(expr) if getattr(expr, "is_Integer", False) else None


def module_path(node: Node) -> str:
    """Path of the module that issued the node; "" for the root module."""
    stack = node.meta.get("nn_module_stack") or {}
    entries = list(stack.values())
    if not entries:
        return ""
    path = entries[-1][0] if isinstance(entries[-1], tuple) else str(entries[-1])
    # a module that is called again is recorded as "path@1"
    return re.sub(r"@\d+", "", path)


def source_of(node: Node) -> str:
    """ "file:line" of the last frame outside torch, in short form; "" when unknown."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    outside = [frame for frame in frames if not _in_torch(frame[0])]
    if not outside:
        return ""
    path, line = outside[-1]
    return f"{_short(path)}:{line}"


def _in_torch(path: str) -> bool:
    return path.startswith(str(Path(torch.__file__).parent) + os.sep)


def _short(path: str) -> str:
    if "site-packages" in path:
        return path.split("site-packages" + os.sep)[-1]
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return os.sep.join(Path(path).parts[-2:])


def _from_float(value: float) -> Expr:
    if value != value:
        return sympy.nan
    if value in (float("inf"), float("-inf")):
        return sympy.oo if value > 0 else -sympy.oo
    return sympy.Integer(int(value)) if value.is_integer() else sympy.Float(value)


def _plain(expr: Expr) -> Expr:
    """torch's own sympy functions written as sympy's."""
    from torch.utils._sympy import functions as own

    return expr.replace(own.FloorDiv, lambda a, b: sympy.floor(a / b)).replace(
        own.Mod, lambda a, b: sympy.Mod(a, b)
    )
