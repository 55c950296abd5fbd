"""What estimates say of calls that were measured on one H200, beside what was measured.

    python benchmarks/predicted.py

Attention alone from `results/{msa,msa_decode,moba}_h200.json`, whole models from
`results/prefill_h200.json`, by the packaged calibration. Of these runs it has seen the decode steps
of MSA alone (`time_model.py`), so the rest tests it. Ranges are mean errors of fits; where one does
not hold what was measured, `OUTSIDE` says why; "probably" is what no measurement has shown apart.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from sparsify.cost_model.calibration import packaged_calibration
from sparsify.cost_model.configuration import DENSE, PUBLISHED, Configuration
from sparsify.cost_model.hardware import load_gpu
from sparsify.cost_model.layer_cost import PREPARING, layer_cost
from sparsify.cost_model.times import Source, TimeEstimate
from sparsify.cost_model.workload import BF16, AttentionShape, ElementBytes, Phase, Workload
from sparsify.estimates import estimate
from sparsify.policy import PRESETS, Policy

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
LLAMA = ROOT / "tests" / "cost_model" / "configs" / "llama-3.1-8b.json"
H200 = load_gpu("h200")
(LEARNED,) = (
    replace(c, decode="sparse") for c in PUBLISHED if (c.method, c.indexer) == ("msa", "learned")
)
MSA_HEADS = AttentionShape(64, 4, 128, 128)
EIGHT_BITS = replace(BF16, index=1)
POLICIES = {
    "moba 128/8": Policy.moba(block_size=128, topk=8),
    "moba 512/3": Policy.moba(block_size=512, topk=3),
    "kimi-1m (4096/12, last 3 layers dense)": PRESETS["kimi-1m"],
}

# Why a range does not hold what was measured: kind, what its case begins with, reason.
SINGLE = "the range is a mean error of runs that the fit did not see, which single calls exceed"
OUTSIDE = (
    (
        "dense prefill",
        "",
        "torch's best kernel, cuDNN; the calibration is of FlashAttention-3, which is faster from "
        "128K tokens on",
    ),
    ("dense decode", "", SINGLE),
    (
        "MSA prefill",
        "short",
        "the model counts every query that a block gathers as read from memory; 512 of them "
        "probably stay in the L2 cache",
    ),
    (
        "MSA decode",
        "8x8x",
        "the choice is calibrated on one query per sequence, and takes longer for several",
    ),
    (
        "MSA decode",
        "128x8x",
        "eight queries choose more blocks than the sequence has, and the model counts each block "
        "once; the kernel fetches it for each query, probably from the L2 cache",
    ),
    (
        "MoBA prefill",
        "4096/12:1m",
        "beyond the calibrated 256K tokens, where the gate takes seven times its fit",
    ),
    (
        "model speed-up",
        "moba",
        "eager PyTorch probably takes longer beside attention than products and passes over "
        "activations",
    ),
    ("model speed-up", "kimi-1m", "measured against cuDNN, predicted against FlashAttention-3"),
)


class Call(NamedTuple):
    """A measured call of one attention layer."""

    kind: str
    case: str
    shape: AttentionShape
    workload: Workload
    configuration: Configuration
    elements: ElementBytes
    ms: float


@dataclass(frozen=True)
class Row:
    """A prediction, in milliseconds or as a factor, and what was measured."""

    kind: str
    case: str
    low: float
    expected: float
    high: float
    source: Source
    measured: float

    @property
    def error(self) -> float:
        """How much more was measured than expected, as a share."""
        return self.measured / self.expected - 1

    @property
    def reason(self) -> str | None:
        """What is known of a value outside the range."""
        rules = (rule for rule in OUTSIDE if rule[0] == self.kind)
        return next((why for _, begin, why in rules if self.case.startswith(begin)), None)

    @property
    def holds(self) -> bool:
        """Whether the range holds what was measured."""
        return self.low <= self.measured <= self.high


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def _elements(case):
    return EIGHT_BITS if case.endswith("fp8") else BF16


def _with_dense(call, row):
    """The call, and dense attention in it where that was measured."""
    yield call
    if times := row.get("dense_ms"):
        kind = f"dense {call.workload.phase.value}"
        yield call._replace(kind=kind, configuration=DENSE, elements=BF16, ms=min(times.values()))


def msa_calls(name="msa_h200"):
    for row in read(name):
        queries, case = row["queries"], row["case"]
        workload = Workload(Phase.PREFILL, 1, queries, row["context_tokens"] - queries)
        about = (MSA_HEADS, workload, LEARNED, _elements(case))
        yield from _with_dense(Call("MSA prefill", case, *about, row["ms"]), row)


def decode_calls():
    """Decode steps, each with the time of scores and top-k alone."""
    for row in read("msa_decode_h200"):
        queries, case = row["queries"], row["case"]
        workload = Workload(Phase.DECODE, row["batch"], queries, row["context_tokens"] - queries)
        about = (MSA_HEADS, workload, LEARNED, _elements(case))
        yield Call("MSA decode", case, *about, row["ms"]), row["choice_ms"]


def decode_calls_with_dense():
    """Drafts of several queries have no dense call: torch has no kernel made for them."""
    for row, (call, _) in zip(read("msa_decode_h200"), decode_calls(), strict=True):
        yield from _with_dense(call, row if call.workload.new_tokens == 1 else {})


def moba_calls():
    for row in read("moba_h200"):
        block, topk = map(int, row["case"].split(":")[0].split("/"))
        workload = Workload.of(Phase.PREFILL, row["context_tokens"])
        shape, configuration = AttentionShape(*row["heads"], 128, 128), Configuration
        about = (shape, workload, configuration("moba", block, topk), BF16)
        ms = row["graph_ms"] or row["ms"]
        yield from _with_dense(Call("MoBA prefill", row["case"], *about, ms), row)


def predicted(call):
    """The row of a call; what only prepares an index was not part of what was measured."""
    cost = layer_cost(
        call.shape,
        call.workload,
        call.configuration,
        H200,
        element_bytes=call.elements,
        calibration=packaged_calibration(H200),
    )
    time = TimeEstimate.total(s.time for s in cost.stages if s.family not in PREPARING)
    range_ms = (time.low_ms, time.expected_ms, time.high_ms)
    return Row(call.kind, call.case, *range_ms, time.source, call.ms)


def model_rows():
    """Speed-ups of whole models."""
    for row in read("prefill_h200"):
        if policy := POLICIES.get(row["model"]):
            tokens = row["context_tokens"]
            (found,) = estimate(LLAMA, policy, gpu="h200", context=tokens).rows
            whole, source = found.end_to_end, found.sparse.time.source
            case = f"{row['model'].split(' (')[0]}:{tokens >> 10}k"
            factors = (whole.low, whole.speedup, whole.high)
            yield Row("model speed-up", case, *factors, source, row["speedup"])


def rows():
    """All rows."""
    for calls in (msa_calls(), decode_calls_with_dense(), moba_calls()):
        yield from map(predicted, calls)
    yield from model_rows()


def show(found):
    print(f"{'':34} {'low':>10} {'expected':>10} {'high':>10} {'measured':>10} {'error':>7}")
    for row in found:
        figures = " ".join(f"{x:10.4g}" for x in (row.low, row.expected, row.high, row.measured))
        note = "" if row.holds else f"  outside: {row.reason}"
        print(f"{row.kind:15} {row.case:18} {figures} {row.error:+7.1%}{note}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    show(rows())
