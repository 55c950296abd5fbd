"""Which implementation runs a call; tensors that say they are on a GPU stand in for it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from sparsify.errors import UsageError
from sparsify.kernels import dispatch, reference
from sparsify.kernels.layout import Layout

pytest.importorskip("triton")

MOBA_OPS = ("moba_select", "moba_attention", "moba_attention_backward", "block_attention")
MSA_OPS = ("msa_select", "msa_attention", "msa_attention_backward")
SIZES = {"block_size": 4, "topk": 3}


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    @property
    def device(self):
        return SimpleNamespace(type="cuda")


def tensors(name, *, dtype=torch.bfloat16, size=64, keys=64, places=3, on_gpu=True):
    """The op's own tensors, as the ops hand them over."""
    q, k = torch.empty(1, 2, 8, size, dtype=dtype), torch.empty(1, 2, keys, size, dtype=dtype)
    lists = torch.zeros(1, 2, 8, places, dtype=torch.int32)
    own = {
        "moba_select": (q, k),
        "moba_attention": (q, k, k),
        "moba_attention_backward": (q, None, q, k, k, q, q[..., 0].float()),
        "block_attention": (q, k, k, lists),
        "msa_select": (q, k),
        "msa_attention": (q, k, k, q, k),
        "msa_attention_backward": (q, None, q, k, k, q, k, q, q[..., 0].float()),
    }[name]
    if not on_gpu:
        return own
    return tuple(None if x is None else x.as_subclass(OnGpu) for x in own)


def chosen(name, *, layout=None, options=None, **what):
    own = tensors(name, **what)
    return dispatch.implementation(name, own, layout or Layout(), options or SIZES)


@pytest.fixture
def accelerated():
    from sparsify.kernels import accelerated

    return accelerated


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("name", MOBA_OPS + MSA_OPS)
def test_a_gpu_runs_the_kernels(name, impl, accelerated, monkeypatch):
    monkeypatch.setenv("SPARSIFY_IMPL", impl)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert chosen(name, dtype=dtype) is accelerated


@pytest.mark.parametrize("name", MOBA_OPS + MSA_OPS)
def test_the_reference_by_name(name, monkeypatch):
    monkeypatch.setenv("SPARSIFY_IMPL", "reference")
    assert chosen(name) is reference
    assert chosen(name, on_gpu=False) is reference


@pytest.mark.parametrize("name", MOBA_OPS + MSA_OPS)
def test_auto_on_a_cpu_is_the_reference(name, monkeypatch):
    monkeypatch.delenv("SPARSIFY_IMPL", raising=False)
    assert chosen(name, on_gpu=False) is reference
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert chosen(name, on_gpu=False) is reference


CANNOT = {
    "torch.float64 has no tensor-core kernels here": {"dtype": torch.float64},
    "head sizes beyond 256 do not fit a tile": {"size": 257},
    "a scale that is not positive turns the order of the scores round": {
        "options": {**SIZES, "scale": -0.5}
    },
}


@pytest.mark.parametrize("why", CANNOT)
@pytest.mark.parametrize("name", MOBA_OPS)
def test_what_the_kernels_cannot_do(name, why, accelerated, monkeypatch):
    monkeypatch.setenv("SPARSIFY_IMPL", "auto")
    assert chosen(name, **CANNOT[why]) is reference
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")
    with pytest.raises(UsageError, match=rf"^SPARSIFY_IMPL is triton, but {why}\.") as raised:
        chosen(name, **CANNOT[why])
    assert "SPARSIFY_IMPL=auto" in raised.value.hint


def test_limits_themselves_are_within(accelerated, monkeypatch):
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")
    assert chosen("moba_attention", size=256) is accelerated
    assert chosen("moba_attention", options={**SIZES, "scale": 1e-3}) is accelerated
    most = {"block_size": 1, "topk": 256}
    assert chosen("moba_attention", keys=1000, options=most) is accelerated
    assert chosen("block_attention", places=256) is accelerated


def test_long_lists_go_to_the_reference_unless_they_hold_every_block(accelerated, monkeypatch):
    monkeypatch.setenv("SPARSIFY_IMPL", "auto")
    long = {"block_size": 1, "topk": 257}
    assert chosen("moba_attention", keys=1000, options=long) is reference
    assert chosen("moba_select", keys=1000, options=long) is reference
    assert chosen("block_attention", places=257) is reference
    assert chosen("moba_attention", keys=257, options=long) is accelerated
    every = {"block_size": 1, "topk": 10**6}
    assert chosen("moba_attention", keys=1000, options=every) is accelerated


@pytest.mark.parametrize("name", ["kda", "moba_attention_twice"])
def test_other_ops_have_no_kernels(name, accelerated):
    own = tensors("moba_attention")
    why = accelerated.unsupported(name, own, Layout(), SIZES)
    assert why == f"there are no Triton kernels for {name} yet"


def test_documents_count_among_the_blocks(accelerated):
    """Each of them may have a block that is not full."""
    for documents, runs in ((2**10, True), (2**19, False)):
        cumulative = torch.empty(documents + 1, dtype=torch.int32)
        layout = Layout(cu_seqlens_q=cumulative)
        assert (chosen("moba_attention", layout=layout) is accelerated) == runs


@pytest.mark.parametrize("name", MOBA_OPS)
def test_triton_by_name_needs_a_gpu_or_the_interpreter(name, accelerated, monkeypatch):
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match=r"^SPARSIFY_IMPL is triton, but the tensors are not on"):
        chosen(name, on_gpu=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert chosen(name, on_gpu=False) is accelerated


def test_without_triton(monkeypatch):
    monkeypatch.setattr(dispatch, "_has_triton", lambda: False)
    monkeypatch.setenv("SPARSIFY_IMPL", "auto")
    assert chosen("moba_attention") is reference
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")
    with pytest.raises(UsageError, match="triton is not installed"):
        chosen("moba_attention")


def test_a_call_left_to_the_reference_is_told_once(accelerated, monkeypatch, caplog):
    monkeypatch.setenv("SPARSIFY_IMPL", "auto")
    dispatch._tell.cache_clear()
    with caplog.at_level("INFO", logger="sparsify"):
        for _ in range(2):
            assert chosen("moba_attention", dtype=torch.float64) is reference
            assert chosen("moba_attention") is accelerated
    (record,) = caplog.records
    assert "runs as plain PyTorch: torch.float64" in record.getMessage()


def test_a_call_on_a_cpu_imports_no_kernels():
    code = (
        "import sys, torch\n"
        "from sparsify.kernels import schemas\n"
        "x = torch.randn(1, 2, 5, 4)\n"
        "schemas.moba_attention(x, x, x, block_size=2, topk=2)\n"
        "assert 'sparsify.kernels.accelerated' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_function_of_the_reference_is_there(accelerated):
    """Dispatch takes a function by its name from either module."""
    for name in (*MOBA_OPS, *MSA_OPS, "block_attention_backward"):
        assert callable(getattr(accelerated, name)) and callable(getattr(reference, name))
        assert name in accelerated.__all__


@pytest.mark.parametrize("asked", [0, 1, 8, 9])
def test_lengths_of_documents_are_read_only_for_a_least_context(asked, monkeypatch):
    q = torch.empty(1, 2, 12, 4)
    layout = Layout(cu_seqlens_q=torch.tensor([0, 3, 3, 11]))
    reads = []
    real = torch.Tensor.tolist

    def counted(self):
        reads.append(self.shape)
        return real(self)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    assert dispatch.attends_every_block(q, q, layout, min_context=asked) == (asked == 9)
    assert bool(reads) == bool(asked)
