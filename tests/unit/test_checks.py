"""The checks: each passes on a right rewrite and fails on the fault it is there for."""

import dataclasses
import functools

import pytest
import torch

import sparsify as sp
from sparsify import checks, equality
from sparsify.hosts import attention
from sparsify.hosts import transformers as host
from tests._util.tiny_models import build, tokens

SIZE, TOPK = 8, 2


@functools.cache
def inspection():
    return sp.inspect(build("llama"))


@pytest.fixture(params=["moba", "msa"])
def pair(request):
    model = build("llama")
    policy = getattr(sp.Policy, request.param)(block_size=SIZE, topk=TOPK, dense_last=1)
    return model, sp.sparsify(model, policy, inspection=inspection())


def run(pair, *names, **options):
    model, result = pair
    options = {"greedy_tokens": 4, **options}
    return checks.run(model, result.model, tokens(1, 120), checks=names or None, **options)


def by_name(report):
    return {f"{c.check} {c.name}": c for c in report.checks}


def test_a_right_rewrite_passes_every_check(pair, tmp_path):
    _model, result = pair
    folder = sp.export(result, tmp_path / "out")
    report = run(pair, directory=folder, expected=3)
    assert {name: c.status for name, c in by_name(report).items()} == {
        "V1 structure": "passed",
        "V2 no-op": "passed",
        "V3 dense limit": "passed",
        "V5 determinism": "passed",
        "V5 chunks and decode": "passed",
        "V6 quality": "passed",
        "V7 artefact": "passed",
    }
    assert report.ok
    assert by_name(report)["V3 dense limit"].metrics["sparse_rows"] > 0


def test_lengths_stand_around_the_borders_of_blocks_and_of_top_k(pair):
    v3 = by_name(run(pair, "V3"))["V3 dense limit"]
    assert {1, 7, 9, 15, 17, 35, 64} <= set(v3.metrics["tokens"])


def test_structure_fails_when_a_weight_changed(pair):
    _model, result = pair
    name, old = next(iter(result.model.named_parameters()))
    module = result.model.get_submodule(name.rpartition(".")[0])
    new = old.detach().clone()
    new.view(-1)[0] += 1e-3
    setattr(module, name.rpartition(".")[2], torch.nn.Parameter(new))
    assert "weights changed" in run(pair, "V1").checks[0].summary


def test_structure_fails_when_attention_layers_were_missed(pair):
    report = run(pair, "V1", expected=5)
    assert report.checks[0].status == "failed"
    assert "5 attention layers" in report.checks[0].summary


def test_no_op_fails_when_dense_layers_are_not_the_original_ones(pair, monkeypatch):
    real = attention._dense_function
    monkeypatch.setattr(
        attention,
        "_dense_function",
        lambda m: lambda *a, **k: (real(m)(*a, **k)[0] * (1 + 1e-6), None),
    )
    assert run(pair, "V2").checks[0].status == "failed"


def test_dense_limit_fails_when_the_op_is_wrong(pair, monkeypatch):
    real = attention.run_sparse
    monkeypatch.setattr(attention, "run_sparse", lambda *a, **k: real(*a, **k) * 1.01)
    assert run(pair, "V3").checks[0].status == "failed"


def test_dense_limit_fails_when_no_row_is_sparse(pair):
    _model, result = pair
    wide = result.plan.layers
    wide = tuple(dataclasses.replace(p, topk=10**5) if p.sparse else p for p in wide)
    host.apply(result.model, sp.Plan(wide))
    report = run(pair, "V3", "V6")
    assert [c.status for c in report.checks] == ["failed", "failed"]


def test_determinism_fails_when_runs_differ(pair, monkeypatch):
    real, count = attention.run_sparse, iter(range(10**6))
    monkeypatch.setattr(
        attention, "run_sparse", lambda *a, **k: real(*a, **k) * (1 + 1e-4 * next(count))
    )
    assert "two runs" in by_name(run(pair, "V5"))["V5 determinism"].summary


