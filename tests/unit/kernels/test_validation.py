"""Wrong arguments are refused by name, with what was given and what is expected."""

from __future__ import annotations

import pytest
import torch

from sparsify.kernels import schemas
from tests._util.ops import make


def base(kind="proxy"):
    return make(kind, batch=2, queries=3, keys=10, dtype=torch.float32)


SIZES = {"block_size": 4, "topk": 2}
INTS = torch.tensor([1, 2], dtype=torch.int32)
MASK = torch.ones(2, 10, dtype=torch.bool)


def moba(**changes):
    case = {n: x for n, x in base().items() if n in ("q", "k", "v")}
    return schemas.moba_attention(**{**case, **SIZES, **changes})


def msa(**changes):
    return schemas.msa_attention(**{**base(), **SIZES, **changes})


def blocks(**changes):
    case = {n: x for n, x in base().items() if n in ("q", "k", "v")}
    lists = torch.zeros(2, 4, 3, 2, dtype=torch.int32)
    return schemas.block_attention(**{**case, "blocks": lists, "block_size": 4, **changes})


def t(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


WRONG = [
    (moba, {"q": t(4, 3, 6)}, r"q has shape \[4, 3, 6\]; expected \[B, H, T, D\]"),
    (moba, {"k": t(2, 2, 10, 6, 1)}, r"k has shape .* expected \[B, G, S, D\]"),
    (moba, {"v": t(2, 10, 5)}, r"v has shape .* expected \[B, G, S, V\]"),
    (moba, {"q": t(2, 3, 3, 6)}, "q has 3 heads and k has 2; the first must be a multiple"),
    (moba, {"q": t(2, 1, 3, 6)}, "q has 1 heads and k has 2"),
    (moba, {"k": t(2, 0, 10, 6), "v": t(2, 0, 10, 5)}, "q has 4 heads and k has 0"),
    (moba, {"q": t(3, 4, 3, 6)}, "k has batch size 2; expected 3 of q"),
    (moba, {"q": t(2, 4, 3, 7)}, "k has head size 6; expected 7 of q"),
    (moba, {"q": t(2, 4, 3, 0), "k": t(2, 2, 10, 0)}, "q has head size 0"),
    (moba, {"v": t(2, 1, 10, 5)}, "v has head count 1; expected 2 of k"),
    (moba, {"v": t(2, 2, 9, 5)}, "v has length 9; expected 10 of k"),
    (
        moba,
        {"k": t(2, 2, 10, 6, dtype=torch.float64)},
        "k has dtype torch.float64; expected torch.f",
    ),
    (moba, {"v": t(2, 2, 10, 5, dtype=torch.float16)}, "v has dtype torch.float16; expected"),
    (moba, {"q": t(2, 4, 3, 6, dtype=torch.int64)}, "q has dtype torch.int64; expected float16"),
    (moba, {"block_size": 0}, "block_size is 0; expected a whole number of at least 1"),
    (moba, {"topk": 0}, "topk is 0; expected a whole number of at least 1"),
    (moba, {"topk": -3}, "topk is -3"),
    (
        moba,
        {"q_start": t(3, dtype=torch.int32)},
        r"q_start has length 3; expected 2 \(batch size\)",
    ),
    (moba, {"q_start": t(2)}, "q_start has dtype torch.float32; expected int32 or int64"),
    (moba, {"kv_len": t(2, 1, dtype=torch.int32)}, r"kv_len has shape \[2, 1\]; expected \[B\]"),
    (
        moba,
        {"kv_len": torch.tensor([3, 11])},
        "kv_len is 11 for sequence 1, which has 10 key slots",
    ),
    (moba, {"block_origin": torch.tensor([0, -1])}, "block_origin is -1 for sequence 1"),
    (moba, {"key_mask": MASK.int()}, "key_mask has dtype torch.int32; expected torch.bool"),
    (moba, {"key_mask": MASK[:, :9]}, r"key_mask has length 9; expected 10 \(key slots\)"),
    (moba, {"key_mask": MASK[:1]}, "key_mask has batch size 1; expected 2 of the queries"),
    (moba, {"key_mask": MASK[:, None, None]}, r"key_mask has shape .* expected \[B, S\]"),
    (moba, {"cu_seqlens_q": INTS}, "cu_seqlens_q is given for batch size 2; expected 1"),
    (moba, {"cu_seqlens_k": INTS}, "cu_seqlens_k is given without cu_seqlens_q"),
    (moba, {"block_means": t(2, 2, 2, 6)}, "block_means holds 2 blocks; expected at least 3"),
    (moba, {"block_means": t(2, 4, 3, 6)}, "block_means has head count 4; expected 2 of k"),
    (moba, {"block_means": t(2, 2, 3, 5)}, "block_means has head size 5; expected 6 of k"),
    (moba, {"page_table": t(2, 3, dtype=torch.int32)}, r"k has page size 10; expected 4"),
    (moba, {"page_table": t(2, 3)}, "page_table has dtype torch.float32; expected int32 or int64"),
    (msa, {"iq": t(2, 4, 3, 4)}, "ik has 2 heads; expected 1"),
    (msa, {"iq": t(2, 1, 3, 4), "ik": t(2, 1, 10, 4)}, "iq has head count 1; expected 2 of k"),
    (msa, {"ik": t(2, 3, 10, 4)}, r"ik has 3 heads; expected 1 \(shared\) or 2"),
    (msa, {"ik": t(2, 1, 9, 4)}, "ik has length 9; expected 10 of k"),
    (msa, {"iq": t(2, 2, 2, 4)}, "iq has length 2; expected 3 of q"),
    (msa, {"iq": t(2, 2, 3, 5)}, "ik has head size 4; expected 5 of iq"),
    (
        msa,
        {"iq": t(2, 2, 3, 4, dtype=torch.int32)},
        "iq has dtype torch.int32; expected a floating",
    ),
    (msa, {"local": "both"}, 'local is \'both\'; expected "inside" or "union"'),
    (blocks, {"blocks": t(2, 4, 3, 2)}, "blocks has dtype torch.float32; expected torch.int32"),
    (blocks, {"blocks": t(2, 3, 3, 2, dtype=torch.int32)}, "blocks has 3 heads; expected 4"),
    (blocks, {"blocks": t(2, 4, 2, 2, dtype=torch.int32)}, "blocks has length 2; expected 3 of q"),
    (
        blocks,
        {"blocks": t(2, 4, 3, dtype=torch.int32)},
        r"blocks has shape .* expected \[B, H or G",
    ),
]


@pytest.mark.parametrize(("op", "changes", "message"), WRONG, ids=[m[:40] for _, _, m in WRONG])
def test_wrong_arguments_are_named(op, changes, message):
    with pytest.raises(ValueError, match=message):
        op(**changes)


@pytest.mark.parametrize("op", [moba, msa, blocks])
def test_right_arguments_pass(op):
    out, lse = op()
    assert out.shape == (2, 4, 3, 5)
    assert lse.shape == (2, 4, 3)


@pytest.mark.parametrize("name", ["block_size", "topk"])
@pytest.mark.parametrize("value", [2.5, 4.0, True, "4", None])
def test_sizes_that_are_no_whole_numbers_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        moba(**{name: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), True])
@pytest.mark.parametrize("op", [moba, msa, blocks])
def test_scales_that_are_not_finite_are_refused(op, value):
    with pytest.raises(ValueError, match=r"scale is .*; expected a finite number"):
        op(scale=value)


