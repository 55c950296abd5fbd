"""The stages of the Triton kernels, timed over all slices of a call.

Kernels work in slices, so that scratch memory stays bounded. The choice of blocks is made once and
kept for all slices; what follows it is timed as a growing chain (index; index and attention; index,
attention and combine), since partial outputs of all slices would not fit, and a stage is the
difference of two chains. So is MSA's top-k: its scores would not fit either.

Legend: B batch, H query heads, G key/value heads, T queries, S keys, D head size, I index size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsify.timing import Run

__all__ = ["NAMES", "Stages", "by_family", "moba_stages", "moba_stages_ms", "msa_stages_ms"]

# Families of the cost model, and what tables call them.
NAMES = {
    "moba_means": "means",
    "moba_gate": "gate",
    "moba_decode_gate": "gate",
    "msa_index": "scores",
    "msa_proxy_index": "scores",
    "msa_topk": "top-k",
    "msa_decode_scores": "scores",
    "msa_decode_topk": "top-k",
    "reverse_index": "index",
    "moba_attention": "attention",
    "msa_attention": "attention",
    "moba_decode_attention": "attention",
    "msa_short_attention": "attention",
    "msa_decode_attention": "attention",
    "combine": "combine",
    "msa_combine": "combine",
}
# Kernels that the cost model counts as one stage.
TOGETHER = ("msa_decode_scores", "msa_decode_topk")
# Differences of two times may come out as nothing.
LEAST_MS = 1e-4

Timer = Callable[[Run], float]
Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Queries, keys, values, index queries and index keys."""


def moba_stages_ms(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    block_size: int,
    topk: int,
    timer: Timer,
    means_given: bool = False,
    workspace_bytes: int | None = None,
) -> dict[str, float]:
    """Times of the stages by family, in milliseconds; `timer` times one call.

    Calls of few queries are decode steps: they have two stages, and the block means are given, as
    they are to others with `means_given`. `topk` must be less than the number of blocks, or there
    are no stages.
    """
    stages = moba_stages(q_BHTD, k_BGSD, v_BGSD, block_size, topk, workspace_bytes)
    if stages.few:
        attention = timer(lambda: stages.attend(stages.by_query, combine=True))
        return {"moba_decode_gate": timer(stages.choose), "moba_decode_attention": attention}
    found = {} if means_given else {"moba_means": timer(stages.means)}
    found["moba_gate"] = timer(stages.choose)
    return found | stages.attention_ms(timer, "moba_attention", "combine")


def msa_stages_ms(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    iq_BGTI: Tensor,
    ik_B1SI: Tensor,
    *,
    block_size: int,
    topk: int,
    timer: Timer,
    proxy: bool = False,
    choice_alone: bool = False,
    workspace_bytes: int | None = None,
) -> dict[str, float]:
    """Times of the stages, in milliseconds; `timer` times one call.

    They bear the names of their families; `by_family` puts together what is one family. Where a
    kernel of its own ranks the blocks, top-k is a stage; where programs of the attention of a
    decode step rank them, it is in the attention. `topk` must be less than the number of blocks.

    Args:
        proxy: the index tensors are those of the proxy indexer.
        choice_alone: leave out all but the choice of blocks.
    """
    tensors = (q_BHTD, k_BGSD, v_BGSD, iq_BGTI, ik_B1SI)
    step = _decode_step(tensors, block_size, topk)
    stages = step or _msa_stages(tensors, block_size, topk, workspace_bytes)
    names = _choice_names(q_BHTD.shape[2] == 1, proxy)
    found = {names[0]: timer(stages.score)}
    choice = found[names[0]]
    if step is None or not step.call.ranked:
        choice = timer(stages.choose)
        found[names[1]] = max(choice - found[names[0]], LEAST_MS)
    if choice_alone:
        return found
    if isinstance(stages, _DecodeStep):
        attention = max(timer(stages.run) - choice, LEAST_MS)
    elif stages.few:
        attention = timer(lambda: stages.attend(stages.by_query, combine=True))
    else:
        return found | stages.attention_ms(timer, "msa_attention", "msa_combine")
    few = "msa_decode_attention" if q_BHTD.shape[2] == 1 else "msa_short_attention"
    return found | {few: attention}


def _choice_names(decode: bool, proxy: bool) -> tuple[str, str]:
    if decode:
        return TOGETHER
    return "msa_proxy_index" if proxy else "msa_index", "msa_topk"


def by_family(times_ms: dict[str, float], proxy: bool = False) -> dict[str, float]:
    """Times by family of the cost model, in which a decode step chooses in one stage."""
    together = {name: ms for name, ms in times_ms.items() if name in TOGETHER}
    if not together:
        return dict(times_ms)
    family = "msa_decode_proxy_index" if proxy else "msa_decode_index"
    rest = {name: ms for name, ms in times_ms.items() if name not in together}
    return {family: sum(together.values()), **rest}


def moba_stages(
    q: Tensor, k: Tensor, v: Tensor, block: int, topk: int, workspace: int | None = None
) -> Stages:
    """A call of MoBA."""
    from sparsify.kernels.attend.forward import shape_of
    from sparsify.kernels.select.moba import Gate

    place = _place(q, k, block)
    gate = Gate(q, k, place, None, block, topk - 1)
    return Stages(q, k, v, place, shape_of(q, k, v, block, None), gate, workspace)


