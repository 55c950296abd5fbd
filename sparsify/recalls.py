"""Score recall of many configurations at once, in the activations of one dense pass per sample.

The score recall of a layer is the share of its dense attention mass that the selected blocks hold,
over the rows that are sparse, as `quality` takes it. Here every configuration asked for is judged
on the same queries and keys, and of long samples only some rows are.

Legend: B batch (1), H query heads, G KV heads, T queries, S keys, D head size, N blocks, K list
places, R rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from sparsify import planner, rewriting
from sparsify.cost_model.configuration import Configuration
from sparsify.hosts.calls import SiteCall, observing
from sparsify.ir import AttentionSite, site_key
from sparsify.planning import method_of
from sparsify.plans import LayerPlan, Plan
from sparsify.quality import select

__all__ = ["MOST_ROWS", "Recalls", "measure"]

# Rows of a sample that are judged, in runs of ROWS_AT_ONCE spread evenly; all of shorter samples.
MOST_ROWS = 1024
ROWS_AT_ONCE = 64


@dataclasses.dataclass(frozen=True)
class Recalls:
    """What was measured.

    `losses` has 1 - score recall by site key and configuration, of the sample where it is worst;
    configurations without a sparse row in any sample are in `unmeasured`, as labels. `tokens` are
    the lengths of the samples, `rows` the rows judged of all of them.
    """

    losses: Mapping[str, Mapping[Configuration, float]]
    unmeasured: tuple[str, ...]
    tokens: tuple[int, ...]
    rows: int


Wanted = Mapping[str, Sequence[Configuration]]


@torch.no_grad()
def measure(
    model: torch.nn.Module,
    sites: Sequence[AttentionSite],
    wanted: Wanted,
    samples: Sequence[torch.Tensor],
    say: Callable[[str], None],
) -> Recalls:
    """Losses of the configurations in `wanted`, by site key, on `samples` of ids `[1, T]`.

    Args:
        model: a transformers language model; it is not changed.

    Raises:
        CaptureError: a site cannot be observed.
    """
    plan = _observed(sites, wanted)
    twin, _ = rewriting.apply_plan(model, plan, (), host="transformers", inplace=False)
    losses: dict[str, dict[Configuration, float]] = {key: {} for key in wanted}
    rows = 0
    for number, ids in enumerate(samples, start=1):
        rows += sum(len(part) for part in _row_runs(ids.shape[1]))
        text = f"recall on sample {number} of {len(samples)} ({ids.shape[1]:,} tokens)"

        def observe(call: SiteCall, text: str = text) -> None:
            say(f"{text}: {call.plan.fqn}")
            known = losses[call.plan.key]
            for configuration, loss in _losses(call, wanted[call.plan.key]).items():
                known[configuration] = max(loss, known.get(configuration, 0.0))

        with observing(observe, run_dense=True):
            twin(ids, use_cache=False)
    missing = {
        c.label: None for key, known in losses.items() for c in wanted[key] if c not in known
    }
    return Recalls(losses, tuple(missing), tuple(ids.shape[1] for ids in samples), rows)


def _observed(sites: Sequence[AttentionSite], wanted: Wanted) -> Plan:
    """A plan under which every wanted site is seen; it runs dense while it is observed."""
    layers = []
    for site in sites:
        if wanted.get(site_key(site.fqn, site.ordinal)):
            layers.append(_as_layer(site.fqn, site.ordinal, Configuration("moba", 64, 1)))
        else:
            layers.append(LayerPlan(site.fqn, site.ordinal, "dense", "kept_dense", "not observed"))
    return Plan(tuple(layers))


def _as_layer(fqn: str, ordinal: int, configuration: Configuration) -> LayerPlan:
    named = LayerPlan(fqn, ordinal, "dense", "kept_dense", "")
    return planner.rewritten_layer(named, method_of(configuration), "")


def _row_runs(length: int) -> list[range]:
    """The rows that are judged, in runs of neighbours, the last row among them."""
    starts = list(range(0, length, ROWS_AT_ONCE))
    most = MOST_ROWS // ROWS_AT_ONCE
    if len(starts) > most:
        last = length - ROWS_AT_ONCE
        starts = [round(last * i / (most - 1)) for i in range(most)]
    return [range(start, min(start + ROWS_AT_ONCE, length)) for start in starts]


def _losses(call: SiteCall, configurations: Sequence[Configuration]) -> dict[Configuration, float]:
    """1 - score recall of each configuration that has a sparse row here."""
    sums = dict.fromkeys(configurations, 0.0)
    counts = dict.fromkeys(configurations, 0)
    for rows in _row_runs(call.q.shape[2]):
        sparse = [c for c in configurations if c.budget_tokens < rows.stop]
        if not sparse:
            continue
        part = _part(call, rows)
        mass_HRS = _mass(part, rows)
        by_size = {size: _by_block(mass_HRS, size) for size in {c.block_size for c in sparse}}
        for c in sparse:
            first = max(c.budget_tokens - rows.start, 0)
            kept_HR = _kept(part, by_size[c.block_size], c)[:, first:]
            sums[c] += float(kept_HR.sum())
            counts[c] += kept_HR.numel()
    return {c: 1 - sums[c] / counts[c] for c in configurations if counts[c]}


def _part(call: SiteCall, rows: range) -> SiteCall:
    """The call's queries `rows`, with the keys that they can see."""
    start = torch.tensor([rows.start], dtype=torch.int32, device=call.q.device)
    return dataclasses.replace(
        call,
        q=call.q[:, :, rows.start : rows.stop],
        k=call.k[:, :, : rows.stop],
        v=call.v[:, :, : rows.stop],
        q_start=start,
        key_mask=None,
    )


def _mass(part: SiteCall, rows: range) -> torch.Tensor:
    """Dense causal attention mass of every key `[H, R, S]`, in float32."""
    n_H, n_D = part.q.shape[1], part.q.shape[3]
    scale = n_D**-0.5 if part.scale is None else part.scale
    k_HSD = part.k[0].float().repeat_interleave(n_H // part.k.shape[1], 0)
    scores_HRS = part.q[0].float() @ k_HSD.mT * scale
    position_R = torch.arange(rows.start, rows.stop, device=part.q.device)
    future_RS = torch.arange(rows.stop, device=part.q.device) > position_R[:, None]
    return scores_HRS.masked_fill_(future_RS, -torch.inf).softmax(-1)


def _by_block(mass_HRS: torch.Tensor, size: int) -> torch.Tensor:
    """Mass of every block, and none in one more behind them, `[H, R, N + 1]`."""
    n_S = mass_HRS.shape[2]
    n_N = -(-n_S // size)
    padded = torch.nn.functional.pad(mass_HRS, (0, (n_N + 1) * size - n_S))
    return padded.view(*padded.shape[:2], n_N + 1, size).sum(-1)


def _kept(part: SiteCall, mass_HRN: torch.Tensor, configuration: Configuration) -> torch.Tensor:
    """Share of each row's mass that the configuration's blocks hold, `[H, R]`."""
    plan = _as_layer(part.plan.fqn, part.plan.ordinal, configuration)
    lists = select(dataclasses.replace(part, plan=plan))[0].long()
    lists_HRK = lists.repeat_interleave(mass_HRN.shape[0] // lists.shape[0], 0)
    # Empty places, -1, read the block without mass.
    index_HRK = lists_HRK.masked_fill(lists_HRK < 0, mass_HRN.shape[2] - 1)
    return mass_HRN.gather(-1, index_HRK).sum(-1)
