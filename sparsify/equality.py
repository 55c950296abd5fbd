"""V3 and V5: the rewritten model against the original, and against itself in other steps."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch

from sparsify.comparing import (
    Context,
    error,
    join,
    logits,
    logits_in_steps,
    plain_and_padded,
    result,
    same_bits,
    variant,
)
from sparsify.hosts.calls import ALL_BLOCKS, SiteCall, observing, run_sparse
from sparsify.kernels.selection import Selection, record_selection, replay_selection
from sparsify.report import CheckResult
from sparsify.sparse_rows import watching
from sparsify.variants import in_float64, takes

__all__ = ["dense_limit", "determinism", "phases"]

# Share of rows that may choose other blocks, near ties flipped by rounding.
FLIPPED_ROWS = {torch.float32: 1e-3, torch.float64: 0.0}
LOW_PRECISION_FLIPPED_ROWS = 1e-2


def dense_limit(c: Context) -> CheckResult:
    """V3: with top-k = all blocks the rewrite matches the original; greedy tokens are identical."""
    full = variant(c, topk=ALL_BLOCKS, min_context=0, decode="sparse")
    lengths, worst, faults = c.derived_lengths(), 0.0, []
    with watching(c.plan) as seen:
        for n in lengths:
            for ids, mask in plain_and_padded(c, n):
                a, b = logits(full, ids, mask), logits(c.original, ids, mask)
                far, allowed = error(a, b, functools.partial(_exact, c.original, ids, mask))
                worst = max(worst, far)
                if not far <= allowed:
                    faults.append(
                        f"logits differ by {far:.1e} at {n} tokens ({allowed:.0e} allowed)"
                    )
    faults += seen.faults() + _greedy_faults(c, full)
    rows = seen.sparse_rows
    metrics: dict[str, Any] = {"tokens": lengths, "worst_error": worst, "sparse_rows": rows}
    metrics["greedy_tokens"] = c.greedy_tokens
    done = (
        f"worst error {worst:.1e} of the largest logit at {join(lengths)} tokens "
        f"({rows} rows beyond top-k blocks), {c.greedy_tokens} greedy tokens identical, "
        f"{c.settings_run}"
    )
    return result("V3", "dense limit", faults, done, metrics)


def determinism(c: Context) -> CheckResult:
    """V5: reruns of the model, and batch composition and thread count of its ops, bit for bit."""
    model, ids = variant(c, min_context=0), c.tokens(c.limit)
    calls: list[SiteCall] = []
    with observing(calls.append):
        first = logits(model, ids)
    with watching(c.plan) as seen:
        again = logits(model, ids)
    faults = [] if same_bits(first, again) else ["two runs on the same input differ"]
    faults += seen.faults()
    chosen = [calls[i] for i in sorted({0, len(calls) // 2, len(calls) - 1})] if calls else []
    for call in chosen:
        faults += _op_faults(call)
    names = join([call.plan.key for call in chosen] or ["no site"])
    done = (
        f"{c.limit} tokens ({seen.sparse_rows} sparse rows): reruns of the model bit-equal, ops of "
        f"{names} bit-equal in other batches"
    )
    metrics = {"tokens": c.limit, "sparse_rows": seen.sparse_rows}
    return result("V5", "determinism", faults, done, metrics)


def _op_faults(call: SiteCall) -> list[str]:
    """How the op's bits depend on the batch around it and on the number of threads."""
    alone, faults = run_sparse(call), []
    for place in (0, 1):
        if not same_bits(alone, run_sparse(_batched(call, place))[place : place + 1]):
            faults.append(f"{call.plan.key}: output depends on its batch neighbour")
    if call.q.device.type == "cpu" and not same_bits(alone, _with_one_thread(call)):
        faults.append(f"{call.plan.key}: output depends on the number of threads")
    return faults


