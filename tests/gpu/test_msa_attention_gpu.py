"""MSA's attention on a GPU: lists that the heads of a group share, against the float64 reference.

Kernels are compiled per shape, which costs more time than running them: most tests share the shape
of `base`, and lengths that 16 does not divide.
"""

from __future__ import annotations

import math

import pytest
import torch

from sparsify.kernels import accelerated, lists, reference, schemas
from sparsify.kernels.attend import forward, shared_hopper
from sparsify.kernels.layout import Layout
from sparsify.kernels.placement import place
from sparsify.kernels.selection import record_selection, replay_selection
from tests._util.parity import Inputs, assert_attention, error, expected, inputs, same_bits

DEVICE = "cuda"
BLOCK, PLACES, KEYS = 128, 16, 4611
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN, INF = math.nan, math.inf
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("kernels_alone"),
]
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs an sm_90 device")


def base(**sizes):
    """Tensors of the shape that most tests share, as projections leave them."""
    given = {"heads": 32, "groups": 2, "keys": KEYS, "size": 128, "dtype": BF16} | sizes
    x = inputs(**given, device=DEVICE)
    return Inputs(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in x))


def chosen(x, block=BLOCK, places=PLACES, seed=0):
    """For every group and query, past blocks by chance and the own block; ascending, -1 behind."""
    batch, _, queries, _ = x.q.shape
    groups, keys = x.k.shape[1], x.k.shape[2]
    generator = torch.Generator().manual_seed(seed)
    own = (torch.arange(keys - queries, keys) // block)[None, None, :, None]
    ranks = torch.rand(batch, groups, queries, -(-keys // block), generator=generator)
    numbers = torch.arange(ranks.shape[-1])
    ranks = ranks.masked_fill(numbers >= own, -1.0)
    best = ranks.topk(min(places - 1, ranks.shape[-1]), -1)
    none = 2**31 - 1
    rows = torch.where(best.values >= 0, best.indices, none)
    rows = torch.cat([rows, own.expand(batch, groups, -1, -1)], -1).sort(-1).values
    return torch.where(rows == none, -1, rows).int().to(DEVICE)


def attend(x, rows, block=BLOCK, *, force=None, layout=None, workspace_bytes=2 << 30):
    """By the kernel that is asked for."""
    shape = forward.shape_of(*x, block, None, x.q.shape[1] // rows.shape[1])
    placement = place(layout or Layout(), x.q.shape[0], x.q.shape[2], x.k.shape[2], block)
    given = lists.Given(rows, placement, block)
    return forward.sparse(*x, placement, shape, given, workspace_bytes, force)


def listed(x, rows, block=BLOCK, **options):
    return schemas.block_attention(*x, rows, block_size=block, **options)


def check(x, block=BLOCK, places=PLACES, rows=None, layout=None):
    rows = chosen(x, block, places) if rows is None else rows
    got = listed(x, rows, block, **(layout or Layout())._asdict())
    assert_attention(got, rows, x, block, layout=layout)
    return got


# Parity


@pytest.mark.parametrize(("heads", "groups"), [(32, 2), (8, 4), (14, 2), (8, 1), (24, 1), (64, 1)])
def test_shares(heads, groups):
    check(base(heads=heads, groups=groups))


@pytest.mark.parametrize("block", [16, 32, 64, 96, 256, 512, 2048])
def test_blocks(block):
    check(base(), block, 4)


@pytest.mark.parametrize(
    ("size", "value_size"), [(64, 64), (80, 80), (192, 128), (256, 256), (128, 64), (64, 128)]
)
def test_head_sizes(size, value_size):
    check(base(size=size, value_size=value_size))


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_dtypes(dtype):
    check(base(dtype=dtype, heads=16, groups=1, keys=2051))


@pytest.mark.parametrize("queries", [1, 5, 32, 33, 700])
def test_queries_at_the_end(queries):
    check(base(queries=queries))


@pytest.mark.parametrize("keys", [127, 129, 2047, 2049])
def test_lengths_around_the_borders(keys):
    check(base(keys=keys))


def test_batch():
    check(base(batch=3, keys=1027))


def layouts():
    at = torch.arange(KEYS, device=DEVICE)

    def tensor(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    return {
        "lengths": {
            "kv_len": tensor([KEYS, 3003]),
            "q_start": tensor([KEYS - 650, 2000]),
            "block_origin": tensor([0, 77]),
        },
        "documents": {"cu_seqlens_q": tensor([0, 700, 700, 1801, KEYS - 40, KEYS])},
        "holes": {"key_mask": (at % 301 > 30)[None].repeat(2, 1)},
    }


@pytest.mark.parametrize("name", ["lengths", "documents", "holes"])
def test_layouts(name):
    batch, queries = (1, None) if name == "documents" else (2, 650)
    x = base(batch=batch, queries=queries)
    generator = torch.Generator().manual_seed(0)
    shape = (batch, 2, x.q.shape[2], PLACES)
    rows = torch.randint(-2, 37, shape, generator=generator, dtype=torch.int32).to(DEVICE)
    check(x, rows=rows, layout=Layout(**layouts()[name]))


def test_offsets_beyond_two_to_the_31():
    """Keys of a batch row that lies more than 2^31 elements behind the first."""
    x = base(batch=2, keys=515, heads=16, groups=1)
    far = 2**31 + 2**12
    buffer = torch.empty(far + x.k[0].numel(), dtype=BF16, device=DEVICE)
    k = buffer.as_strided(x.k.shape, (far, 128, 128, 1)).copy_(x.k)
    check(x._replace(k=k))


# The warp-specialised kernel


def test_what_runs_a_call_can_be_asked():
    x = base()
    shape = forward.shape_of(*x, BLOCK, None, 16)
    placement = place(Layout(), 1, KEYS, KEYS, BLOCK)
    assert forward.path(*x, placement, shape) == ("shared gluon" if HOPPER else "triton")
    assert forward.path(*x, placement, shape._replace(share=8)) == "triton"


@needs_hopper
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("keys", [300, 1027, 8192])
def test_gluon_and_triton_answer_to_the_reference(dtype, keys):
    x = base(keys=keys, dtype=dtype)
    rows = chosen(x)
    for force in ("gluon", "triton"):
        assert_attention(attend(x, rows, force=force), rows, x, BLOCK)


@needs_hopper
@pytest.mark.parametrize("heads_first", [True, False])
def test_gluon_takes_both_orders_of_axes(heads_first):
    x = base(batch=2, keys=1027, heads=64, groups=4)
    if heads_first:
        x = Inputs(*(t.contiguous() for t in x))
    rows = chosen(x)
    assert_attention(attend(x, rows, force="gluon"), rows, x, BLOCK)


@needs_hopper
def test_gluon_at_a_block_that_every_query_chose():
    """Many work items of one block; the last one is no whole tile."""
    x = base(keys=3001)
    rows = chosen(x, places=3)
    own = rows.amax(-1, keepdim=True)
    rows = torch.cat([torch.zeros_like(own), own], -1)
    assert_attention(attend(x, rows, force="gluon"), rows, x, BLOCK)


@needs_hopper
def test_gluon_by_few_and_by_many_work_items():
    """Fewer items than multiprocessors, and items that come round many times."""
    for queries, keys in ((33, 600), (4096, 20_000)):
        x = base(queries=queries, keys=keys)
        rows = chosen(x)
        assert_attention(attend(x, rows, force="gluon"), rows, x, BLOCK)


@needs_hopper
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("name", ["k", "v"])
def test_gluon_reads_no_block_that_was_not_chosen(name, value):
    x = base(keys=2048)
    rows = chosen(x, places=4)
    rows = torch.where(rows == 5, -1, rows)
    clean = attend(x, rows, force="gluon")
    getattr(x, name)[:, :, 5 * BLOCK : 6 * BLOCK] = value
    got = attend(x, rows, force="gluon")
    seen = torch.arange(2048, device=DEVICE) // BLOCK != 5
    assert same_bits([t[:, :, seen] for t in got], [t[:, :, seen] for t in clean])


@needs_hopper
def test_gluon_rows_without_a_finite_logit_give_nothing():
    x = base(keys=1027)
    x.q.abs_()
    x.k[..., 0] = -INF
    out, lse = attend(x, chosen(x), force="gluon")
    assert not bool(out.any()) and bool((lse == -INF).all())


# The same bits, whatever lies around


@pytest.mark.parametrize("force", ["triton", pytest.param("gluon", marks=needs_hopper)])
def test_determinism_and_slices(force):
    x = base(batch=2)
    rows = chosen(x)
    whole = attend(x, rows, force=force)
    for workspace_bytes in (2 << 30, 300 << 20, 20 << 20):
        got = attend(x, rows, force=force, workspace_bytes=workspace_bytes)
        assert same_bits(got, whole)


@pytest.mark.parametrize("force", ["triton", pytest.param("gluon", marks=needs_hopper)])
def test_rows_do_not_depend_on_their_neighbours(force):
    x = base(batch=2)
    rows = chosen(x)
    whole = attend(x, rows, force=force)
    part = Inputs(x.q[1:, :, 1001:], x.k[1:], x.v[1:])
    got = attend(part, rows[1:, :, 1001:].contiguous(), force=force)
    assert same_bits(got, [t[1:, :, 1001:] for t in whole])


@pytest.mark.parametrize("force", ["triton", pytest.param("gluon", marks=needs_hopper)])
def test_scratch_memory_is_never_read_unwritten_nor_overrun(force, monkeypatch):
    x = base()
    rows = chosen(x)
    clean = attend(x, rows, force=force)
    made, band = [], 512
    real = torch.Tensor.new_empty

    def new_empty(tensor, *size, dtype=None, **further):
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        dtype = dtype or tensor.dtype
        count = math.prod(shape)
        buffer = real(tensor, (count + 2 * band,), dtype=dtype, **further)
        buffer.fill_(NAN if dtype.is_floating_point else 3)
        made.append((buffer, count))
        return buffer[band : band + count].view(tuple(shape))

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    got = attend(x, rows, force=force)
    torch.cuda.synchronize()
    monkeypatch.undo()
    assert same_bits(got, clean)
    for buffer, count in made:
        for part in (buffer[:band], buffer[band + count :]):
            fine = part.isnan() if buffer.dtype.is_floating_point else part == 3
            assert bool(fine.all())


@pytest.mark.parametrize("queries", [5, KEYS])
def test_captured_graphs(queries):
    """A graph replays with other numbers and other lists."""
    x = base(queries=queries)
    rows = chosen(x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            listed(x, rows)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = listed(x, rows)
    for seed in (1, 2):
        other = base(queries=queries, seed=seed)
        for mine, theirs in zip(x, other, strict=True):
            mine.copy_(theirs)
        rows.copy_(chosen(x, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        assert_attention(got, rows, x, BLOCK)


# The fused op


def index_of(x, heads=1, seed=7):
    one = inputs(
        batch=x.q.shape[0],
        heads=x.k.shape[1],
        groups=heads,
        queries=x.q.shape[2],
        keys=x.k.shape[2],
        size=128,
        dtype=BF16,
        device=DEVICE,
        seed=seed,
    )
    return one.q, one.k


SIZES = {"block_size": BLOCK, "topk": PLACES}


@pytest.mark.parametrize("local", ["inside", "union"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("queries", [20, 700, 8192])
def test_fused(local, heads, queries):
    """At 8K tokens, output and choice: the choice of the op is that of the select op."""
    x = base(keys=8192, queries=queries)
    index = index_of(x, heads)
    rows = schemas.msa_select(*index, **SIZES, local=local)
    got = schemas.msa_attention(*x, *index, **SIZES, local=local)
    assert_attention(got, rows, x, BLOCK)


def test_dense():
    x = base(keys=2000)
    got = schemas.msa_attention(*x, *index_of(x), block_size=BLOCK, topk=16)
    rows = torch.arange(16, dtype=torch.int32, device=DEVICE).expand(1, 2, 2000, 16).contiguous()
    assert_attention(got, rows, x, BLOCK)


def test_recorded_and_replayed():
    x = base(queries=700)
    index = index_of(x)
    with record_selection() as kept:
        clean = schemas.msa_attention(*x, *index, **SIZES)
    other = (-index[0], index[1])
    with replay_selection(kept):
        got = schemas.msa_attention(*x, *other, **SIZES)
    assert same_bits(got, clean)
    assert not same_bits(schemas.msa_attention(*x, *other, **SIZES), clean)


def test_gradients():
    x = base(keys=1500, heads=16, groups=1)
    index = index_of(x)
    rows = schemas.msa_select(*index, **SIZES)
    leaves = [t.clone().requires_grad_() for t in (*x, *index)]
    schemas.msa_attention(*leaves, **SIZES)[0].float().square().sum().backward()
    wide = [t.double() for t in x]
    want, want_lse = expected(rows, x, BLOCK)
    grads = reference.block_attention_backward(
        2 * want, None, *wide, rows, want, want_lse, Layout(), block_size=BLOCK
    )
    for leaf, grad in zip(leaves[:3], grads, strict=True):
        assert error(leaf.grad, grad) < 3e-2
    for leaf in leaves[3:]:
        assert leaf.grad is None or not bool(leaf.grad.any())


def test_nothing_waits_for_the_device():
    x = base(queries=700)
    index = index_of(x)
    accelerated.msa_attention(*x, *index, Layout(), **SIZES)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        accelerated.msa_attention(*x, *index, Layout(), **SIZES)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_plain_kernel_stays_when_gluon_is_gone(monkeypatch):
    monkeypatch.setattr(shared_hopper, "_kernel", lambda: None)
    check(base(keys=1027))
