"""V6: what sparsity costs on the user's own text. Judged only by a budget of the user's policy.

* score recall: share of the dense attention mass that the selected blocks hold;
* block recall: share of the K blocks with the most mass that were selected;
* loss in nats per token, over all tokens and over the last 512 (the tail is where block sparsity
  hurts), KL of the next-token distribution, top-1 agreement;
* a retrieval probe: evidence placed early in the text, asked for at the end.

Recalls are taken in the dense model's own activations, over the rows that are sparse (positions
of at least top-k blocks), so they do not depend on what other layers lose.

Legend: B batch, H query heads, G KV heads, T queries, S keys, D head size, N blocks, K top-k.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from sparsify.hosts.calls import SiteCall, observing
from sparsify.kernels import schemas
from sparsify.kernels.proxy import proxy_index

__all__ = [
    "LayerRecall",
    "RetrievalProbe",
    "compare",
    "measure",
    "measure_recall",
    "probe_retrieval",
    "select",
]

TAIL_TOKENS = 512
ROWS_AT_ONCE = 256
RETRIEVAL_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class LayerRecall:
    """Recalls of one layer, each in 0..1, averaged over heads and the `rows` sparse positions;
    None where no position was sparse."""

    site: str
    score_recall: float | None
    block_recall: float | None
    rows: int


@dataclasses.dataclass(frozen=True)
class RetrievalProbe:
    """Mean log-probability (nats per token) of the right answer, and whether greedy finds it."""

    tokens: int
    distance_tokens: int
    dense_logprob: float
    sparse_logprob: float
    dense_correct: bool
    sparse_correct: bool


def measure(
    original: torch.nn.Module, rewritten: torch.nn.Module, ids: torch.Tensor, tokenizer: Any
) -> dict[str, Any]:
    """Everything V6 reports of one text `ids` [1, T], as JSON."""
    found = compare(original, rewritten, ids)
    layers = [dataclasses.asdict(layer) for layer in measure_recall(rewritten, ids)]
    rows = [layer for layer in layers if layer["rows"]]
    for name in ("score_recall", "block_recall"):
        found[name] = sum(layer[name] for layer in rows) / len(rows) if rows else None
    found["layers"] = layers
    if tokenizer is not None and ids.shape[1] >= RETRIEVAL_TOKENS:
        probe = probe_retrieval(original, rewritten, tokenizer, ids)
        found["retrieval"] = dataclasses.asdict(probe)
    return found


@torch.no_grad()
def measure_recall(model: torch.nn.Module, ids: torch.Tensor) -> list[LayerRecall]:
    """Recalls of every sparse site of a rewritten `model` on `ids` [1, T], in execution order.

    The tokens are one unpadded sequence, so that positions are row numbers.
    """
    found: list[LayerRecall] = []
    with observing(lambda call: found.append(_recall(call)), run_dense=True):
        model(ids, use_cache=False)
    return found


def _recall(call: SiteCall) -> LayerRecall:
    plan, (n_T, n_D) = call.plan, call.q.shape[2:]
    size, n_K = plan.budget
    first = n_K * size
    blocks_BHTK = select(call)
    if first >= n_T:
        return LayerRecall(plan.key, None, None, 0)
    scale = n_D**-0.5 if call.scale is None else call.scale
    group = call.q.shape[1] // call.k.shape[1]
    score = block = count = 0.0
    for b in range(call.q.shape[0]):
        for h in range(call.q.shape[1]):
            chosen_TK = blocks_BHTK[b, h if plan.method == "moba" else h // group]
            for start in range(first, n_T, ROWS_AT_ONCE):
                rows = torch.arange(start, min(start + ROWS_AT_ONCE, n_T), device=call.q.device)
                mass_RN = _block_mass(call.q[b, h, rows], call.k[b, h // group], rows, size, scale)
                s, k = _row_recalls(mass_RN, chosen_TK[rows], n_K)
                score, block, count = score + s, block + k, count + len(rows)
    return LayerRecall(plan.key, score / count, block / count, n_T - first)


def select(call: SiteCall) -> torch.Tensor:
    """The blocks `[B, Hq or Hkv, T, K']` that the site's plan chooses for this call."""
    plan, (size, topk) = call.plan, call.plan.budget
    where = {"q_start": call.q_start, "key_mask": call.key_mask, "block_origin": call.block_origin}
    if plan.method == "moba":
        return schemas.moba_select(call.q, call.k, **where, block_size=size, topk=topk)
    iq, ik = proxy_index(call.q, call.k) if call.index is None else call.index
    return schemas.msa_select(iq, ik, **where, block_size=size, topk=topk, local=plan.local)


