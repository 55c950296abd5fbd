"""MoBA's forward kernels on one H200: checked against float64, then timed against their targets.

    python benchmarks/moba_h200.py [--cases 128/8:32k,...] [--json OUT] [--no-check] [--no-dense]

Inputs are random, bfloat16, batch 1, head size 128. Times are medians of CUDA events after warm-up
with a cold L2 cache; `graph` replays the op as a CUDA graph. Dense is torch's best of the same run
(FlashAttention-2 or cuDNN); from 512k tokens on it is timed once, at 1m cuDNN alone, without a
warm-up. Extra memory is the peak beyond inputs and outputs.
"""

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
)

from sparsify.benches.stages import NAMES, moba_stages_ms
from sparsify.kernels import accelerated, reference
from sparsify.kernels.gaps import moba_gaps
from sparsify.kernels.layout import Layout
from sparsify.timing import extra_bytes

RESULTS = Path(__file__).parent / "results" / "moba_h200.json"
HEAD_DIM = 128
LAUNCHED_FROM = 1 << 20  # launches are nothing beside such calls; a graph would hold much memory
MOST_EXTRA_GIB = 3.0  # at 512k tokens, 128/8
MOST_HOT_RATIO = 1.15


class Case(NamedTuple):
    """A shape and length, and the time that it is to take; where `graph`, as a CUDA graph."""

    block: int
    topk: int
    context: str
    target_ms: float | None = None
    graph: bool = False
    heads: tuple[int, int] = (16, 16)

    @property
    def name(self) -> str:
        return f"{self.block}/{self.topk}:{self.context}"

    @property
    def tokens(self) -> int:
        return tokens_of(self.context)


CASES = (
    Case(128, 8, "8k", 0.55, True),
    Case(128, 8, "32k", 1.7),
    Case(128, 8, "128k", 7.5),
    Case(128, 8, "512k", 46.0),
    Case(512, 3, "32k", 1.4, True),
    Case(512, 3, "128k", 5.5),
    Case(512, 3, "512k", 25.0),
    Case(4096, 12, "128k", 180.0, heads=(32, 8)),
    Case(4096, 12, "1m", 1750.0, heads=(32, 8)),
)
# Query and key/value heads, tokens, block, top-k.
CHECKS = ((4, 4, 8192, 128, 8), (4, 2, 4096, 512, 3), (4, 2, 16384, 1024, 12), (2, 1, 3001, 96, 5))


def named_case(name: str) -> Case:
    """A case of the table, or one of its own without a target."""
    sizes, context = name.split(":")
    block, topk = map(int, sizes.split("/"))
    heads = (32, 8) if block >= 4096 else (16, 16)
    known = [case for case in CASES if case.name == name]
    return known[0] if known else Case(block, topk, context, heads=heads)


