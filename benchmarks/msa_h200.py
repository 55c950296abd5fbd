"""MSA's prefill kernels on one H200: checked against float64, then timed against their targets.

    python benchmarks/msa_h200.py [--cases chunk:128k,...] [--json OUT]
        [--no-check] [--no-dense] [--workload]

64 query and 4 key/value heads, 4 index heads that share one index key, head and index size 128,
block 128, top-16, bfloat16, batch 1, random inputs. `chunk:L` are 16,384 queries at the end of L
tokens, `short:L` 512 queries in a CUDA graph, `whole:L` a prefill in one call; `fp8` has index
queries and keys in e4m3. Times are medians of CUDA events after warm-up with a cold L2 cache. Dense
is torch's best of the same run; from 512k tokens on it is timed once, at 1m cuDNN alone, without a
warm-up.
`--workload` times the batch-1 calls of MSA's public prefill workload, weighted as there.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import (
    DEVICE,
    Choices,
    Results,
    against_dense,
    error_lines,
    errors,
    head_line,
    is_exact,
    is_right,
    line,
    parser,
    poisoned,
    target_lines,
    timing,
    tokens_of,
    tokens_outermost,
    weighted,
)

from sparsify.kernels import accelerated, reference
from sparsify.kernels.gaps import msa_gaps
from sparsify.kernels.layout import Layout
from sparsify.timing import extra_bytes

RESULTS = Path(__file__).parent / "results" / "msa_h200.json"
WORKLOAD = Path(__file__).parent / "data" / "msa_workload.json"
HEADS, GROUPS, SIZE = 64, 4, 128
BLOCK, TOPK = 128, 16
SIZES = {"block_size": BLOCK, "topk": TOPK}
CHUNK, SHORT = 16_384, 512
MOST_SKEW_RATIO = 1.3
HOT = 4  # blocks that every query chooses, in the skewed case
FP8 = torch.float8_e4m3fn


class Case(NamedTuple):
    """Queries at the end of a context, and the time that they are to take."""

    kind: str
    context: str
    target_ms: float | None = None
    fp8: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.context}{':fp8' if self.fp8 else ''}"

    @property
    def keys(self) -> int:
        return tokens_of(self.context)

    @property
    def queries(self) -> int:
        return {"chunk": CHUNK, "short": SHORT, "whole": self.keys}[self.kind]


CASES = (
    Case("chunk", "32k", 5.3),
    Case("chunk", "128k", 8.3),
    Case("chunk", "512k", 20.0),
    Case("chunk", "1m", 35.0),
    Case("chunk", "1m", 24.0, fp8=True),
    Case("short", "128k", 0.40),
    Case("whole", "128k", 52.0),
    Case("whole", "512k", 390.0),
    Case("whole", "1m", 1300.0),
    Case("whole", "1m", 930.0, fp8=True),
)
# Query heads, groups, queries, keys.
CHECKS = ((16, 4, 4096, 4096), (64, 4, 1024, 8192), (16, 1, 700, 4611))


def named_case(name: str) -> Case:
    """A case of the table, or one of its own without a target."""
    known = [case for case in CASES if case.name == name]
    kind, context, *more = name.split(":")
    return known[0] if known else Case(kind, context, fp8=more == ["fp8"])


def inputs(queries, keys, heads=HEADS, groups=GROUPS, fp8=False, seed=0):
    """q, k, v, iq and ik, tokens outermost in memory."""
    q, iq = tokens_outermost((heads, groups), queries, SIZE, seed)
    k, v, ik = tokens_outermost((groups, groups, 1), keys, SIZE, seed + 1)
    if fp8:
        iq, ik = iq.to(FP8), ik.to(FP8)
    return q, k, v, iq, ik


def msa(x):
    """The call that is timed."""
    return lambda: accelerated.msa_attention(*x, Layout(), **SIZES)


def check(heads, groups, queries, keys, fp8=False) -> dict[str, Any]:
    """Rows that choose other blocks than the reference, and errors with the selection replayed.

    In fp8 the choice is compared with that by float32 scores of the same fp8 values; the hardware
    sums fp8 products with fewer bits, so differing rows are only counted.
    """
    x = q, k, v, iq, ik = inputs(queries, keys, heads, groups, fp8, seed=2)
    wide = (iq.float(), ik.float()) if fp8 else (iq, ik)
    theirs = reference.msa_select(*wide, Layout(), **SIZES)
    with poisoned():
        mine = accelerated.msa_select(iq, ik, Layout(), **SIZES)
        out, lse = msa(x)()
    again, _ = msa(x)()
    choices = Choices(mine, theirs, msa_gaps(*wide, **SIZES).close())
    found = {"fp8": fp8, **errors(q, k, v, choices, (out, lse), again, BLOCK)}
    return {**found, "ok": (fp8 or is_right(found)) and is_exact(found)}


def run_case(case: Case, with_dense: bool) -> dict[str, Any]:
    """One row of the table."""
    x = inputs(case.queries, case.keys, fp8=case.fp8)
    run = msa(x)
    extra = extra_bytes(run, DEVICE)
    graph = case.kind == "short"
    taken = timing(run, graph=graph, repeats=5 if case.kind == "whole" else 15)
    row = {
        "case": case.name,
        "queries": case.queries,
        "context_tokens": case.keys,
        "ms": taken.median_ms,
        "timing": taken.to_json(),
        "extra_gib": extra / 2**30,
        "target_ms": case.target_ms,
        "met": None if case.target_ms is None else taken.median_ms <= case.target_ms,
    }
    torch.cuda.empty_cache()
    if with_dense and case.kind == "whole" and not case.fp8:
        row |= against_dense(*x[:3], case.keys, taken.median_ms, repeats=5)
    return row


def skew(tokens=128 << 10) -> dict[str, Any]:
    """A whole prefill in which every query chooses the same few blocks, against a random one."""
    x = inputs(tokens, tokens)
    iq, ik = x[3:]
    uniform_ms = timing(msa(x), repeats=7).median_ms
    axis = torch.zeros(SIZE, device=DEVICE, dtype=torch.bfloat16)
    axis[0] = 16.0
    iq += axis
    ik[:, :, : HOT * BLOCK] += axis
    lists = accelerated.msa_select(iq, ik, Layout(), **SIZES)
    later = lists[:, :, TOPK * BLOCK :]
    chosen = torch.stack([(later == block).any(-1) for block in range(HOT)]).all(0)
    skewed = timing(msa(x), repeats=7)
    ratio = skewed.median_ms / uniform_ms
    return {
        "case": f"whole:{tokens >> 10}k",
        "uniform_ms": uniform_ms,
        "skewed_ms": skewed.median_ms,
        "skewed_p99_ms": skewed.percentile_ms(99),
        "ratio": ratio,
        "rows_that_choose_all_hot_blocks": chosen.float().mean().item(),
        "most": MOST_SKEW_RATIO,
        "met": ratio <= MOST_SKEW_RATIO and chosen.float().mean().item() > 0.999,
    }


def workload() -> dict[str, Any]:
    """The public prefill workload's calls of batch 1 as CUDA graphs, and their weighted mean."""
    public = json.loads(WORKLOAD.read_text())
    rows = []
    for call in public["prefill"]:
        x = inputs(call["queries"], call["keys"])
        ms = timing(msa(x), graph=True, repeats=9).median_ms
        rows.append({**call, "ms": ms})
        print(f"{call['queries']:6} queries over {call['keys']:7} keys {ms:9.3f} ms", flush=True)
        torch.cuda.empty_cache()
    of_all = public["prefill_weight_of_all"]
    return {"about": public["about"], "weight_of_all": of_all, **weighted(rows)}


