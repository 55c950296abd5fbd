"""Tiles are measured on a GPU: all candidates are right, and nothing is measured unasked.

Legend: x inputs q, k and v.
"""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")

from sparsify.kernels import schemas, tuned
from sparsify.kernels.attend import tuning
from sparsify.kernels.tuned import Sizes
from tests._util.commands import run_cli
from tests._util.parity import assert_attention, inputs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCK, TOPK = 64, 4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The kernels or an error, a process that knows of no tiles, and a folder; gives the file."""
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")
    monkeypatch.setenv("SPARSIFY_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("SPARSIFY_AUTOTUNE", raising=False)
    monkeypatch.delenv("SPARSIFY_DISABLE", raising=False)
    tuned.forget()
    yield tmp_path / tuned.FILE
    tuned.forget()


@pytest.fixture
def few_candidates(monkeypatch):
    """Compiling takes the time: two shapes, two combines."""
    shapes, combines = tuning.shapes, tuning.combines
    monkeypatch.setattr(tuning, "shapes", lambda *at: list(shapes(*at))[1:3])
    monkeypatch.setattr(tuning, "combines", lambda tiles: list(combines(tiles))[:2])


@pytest.fixture
def unasked(monkeypatch):
    """Tuning is a failure."""

    def forbid():
        monkeypatch.setattr(tuning, "tune", lambda *_: pytest.fail("tuned"))

    return forbid


def base(**sizes):
    given = {"heads": 4, "groups": 2, "keys": 2115, "size": 64, "dtype": BF16} | sizes
    return inputs(**given, device="cuda")


def attend(x, block=BLOCK, topk=TOPK):
    return schemas.moba_attention(*x, block_size=block, topk=topk)


def lists_of(x, block=BLOCK, topk=TOPK):
    return schemas.moba_select(x.q, x.k, block_size=block, topk=topk)


def sizes_of(x, block=BLOCK, share=1):
    return Sizes(block, x.q.shape[-1], x.v.shape[-1], x.q.element_size(), share)


def same(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def test_nothing_is_measured_unasked(cache, unasked):
    unasked()
    x = base()
    attend(x)
    assert not tuned.is_measured(x.q.device, sizes_of(x)) and not cache.exists()


def test_a_call_that_is_asked_measures_once(cache, few_candidates, unasked, monkeypatch):
    x = base()
    monkeypatch.setenv("SPARSIFY_AUTOTUNE", "1")
    first = attend(x)
    assert_attention(first, lists_of(x), x, BLOCK)
    assert tuned.is_measured(x.q.device, sizes_of(x))
    unasked()
    assert same(attend(x), first)
    entry = json.loads(cache.read_text())["tiles"][0]
    assert entry["gpu"] == torch.cuda.get_device_name() and "2115 queries" in entry["measured"]
    tuned.forget()  # as another process
    assert same(attend(x), first)
    assert tuned.is_measured(x.q.device, sizes_of(x))


def test_a_row_does_not_depend_on_what_was_tuned_with(few_candidates, monkeypatch):
    x = base(batch=2)
    monkeypatch.setenv("SPARSIFY_AUTOTUNE", "1")
    whole = attend(x)
    alone = attend(type(x)(*(t[:1] for t in x)))
    assert same([t[:1] for t in whole], alone)


def test_lists_that_heads_share(cache, few_candidates, monkeypatch):
    x = base()
    lists = lists_of(type(x)(x.q[:, ::2], x.k, x.v))
    run = lambda: schemas.block_attention(*x, lists, block_size=BLOCK)  # noqa: E731
    assert_attention(run(), lists, x, BLOCK)
    monkeypatch.setenv("SPARSIFY_AUTOTUNE", "1")
    assert_attention(run(), lists, x, BLOCK)
    assert tuned.is_measured(x.q.device, sizes_of(x, share=2))
    assert not tuned.is_measured(x.q.device, sizes_of(x))


def test_a_capture_measures_nothing(cache, unasked, monkeypatch):
    x = base()
    wanted = attend(x)
    unasked()
    monkeypatch.setenv("SPARSIFY_AUTOTUNE", "1")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(x)
    graph.replay()
    torch.cuda.synchronize()
    assert same(got, wanted) and not cache.exists()
    assert not tuned.is_measured(x.q.device, sizes_of(x))


def test_short_calls_measure_nothing(cache, unasked, monkeypatch):
    unasked()
    monkeypatch.setenv("SPARSIFY_AUTOTUNE", "1")
    attend(base(queries=1))
    attend(base(keys=700))
    assert not cache.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "topk", "given"),
    [
        (128, 8, {"size": 128}),
        (512, 3, {"size": 96, "keys": 4099}),  # no size of the kernel that Hopper has for itself
        (512, 3, {"size": 128, "keys": 4096, "dtype": FP16}),
        (64, 4, {"size": 64, "dtype": FP32}),
        (128, 4, {"size": 256}),
    ],
)
def test_every_candidate_is_right(block, topk, given):
    """And all of the kinds that the compiler takes elsewhere run here."""
    x = base(**given)
    lists = lists_of(x, block, topk)
    sizes = sizes_of(x, block)
    attend(x, block, topk)  # compiles what tuning does not
    found = tune_by_hand(x, block, topk)
    ran = [trial for trial in found.trials if trial.ms is not None]
    assert len(ran) >= len(found.trials) / 2, [trial.why for trial in found.trials]
    assert not [trial for trial in found.trials if "another" in trial.why]
    for trial in ran:
        tuned.keep(x.q.device, sizes, trial.tiles)
        assert_attention(attend(x, block, topk), lists, x, block)


def tune_by_hand(x, block, topk):
    from sparsify.kernels.attend import forward
    from sparsify.kernels.layout import Layout
    from sparsify.kernels.placement import place
    from sparsify.kernels.select.moba import Gate

    placement = place(Layout(), x.q.shape[0], x.q.shape[2], x.k.shape[2], block)
    shape = forward.shape_of(*x, block, None)
    gate = Gate(x.q, x.k, placement, None, block, topk - 1)
    return tuning.tune(tuning.TunedSlice(*x, placement, shape, gate, 1 << 30), tuning._event_ms)


def test_the_command(cache, capsys, few_candidates):
    words = ("--shape", "heads=4/2,dim=64,block=64,topk=4", "--context", "4k", "--repeats", "3")
    code, out, err = run_cli(capsys, "bench", *words, "--tune")
    assert code == 0, err
    assert f"Written to {cache}" in out.replace("\n", "") and "attention, rows" in err
    x = base()
    tuned.forget()
    assert tuned.is_measured(x.q.device, sizes_of(x))
    assert_attention(attend(x), lists_of(x), x, BLOCK)