@pytest.mark.parametrize("value", [None, 0.0, -0.5, 1])
def test_finite_scales_are_accepted(value):
    out, _ = moba(scale=value)
    assert out.isfinite().all()


def test_packing_excludes_pages_and_means():
    case = make(batch=1, queries=8, keys=8, dtype=torch.float32)
    qkv = (case["q"], case["k"], case["v"])
    edges = torch.tensor([0, 8])
    with pytest.raises(ValueError, match="block_means and cu_seqlens_q are both given"):
        schemas.moba_attention(*qkv, cu_seqlens_q=edges, block_means=t(1, 2, 2, 6), **SIZES)
    with pytest.raises(ValueError, match="page_table and cu_seqlens_q are both given"):
        table = t(1, 1, dtype=torch.int32)
        sizes = {"block_size": 8, "topk": 2}
        schemas.moba_attention(*qkv, cu_seqlens_q=edges, page_table=table, **sizes)
    with pytest.raises(ValueError, match="cu_seqlens_k has length 3; expected 2"):
        schemas.moba_attention(
            *qkv, cu_seqlens_q=edges, cu_seqlens_k=torch.tensor([0, 1, 8]), **SIZES
        )


def test_index_dtypes_may_differ():
    case = base()
    msa(iq=case["iq"].float(), ik=case["ik"].bfloat16())


def test_other_devices_are_refused():
    case = base()
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match="meta"):
        moba(k=case["k"].to("meta"))


@pytest.mark.parametrize("name", ["q_start", "kv_len", "block_origin"])
def test_layouts_on_other_devices_are_refused(name):
    vector = torch.zeros(base()["q"].shape[0], dtype=torch.long)
    moba(**{name: vector})
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match="meta"):
        moba(**{name: vector.to("meta")})