def inputs(heads: int, groups: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v as models give them: `[1, heads, tokens, 128]`, tokens outermost in memory."""
    return tokens_outermost((heads, groups, groups), tokens, HEAD_DIM, seed)


def moba(q, k, v, block, topk):
    """The call that is timed."""
    return lambda: accelerated.moba_attention(q, k, v, Layout(), None, block_size=block, topk=topk)


def check(heads, groups, tokens, block, topk) -> dict[str, Any]:
    """Rows that choose other blocks than the reference, and errors with the selection replayed."""
    q, k, v = inputs(heads, groups, tokens, seed=1)
    sizes = {"block_size": block, "topk": topk}
    theirs = reference.moba_select(q, k, Layout(), None, **sizes)
    with poisoned():
        mine = accelerated.moba_select(q, k, Layout(), None, **sizes)
        out, lse = moba(q, k, v, block, topk)()
    again, _ = moba(q, k, v, block, topk)()
    choices = Choices(mine, theirs, moba_gaps(q, k, **sizes).close())
    found = errors(q, k, v, choices, (out, lse), again, block)
    return {**found, "ok": is_right(found) and is_exact(found)}


def run_case(case: Case, with_dense: bool) -> dict[str, Any]:
    """One row of the table."""
    q, k, v = inputs(*case.heads, case.tokens)
    run = moba(q, k, v, case.block, case.topk)
    extra = extra_bytes(run, DEVICE)
    launched = timing(run)
    replayed = None if case.tokens >= LAUNCHED_FROM else timing(run, graph=True)
    chosen = replayed if case.graph and replayed else launched
    torch.cuda.empty_cache()
    short = case.tokens <= 128 << 10  # launches are nothing beside longer calls
    stages = moba_stages_ms(
        q, k, v, block_size=case.block, topk=case.topk,
        timer=lambda call: timing(call, graph=short, repeats=7).median_ms,
    )  # fmt: skip
    row = {
        "case": case.name,
        "heads": list(case.heads),
        "context_tokens": case.tokens,
        "ms": launched.median_ms,
        "graph_ms": replayed and replayed.median_ms,
        "launched": launched.to_json(),
        "replayed": replayed and replayed.to_json(),
        "extra_gib": extra / 2**30,
        "stages_ms": {NAMES[family]: ms for family, ms in stages.items()},
        "target_ms": case.target_ms,
        "target_of": "graph_ms" if case.graph else "ms",
        "met": None if case.target_ms is None else chosen.median_ms <= case.target_ms,
    }
    torch.cuda.empty_cache()
    if with_dense:
        row |= against_dense(q, k, v, case.tokens, chosen.median_ms, repeats=7)
    return row


def hot_blocks(block=128, topk=8, tokens=128 << 10, heads=16) -> dict[str, Any]:
    """Two blocks that every query chooses, against random choices."""
    q, k, v = inputs(heads, heads, tokens)
    random_ms = timing(moba(q, k, v, block, topk)).median_ms
    axis = torch.zeros(HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    axis[0] = 8.0
    q += axis
    k[:, :, : 2 * block] += axis
    lists = accelerated.moba_select(q, k, Layout(), None, block_size=block, topk=topk)
    later = lists[:, :, 3 * block :]
    both = ((later == 0).any(-1) & (later == 1).any(-1)).float().mean().item()
    hot_ms = timing(moba(q, k, v, block, topk)).median_ms
    ratio = hot_ms / random_ms
    return {
        "case": f"{block}/{topk}:{tokens >> 10}k",
        "random_ms": random_ms,
        "hot_ms": hot_ms,
        "ratio": ratio,
        "rows_that_choose_both": both,
        "most": MOST_HOT_RATIO,
        "met": ratio <= MOST_HOT_RATIO and both > 0.999,
    }


def show(row: dict[str, Any]) -> None:
    stages = ", ".join(f"{key} {value:.3f}" for key, value in row["stages_ms"].items())
    graph = "        -" if row["graph_ms"] is None else f"{row['graph_ms']:9.3f}"
    print(
        f"{row['case']:14} {row['ms']:9.3f} ms, graph {graph}, "
        f"extra {row['extra_gib']:.2f} GiB, dense {row.get('dense_ms')}; {stages}",
        flush=True,
    )


def table(result: dict[str, Any]) -> None:
    """What was to be reached, and what was."""
    head_line()
    target_lines(result["rows"])
    for row in result["rows"]:
        if row["case"] == "128/8:512k":
            extra = row["extra_gib"]
            met = extra <= MOST_EXTRA_GIB
            line(row["case"], "extra", f"{extra:.2f} GiB", f"{MOST_EXTRA_GIB} GiB", met)
    hot = result.get("hot_blocks")
    if hot:
        line(hot["case"], "hot blocks", f"{hot['ratio']:.3f}x", f"{hot['most']}x", hot["met"])
    error_lines(result["checks"])


def main() -> None:
    args = parser(__doc__, RESULTS, "128/8:32k,512/3:1m").parse_args()
    cases = CASES if args.cases is None else tuple(map(named_case, args.cases.split(",")))
    what = __doc__.split("\n\n")[2].strip()
    results = Results(args.json, what=what, dtype="bf16", checks=[], rows=[])
    for shape in () if args.no_check else CHECKS:
        results.check(shape, lambda shape=shape: check(*shape))
    for case in cases:
        results.row(case.name, lambda case=case: run_case(case, not args.no_dense), show)
    if args.cases is None:
        results.add("hot_blocks", hot_blocks)
    table(results.found)
    results.keep()


if __name__ == "__main__":
    main()