def _msa_stages(tensors: Tensors, block: int, topk: int, workspace: int | None) -> Stages:
    """A call of MSA that its decode kernels do not run."""
    from sparsify.kernels.attend.forward import shape_of
    from sparsify.kernels.select.msa import Index

    q, k, v, iq, ik = tensors
    place = _place(q, k, block)
    index = Index(iq, ik, place, block, topk, workspace_bytes=_room(workspace))
    shape = shape_of(q, k, v, block, None, q.shape[1] // k.shape[1])
    return Stages(q, k, v, place, shape, index, workspace)


def _place(q: Tensor, k: Tensor, block: int) -> Any:
    from sparsify.kernels.layout import Layout
    from sparsify.kernels.placement import place

    return place(Layout(), q.shape[0], q.shape[2], k.shape[2], block)


def _room(workspace: int | None) -> int:
    from sparsify.kernels.accelerated import WORKSPACE_BYTES

    return WORKSPACE_BYTES if workspace is None else workspace


class _DecodeStep:
    """A call that MSA's decode kernels run."""

    def __init__(self, tensors: Tensors, block: int, topk: int) -> None:
        from sparsify.kernels.decoding import call_of
        from sparsify.kernels.layout import Layout

        self.tensors, self.layout = tensors, Layout()
        self.sizes: dict[str, Any] = {"block_size": block, "topk": topk}
        self.call = call_of(*tensors, self.layout, block, topk, "inside")

    def score(self) -> Tensor:
        """The scores of all blocks."""
        from sparsify.kernels.select.decode_choice import scored

        return scored(*self.tensors[3:], self.layout, self.call)

    def choose(self) -> Tensor:
        """What the attention takes: the best blocks, or the scores in which it finds them."""
        from sparsify.kernels.select.decode_choice import best_blocks

        scores = self.score()
        if self.call.ranked:
            return scores
        return best_blocks(scores, self.layout, self.call, self.call.segments)

    def run(self) -> Any:
        """The whole call."""
        from sparsify.kernels.attend.decode import msa_decode

        return msa_decode(*self.tensors, self.layout, **self.sizes)


def _decode_step(tensors: Tensors, block: int, topk: int) -> _DecodeStep | None:
    """None where the decode kernels do not run the call."""
    from sparsify.kernels.attend.decode import unsupported
    from sparsify.kernels.layout import Layout

    if unsupported(*tensors, Layout(), block, topk) is not None:
        return None
    return _DecodeStep(tensors, block, topk)


class Stages:
    """One call, cut into slices, with the chosen blocks of each."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        place: Any,
        shape: Any,
        chooser: Any,
        workspace: int | None,
    ) -> None:
        from sparsify.kernels.attend import forward

        self.forward: Any = forward
        self.q, self.k, self.v = q, k, v
        self.place, self.shape, self.chooser = place, shape, chooser
        self.few = q.shape[2] <= forward.FEW_QUERIES
        self.slices = list(forward.slices(q, v, chooser, _room(workspace), shape.share))
        self.chosen = self.choose()
        self.by_block = self.forward.by_block
        self.by_query = self.forward.by_query
        self.out, self.lse = self.forward.outputs(q, v)

    def means(self) -> Tensor:
        """Means of all blocks."""
        from sparsify.kernels.select.moba import block_means

        return block_means(self.k, self.place, self.shape.block)

    def score(self) -> None:
        """The scores of MSA's choice, of every slice, without the choice."""
        index = copy.copy(self.chooser)
        index._rank = index._rank_exactly = lambda *_: None
        for part in self.slices:
            index.rows(*part)

    def choose(self) -> list[Tensor]:
        """The chosen past blocks of every slice, `[lists, queries, W]`."""
        return [self.chooser.rows(*part)[0] for part in self.slices]

    def index(self) -> None:
        """The reverse index of every slice."""
        from sparsify.kernels.select.reverse_index import reverse_index

        for part, idx in zip(self.slices, self.chosen, strict=True):
            fixed = (self.place, self.shape, part.queries)
            chunk = self.forward.entries_per_item(self.q, self.k, self.v, *fixed)
            reverse_index(idx, self.place.blocks, chunk)

    def attend(self, attend: Callable[..., Any], *, combine: bool) -> None:
        """Past blocks of every slice by `attend`, then what `combine` adds: the own blocks."""
        call = (self.q, self.k, self.v)
        for part, idx in zip(self.slices, self.chosen, strict=True):
            fixed = (self.place, self.shape, part, self.chooser.chosen)
            parts = attend(*call, idx, *fixed)
            if combine:
                self.forward.combine(*call, idx, None, parts, self.out, self.lse, *fixed)

    def attention_ms(self, timer: Timer, attention: str, combine: str) -> dict[str, float]:
        """The stages behind the choice, by the names of two of them."""
        index = timer(self.index)
        attended = timer(lambda: self.attend(self.by_block, combine=False))
        whole = timer(lambda: self.attend(self.by_block, combine=True))
        return {
            "reverse_index": index,
            attention: max(attended - index, LEAST_MS),
            combine: max(whole - attended, LEAST_MS),
        }
