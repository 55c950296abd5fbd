"""The warp-specialised kernel of shared lists: what it takes, and what the compiler makes of it."""

from __future__ import annotations

import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from sparsify.kernels import gpus
from sparsify.kernels.attend import shared_hopper
from sparsify.kernels.attend.cutting import Parts, Slice
from sparsify.kernels.attend.forward import shape_of
from sparsify.kernels.layout import Layout
from sparsify.kernels.placement import place
from sparsify.kernels.select import msa_tiles
from sparsify.kernels.select.reverse_index import ReverseIndex
from tests._util.compiling import SHARED_BYTES, compiled, launches, resources

CHOSEN, WIDTH, KEYS = 15, 16, 8192
HEADS, GROUPS = 64, 4


def tensors(dtype=torch.bfloat16, size=128, value_size=128, heads=HEADS, groups=GROUPS):
    def made(heads, size):
        return torch.empty(1, KEYS, heads, size, dtype=dtype).transpose(1, 2)

    return made(heads, size), made(groups, size), made(groups, value_size)


def launched(**sizes):
    """The launch that a call would do."""
    q, k, v = tensors(**sizes)
    shape = shape_of(q, k, v, 128, None, 16)
    numbers = torch.empty(GROUPS * KEYS * WIDTH, dtype=torch.int32)
    index = ReverseIndex(numbers, numbers.view(-1, 4), numbers[:1], 4096)
    stats = q.new_empty(GROUPS, KEYS, WIDTH, 2, 16, dtype=torch.float32)
    parts = Parts(q.new_empty(GROUPS, KEYS, CHOSEN, 16, 128), stats)
    part, placement = Slice(0, GROUPS, 0, KEYS), place(Layout(), 1, KEYS, KEYS, 128)
    with launches() as found, mock.patch.object(shared_hopper, "processors", lambda _: 132):
        shared_hopper.shared_block(q, k, v, index, parts, placement, shape, part, CHOSEN, WIDTH)
    (launch,) = found
    return launch


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_fits_an_h200_and_products_are_not_serialised(dtype):
    kernel = compiled(launched(dtype=dtype), "sm_90")
    assert kernel.metadata.shared <= SHARED_BYTES["sm_90"]
    assert resources(kernel)["stack_bytes"] == 0
    ptx = kernel.asm["ptx"]
    # Eight boxes of queries, two of keys and of values, eight of results for each of two groups.
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.4d", ptx)) == 12
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d", ptx)) == 16
    assert "wgmma.mma_async" in ptx and "setmaxnreg" in ptx
    # Two waits a group and no more: ptxas serialises products by waits of its own.
    assert kernel.asm["sass"].count("WARPGROUP.DEPBAR") == 4


def test_a_launch_tells_the_shape():
    values = launched().values
    assert (values["LISTS"], values["WIDTH"], values["CHOSEN"]) == (GROUPS, WIDTH, CHOSEN)
    assert values["q_desc"].block_shape == [1, 1, 16, 64]
    assert values["q_desc"].shape == [1, KEYS, HEADS, 128]
    assert values["k_desc"].block_shape == values["v_desc"].block_shape == [1, 1, 128, 64]
    assert values["part_desc"].shape == [GROUPS * KEYS * CHOSEN * 16, 128]


def fits(*, block=128, share=16, capability=(9, 0), layout=None, tensors_of=None, **sizes):
    q, k, v = tensors_of or tensors(**sizes)
    shape = shape_of(q, k, v, block, None, share)
    placement = place(layout or Layout(), 1, KEYS, KEYS, block)
    with mock.patch.object(shared_hopper, "is_hopper", lambda _: capability == (9, 0)):
        return shared_hopper.fits(q, k, v, placement, shape)


def test_what_it_takes():
    assert fits()
    assert fits(dtype=torch.float16)
    q, k, v = tensors()
    assert fits(tensors_of=(q.contiguous(), k.contiguous(), v))


