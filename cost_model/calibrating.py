"""From timed runs of kernel families to a calibration file.

Every run has one family, so a fit has two unknowns: efficiency and overhead. They are fitted on
every other run, by size; `error` is the mean relative error on the runs in between; what is kept
is fitted on all of them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparsify.cost_model.calibration import (
    LEAST_EFFICIENT,
    MOST_EFFICIENT,
    MOST_ERROR,
    SCHEMA,
    Calibration,
    FamilyEfficiency,
    load_calibration,
)
from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.counts import StageCounts, counted, values_of
from sparsify.cost_model.fitting import OVERHEAD, Fit, Row, fit, halves
from sparsify.cost_model.hardware import Gpu, load_gpu
from sparsify.cost_model.roofline import made_ms, stage_bound
from sparsify.cost_model.stages import stage_formulas
from sparsify.cost_model.workload import BF16, AttentionShape, ElementBytes, Workload
from sparsify.documents import read_document
from sparsify.errors import UsageError

__all__ = [
    "FamilyRun",
    "calibration_of",
    "fitted",
    "merged",
    "plain_run",
    "stage_run",
    "to_document",
]

# One entry serves all GQA groups: what these kernels do does not depend on the group.
ANY_GROUP = (
    "dense_prefill",
    "dense_decode",
    "moba_means",
    "msa_index",
    "msa_proxy_index",
    "msa_topk",
    "msa_decode_index",
    "msa_decode_proxy_index",
    "reverse_index",
)
# Nor on the block size.
ANY_BLOCK = ("moba_means",)
LEAST_RUNS = 4
# Kept when a calibration is merged into a file that has them: they may be of better kernels than
# those that torch brings along.
KEPT = ("dense_prefill", "dense_decode", "dense_backward")
FAR_OFF = 0.5  # an entry that is further off says less than a range


@dataclass(frozen=True)
class FamilyRun:
    """One timed run: its bound on the GPU, waves and imbalance included, and its time.

    `tokens` is the context, or for other work the rows of the product or the bytes copied.
    """

    family: str
    bound_ms: float
    ms: float
    tokens: int
    group_size: int | None = None
    block_size: int | None = None
    kernel: str = ""
    dtype: Literal["bf16", "fp8"] = "bf16"

    @property
    def key(self) -> tuple[str, str, int | None, int | None]:
        """What shares an entry."""
        return self.family, self.dtype, self.group_size, self.block_size


def stage_run(
    family: str,
    shape: AttentionShape,
    workload: Workload,
    configuration: Configuration,
    ms: float,
    gpu: Gpu,
    kernel: str = "",
    *,
    elements: ElementBytes = BF16,
) -> FamilyRun:
    """A run of one stage of an attention layer, bfloat16 or with an index of eight bits; such a run
    is one of "fp8" where the stage reads the index.

    Raises:
        KeyError: the configuration has no such stage in that call.
    """
    values = values_of(shape, workload, configuration, elements)
    formulas = [f for f in stage_formulas(configuration, workload) if f.family == family]
    if not formulas:
        raise KeyError(f"{configuration.label} has no stage {family}")
    bounds = (made_ms(counted(formula, values), gpu, elements) for formula in formulas)
    fp8 = elements.index <= 1 and any(formula.on_index for formula in formulas)
    any_block = family in ANY_BLOCK or not configuration.sparse
    return FamilyRun(
        family,
        sum(bounds),
        ms,
        workload.context_tokens,
        None if family in ANY_GROUP else shape.group_size,
        None if any_block else configuration.block_size,
        kernel,
        "fp8" if fp8 else "bf16",
    )


def plain_run(
    family: str, flops: int, dram_bytes: int, tokens: int, ms: float, gpu: Gpu, kernel: str = ""
) -> FamilyRun:
    """A run of what is no attention: a product ("gemm") or a copy."""
    stage = StageCounts(family, family, flops, dram_bytes, 0, 0, 1, None, False)
    return FamilyRun(family, stage_bound(stage, gpu, BF16).ms, ms, tokens, kernel=kernel)


def fitted(runs: Iterable[FamilyRun]) -> tuple[FamilyEfficiency, ...]:
    """One entry per family, dtype, group and block.

    Raises:
        UsageError: an entry would rest on too few runs, or on times that are not positive.
    """
    groups: dict[tuple[str, str, int | None, int | None], list[FamilyRun]] = defaultdict(list)
    for run in runs:
        groups[run.key].append(run)
    return tuple(_entry(sorted(mine, key=lambda run: run.bound_ms)) for mine in groups.values())


def _entry(runs: list[FamilyRun]) -> FamilyEfficiency:
    family = runs[0].family
    lengths = {run.tokens for run in runs}
    if len(lengths) < LEAST_RUNS:
        raise UsageError(
            f"{family} was timed at {len(lengths)} lengths; a fit and its test need {LEAST_RUNS}."
        )
    rows = [Row({family: run.bound_ms}, run.ms) for run in runs]
    if min(run.ms for run in runs) <= 0:
        raise UsageError(f"A time of {family} is not positive.")
    seen, unseen = halves(rows)
    whole = _bounded_fit(rows, family)
    efficiency = whole.efficiency(family)
    assert efficiency is not None  # a bounded fit has one
    return FamilyEfficiency(
        family=family,
        kernel=Counter(run.kernel for run in runs).most_common(1)[0][0],
        dtype=runs[0].dtype,
        group_size=runs[0].group_size,
        block_size=runs[0].block_size,
        efficiency=float(f"{min(efficiency, MOST_EFFICIENT):.4g}"),
        overhead_us=round(1e3 * whole.overhead_ms, 2),
        error=min(round(_bounded_fit(seen, family).mean_error(unseen), 4), MOST_ERROR),
        points=len(rows),
        contexts=(min(lengths), max(lengths)),
    )


def _bounded_fit(rows: Sequence[Row], family: str) -> Fit:
    """The fit; where its efficiency is beyond what a file may say, the best overhead for the
    nearest that it may: counts of bytes can be too large, or the size may not matter at all."""
    found = fit(rows)
    free = found.efficiency(family) or math.inf
    efficiency = min(max(free, LEAST_EFFICIENT), MOST_EFFICIENT)
    if efficiency == free:
        return found
    factor = 1 / efficiency
    rest = sum((1 - factor * r.bounds_ms[family] / r.measured_ms) / r.measured_ms for r in rows)
    overhead = max(0.0, rest / sum(row.measured_ms**-2 for row in rows))
    return Fit({OVERHEAD: overhead, family: factor})


def calibration_of(
    runs: Iterable[FamilyRun],
    gpu: Gpu,
    *,
    date: str,
    software: dict[str, str],
    source: str,
    leave_out: Callable[[FamilyEfficiency], None] = lambda _: None,
) -> Calibration:
    """The calibration that the runs give; entries that miss by more than `FAR_OFF` are handed to
    `leave_out` and are no part of it.

    Raises:
        UsageError: as `fitted`.
    """
    entries = fitted(runs)
    for entry in entries:
        if entry.error > FAR_OFF:
            leave_out(entry)
    families = tuple(entry for entry in entries if entry.error <= FAR_OFF)
    return Calibration(gpu=gpu.name, date=date, software=software, source=source, families=families)


def to_document(found: Calibration) -> dict[str, Any]:
    """The content of a file; what does not apply is left out."""
    data = found.to_json()
    data["families"] = [
        {name: value for name, value in entry.items() if value is not None}
        for entry in data["families"]
    ]
    return data


def merged(path: str | Path, found: Calibration) -> dict[str, Any]:
    """The content of the file `path` with the entries of `found` put in.

    Entries of the same family, dtype, group and block are replaced; dense ones that the file has
    are kept.

    Raises:
        UsageError: the file is missing or wrong, or of another GPU.
    """
    load_calibration(path, load_gpu(found.gpu))
    old = read_document(path, "calibration")
    dense = {entry["family"] for entry in old["families"]} & set(KEPT)
    new = [e for e in to_document(found)["families"] if e["family"] not in dense]
    replaced = set(map(_key, new))
    kept = [entry for entry in old["families"] if _key(entry) not in replaced]
    source = str(old["source"])
    if found.source not in source:
        source = f"{source}; {found.source}"
    return {
        "schema": SCHEMA,
        "gpu": found.gpu,
        "date": found.date,
        "software": {**old.get("software", {}), **found.software},
        "source": source,
        "families": [*kept, *new],
    }


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    sizes = (entry.get("group_size"), entry.get("block_size"))
    return (entry["family"], entry.get("dtype", "bf16"), *sizes)
