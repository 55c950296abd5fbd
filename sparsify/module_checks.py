"""The checks of a rewritten module that is no language model, on the user's example inputs.

Its inputs are whatever its forward takes, so what can be asked of any module is asked: structure
(V1), no-op (V2), dense limit (V3), reruns (V5) and the saved folder (V7).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sparsify.comparing import (
    Pair,
    error,
    names_of,
    plan_to_verify,
    result,
    same_bits,
)
from sparsify.errors import UsageError
from sparsify.hosts.calls import ALL_BLOCKS
from sparsify.hosts.reload import reloaded
from sparsify.hosts.trials import copies
from sparsify.passes.modes import evaluating, trying
from sparsify.report import CheckResult, VerificationReport
from sparsify.sparse_rows import watching
from sparsify.structure import interface_faults, program_faults, site_faults, state_faults
from sparsify.variants import retuned

__all__ = ["run"]

Tensors = list[torch.Tensor]


@dataclasses.dataclass
class _Context(Pair):
    """The pair of models, and one call of their forward."""

    directory: Path | None

    def outputs(self, model: Any) -> Tensors:
        """All tensors that the call returns; every call finds the buffers as the first one did."""
        assert self.inputs is not None
        args, kwargs = copies(self.inputs)
        with trying(model):
            leaves = pytree.tree_leaves(model(*args, **kwargs))
            return [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def run(
    original: torch.nn.Module,
    rewritten: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    checks: Any = None,
    directory: str | Path | None = None,
    detected: Any = None,
    model_name: str = "",
    against: str = "",
    progress: Callable[[str], None] | None = None,
) -> VerificationReport:
    """Run the checks and report; a failed check does not stop the others.

    Args:
        args, kwargs: one call of the forward, long enough that some rows are sparse.
        checks: names to run, all by default.
        directory: the saved folder, for V7.
        detected: site keys of a fresh inspection of the original, for V1.
        model_name, against: what the report calls the two models.
        progress: told what is being done, a line at a time.

    Raises:
        UsageError: an unknown check, a model without a plan, or no inputs.
    """
    names, plan = names_of(checks, CHECKS), plan_to_verify(rewritten)
    if not (args or kwargs):
        raise UsageError(
            f"{type(original).__name__} needs example inputs.", "Pass samples=(args, kwargs)."
        )
    where = None if directory is None else Path(directory)
    found = None if detected is None else tuple(detected)
    context = _Context(original, rewritten, plan, None, found, (tuple(args), dict(kwargs)), where)
    results = []
    with evaluating(original), evaluating(rewritten), torch.no_grad():
        for name in names:
            if progress is not None:
                progress(f"{name}: {CHECKS[name].__name__.replace('_', ' ')}")
            results.append(CHECKS[name](context))
    return VerificationReport(
        model=model_name or str(directory or type(rewritten).__name__),
        against=against or type(original).__name__,
        checks=tuple(results),
    )


def structure(c: _Context) -> CheckResult:
    """V1: same weights, inputs, outputs and dynamic sizes; every detected site accounted for."""
    faults = state_faults(c) + site_faults(c) + program_faults(c)
    shapes = [[t.shape for t in c.outputs(model)] for model in (c.original, c.rewritten)]
    faults += interface_faults(c) + ([] if shapes[0] == shapes[1] else ["outputs changed shape"])
    weights = len(c.original.state_dict())
    done = f"{weights} tensors bit-identical; {len(c.plan.rewritten)} of {len(c.plan)} rewritten"
    return result("V1", "structure", faults, done, {"weights": weights})


def no_op(c: _Context) -> CheckResult:
    """V2: with an all-dense plan the outputs are bit-equal."""
    pairs = zip(c.outputs(c.original), c.outputs(c.dense), strict=True)
    faults = [f"output {n} differs" for n, (a, b) in enumerate(pairs) if not same_bits(a, b)]
    return result("V2", "no-op", faults, "bit-equal on the example inputs", {})


def dense_limit(c: _Context) -> CheckResult:
    """V3: with top-k = all blocks the rewrite matches the original."""
    full = retuned(c.rewritten, topk=ALL_BLOCKS, min_context=0, decode="sparse")
    with watching(c.plan) as seen:
        found = c.outputs(full)
    faults, worst = seen.faults(), 0.0
    for n, (a, b) in enumerate(zip(found, c.outputs(c.original), strict=True)):
        if a.is_floating_point() and a.numel():
            far, allowed = error(a, b, functools.partial(_exact, c, n))
            worst = max(worst, far)
            if not far <= allowed:
                faults.append(f"output {n} differs by {far:.1e} ({allowed:.0e} allowed)")
    done = (
        f"worst error {worst:.1e} of the largest output on the example inputs "
        f"({seen.sparse_rows} rows beyond top-k blocks)"
    )
    metrics = {"worst_error": worst, "sparse_rows": seen.sparse_rows}
    return result("V3", "dense limit", faults, done, metrics)


def determinism(c: _Context) -> CheckResult:
    """V5: reruns are bit-equal."""
    model = retuned(c.rewritten, min_context=0)
    with watching(c.plan) as seen:
        first, again = c.outputs(model), c.outputs(model)
    same = all(same_bits(a, b) for a, b in zip(first, again, strict=True))
    faults = seen.faults() + ([] if same else ["two runs on the same input differ"])
    done = f"reruns bit-equal ({seen.sparse_rows} sparse rows)"
    return result("V5", "determinism", faults, done, {"sparse_rows": seen.sparse_rows})


def artefact(c: _Context) -> CheckResult:
    """V7: a fresh process loads the saved folder and computes the same bits."""
    if c.directory is None:
        return CheckResult("V7", "artefact", "skipped", "no saved folder was given", {})
    assert c.inputs is not None
    there = reloaded(c.directory, *c.inputs)
    if isinstance(there, str):
        return CheckResult("V7", "artefact", "failed", there, {})
    here = [tensor.cpu() for tensor in c.outputs(c.rewritten)]
    same = len(there) == len(here) and all(map(same_bits, there, here))
    faults = [] if same else ["the reloaded model computes other outputs"]
    return result("V7", "artefact", faults, "a fresh process computes the same bits", {})


CHECKS: dict[str, Callable[[_Context], CheckResult]] = {
    "V1": structure,
    "V2": no_op,
    "V3": dense_limit,
    "V5": determinism,
    "V7": artefact,
}


def _exact(c: _Context, number: int) -> torch.Tensor:
    """Output `number` of the original in float64."""
    twin = copy.deepcopy(c.original).double()
    assert c.inputs is not None
    args, kwargs = pytree.tree_map(_doubled, c.inputs)
    found = [x for x in pytree.tree_leaves(twin(*args, **kwargs)) if isinstance(x, torch.Tensor)]
    return found[number]


def _doubled(leaf: Any) -> Any:
    floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.double() if floating else leaf