def phases(c: Context) -> CheckResult:
    """V5: chunked prefill and decode equal the whole prefill, given the same selection.

    Rows may choose other blocks where rounding in the layers before flips a near tie; they are
    counted. That the ops alone choose alike is held by their own tests.
    """
    model, n = variant(c, min_context=0), c.limit
    ids, (ends, decoded) = c.tokens(n), _steps(c, n)
    with record_selection() as whole, watching(c.plan) as seen:
        wanted = logits(model, ids)
    with replay_selection(whole):
        replayed = logits_in_steps(model, ids, ends)
        exact = functools.partial(_rewritten_exact, c, model, ids)
        far, allowed = error(replayed, wanted, exact)
    with record_selection() as own:
        logits_in_steps(model, ids, ends)
    differing, rows, unmatched = _differences(whole, own)
    share = FLIPPED_ROWS.get(wanted.dtype, LOW_PRECISION_FLIPPED_ROWS)
    faults = seen.faults()
    if not far <= allowed:
        faults.append(f"with the selection replayed, logits differ by {far:.1e}")
    if differing > share * rows:
        faults.append(f"{differing} of {rows} rows choose other blocks")
    if unmatched or not rows:
        faults.append(f"{unmatched} rows were sparse in one of the two runs only")
    metrics: dict[str, Any] = {"tokens": n, "worst_error": far, "sparse_rows": seen.sparse_rows}
    metrics |= {"rows": rows, "rows_choosing_otherwise": differing}
    metrics |= {"chunks_end_at": ends, "decoded_tokens": decoded}
    done = (
        f"{n} tokens in {len(ends)} steps ({decoded} of them decode): error {far:.1e} with the "
        f"selection replayed, {differing} of {rows} rows choose other blocks"
    )
    return result("V5", "chunks and decode", faults, done, metrics)


def _steps(c: Context, n: int) -> tuple[list[int], int]:
    """Where the chunks of `n` tokens end, and how many of them are single decoded tokens."""
    decoded = 0 if any(p.decode == "dense" for p in c.plan.rewritten) else min(4, n - 1)
    prefilled = n - decoded
    ends = {prefilled * 5 // 8 + 1, prefilled, *range(prefilled + 1, n + 1)}
    return sorted(end for end in ends if end <= n), decoded


def _greedy_faults(c: Context, full: Any) -> list[str]:
    """Where greedy continuations of the original and the full-top-k model part ways."""
    if c.greedy_tokens < 1:
        return []
    n = max(1, min(c.spans[0] + 1, c.limit - c.greedy_tokens))
    faults = []
    for ids, mask in plain_and_padded(c, n):
        real = torch.ones_like(ids) if mask is None else mask
        a, b = (_continued(m, ids, real, c.greedy_tokens) for m in (c.original, full))
        if not torch.equal(a, b):
            faults.append(f"greedy tokens differ after {n} tokens")
    return faults


def _continued(model: Any, ids: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` most likely next tokens `[B, count]`, one after the other, over a cache."""
    name = "cache" if takes(model, "cache") else "past_key_values"
    out, tokens = model(ids, attention_mask=mask, use_cache=True), []
    for _ in range(count):
        tokens.append(out.logits[:, -1:].argmax(-1))
        mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], 1)
        if len(tokens) < count:
            cache = {name: out[name]}
            out = model(tokens[-1], attention_mask=mask, use_cache=True, **cache)
    return torch.cat(tokens, 1)


def _batched(call: SiteCall, place: int) -> SiteCall:
    """The call as sequence `place` of a batch of two, beside its own reverse."""

    def pair(x: torch.Tensor) -> torch.Tensor:
        both = [x[:1], x[:1].flip(2)]
        return torch.cat(both if place == 0 else both[::-1])

    def twice(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else torch.cat([x[:1], x[:1]])

    # The samples of this check are not padded, so both sequences lie alike.
    return dataclasses.replace(
        call,
        q=pair(call.q),
        k=pair(call.k),
        v=pair(call.v),
        q_start=twice(call.q_start),
        key_mask=twice(call.key_mask),
        documents=twice(call.documents),
        block_origin=twice(call.block_origin),
        index=None if call.index is None else (pair(call.index[0]), pair(call.index[1])),
    )


def _with_one_thread(call: SiteCall) -> torch.Tensor:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run_sparse(call)
    finally:
        torch.set_num_threads(threads)


def _differences(a: Selection, b: Selection) -> tuple[int, int, int]:
    """Rows that choose otherwise, rows compared, rows that only one of the two holds."""
    diffs = a.diff(b).values()
    return (
        sum(d.differing for d in diffs),
        sum(d.total for d in diffs),
        sum(d.unmatched for d in diffs),
    )


def _rewritten_exact(c: Context, model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a rewritten model in float64."""
    return logits(in_float64(c.original, model), ids)


def _exact(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Logits of the model in float64."""
    return logits(copy.deepcopy(model).double(), ids, mask)