@pytest.mark.parametrize(
    "other",
    [
        {"block": 64},
        {"share": 1},
        {"heads": 32, "share": 8},
        {"capability": (10, 0)},
        {"size": 64},
        {"value_size": 64},
        {"dtype": torch.float32},
        {"layout": Layout(key_mask=torch.ones(1, KEYS, dtype=torch.bool))},
        {"layout": Layout(kv_len=torch.tensor([KEYS - 1]))},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_it_does_not_take(other):
    assert not fits(**other)


def test_rows_that_cannot_be_fetched_in_bulk():
    q, k, v = tensors()
    shifted = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(1, KEYS, GROUPS, 128)
    for bad in (shifted.transpose(1, 2), k.mT.contiguous().mT, k[:, :1].expand_as(k)):
        assert not fits(tensors_of=(q, bad, v))
        assert not fits(tensors_of=(q, k, bad))
    assert not fits(tensors_of=(q[:, :1].expand_as(q), k, v))


def test_there_is_none_without_hopper():
    """Neither on a CPU nor on AMD's GPUs is a capability asked for."""
    assert not shared_hopper.is_hopper(torch.device("cpu"))
    with mock.patch.object(torch.version, "hip", "7.0"):
        gpus.capability.cache_clear()
        assert not shared_hopper.is_hopper(torch.device("cuda"))
    gpus.capability.cache_clear()


def test_a_triton_without_gluon_leaves_the_plain_kernel(monkeypatch):
    monkeypatch.setattr(shared_hopper, "_kernel", lambda: None)
    assert not fits()


# The barriers, simulated: both rings, three roles, any interleaving.


def simulated(items, choose):
    """Run the roles until all end; `choose` picks among those that are not waiting.

    Returns the numbers of tiles in the order of each group, or raises when all wait.
    """
    full, empty = SimpleNamespace(q=[0] * 4, kv=[0] * 2), SimpleNamespace(q=[0] * 4, kv=[0] * 2)
    arrived = [0, 0]
    held = {}
    done = ([], [])

    def passed(completions, parity):
        """What `mbarrier.wait` sees: whether the phase of that parity is over."""
        return (completions - 1) % 2 == parity

    def fetch():
        step = 0
        for turn, tiles in enumerate(items):
            at = turn % 2
            yield lambda at=at, turn=turn: passed(empty.kv[at], turn // 2 & 1 ^ 1)
            held["kv", at] = turn
            full.kv[at] += 1
            for _ in range(tiles):
                q_at = step % 4
                yield lambda q_at=q_at, step=step: passed(empty.q[q_at], step // 4 & 1 ^ 1)
                held["q", q_at] = step
                full.q[q_at] += 1
                step += 1

    def attend(side):
        before = 0
        for turn, tiles in enumerate(items):
            at = turn % 2
            yield lambda at=at, turn=turn: passed(full.kv[at], turn // 2 & 1)
            for i in range((side + before) & 1, tiles, 2):
                assert held["kv", at] == turn
                step = before + i
                q_at = step % 4
                yield lambda q_at=q_at, step=step: passed(full.q[q_at], step // 4 & 1)
                assert held["q", q_at] == step
                done[side].append(step)
                empty.q[q_at] += 1
            assert held["kv", at] == turn
            arrived[at] += 1
            if arrived[at] % 2 == 0:
                empty.kv[at] += 1
            before += tiles

    roles = [fetch(), attend(0), attend(1)]
    waits = [next(role, None) for role in roles]
    while any(waits):
        ready = [n for n, wait in enumerate(waits) if wait is not None and wait()]
        assert ready, "all roles wait"
        n = choose(ready)
        waits[n] = next(roles[n], None)
    return done


@pytest.mark.parametrize("seed", range(40))
def test_barriers_neither_block_nor_let_a_slot_be_overwritten(seed):
    generator = torch.Generator().manual_seed(seed)
    items = torch.randint(1, 8, (20,), generator=generator).tolist()
    favourite = seed % 4  # one role as fast as it can, or all by chance

    def choose(ready):
        if favourite in ready:
            return favourite
        return ready[int(torch.randint(len(ready), (1,), generator=generator))]

    done = simulated(items, choose)
    assert done == (list(range(0, sum(items), 2)), list(range(1, sum(items), 2)))


def test_a_triton_whose_gluon_changed_is_told_once(caplog):
    gpus.gluon.cache_clear()
    with caplog.at_level("WARNING"):
        assert gpus.gluon("sparsify.kernels.attend.no_such_kernel") is None
        assert gpus.gluon("sparsify.kernels.attend.no_such_kernel") is None
        assert gpus.gluon("sparsify.kernels.attend.shared_hopper_kernel") is not None
    told = [record for record in caplog.records if "plain ones run" in record.message]
    assert len(told) == 1
    gpus.gluon.cache_clear()


def test_scores_have_a_plain_kernel_without_gluon(monkeypatch):
    iq = torch.empty(1, 4, 256, 128, dtype=torch.bfloat16)
    ik = torch.empty(1, 1, 4096, 128, dtype=torch.bfloat16)
    placement = place(Layout(), 1, 256, 4096, 128)
    assert msa_tiles.fits_gluon(iq, ik, placement, 128)
    monkeypatch.setattr(msa_tiles, "gluon", lambda _: None)
    assert not msa_tiles.fits_gluon(iq, ik, placement, 128)
