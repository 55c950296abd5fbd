"""MSA's decode kernels: which calls they refuse, and the ops that start them."""

from __future__ import annotations

import pytest
import torch

from sparsify.kernels import accelerated
from sparsify.kernels.attend import decode
from sparsify.kernels.select import decode_choice
from sparsify.kernels.selection import record_selection, replay_selection
from tests._util.msa_decode import attend, case, in_pages
from tests._util.parity import error, same_bits

REFUSED = {
    "queries": ({"queries": 17}, "no decode step"),
    "block": ({"block": 15}, "16 to 256"),
    "group": ({"heads": 130, "groups": 2}, "query heads of a group"),
    "size": ({"size": 300}, "head sizes"),
    "lists": ({"topk": 300, "keys": 16 * 300}, "lists of more than"),
    "dtype": ({"dtype": torch.float64}, "tensor-core"),
    "index dtype": ({"index_dtype": torch.float64}, "index tensors"),
    "index keys": ({"key_dtype": torch.float8_e5m2}, "index tensors"),
    "documents": ({"cu_seqlens_q": [0, 1]}, "packed documents"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_are_refused(name):
    given, reason = REFUSED[name]
    x = case(**given)
    assert reason in decode.unsupported(*x[:5], x.layout, *x.sizes.values())
    with pytest.raises(ValueError, match=reason):
        attend(x)


def test_pages_with_masks_or_origins_are_refused_and_others_are_not():
    x = in_pages(case(keys=64))
    assert decode.unsupported(*x[:5], x.layout, *x.sizes.values()) is None
    for other in (
        {"key_mask": torch.ones(1, 64, dtype=torch.bool)},
        {"block_origin": torch.tensor([0])},
    ):
        layout = x.layout._replace(**other)
        assert "gathered first" in decode.unsupported(*x[:5], layout, *x.sizes.values())


def test_scales_that_are_not_positive_are_refused():
    with pytest.raises(ValueError, match="scale"):
        attend(case(), scale=0.0)


# The op


@pytest.mark.parametrize(("paged", "local"), [(False, "inside"), (True, "union")])
def test_ops_choose_and_attend_alike(paged, local):
    """The select op, the fused op and a recorded call choose by the same kernels."""
    x = case(batch=2, queries=3, keys=96, local=local, kv_len=[90, 33])
    x = in_pages(x) if paged else x
    got = accelerated.msa_attention(*x[:5], x.layout, **x.sizes)
    assert same_bits(got, attend(x))
    lists = accelerated.msa_select(x.iq, x.ik, x.layout, **x.sizes)
    chosen = decode_choice.choose(x.iq, x.ik, x.layout, **x.sizes)
    assert torch.equal(lists, chosen)
    with record_selection() as recorded:
        accelerated.msa_attention(*x[:5], x.layout, **x.sizes)
    with replay_selection(recorded):
        again = accelerated.msa_attention(*x[:5], x.layout, **x.sizes)
    assert error(again[0], got[0]) < 1e-6 and error(again[1], got[1]) < 1e-6


def test_packed_documents_are_chosen_by_other_kernels():
    x = case(batch=1, queries=3, cu_seqlens_q=[0, 3], cu_seqlens_k=[0, 100])
    assert decode.chooser(x.iq, x.ik, x.layout, *x.sizes.values()) is None
    assert accelerated.msa_select(x.iq, x.ik, x.layout, **x.sizes).shape == (1, 2, 3, 3)
