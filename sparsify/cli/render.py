"""Tables and lines for people, from the data classes of inspections, reports and checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from sparsify.cli.grouping import group
from sparsify.ir import AttentionSite, MaskProof, Refusal, site_name
from sparsify.report import SiteReport, SparsifyReport, VerificationReport

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["explain", "inspection", "open_table", "report", "verification"]

STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}
DONE = {"rewritten": "rewritten", "kept_dense": "kept dense", "refused": "refused"}


def inspection(
    model: str, sites: Sequence[AttentionSite], refusals: Sequence[Refusal], notes: Iterable[str]
) -> list[RenderableType]:
    """Tables of `inspect`: replaceable sites, then the refused ones."""
    out: list[RenderableType] = [
        f"{model}: {_count(len(sites), 'replaceable attention site')}, {len(refusals)} refused"
    ]
    if sites:
        out.append(_sites(sites))
    if refusals:
        out.append(_refusals(refusals))
    return out + _assumed(sites) + [f"note: {note}" for note in notes]


def _assumed(sites: Sequence[AttentionSite]) -> list[RenderableType]:
    """What the proofs take for granted, with the number of sites that rest on it."""
    counts = Counter(
        a for site in sites for a in (*site.mask.assumptions, *site.stream.assumptions)
    )
    return [f"assumed for {_count(n, 'site')}: {text}" for text, n in counts.items()]


def _sites(sites: Sequence[AttentionSite]) -> Table:
    table = open_table(
        "site", ">sites", "pattern", ">heads q/kv", ">head dim", ">scale", "mask", "phase", "source"
    )
    for name, members in group(sites, _name, _site_row):
        row = _site_row(members[0])
        table.add_row(name, str(len(members)), *row)
    return table


def _site_row(site: AttentionSite) -> tuple[str, ...]:
    heads = site.heads
    size = str(heads.head_dim)
    if heads.value_dim != heads.head_dim:
        size += f"/{heads.value_dim}"
    return (
        site.pattern,
        f"{heads.q_heads}/{heads.kv_heads}",
        size,
        f"{site.scale:.6g}",
        _mask(site.mask),
        site.phase.value,
        _file(site.source),
    )


def _file(source: str) -> str:
    """File and line without the folders, which `--explain` and `--json` have."""
    return source.rsplit("/", 1)[-1]


def _mask(mask: MaskProof) -> str:
    text = mask.kind.value if mask.window is None else f"{mask.kind.value}({mask.window})"
    if mask.documents is not None:
        text = f"{text} by {mask.documents}"
    return f"{text}, padding by {mask.padding}" if mask.padding else text


def _refusals(refusals: Sequence[Refusal]) -> Table:
    table = open_table("refused", ">sites", "code", "why", "hint", "source")
    for name, members in group(refusals, _name, _refusal_row):
        table.add_row(name, str(len(members)), *_refusal_row(members[0]))
    return table


def _refusal_row(refusal: Refusal) -> tuple[str, ...]:
    return (refusal.code, refusal.message, refusal.hint, _file(refusal.source))


def explain(found: AttentionSite | Refusal) -> list[RenderableType]:
    """Everything that is known of one site, a line each."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("verdict", "refused" if isinstance(found, Refusal) else "replaceable")
    for field, value in _flat(found.to_json()):
        table.add_row(field, Text(str(value)))
    return [_name(found), table]


