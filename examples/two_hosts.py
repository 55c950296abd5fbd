"""One model on both hosts, as a transformers model and as exported programs. Called by `make demo`.

Two right implementations may choose other blocks where scores nearly tie, so the logits are
compared with the selection of the first replayed in the second, and rows that choose otherwise are
counted.

Usage: two_hosts.py MODEL TEXT [BLOCK_SIZE TOPK DENSE_LAST]
"""

import sys
from pathlib import Path

import torch

import sparsify as sp
from sparsify.sources import load_model

ALLOWED = 1e-4  # max|a - b| / max|b| of float32 logits, given the same selection


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def compare(one: torch.nn.Module, two: torch.nn.Module, ids: torch.Tensor) -> tuple[float, str]:
    """The error, and how many rows choose other blocks."""
    with sp.record_selection() as chosen:
        wanted = logits(one, ids)
    with sp.replay_selection(chosen):
        found = logits(two, ids)
    with sp.record_selection() as own:
        logits(two, ids)
    rows = chosen.diff(own).values()
    flipped, total = sum(site.differing for site in rows), sum(site.total for site in rows)
    error = float((found - wanted).abs().max() / wanted.abs().max())
    return error, f"{flipped} of {total:,} rows choose other blocks"


def main(model: str, text: str, size: int = 64, topk: int = 8, dense_last: int = 3) -> int:
    loaded = load_model(model)
    policy = sp.Policy.moba(block_size=size, topk=topk, dense_last=dense_last)
    print(f"\nBoth hosts, MoBA block {size} top-k {topk}:", flush=True)
    hosts = [sp.sparsify(loaded.model, policy, host=host) for host in ("transformers", "graph")]
    for result in hosts:
        counts = ", ".join(
            f"{n} {what.replace('_', ' ')}" for what, n in result.report.counts.items()
        )
        print(f"  {type(result.model).__name__}: {counts}", flush=True)
    ids = loaded.tokenizer(Path(text).read_text(), return_tensors="pt")["input_ids"]
    worst = 0.0
    for length in (size * topk - 1, size * topk + 1, 4 * size * topk):
        whole = ids.repeat(1, -(-length // ids.shape[1]))[:, :length]
        error, rows = compare(hosts[0].model, hosts[1].model, whole)
        print(
            f"  {length:5} tokens: logits differ by {error:.1e} of the largest; {rows}", flush=True
        )
        worst = max(worst, error)
    print(f"  {'equal' if worst <= ALLOWED else 'NOT equal'} (allowed: {ALLOWED:.0e})", flush=True)
    return 0 if worst <= ALLOWED else 4


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3], *map(int, sys.argv[3:])))
