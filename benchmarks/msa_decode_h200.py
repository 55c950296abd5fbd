"""MSA's decode on one H200: checked against float64, then timed beside torch's dense decode.

    python benchmarks/msa_decode_h200.py [--cases 128k,1m:fp8,...] [--json OUT] [--no-check]
        [--no-dense] [--tune] [--workload]

64 query, 4 key/value and 4 index heads that share one index key, head and index size 128, blocks of
128, top-16, bfloat16; index tensors also in float8_e4m3fn. Times are medians of CUDA-graph replays.
A graph holds 16 calls that take inputs in turn, so many that what a call reads lies more than twice
the L2 cache back; nothing else is written in between. The time is that of one call.
`same_inputs_ms` is the time where all calls of a graph read the same: up to 128K tokens the index
keys come from L2 then. Batches lie in shuffled pages, with lengths around the nominal one and
drafts of 8 queries. Dense is torch's best kernel of the same run, on contiguous keys of the nominal
length. `choice` is the time of the kernels before the attention: scores, and top-k where programs
of the attention do not rank the blocks themselves. `--tune` times other tiles of the attention,
`--workload` the calls of MSA's public decode workload, weighted as there.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from common import (
    BUDGET_S,
    DEVICE,
    Results,
    guarded,
    head_line,
    line,
    parser,
    poisoned,
    relative,
    timing,
    weighted,
)
from torch.nn.attention import sdpa_kernel

from sparsify.benches.dense import BACKENDS
from sparsify.kernels import decoding, reference
from sparsify.kernels.attend import decode
from sparsify.kernels.gaps import msa_gaps
from sparsify.kernels.layout import Layout
from sparsify.kernels.select import decode_choice
from sparsify.timing import time_call

RESULTS = Path(__file__).parent / "results" / "msa_decode_h200.json"
WORKLOAD = Path(__file__).parent / "data" / "msa_workload.json"
HEADS, GROUPS, SIZE, BLOCK, TOPK = 64, 4, 128, 128, 16
SIZES: dict[str, Any] = {"block_size": BLOCK, "topk": TOPK}
REUSE_BYTES = 120 << 20  # more than twice the L2 cache
LEAST_INPUTS = 4
MOST_BYTES = 48 << 30  # of inputs
CALLS = 16  # of a graph: its launch counts for little then
SEED = 1701
FLOAT8 = torch.float8_e4m3fn


class Case(NamedTuple):
    """Sequences, queries of each, nominal length, index dtype, and the time it is to take."""

    name: str
    batch: int
    queries: int
    tokens: int
    index_dtype: torch.dtype = torch.bfloat16
    target_ms: float | None = None

    @property
    def paged(self) -> bool:
        return self.batch > 1


CASES = (
    Case("32k", 1, 1, 32 << 10),
    Case("128k", 1, 1, 128 << 10, target_ms=0.020),
    Case("512k", 1, 1, 512 << 10),
    Case("1m", 1, 1, 1 << 20, target_ms=0.078),
    Case("128k:fp8", 1, 1, 128 << 10, FLOAT8),
    Case("512k:fp8", 1, 1, 512 << 10, FLOAT8),
    Case("1m:fp8", 1, 1, 1 << 20, FLOAT8, 0.050),
    Case("8x8x100k", 8, 8, 100_000, target_ms=0.13),
    Case("8x8x100k:fp8", 8, 8, 100_000, FLOAT8),
    Case("32x8x50k", 32, 8, 50_000),
    Case("128x8x10k", 128, 8, 10_000, target_ms=0.8),
    Case("128x8x10k:fp8", 128, 8, 10_000, FLOAT8),
)


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    iq: torch.Tensor
    ik: torch.Tensor
    layout: Layout


def lengths_of(case: Case) -> list[int]:
    """Lengths around the nominal one, in pairs whose mean it is."""
    if not case.paged:
        return [case.tokens]
    generator = torch.Generator().manual_seed(SEED)
    low, high = case.tokens // 20, case.tokens // 4
    off = torch.randint(low, high + 1, (case.batch // 2,), generator=generator).tolist()
    return [case.tokens + sign * n for n in off for sign in (1, -1)]


def inputs(case: Case, seed: int) -> Inputs:
    """Keys of one sequence are contiguous, those of several lie in shuffled pages."""
    torch.manual_seed(seed)
    lengths = lengths_of(case)
    pages_of = [-(-n // BLOCK) for n in lengths]
    rows, slots = (sum(pages_of), BLOCK) if case.paged else (1, case.tokens)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16).to(dtype)

    q = normal(case.batch, case.queries, HEADS, SIZE).transpose(1, 2)
    iq = normal(case.batch, case.queries, GROUPS, SIZE, dtype=case.index_dtype).transpose(1, 2)
    k, v = normal(rows, GROUPS, slots, SIZE), normal(rows, GROUPS, slots, SIZE)
    ik = normal(rows, 1, slots, SIZE, dtype=case.index_dtype)
    layout = Layout(kv_len=torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
    if case.paged:
        order = torch.randperm(rows, dtype=torch.int32)
        table = torch.zeros(case.batch, max(pages_of), dtype=torch.int32)
        for row, pages in zip(table, order.split(pages_of), strict=True):
            row[: len(pages)] = pages
        layout = layout._replace(page_table=table.to(DEVICE))
    return Inputs(q, k, v, iq, ik, layout)


def rotated(case: Case) -> list[Inputs]:
    """As many inputs as lie between two uses of one, and some more where memory has room."""
    keys = case.batch * case.tokens
    read = keys * SIZE * case.index_dtype.itemsize
    room = MOST_BYTES // (read + 4 * keys * GROUPS * SIZE)
    count = max(1, -(-REUSE_BYTES // read), min(LEAST_INPUTS, room))
    return [inputs(case, seed) for seed in range(count)]


def call_ms(run, several: list[Any], calls: int = CALLS) -> tuple[float, dict[str, Any]]:
    """Milliseconds of one call, by a graph of `calls` or more that take the inputs in turn."""
    turns = -(-calls // len(several))

    def every():
        return [run(one) for _ in range(turns) for one in several]

    measured = time_call(
        every, device=DEVICE, repeats=20, graph=True, flush_l2=False, budget_s=BUDGET_S
    )
    return measured.median_ms / (turns * len(several)), measured.to_json()


def attend(x: Inputs):
    return decode.msa_decode(*x, **SIZES)


def choose(x: Inputs):
    """The kernels before the attention, as `attend` starts them."""
    call = decoding.call_of(*x, BLOCK, TOPK, "inside")
    scores = decode_choice.scored(x.iq, x.ik, x.layout, call)
    if call.ranked:
        return scores
    return decode_choice.best_blocks(scores, x.layout, call, call.segments)


def check(x: Inputs) -> dict[str, Any]:
    """Rows that choose other blocks than the reference, and the error with the lists given."""
    rows = slice(0, min(2, len(x.q)))  # of long batches, the first ones
    part = Inputs(x.q[rows], x.k, x.v, x.iq[rows], x.ik, x.layout)
    if x.layout.page_table is None:
        part = part._replace(k=x.k[rows], v=x.v[rows], ik=x.ik[rows])
    layout = Layout(*(None if t is None else t[rows] for t in x.layout))
    part = part._replace(layout=layout)
    with poisoned():
        out, lse = attend(x)
    again, _ = attend(x)
    alone, _ = attend(part)
    mine = decode_choice.choose(part.iq, part.ik, layout, **SIZES)
    off = (mine != reference.msa_select(part.iq, part.ik, layout, **SIZES)).any(-1)
    close = msa_gaps(part.iq, part.ik, layout, **SIZES).close()
    wide = [t.double() for t in (part.q, part.k, part.v)]
    exact, exact_lse = reference.block_attention(*wide, mine, layout, block_size=BLOCK)
    found = {
        "rows_off": off.float().mean().item(),
        "rows_off_by_more_than_rounding": int((off & ~close).sum()),
        "error": relative(out[rows], exact),
        "lse_error": (lse[rows] - exact_lse).abs().max().item(),
        "nan": out.isnan().any().item() or lse.isnan().any().item(),
        "bit_equal_without_poison": torch.equal(out, again),
        "bit_equal_without_other_rows": torch.equal(out[rows], alone),
    }
    right = not found["rows_off_by_more_than_rounding"] or x.ik.dtype == FLOAT8
    bits = found["bit_equal_without_poison"] and found["bit_equal_without_other_rows"]
    return {**found, "ok": right and bits and found["error"] <= 5e-3 and not found["nan"]}


def dense_ms(case: Case) -> dict[str, float]:
    """Every query over all keys by each of torch's kernels."""
    read = 2 * case.batch * case.tokens * GROUPS * SIZE * 2
    torch.manual_seed(0)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        shape = (case.batch, tokens, heads, SIZE)
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)

    def one():
        keys = [normal(GROUPS, case.tokens).contiguous() for _ in range(2)]
        return normal(HEADS, case.queries), *keys

    several = [one() for _ in range(max(1, -(-REUSE_BYTES // read)))]
    found = {}
    for name, backend in BACKENDS.items():

        def run(qkv, backend=backend):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*qkv, enable_gqa=True)

        try:
            found[name] = call_ms(run, several, LEAST_INPUTS)[0]
        except RuntimeError as error:
            print(f"{name} does not run {case.name}: {str(error).splitlines()[0][:120]}")
    return found


def run_case(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    several = rotated(case)
    first = several[0]
    checked = {} if options.no_check else {"check": check(first)}
    call = decoding.call_of(*first, BLOCK, TOPK, "inside")
    ms, replayed = call_ms(attend, several)
    row = {
        "case": case.name,
        "batch": case.batch,
        "queries": case.queries,
        "context_tokens": case.tokens,
        "index_dtype": str(case.index_dtype).removeprefix("torch."),
        "ms": ms,
        "replayed": replayed,
        "inputs": len(several),
        "same_inputs_ms": call_ms(attend, [first])[0],
        "choice_ms": call_ms(choose, several)[0],
        "launched_ms": timing(lambda: attend(first)).median_ms,
        "programs_walk_over_lists": call.one_program,
        "target_ms": case.target_ms,
        "met": None if case.target_ms is None else ms <= case.target_ms,
        **checked,
    }
    if options.tune:
        row["tiles_ms"] = tuned(case, several)
    return row


def with_dense(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """A row and, once its inputs are gone, dense attention beside it."""
    row = run_case(case, options)
    torch.cuda.empty_cache()
    if not options.no_dense:
        row["dense_ms"] = times = dense_ms(case)
        row["speedup"] = min(times.values()) / row["ms"] if times else None
    return row


def tuned(case: Case, several: list[Inputs]) -> dict[str, float]:
    """Times with other tiles, stages, and ways to attend a list."""
    found, real = {}, decoding.tiles_of
    for columns in (32, 64, 128):
        for stages in (2, 3, 4):
            for processors in (1, 1 << 20):  # lists walked over, lists place by place

                def tiles(*args, columns=columns, stages=stages):
                    return dataclasses.replace(real(*args), columns=columns, stages=stages)

                name = f"{columns}x{stages}, {'lists' if processors == 1 else 'places'}"
                with (
                    mock.patch.object(decoding, "tiles_of", tiles),
                    mock.patch.object(decoding, "processors", lambda _, n=processors: n),
                ):
                    ms = guarded(name, lambda: call_ms(attend, several)[0] - choice(several), [])
                if ms is not None:
                    found[name] = ms
                    print(f"{case.name:14} {name:20} attention {ms:.4f} ms", flush=True)
    return found


def choice(several: list[Inputs]) -> float:
    return call_ms(choose, several)[0]


def workload() -> dict[str, Any]:
    """The calls of the public decode workload, as `ms` of a row, and their weighted mean."""
    public = json.loads(WORKLOAD.read_text())
    rows = []
    for call in public["decode"]:
        case = Case("", call["batch"], public["decode_queries"], call["keys"])
        ms, _ = call_ms(attend, rotated(case))
        rows.append({**call, "ms": ms})
        print(f"{call['batch']:4} sequences of {call['keys']:7} keys {ms:9.4f} ms", flush=True)
        torch.cuda.empty_cache()
    return {"about": public["about"], **weighted(rows)}


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['case']:14} {row['ms']:.4f} ms (choice {row['choice_ms']:.4f}; the same inputs "
        f"again {row['same_inputs_ms']:.4f}), launched "
        f"{row['launched_ms']:.4f}, dense {row.get('dense_ms')}, {row.get('check')}",
        flush=True,
    )


def table(result: dict[str, Any]) -> None:
    """What was to be reached, and what was."""
    head_line()
    for row in result["rows"]:
        if row["target_ms"] is not None:
            gain = f"{row['speedup']:.1f}x" if row.get("speedup") else ""
            line(row["case"], "graph", f"{row['ms']:.4f} ms", f"{row['target_ms']} ms",
                 row["met"], gain)  # fmt: skip
        if "check" in row:
            found = row["check"]
            line(row["case"], "error", f"{found['error']:.2e}", "5e-3", found["ok"])


def main() -> None:
    known = parser(__doc__, RESULTS, "128k,1m:fp8")
    known.add_argument("--tune", action="store_true")
    known.add_argument("--workload", action="store_true")
    options = known.parse_args()
    names = None if options.cases is None else options.cases.split(",")
    cases = [case for case in CASES if names is None or case.name in names]
    results = Results(options.json, what=" ".join(__doc__.split("\n\n")[2].split()), rows=[])
    for case in cases:
        results.row(case.name, lambda case=case: with_dense(case, options), show)
    if options.workload:
        results.add("workload", workload)
        results.keep()
    table(results.found)


if __name__ == "__main__":
    main()