def _flat(data: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for field, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{field}.")
        elif isinstance(value, list):
            yield from ((f"{prefix}{field}", item) for item in value)
        elif value not in (None, ""):
            yield f"{prefix}{field}", value


def report(found: SparsifyReport) -> list[RenderableType]:
    """Tables of `rewrite`: what was done at every site and why, and the pairs it saves."""
    counts = found.counts
    head = (
        f"{found.model}: {_count(counts['detected'], 'attention site')}, "
        f"{counts['rewritten']} rewritten, {counts['kept_dense']} kept dense, "
        f"{counts['refused']} refused"
    )
    table = open_table("site", ">sites", "done", "attention", ">heads q/kv", "why")
    for name, members in group(found.sites, lambda site: site.name, _report_row):
        table.add_row(name, str(len(members)), *_report_row(members[0]))
    out: list[RenderableType] = [head, table]
    if found.pairs:
        out += ["query-key pairs of all proved sites (prefill, causal, exact; selection is extra):"]
        out += [_pairs(found)]
    return out + [f"note: {note}" for note in found.notes]


def _report_row(site: SiteReport) -> tuple[str, ...]:
    heads = "" if site.q_heads is None else f"{site.q_heads}/{site.kv_heads}"
    return (DONE[site.status], _attention(site), heads, site.reason)


def _attention(site: SiteReport) -> str:
    if site.method == "dense":
        return "dense"
    parts = [f"{site.method} block {site.block_size} top-k {site.topk}"]
    if site.indexer:
        size = f" of size {site.index_dim}" if site.index_dim else ""
        parts.append(f"{site.indexer} indexer{size}")
    if site.local == "union":
        parts.append("local union")
    if site.decode == "dense":
        parts.append("decode dense")
    if site.min_context:
        parts.append(f"from {site.min_context} keys")
    return ", ".join(parts)


def _pairs(found: SparsifyReport) -> Table:
    table = open_table(">context", ">dense pairs", ">attended pairs", ">share")
    for count in found.pairs:
        row = (count.context, count.dense, count.attended)
        table.add_row(*(f"{number:,}" for number in row), f"{count.share:.1%}")
    return table


def verification(found: VerificationReport) -> list[RenderableType]:
    """Tables of `verify`: the checks, then quality per layer and losses."""
    table = open_table("check", "name", "result", "what was seen")
    for check in found.checks:
        style = STYLES[check.status]
        table.add_row(check.check, check.name, Text(check.status, style), Text(check.summary))
    out: list[RenderableType] = [f"{found.model} against {found.against}", table]
    for check in found.checks:
        runs = check.metrics.get("runs") or []
        if check.check == "V6" and runs:
            out += [f"quality per layer at {runs[-1]['tokens']:,} tokens:", _layers(runs[-1])]
            out += ["losses and KL in nats per token:", _losses(runs)]
            out += _retrieval(runs[-1])
    return out


def _layers(run: dict[str, Any]) -> Table:
    table = open_table("layer", ">score recall", ">block recall", ">sparse rows")
    for layer in run["layers"]:
        measured = (layer["score_recall"], layer["block_recall"])
        recalls = ("-" if value is None else f"{value:.3f}" for value in measured)
        table.add_row(layer["site"].removesuffix("#0"), *recalls, f"{layer['rows']:,}")
    return table


def _losses(runs: Sequence[dict[str, Any]]) -> Table:
    table = open_table(
        ">tokens", ">loss dense", ">sparse", ">last 512 dense", ">sparse", ">KL", ">top-1 same"
    )
    keys = (
        "dense_loss_nats",
        "sparse_loss_nats",
        "dense_loss_last_512_nats",
        "sparse_loss_last_512_nats",
        "kl_nats",
    )
    for run in runs:
        numbers = (f"{run[key]:.4f}" for key in keys)
        table.add_row(f"{run['tokens']:,}", *numbers, f"{run['top1_agreement']:.1%}")
    return table


def _retrieval(run: dict[str, Any]) -> list[RenderableType]:
    probe = run.get("retrieval")
    if not probe:
        return []
    sides = (
        f"{side} {'found' if probe[f'{side}_correct'] else 'missed'} "
        f"(log-probability {probe[f'{side}_logprob']:.2f} nats per token)"
        for side in ("dense", "sparse")
    )
    return [f"retrieval over {probe['distance_tokens']:,} tokens: {', '.join(sides)}"]


def _name(found: AttentionSite | Refusal) -> str:
    return site_name(found.fqn, found.ordinal)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def open_table(*columns: str) -> Table:
    """An open table; a leading ">" aligns a column to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify = "right" if column.startswith(">") else "left"
        table.add_column(column.lstrip(">"), justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table
