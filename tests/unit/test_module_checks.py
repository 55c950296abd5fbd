"""The checks of modules that are no language models: each fails on the fault it is there for."""

import pytest
import torch
from torch import nn

import sparsify as sp
from sparsify import module_checks
from sparsify.hosts import graph_sites
from sparsify.hosts.calls import observing
from sparsify.kernels import reference
from sparsify.sparse_rows import Seen

SIZE, TOPK, LENGTH = 4, 2, 30
DOCUMENTS = (17, 3, 10)


class Attention(nn.Module):
    """Causal attention over `[batch, length, 16]`, inside documents where a table is given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, documents=None):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if documents is None:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            slots = torch.arange(x.shape[1])
            seen = (documents[:, :, None] == documents[:, None]) & (slots[:, None] >= slots)
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
        return y.transpose(1, 2).flatten(2)


def inputs(packed=False):
    x = torch.randn(2, LENGTH, 16, generator=torch.Generator().manual_seed(1))
    table = torch.repeat_interleave(torch.arange(3), torch.tensor(DOCUMENTS)).expand(2, -1)
    return (x, table.contiguous()) if packed else (x,)


def rewritten(packed=False, **options):
    model = Attention().eval()
    policy = sp.Policy.moba(block_size=SIZE, topk=TOPK, **options)
    return model, sp.sparsify(model, policy, inputs(packed))


def run(model, result, *names, packed=False, **options):
    args = inputs(packed)
    report = module_checks.run(model, result.model, args, {}, checks=names or None, **options)
    return {check.check: check for check in report.checks}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("min_context", [0, LENGTH + 1])
def test_a_right_rewrite_passes_every_check(tmp_path, packed, min_context):
    model, result = rewritten(packed, min_context=min_context)
    folder = sp.export(result, tmp_path / "out")
    found = run(model, result, packed=packed, directory=folder)
    assert {name: check.status for name, check in found.items()} == dict.fromkeys(
        ("V1", "V2", "V3", "V5", "V7"), "passed"
    )


class Counting(Attention):
    """Attention whose result grows with the number of calls, which a buffer counts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1.0)
        return super().forward(x) * self.calls, self.calls


def test_every_run_of_a_check_finds_the_buffers_as_the_first_one_did(tmp_path):
    model = Counting().eval()
    result = sp.sparsify(model, sp.Policy.moba(block_size=SIZE, topk=TOPK), inputs())
    found = run(model, result, directory=sp.export(result, tmp_path / "out"))
    assert {check.status for check in found.values()} == {"passed"}
    assert model.calls == 0.0


def test_structure_fails_when_a_weight_changed():
    model, result = rewritten()
    result.model.qkv.weight = nn.Parameter(result.model.qkv.weight + 1e-3)
    assert "weights changed" in run(model, result, "V1")["V1"].summary


def test_dense_limit_fails_when_the_op_is_wrong(monkeypatch):
    model, result = rewritten()
    real = reference.moba_attention
    monkeypatch.setattr(
        reference, "moba_attention", lambda *a, **k: tuple(x * 1.01 for x in real(*a, **k))
    )
    assert run(model, result, "V3")["V3"].status == "failed"


def test_determinism_fails_when_runs_differ(monkeypatch):
    model, result = rewritten()
    real, count = reference.moba_attention, iter(range(100))
    monkeypatch.setattr(
        reference,
        "moba_attention",
        lambda *a, **k: tuple(x + 1e-3 * next(count) for x in real(*a, **k)),
    )
    assert "two runs" in run(model, result, "V5")["V5"].summary


def test_nothing_passes_when_the_sites_ran_dense(monkeypatch):
    model, result = rewritten()
    monkeypatch.setattr(graph_sites, "_runs_dense", lambda named: True)
    found = run(model, result, "V3", "V5")
    assert all("ran dense" in check.summary for check in found.values())


def test_the_saved_folder_of_another_model_fails(tmp_path):
    model, result = rewritten()
    with torch.no_grad():
        result.model.qkv.weight.mul_(2)
    folder = sp.export(result, tmp_path / "out")
    with torch.no_grad():
        result.model.qkv.weight.div_(2)
    assert "other outputs" in run(model, result, "V7", directory=folder)["V7"].summary


def test_a_disabled_model_cannot_be_verified(monkeypatch):
    model, result = rewritten()
    monkeypatch.setenv("SPARSIFY_DISABLE", "1")
    with pytest.raises(sp.UsageError, match="SPARSIFY_DISABLE"):
        run(model, result, "V3")


def test_checks_of_language_models_and_missing_inputs_are_refused():
    model, result = rewritten()
    with pytest.raises(sp.UsageError, match="Unknown check V4; known for this kind of model"):
        run(model, result, "V4")
    with pytest.raises(sp.UsageError, match="needs example inputs"):
        module_checks.run(model, result.model, (), {})


@torch.no_grad()
def sparse_rows(result, packed=False):
    seen = Seen(result.plan)
    with observing(seen.note):
        result.model(*inputs(packed))
    return {key: (seen.calls[key], seen.rows[key]) for key in seen.spans}


def test_sparse_rows_are_counted_by_document():
    ((calls, rows),) = sparse_rows(rewritten()[1]).values()
    assert (calls, rows) == (1, 2 * (LENGTH - SIZE * TOPK))
    ((calls, rows),) = sparse_rows(rewritten(packed=True)[1], packed=True).values()
    assert (calls, rows) == (1, 2 * sum(max(0, n - SIZE * TOPK) for n in DOCUMENTS))


def test_calls_that_run_dense_are_not_counted(monkeypatch):
    assert list(sparse_rows(rewritten(min_context=LENGTH + 1)[1]).values()) == [(0, 0)]
    result = rewritten(min_context=LENGTH)[1]
    assert list(sparse_rows(result).values()) == [(1, 2 * (LENGTH - SIZE * TOPK))]
    monkeypatch.setenv("SPARSIFY_DISABLE", "1")
    assert list(sparse_rows(result).values()) == [(0, 0)]