def _block_mass(
    q_RD: torch.Tensor, k_SD: torch.Tensor, rows_R: torch.Tensor, size: int, scale: float
) -> torch.Tensor:
    """Dense causal attention mass of every block `[R, N]`, in float32."""
    n_S = k_SD.shape[0]
    scores_RS = q_RD.float() @ k_SD.float().T * scale
    future_RS = torch.arange(n_S, device=q_RD.device) > rows_R[:, None]
    mass_RS = scores_RS.masked_fill(future_RS, -torch.inf).softmax(-1)
    n_N = -(-n_S // size)
    return torch.nn.functional.pad(mass_RS, (0, n_N * size - n_S)).view(-1, n_N, size).sum(-1)


def _row_recalls(mass_RN: torch.Tensor, chosen_RK: torch.Tensor, n_K: int) -> tuple[float, float]:
    """Sums over rows of the score recall and of the block recall."""
    # -1 goes to a column of its own, behind the blocks.
    n_N = mass_RN.shape[1]
    index_RK = torch.where(chosen_RK < 0, n_N, chosen_RK).long()
    picked_RN = torch.zeros(len(mass_RN), n_N + 1, dtype=torch.bool, device=mass_RN.device)
    picked_RN = picked_RN.scatter_(1, index_RK, True)[:, :n_N]
    score = (mass_RN * picked_RN).sum()
    best_RK = mass_RN.topk(min(n_K, mass_RN.shape[1]), dim=-1).indices
    return float(score), float(picked_RN.gather(1, best_RK).float().mean(-1).sum())


@torch.no_grad()
def compare(
    original: torch.nn.Module, rewritten: torch.nn.Module, ids: torch.Tensor
) -> dict[str, Any]:
    """Losses of both models on `ids` [1, T], KL(original || rewritten) and top-1 agreement."""
    dense = _logits(original, ids)
    sparse = _logits(rewritten, ids)
    targets = ids[0, 1:]
    sums: dict[str, list[torch.Tensor]] = {"dense": [], "sparse": [], "kl": [], "same": []}
    for start in range(0, len(targets), ROWS_AT_ONCE):
        part = slice(start, min(start + ROWS_AT_ONCE, len(targets)))
        p, q = dense[part].float().log_softmax(-1), sparse[part].float().log_softmax(-1)
        wanted = targets[part, None]
        sums["dense"].append(-p.gather(1, wanted)[:, 0])
        sums["sparse"].append(-q.gather(1, wanted)[:, 0])
        sums["kl"].append((p.exp() * (p - q)).sum(-1))
        sums["same"].append((p.argmax(-1) == q.argmax(-1)).float())
    rows = {name: torch.cat(parts) for name, parts in sums.items()}
    return {
        "tokens": ids.shape[1],
        "dense_loss_nats": float(rows["dense"].mean()),
        "sparse_loss_nats": float(rows["sparse"].mean()),
        "dense_loss_last_512_nats": float(rows["dense"][-TAIL_TOKENS:].mean()),
        "sparse_loss_last_512_nats": float(rows["sparse"][-TAIL_TOKENS:].mean()),
        "kl_nats": float(rows["kl"].mean()),
        "kl_last_512_nats": float(rows["kl"][-TAIL_TOKENS:].mean()),
        "top1_agreement": float(rows["same"].mean()),
        "top1_agreement_last_512": float(rows["same"][-TAIL_TOKENS:].mean()),
    }


def _logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(ids, use_cache=False).logits[0]
    return out


@torch.no_grad()
def probe_retrieval(
    original: torch.nn.Module, rewritten: torch.nn.Module, tokenizer: Any, ids: torch.Tensor
) -> RetrievalProbe:
    """Hide a code a tenth of the way into the text `ids` [1, T] and ask for it at the end."""
    evidence = _encode(tokenizer, "\n\nThe access code of the archive is 48213.\n\n")
    question = _encode(
        tokenizer,
        "\n\nQuestion: What is the access code of the archive?\n"
        "Answer: The access code of the archive is",
    )
    answer = _encode(tokenizer, " 48213")
    text = ids[0].tolist()
    cut = len(text) // 10
    text = text[: len(text) - len(evidence) - len(question)]
    prompt = text[:cut] + evidence + text[cut:] + question
    full = torch.tensor([prompt + answer], device=ids.device)
    dense, dense_right = _answer(original, full, len(answer))
    sparse, sparse_right = _answer(rewritten, full, len(answer))
    return RetrievalProbe(
        tokens=len(prompt),
        distance_tokens=len(prompt) - cut,
        dense_logprob=dense,
        sparse_logprob=sparse,
        dense_correct=dense_right,
        sparse_correct=sparse_right,
    )


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _answer(model: torch.nn.Module, full: torch.Tensor, n_answer: int) -> tuple[float, bool]:
    logits = _logits(model, full)[-n_answer - 1 : -1].float()
    wanted = full[0, -n_answer:]
    logprob = logits.log_softmax(-1).gather(1, wanted[:, None]).mean()
    return float(logprob), bool((logits.argmax(-1) == wanted).all())