def show(row: dict[str, Any]) -> None:
    dense = row.get("dense_ms", "")
    print(f"{row['case']:16} {row['ms']:9.3f} ms, extra {row['extra_gib']:.2f} GiB {dense}")


def table(result: dict[str, Any]) -> None:
    """What was to be reached, and what was."""
    head_line()
    target_lines(result["rows"])
    skewed = result.get("skew")
    if skewed:
        ratio, most = f"{skewed['ratio']:.3f}x", f"{skewed['most']}x"
        line(skewed["case"], "skew", ratio, most, skewed["met"])
    error_lines(result["checks"])


def main() -> None:
    options = parser(__doc__, RESULTS, "chunk:128k,whole:1m:fp8")
    options.add_argument("--workload", action="store_true")
    args = options.parse_args()
    cases = CASES if args.cases is None else tuple(map(named_case, args.cases.split(",")))
    what = __doc__.split("\n\n")[2].strip()
    results = Results(args.json, what=what, dtype="bf16", checks=[], rows=[])
    for shape, fp8 in () if args.no_check else (*((s, False) for s in CHECKS), (CHECKS[1], True)):
        results.check(shape, lambda shape=shape, fp8=fp8: check(*shape, fp8=fp8))
    for case in cases:
        results.row(case.name, lambda case=case: run_case(case, not args.no_dense), show)
    if args.cases is None:
        results.add("skew", skew)
    if args.workload:
        results.add("workload", workload)
    table(results.found)
    results.keep()


if __name__ == "__main__":
    main()
