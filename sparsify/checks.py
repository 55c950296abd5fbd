"""The named checks V1-V7 of a rewritten language model against its original."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from sparsify import quality, samples
from sparsify.comparing import (
    Context,
    logits,
    names_of,
    plan_to_verify,
    result,
    same_bits,
    variant,
)
from sparsify.equality import dense_limit, determinism, phases
from sparsify.hosts.reload import reloaded
from sparsify.kernels.selection import record_selection
from sparsify.passes.modes import evaluating
from sparsify.policy import Quality
from sparsify.probes import batches, documents, future
from sparsify.report import CheckResult, VerificationReport
from sparsify.sparse_rows import watching
from sparsify.structure import no_op, structure

__all__ = ["CHECKS", "run"]


def run(
    original: torch.nn.Module,
    rewritten: torch.nn.Module,
    sample: Any = None,
    *,
    tokenizer: Any = None,
    lengths: Any = None,
    checks: Any = None,
    dump_selection: str | Path | None = None,
    directory: str | Path | None = None,
    expected: int | None = None,
    detected: Any = None,
    greedy_tokens: int = 64,
    model_name: str = "",
    against: str = "",
    progress: Callable[[str], None] | None = None,
) -> VerificationReport:
    """Run the checks and report; a failed check does not stop the others.

    Args:
        sample: text, list of texts, or token ids `[1, T]`; real text by default.
        lengths: token counts at which quality (V6) is measured; by default the sample's, up to
            4 * top-k * block size.
        checks: names to run, all by default.
        dump_selection: file to write the selection of the longest V6 run to.
        directory: the saved folder, for V7.
        expected: attention layers that the model has by its config, for V1.
        detected: site keys of a fresh inspection of the original, for V1.
        greedy_tokens: length of the greedy continuation compared in V3.
        model_name, against: what the report calls the two models.
        progress: told what is being done, a line at a time.

    Raises:
        UsageError: an unknown check, a model without a plan, or unusable samples.
    """
    names, plan = names_of(checks, CHECKS), plan_to_verify(rewritten)
    device = next(rewritten.parameters()).device
    vocab = getattr(original.config, "vocab_size", 256)
    ids, source = samples.to_ids(sample, tokenizer, vocab, device)
    say = progress or (lambda _: None)
    context = Context(
        original=original,
        rewritten=rewritten,
        plan=plan,
        ids=ids,
        source=source,
        tokenizer=tokenizer,
        lengths=tuple(lengths) if lengths else None,
        directory=None if directory is None else Path(directory),
        dump_selection=None if dump_selection is None else Path(dump_selection),
        expected=expected,
        detected=None if detected is None else tuple(detected),
        inputs=None,
        greedy_tokens=greedy_tokens,
        say=say,
    )
    results: list[CheckResult] = []
    with evaluating(original), evaluating(rewritten), torch.no_grad():
        for name in names:
            for check in CHECKS[name]:
                say(f"{name}: {check.__name__.replace('_', ' ')}")
                results.append(check(context))
    return VerificationReport(
        model=model_name or str(directory or type(rewritten).__name__),
        against=against or type(original).__name__,
        checks=tuple(results),
    )


def quality_cost(c: Context) -> CheckResult:
    """V6: recalls per layer, losses, agreement and retrieval on the samples.

    Texts that `min_context` would keep dense are measured as if they were sparse. It fails on the
    quality budget of the policy, if there is one, and when nothing was measured.
    """
    runs: list[dict[str, Any]] = []
    least = max(layer.min_context for layer in c.plan.rewritten)
    rewritten = c.rewritten if least <= min(c.quality_lengths()) else variant(c, min_context=0)
    with watching(c.plan) as seen:
        for number, ids in _quality_inputs(c):
            c.say(f"V6: {ids.shape[1]} tokens of sample {number}")
            runs.append(quality.measure(c.original, rewritten, ids, c.tokenizer))
    if c.dump_selection is not None:
        with record_selection() as chosen:
            logits(rewritten, c.ids[0][:, : c.quality_lengths()[-1]])
        chosen.save(c.dump_selection)
    faults = seen.faults()
    if any(not math.isfinite(run["sparse_loss_nats"]) for run in runs):
        faults.append("the loss of the rewritten model is not a number")
    if c.plan.policy.get("quality") and not faults:
        budget = Quality.model_validate(c.plan.policy["quality"])
        faults += [f"{f} at {run['tokens']} tokens" for run in runs for f in budget.faults(run)]
    metrics = {"samples": c.source, "sparse_rows": seen.sparse_rows, "runs": runs}
    text = _losses(runs)
    if rewritten is not c.rewritten:
        metrics["min_context"] = least
        text += f"; the plan keeps texts of fewer than {least:,} tokens dense"
    return result("V6", "quality", faults, text, metrics)


def _quality_inputs(c: Context) -> Iterator[tuple[int, torch.Tensor]]:
    """Number and tokens of every V6 run; a sample shorter than a length is left out of it."""
    lengths = c.quality_lengths()
    for n in lengths:
        for number, ids in enumerate(c.ids, start=1):
            if ids.shape[1] >= n:
                yield number, ids[:, :n]


def artefact(c: Context) -> CheckResult:
    """V7: a fresh process loads the saved folder and computes the same bits."""
    if c.directory is None:
        return CheckResult("V7", "artefact", "skipped", "no saved folder was given", {})
    ids = c.tokens(c.limit)
    there = reloaded(c.directory, (ids,), {"use_cache": False})
    if isinstance(there, str):
        return CheckResult("V7", "artefact", "failed", there, {})
    same = same_bits(there[0], logits(c.rewritten, ids).cpu())
    faults = [] if same else ["the reloaded model computes other outputs"]
    text = f"a fresh process computes the same bits on {c.limit} tokens"
    return result("V7", "artefact", faults, text, {"tokens": c.limit})


CHECKS: dict[str, tuple[Callable[[Context], CheckResult], ...]] = {
    "V1": (structure,),
    "V2": (no_op,),
    "V3": (dense_limit,),
    "V4": (future, batches, documents),
    "V5": (determinism, phases),
    "V6": (quality_cost,),
    "V7": (artefact,),
}


def _losses(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return "no sample"
    r = runs[-1]
    return (
        f"{r['tokens']} tokens: loss {r['dense_loss_nats']:.3f} dense, "
        f"{r['sparse_loss_nats']:.3f} sparse; last 512 {r['dense_loss_last_512_nats']:.3f} dense, "
        f"{r['sparse_loss_last_512_nats']:.3f} sparse (nats per token); "
        f"top-1 agreement {r['top1_agreement']:.1%}"
    )
