"""What the GPU benchmarks of ops share: inputs, poisoned memory, errors, timing, options, results.

Legend of shape suffixes: B batch, H query heads, T queries, K places of a list.
"""

import argparse
import contextlib
import json
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparsify.benches.dense import best, dense_times
from sparsify.files import write_text
from sparsify.kernels import reference
from sparsify.kernels.layout import Layout
from sparsify.timing import machine, time_call

DEVICE = "cuda"
BUDGET_S = 5.0  # for the repeats of one timing
ONCE_FROM = 512 << 10  # dense attention is timed once from here on
FASTEST_FROM = 1 << 20  # and from here on by cuDNN alone, which is the fastest up to here


def tokens_outermost(sizes, tokens, width, seed=0, batch=1):
    """Random tensors `[batch, heads, tokens, width]`, one for each number of heads in `sizes`, with
    tokens outermost in memory, as projections leave them."""
    torch.manual_seed(seed)
    options = {"device": DEVICE, "dtype": torch.bfloat16}
    return tuple(torch.randn(batch, tokens, n, width, **options).transpose(1, 2) for n in sizes)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory that `torch.empty` gives is full of NaN, or of the largest integer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def relative(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def eager(q, k, v, blocks, block):
    """Attention over the chosen blocks as a model would write it out, in the dtype of q; queries
    are the last of the keys."""
    queries, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    blocks = blocks.repeat_interleave(q.shape[1] // blocks.shape[1], 1)
    count = (keys + block - 1) // block
    chosen = torch.zeros(*blocks.shape[:3], count + 1, dtype=torch.bool, device=q.device)
    chosen.scatter_(-1, blocks.long().where(blocks >= 0, count), True)
    at = torch.arange(keys, device=q.device)
    seen = chosen[..., at // block] & (at[None, :] <= at[keys - queries :, None])
    scores = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


class Choices(NamedTuple):
    """Lists of a kernel and of the reference, and where rounding may decide between blocks."""

    mine_BHTK: torch.Tensor
    theirs_BHTK: torch.Tensor
    close_BHT: torch.Tensor

    def errors(self) -> dict[str, Any]:
        off = (self.mine_BHTK != self.theirs_BHTK).any(-1)
        return {
            "rows_off": off.float().mean().item(),
            "rows_off_by_more_than_rounding": int((off & ~self.close_BHT).sum()),
        }


def errors(q, k, v, choices: Choices, results, again, block) -> dict[str, Any]:
    """Rows that choose other blocks than the reference, and errors with the selection replayed.

    `results` are output and logsumexp made in poisoned memory, `again` the output without it.
    """
    out, lse = results
    lists = choices.mine_BHTK
    exact, exact_lse = reference.block_attention(
        q.double(), k.double(), v.double(), lists, Layout(), block_size=block
    )
    return {
        **choices.errors(),
        "error": relative(out, exact),
        "eager_error": relative(eager(q, k, v, lists, block), exact),
        "lse_error": (lse - exact_lse).abs().max().item(),
        "nan": out.isnan().any().item() or lse.isnan().any().item(),
        "bit_equal_without_poison": torch.equal(out, again),
    }


def is_right(found: dict[str, Any]) -> bool:
    """Whether the chosen blocks are those of the reference, up to rounding."""
    return found["rows_off"] <= 0.01 and not found["rows_off_by_more_than_rounding"]


def is_exact(found: dict[str, Any]) -> bool:
    """Whether the output is as good as eager attention's, and the same in any memory."""
    small = found["error"] <= 2 * found["eager_error"]
    return small and not found["nan"] and found["bit_equal_without_poison"]


def timing(run, graph=False, repeats=15):
    return time_call(run, device=DEVICE, repeats=repeats, warm_up=3, graph=graph, budget_s=BUDGET_S)


def against_dense(q, k, v, tokens, ms, repeats) -> dict[str, Any]:
    """Times of torch's dense kernels, and how much longer the best one takes than `ms`."""
    once = tokens >= ONCE_FROM

    def one(run):
        if once:
            return time_call(run, device=DEVICE, repeats=1, warm_up=int(tokens < 1 << 20))
        return timing(run, repeats=repeats)

    times = dense_times(q, k, v, one, ("sdpa_cudnn",) if tokens >= FASTEST_FROM else None)
    fastest = best(times)
    return {
        "dense_ms": {name: found.median_ms for name, found in times.items()},
        "dense_timed_once": once,
        "dense_best": fastest,
        "speedup": None if fastest is None else times[fastest].median_ms / ms,
    }


def weighted(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Calls of a workload and their mean, weighted as there."""
    weight = sum(row["weight"] for row in rows)
    mean_ms = sum(row["ms"] * row["weight"] for row in rows) / weight
    return {"rows": rows, "weight": weight, "weighted_mean_ms": mean_ms}


def tokens_of(context: str) -> int:
    """The number of tokens that "32k" or "1m" says."""
    return int(context[:-1]) << {"k": 10, "m": 20}[context[-1]]


def line(case, what, measured, target, met, more=""):
    print(f"{case:16} {what:10} {measured:>12} {target:>10} {'ok' if met else 'MISSED':6} {more}")


def head_line() -> None:
    print(f"\n{'case':16} {'what':10} {'measured':>12} {'target':>10} {'':6} speed-up over dense")


def target_lines(rows: list[dict[str, Any]]) -> None:
    """A line for each row that has a target."""
    for row in rows:
        if row["target_ms"] is None:
            continue
        once = " (dense timed once)" if row.get("dense_timed_once") else ""
        gain = f"{row['speedup']:.1f}x {row['dense_best']}{once}" if row.get("speedup") else ""
        measured = row.get("target_of", "ms")
        what, taken = measured.replace("_ms", ""), f"{row[measured]:.3f} ms"
        line(row["case"], what, taken, f"{row['target_ms']} ms", row["met"], gain)


def error_lines(checks: list[dict[str, Any]]) -> None:
    for found in checks:
        bound = f"{2 * found['eager_error']:.2e}"
        line(str(found["shape"]), "error", f"{found['error']:.2e}", bound, found["ok"])


def guarded(what: str, run, failed: list[str]):
    """The result of `run`, or None when it failed, which is noted: the rest is worth having."""
    try:
        return run()
    except Exception as error:
        failed.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        print(f"{what} FAILED\n{traceback.format_exc()}", flush=True)
        return None
    finally:
        torch.cuda.empty_cache()


def parser(about: str, results: Path, example: str) -> argparse.ArgumentParser:
    """The options that all have; `example` shows names of cases."""
    options = argparse.ArgumentParser(description=about.splitlines()[0])
    options.add_argument("--cases", help=f"such as {example}; all of the table by default")
    options.add_argument("--json", default=results, metavar="OUT.json")
    options.add_argument("--no-check", action="store_true")
    options.add_argument("--no-dense", action="store_true")
    return options


class Results:
    """What was found so far; a step that fails is noted, and the others go on."""

    def __init__(self, path: Path | str, **known: Any) -> None:
        self.path = path
        self.failed: list[str] = []
        self.found: dict[str, Any] = {**machine(DEVICE), **known, "failed": self.failed}

    def check(self, shape: tuple[int, ...], run: Callable[[], dict[str, Any]]) -> None:
        found = guarded(f"check {shape}", run, self.failed)
        self.found["checks"] += [] if found is None else [{"shape": list(shape), **found}]
        print({"check": shape, **(found or {})}, flush=True)

    def row(self, name: str, run: Callable[[], dict[str, Any]], show: Callable[..., None]) -> None:
        """Measure a case and keep it at once: a later one may run out of time."""
        row = guarded(name, run, self.failed)
        if row is not None:
            self.found["rows"].append(row)
            show(row)
        self.keep()

    def add(self, name: str, run: Callable[[], dict[str, Any]]) -> None:
        self.found[name] = guarded(name.replace("_", " "), run, self.failed)

    def keep(self) -> None:
        write_text(self.path, json.dumps(self.found, indent=1) + "\n", force=True)
