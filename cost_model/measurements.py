"""Timed runs of kernels: the file that benchmarks write, and what the time model makes of a run.

A file of runs is a JSON object with `gpu`, `date`, `software`, `dtype`, `what` and `rows`; a row
names the kernel and everything that its counts need::

    {"kernel": "fa3", "phase": "prefill", "method": "dense", "q_heads": 16, "kv_heads": 16,
     "head_dim": 128, "batch": 1, "context_tokens": 8192, "ms": 0.4876, "timing": "whole"}
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

from sparsify.cost_model.configuration import DENSE, Configuration
from sparsify.cost_model.counts import counted, values_of
from sparsify.cost_model.fitting import Row
from sparsify.cost_model.hardware import Gpu
from sparsify.cost_model.roofline import made_ms
from sparsify.cost_model.stages import stage_formulas
from sparsify.cost_model.workload import BF16, AttentionShape, Phase, Workload
from sparsify.documents import read_document
from sparsify.errors import UsageError

__all__ = ["MeasuredRun", "Measurements", "load_measurements", "model_row"]

NEEDED = ("kernel", "phase", "method", "q_heads", "kv_heads", "head_dim", "context_tokens", "ms")


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """One timed run; `phase` may also be "backward" (of dense attention, alone)."""

    kernel: str
    phase: str
    shape: AttentionShape
    workload: Workload
    configuration: Configuration
    ms: float
    timing: str = ""

    @property
    def label(self) -> str:
        """What it was, for tables."""
        heads = f"{self.shape.q_heads}/{self.shape.kv_heads}"
        return f"{self.configuration.label} {heads} heads {self.workload.context_tokens} tokens"


@dataclasses.dataclass(frozen=True)
class Measurements:
    """All runs of a file."""

    gpu: str
    date: str
    software: dict[str, str]
    what: str
    runs: tuple[MeasuredRun, ...]

    def of(self, kernel: str, phase: str) -> list[MeasuredRun]:
        """The runs of one kernel in one phase, by configuration and length."""
        mine = [run for run in self.runs if (run.kernel, run.phase) == (kernel, phase)]
        return sorted(
            mine,
            key=lambda run: (
                run.shape.q_heads,
                run.configuration.label,
                run.workload.context_tokens,
            ),
        )


def load_measurements(path: str | Path) -> Measurements:
    """Read a file of timed runs.

    Raises:
        UsageError: missing, malformed, or a row lacks what its counts need.
    """
    data = read_document(path, "file of measurements")
    try:
        runs = tuple(map(_run, data["rows"]))
        return Measurements(data["gpu"], data["date"], data["software"], data["what"], runs)
    except (KeyError, TypeError) as error:
        raise UsageError(f"The file of measurements {path} is wrong: {error}.") from None


def _run(row: dict[str, Any]) -> MeasuredRun:
    missing = [name for name in NEEDED if name not in row]
    if missing:
        raise KeyError(f"a row has no {missing[0]}")
    decoding = row["phase"] == "decode"
    new = row.get("new_tokens", 1 if decoding else row["context_tokens"])
    return MeasuredRun(
        row["kernel"],
        row["phase"],
        AttentionShape(
            row["q_heads"], row["kv_heads"], row["head_dim"], row.get("value_dim", row["head_dim"])
        ),
        Workload(
            Phase.DECODE if decoding else Phase.PREFILL,
            row.get("batch", 1),
            new,
            row["context_tokens"] - new,
        ),
        _configuration(row),
        row["ms"],
        row.get("timing", ""),
    )


def _configuration(row: dict[str, Any]) -> Configuration:
    if row["method"] == "dense":
        return DENSE
    learned = row["method"] == "msa"
    return Configuration(
        row["method"],
        row["block_size"],
        row["topk"],
        "learned" if learned else None,
        row.get("index_dim", row["head_dim"]) if learned else None,
    )


def model_row(run: MeasuredRun, gpu: Gpu) -> Row:
    """The bounds of a run by kernel family, waves and imbalance included; bfloat16."""
    values = values_of(run.shape, run.workload, run.configuration, BF16)
    workload = run.workload
    if run.phase == "backward":
        workload = dataclasses.replace(workload, phase=Phase.TRAINING)
    bounds: dict[str, float] = defaultdict(float)
    for formula in stage_formulas(run.configuration, workload):
        stage = counted(formula, values)
        if (run.phase == "backward") != stage.family.endswith("_backward"):
            continue
        bounds[stage.family] += made_ms(stage, gpu, BF16)
    return Row({family: ms for family, ms in bounds.items() if ms}, run.ms, run.label)
