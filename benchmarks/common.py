"""What the GPU benchmarks share: inputs, poisoned memory, errors, timing, lines of a table."""

import contextlib
import traceback
import warnings
from collections.abc import Iterator

import torch

from sparsify.timing import time_call

DEVICE = "cuda"
BUDGET_S = 5.0  # for the repeats of one timing


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


def timing(run, graph=False, repeats=15):
    return time_call(run, device=DEVICE, repeats=repeats, warm_up=3, graph=graph, budget_s=BUDGET_S)


def tokens_of(context: str) -> int:
    """The number of tokens that "32k" or "1m" says."""
    return int(context[:-1]) << {"k": 10, "m": 20}[context[-1]]


def line(case, what, measured, target, met, more=""):
    print(f"{case:16} {what:10} {measured:>12} {target:>10} {'ok' if met else 'MISSED':6} {more}")


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
