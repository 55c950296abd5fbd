"""The index kernels on a GPU, against the reference in float64."""

from __future__ import annotations

import math

import pytest
import torch

from sparsify.kernels import reference
from sparsify.kernels.layout import Layout
from tests._util.index_lists import Keys, assert_choice, by_last_bits, chosen, index_of, inputs

DEVICE = "cuda"
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
BLOCK, TOPK, KEYS, SIZE = 128, 16, 8195, 128
DIFFERING = 1e-3  # of the rows, by rounding
EIGHT_BITS = (
    2**-11
)  # what tensor cores may lose of a sum of eight-bit products, of its largest term
LOCAL = ("inside", "union")
NAN, INF = math.nan, math.inf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PATHS = ["triton"]
if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    PATHS.append("gluon")


def base(**sizes):
    """Tensors of the shape that most tests share."""
    given = {"groups": 4, "queries": 1030, "keys": KEYS, "size": SIZE, "dtype": BF16} | sizes
    kind = given.pop("dtype")
    x = inputs(**given, dtype=FP16 if kind == FP8 else kind, device=DEVICE)
    return Keys(*(t.to(kind) for t in x))


def check(x, block=BLOCK, topk=TOPK, local="inside", **options):
    got = chosen(x, block, topk, local, **options)
    layout = options.get("layout")
    assert_choice(got, x, block, topk, local, layout=layout, differing=DIFFERING)
    return got