def test_determinism_fails_when_a_row_depends_on_its_batch(pair, monkeypatch):
    real = equality.run_sparse
    monkeypatch.setattr(
        equality, "run_sparse", lambda call: real(call) + 1e-4 * (call.q.shape[0] - 1)
    )
    assert "batch neighbour" in by_name(run(pair, "V5"))["V5 determinism"].summary


def test_phases_fail_when_decode_forgets_the_rule(pair, monkeypatch):
    real = attention._planned_dense
    monkeypatch.setattr(
        attention,
        "_planned_dense",
        lambda plan, q, k: "wrong" if q.shape[2] == 1 else real(plan, q, k),
    )
    assert by_name(run(pair, "V5"))["V5 chunks and decode"].status == "failed"


def test_quality_reports_recalls_of_every_sparse_layer(pair):
    run_ = run(pair, "V6").checks[0].metrics["runs"][0]
    assert len(run_["layers"]) == 2
    for layer in run_["layers"]:
        assert 0 < layer["score_recall"] < 1
        assert 0 < layer["block_recall"] <= 1
        assert layer["rows"] == run_["tokens"] - SIZE * TOPK


def test_recalls_are_one_when_all_blocks_are_taken(pair):
    _model, result = pair
    layers = tuple(
        dataclasses.replace(p, topk=5, block_size=8) if p.sparse else p for p in result.plan
    )
    host.apply(result.model, sp.Plan(layers))
    ids = tokens(1, 48)
    from sparsify.quality import measure_recall

    for layer in measure_recall(result.model, ids):
        assert layer.rows == 8
        assert layer.score_recall > 0.5
    everything = tuple(dataclasses.replace(p, topk=6) if p.sparse else p for p in layers)
    host.apply(result.model, sp.Plan(everything))
    assert all(r.rows == 0 and r.score_recall == 1 for r in measure_recall(result.model, ids))


def test_losses_are_those_of_cross_entropy(pair):
    model, result = pair
    ids = tokens(1, 120)
    measured = run(pair, "V6").checks[0].metrics["runs"][0]
    ids = ids[:, : measured["tokens"]]
    with torch.no_grad():
        assert measured["dense_loss_nats"] == pytest.approx(
            float(model(ids, labels=ids).loss), 1e-4
        )
        sparse = float(result.model(ids, labels=ids).loss)
    assert measured["sparse_loss_nats"] == pytest.approx(sparse, 1e-4)


def test_the_selection_can_be_written_and_read_back(pair, tmp_path):
    from sparsify.kernels.selection import Selection

    run(pair, "V6", dump_selection=tmp_path / "chosen.npz")
    chosen = Selection.load(tmp_path / "chosen.npz")
    assert len(list(chosen.sites())) == 2


def test_an_unknown_check_and_a_dense_model_are_user_errors(pair):
    model, _ = pair
    with pytest.raises(sp.UsageError, match="V9"):
        run(pair, "V9")
    with pytest.raises(sp.UsageError, match="no plan"):
        checks.run(model, model)


def test_no_op_holds_when_the_weights_lie_at_other_addresses(pair):
    model, result = pair
    for parameter in model.parameters():
        room = torch.empty(parameter.numel() + 1)
        room[1:] = parameter.detach().view(-1)
        parameter.data = room[1:].view(parameter.shape)
    assert run((model, result), "V1", "V2").ok


@pytest.mark.parametrize(("recall", "status"), [(0.01, "passed"), (0.999, "failed")])
def test_a_quality_budget_of_the_policy_is_held(recall, status):
    model = build("llama")
    policy = sp.Policy.moba(block_size=SIZE, topk=TOPK, quality={"min_score_recall": recall})
    report = run((model, sp.sparsify(model, policy)), "V6")
    assert report.checks[0].status == status
    assert ("score recall" in report.checks[0].summary) == (status == "failed")
