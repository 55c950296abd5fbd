"""What must hold after every pass, and the runner that checks it.

A pass is a function `(graph) -> (graph, modified)`. After each one the graph is linted, its inputs
and outputs are the same as before, and every value still carries its shape; with
`SPARSIFY_DEBUG_DIR` set, the graph is written there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch.fx import Graph, GraphModule

from sparsify.errors import CaptureError
from sparsify.settings import debug_dir

__all__ = ["Pass", "check", "run_passes"]

Pass = Callable[[Graph], tuple[Graph, bool]]


def run_passes(module: GraphModule, passes: Sequence[Pass], label: str) -> bool:
    """Run passes on the module's graph, in order; whether any of them changed it.

    Args:
        module: its graph is edited in place.
        passes: what to run; a pass is named by its function.
        label: begins the file names of the dumps.

    Raises:
        CaptureError: a pass failed or left a broken graph; the message names it.
    """
    changed = False
    _dump(module, label, "00_captured")
    for step, apply in enumerate(passes, start=1):
        before = _interface(module.graph)
        try:
            _, modified = apply(module.graph)
            check(module.graph, before)
        except Exception as error:
            raise CaptureError(f"The pass {apply.__name__} failed: {error}") from error
        changed |= modified
        _dump(module, label, f"{step:02d}_{apply.__name__}")
    if changed:
        module.recompile()
    return changed


def check(graph: Graph, interface: tuple[tuple[str, ...], int] | None = None) -> None:
    """Raise if the graph is broken, or its interface is not `interface`.

    Raises:
        RuntimeError: by the lint, or with a sentence.
    """
    graph.lint()
    if interface is not None and _interface(graph) != interface:
        raise RuntimeError("the inputs or the number of outputs changed")
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            raise RuntimeError(f"{node.name} has lost its shape")


def _interface(graph: Graph) -> tuple[tuple[str, ...], int]:
    inputs = tuple(node.name for node in graph.find_nodes(op="placeholder"))
    return inputs, len(graph.output_node().all_input_nodes)


def _dump(module: GraphModule, label: str, name: str) -> None:
    folder = debug_dir()
    if folder is None:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"{label}_{name}.txt").write_text(f"{module.graph}\n", encoding="utf-8")