def tensor(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("force", PATHS)
@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("shared", [True, False])
def test_both_kernels(shared, local, force):
    check(base(shared=shared), local=local, force=force)


@pytest.mark.parametrize("force", PATHS)
@pytest.mark.parametrize(("dtype", "size"), [(BF16, 64), (FP16, 128)])
def test_sizes_of_the_hopper_kernel(dtype, size, force):
    check(base(size=size, dtype=dtype, batch=2, queries=300), force=force)


@pytest.mark.parametrize("groups", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("force", PATHS)
def test_groups(groups, force):
    check(base(groups=groups, queries=333), force=force)


@pytest.mark.parametrize("force", PATHS)
def test_a_whole_prefill(force):
    check(base(queries=None, groups=2), force=force)


@pytest.mark.parametrize(("size", "dtype"), [(32, BF16), (80, FP16), (256, BF16), (128, FP32)])
def test_other_sizes(size, dtype):
    check(base(size=size, dtype=dtype, queries=200))


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize(
    ("block", "topk"), [(16, 8), (24, 4), (32, 16), (64, 16), (96, 5), (200, 3), (256, 8)]
)
def test_blocks(block, topk, local):
    check(base(queries=600), block, topk, local)


@pytest.mark.parametrize("topk", [1, 2, 8, 9, 17, 40, 1000])
def test_places(topk):
    check(base(queries=300), topk=topk)
    check(base(queries=300), topk=topk, local="union")


@pytest.mark.parametrize("queries", [1, 5, 16, 17, 64, 129])
def test_queries_at_the_end(queries):
    check(base(queries=queries))


@pytest.mark.parametrize("keys", [1, 127, 128, 129, BLOCK * TOPK - 1, BLOCK * TOPK + 1])
def test_lengths_around_the_borders(keys):
    check(base(queries=None, keys=keys))


# Eight bits


def scores_of(x, block=BLOCK):
    """Block scores in float64 `[B, G, T, N]`, and the largest sum of absolute terms of each row."""
    iq, ik = x.iq.double(), x.ik.double()
    blocks = ik.shape[2] // block
    ik = ik[:, :, : blocks * block]
    dots = (iq @ ik.mT).unflatten(-1, (blocks, block)).amax(-1)
    return dots, (iq.abs() @ ik.abs().mT).amax(-1)


@pytest.mark.parametrize("force", PATHS)
@pytest.mark.parametrize("size", [64, 128])
def test_eight_bits_lose_near_ties_alone(size, force):
    """The worst block that is chosen is hardly worse than the best one that is not."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("eight bits are multiplied as sixteen here")
    x = base(dtype=FP8, size=size, queries=500, keys=8192)
    got = chosen(x, BLOCK, TOPK, force=force)
    scores, sizes = scores_of(x)
    numbers = torch.arange(64, device=DEVICE)
    own = (torch.arange(8192 - 500, 8192, device=DEVICE) // BLOCK)[:, None]
    named = (got[..., None] == numbers).any(-2)
    assert bool((named.sum(-1) == TOPK).all()) and bool(
        named.gather(-1, own.expand(1, 4, -1, -1)).all()
    )
    past = numbers < own
    worst = scores.masked_fill(~(named & past), INF).amin(-1)
    best = scores.masked_fill(named | ~past, -INF).amax(-1)
    assert bool((best - worst <= EIGHT_BITS * sizes).all())
    exact = reference.msa_select(x.iq.float(), x.ik.float(), Layout(), block_size=BLOCK, topk=TOPK)
    assert float((got != exact).any(-1).float().mean()) <= 0.1


def test_eight_bits_of_whole_numbers_are_exact():
    x = base(dtype=FP16, queries=500)
    x = Keys(*(t.clamp(-1, 1).round().to(FP8) for t in x))
    got = chosen(x, BLOCK, TOPK)
    assert_choice(got, x, BLOCK, TOPK)


# Ranks


@pytest.mark.parametrize("force", PATHS)
@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("topk", [4, TOPK, 30])
def test_many_equal_scores_are_ranked_by_the_rule(topk, local, force):
    """Products of small whole numbers are exact, so every row must agree."""
    x = base(queries=700)
    x = Keys(*(t.clamp(-1, 1).round() for t in x))
    assert_choice(chosen(x, BLOCK, topk, local, force=force), x, BLOCK, topk, local)


@pytest.mark.parametrize("force", PATHS)
def test_all_scores_equal(force):
    x = base(queries=300)
    x.ik.fill_(1.0)
    got = chosen(x, BLOCK, TOPK, force=force)
    wanted = [*range(TOPK - 1), (KEYS - 1) // BLOCK]
    assert got[0, 0, -1].tolist() == wanted
    assert_choice(got, x, BLOCK, TOPK)


@pytest.mark.parametrize("force", PATHS)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("topk", [4, 100])
def test_keys_and_queries_that_are_not_finite(topk, value, force):
    x = base(queries=300)
    x.ik[0, 0, 700, 5] = value
    x.ik[0, 0, 2000:2100, 7] = value
    x.iq[0, 1, 9, 3] = value
    check(x, topk=topk, force=force)


@pytest.mark.parametrize("force", PATHS)
@pytest.mark.parametrize("local", LOCAL)
def test_later_keys_have_no_effect(local, force):
    x = base(queries=None, keys=3001, groups=2)
    before = chosen(x, BLOCK, TOPK, local, force=force)
    x.ik[:, :, 1500:] = NAN
    after = chosen(x, BLOCK, TOPK, local, force=force)
    assert torch.equal(before[:, :, :1500], after[:, :, :1500])


# Layouts


def layouts():
    at = torch.arange(KEYS, device=DEVICE)
    return {
        "lengths": {
            "kv_len": tensor([KEYS, 3003]),
            "q_start": tensor([KEYS - 650, 2000]),
            "block_origin": tensor([0, 77]),
        },
        "documents": {"cu_seqlens_q": tensor([0, 700, 700, 1801, KEYS - 40, KEYS])},
        "left padding": {"key_mask": at[None] >= tensor([[0], [333]])},
        "holes": {"key_mask": (at % 301 > 30)[None].repeat(2, 1)},
    }


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("topk", [TOPK, 20])
@pytest.mark.parametrize("name", ["lengths", "documents", "left padding", "holes"])
def test_layouts(name, topk, local):
    layout = Layout(**layouts()[name])
    batch, queries = (1, None) if name == "documents" else (2, 650)
    x = base(batch=batch, queries=queries, groups=2)
    check(x, topk=topk, local=local, layout=layout)


def test_hidden_keys_have_no_effect():
    layout = Layout(**layouts()["holes"])
    x = base(batch=2, queries=300)
    before = chosen(x, BLOCK, TOPK, layout=layout)
    x.ik.masked_fill_(~layout.key_mask[:, None, :, None], NAN)
    assert torch.equal(before, chosen(x, BLOCK, TOPK, layout=layout))


# Queries in float32, as the proxy has them, against keys of 16 bits


def proxy(dtype=BF16, **sizes):
    """Random index tensors, with a key head for each group."""
    x = base(**({"dtype": FP32, "shared": False} | sizes))
    return Keys(x.iq, x.ik.to(dtype))


@pytest.mark.parametrize("force", PATHS)
@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_float32_queries(dtype, local, force):
    check(proxy(dtype), local=local, force=force)


@pytest.mark.parametrize(("block", "size"), [(64, 128), (96, 80), (128, 64), (256, 256)])
def test_sizes_with_float32_queries(block, size):
    check(proxy(size=size, queries=300), block, 5)


@pytest.mark.parametrize("force", PATHS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_last_bits_of_float32_queries_count(dtype, force):
    """One number of a query ranks each block; without the last term, otherwise."""
    x, coarse = by_last_bits(dtype, blocks=SIZE, size=SIZE, block=BLOCK, queries=100, device=DEVICE)
    sizes = {"block_size": BLOCK, "topk": TOPK}
    wanted = reference.msa_select(*x, Layout(), **sizes)
    assert torch.equal(chosen(x, BLOCK, TOPK, force=force), wanted)
    assert not torch.equal(reference.msa_select(*coarse, Layout(), **sizes), wanted)


@pytest.mark.parametrize("force", PATHS)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_numbers_that_are_not_finite_with_float32_queries(dtype, value, force):
    x = proxy(dtype, queries=300)
    x.ik[0, 0, 700, 5] = value
    x.ik[0, 1, 2000:2100, 7] = value
    check(x, topk=4, force=force)
    x.iq[0, 1, 9, 3] = value
    check(x, topk=100, force=force)


@pytest.mark.parametrize("force", PATHS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_chunks_of_float32_queries_choose_as_the_whole(dtype, force):
    x = proxy(dtype, batch=2, keys=8192)
    index, _ = index_of(x, BLOCK, TOPK, force=force)
    whole = index.all_rows().flatten(0, 1)
    for group, groups, first, count in [(0, 8, 1, 999), (7, 1, 1029, 1)]:
        rows, _ = index.rows(group, groups, first, count)
        assert torch.equal(rows, whole[group : group + groups, first : first + count])
    few = chosen(Keys(x.iq[:, :, -7:].contiguous(), x.ik), BLOCK, TOPK)
    assert torch.equal(few, chosen(x, BLOCK, TOPK)[:, :, -7:])


def test_both_kernels_choose_alike_with_float32_queries():
    if len(PATHS) < 2:
        pytest.skip("there is one kernel only")
    for dtype in (BF16, FP16):
        x = proxy(dtype, queries=2000, keys=8192)
        a, b = (chosen(x, BLOCK, TOPK, force=force) for force in PATHS)
        assert torch.equal(a, b)


def test_keys_are_not_copied_for_float32_queries():
    x = proxy(queries=500, keys=65_536)
    index, _ = index_of(x, BLOCK, TOPK, workspace_bytes=4 << 20)
    assert index.ik is x.ik
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    index.all_rows()
    keys_bytes = x.ik.numel() * x.ik.element_size()
    assert torch.cuda.max_memory_allocated() - before < keys_bytes // 2


# The same bits, whatever is done beside


@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize("local", LOCAL)
def test_both_kernels_choose_alike(local, dtype):
    """They use the same instructions in the same order."""
    if len(PATHS) < 2:
        pytest.skip("there is one kernel only")
    x = base(dtype=dtype, queries=2000, keys=8192)
    a, b = (chosen(x, BLOCK, TOPK, local, force=force) for force in PATHS)
    assert torch.equal(a, b)


@pytest.mark.parametrize("force", PATHS)
@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize("shared", [True, False])
def test_chunks_and_workspaces_change_nothing(shared, dtype, force):
    x = base(batch=2, dtype=dtype, shared=shared, keys=8192)
    index, _ = index_of(x, BLOCK, TOPK, force=force)
    whole = index.all_rows().flatten(0, 1)
    assert torch.equal(whole, index.all_rows().flatten(0, 1))
    for group, groups, first, count in [(0, 8, 1, 999), (3, 4, 517, 70), (7, 1, 1029, 1)]:
        rows, _ = index.rows(group, groups, first, count)
        assert torch.equal(rows, whole[group : group + groups, first : first + count])
    small, _ = index_of(x, BLOCK, TOPK, force=force, workspace_bytes=1 << 20)
    assert torch.equal(small.all_rows().flatten(0, 1), whole)


@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_few_queries_choose_as_many_do(dtype):
    """Few queries take other tiles."""
    x = base(dtype=dtype, keys=8192)
    whole = chosen(x, BLOCK, TOPK)
    few = chosen(Keys(x.iq[:, :, -7:].contiguous(), x.ik), BLOCK, TOPK)
    assert torch.equal(few, whole[:, :, -7:])


def test_a_row_does_not_depend_on_its_batch():
    x = base(batch=3, queries=500)
    whole = chosen(x, BLOCK, TOPK)
    one = chosen(Keys(x.iq[1:2], x.ik[1:2]), BLOCK, TOPK)
    assert torch.equal(one, whole[1:2])


@pytest.mark.parametrize("force", PATHS)
def test_strides_as_they_come(force):
    x = base(batch=2, queries=500, shared=False)
    plain = chosen(x, BLOCK, TOPK, force=force)
    turned = Keys(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in x))
    assert torch.equal(chosen(turned, BLOCK, TOPK, force=force), plain)


@pytest.mark.parametrize("force", PATHS)
def test_a_graph_replays_the_choice(force):
    x = base(queries=500)
    index, _ = index_of(x, BLOCK, TOPK, force=force)
    wanted = index.all_rows()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = index.all_rows()
    got.zero_()
    graph.replay()
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("force", PATHS)
def test_many_blocks(force):
    """Sums of scores' offsets, several chunks, many segments."""
    x = base(queries=600, keys=262_144 + 5, groups=4)
    got = chosen(x, BLOCK, TOPK, force=force, workspace_bytes=32 << 20)
    part = Keys(x.iq[:, :, -40:], x.ik)
    assert_choice(got[:, :, -40:], part, BLOCK, TOPK, differing=0.02)
