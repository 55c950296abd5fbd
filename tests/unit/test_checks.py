"""The checks: each passes on a right rewrite and fails on the fault it is there for."""

import dataclasses
import functools

import pytest
import torch

import sparsify as sp
from sparsify import checks, equality
from sparsify.hosts import attention
from sparsify.hosts import transformers as host
from sparsify.hosts.calls import observing
from sparsify.quality import measure_recall, select
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
        "V4 future": "passed",
        "V4 padding and batch": "passed",
        "V4 documents": "passed",
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
        lambda plan, q, *rest: "wrong" if q.shape[2] == 1 else real(plan, q, *rest),
    )
    assert by_name(run(pair, "V5"))["V5 chunks and decode"].status == "failed"


def test_quality_reports_recalls_of_every_sparse_layer(pair):
    run_ = run(pair, "V6").checks[0].metrics["runs"][0]
    assert len(run_["layers"]) == 2
    for layer in run_["layers"]:
        assert 0 < layer["score_recall"] < 1
        assert 0 < layer["block_recall"] <= 1
        assert layer["rows"] == run_["tokens"] - SIZE * TOPK


def test_recalls_agree_with_a_computation_row_by_row(pair):
    _model, result = pair
    ids, calls = tokens(1, 40), []
    with observing(calls.append, run_dense=True), torch.no_grad():
        result.model(ids, use_cache=False)
    for call, measured in zip(calls, measure_recall(result.model, ids), strict=True):
        blocks = select(call)
        score, block, rows = 0.0, 0.0, 0
        for h in range(call.q.shape[1]):
            chosen = blocks[0, h if call.plan.method == "moba" else h // 3]
            for p in range(SIZE * TOPK, 40):
                logit = call.k[0, h // 3, : p + 1] @ call.q[0, h, p] * call.scale
                mass = [part.sum().item() for part in logit.softmax(-1).split(SIZE)]
                picked = {c for c in chosen[p].tolist() if c >= 0}
                best = sorted(range(len(mass)), key=lambda c: -mass[c])[:TOPK]
                score += sum(mass[c] for c in picked)
                block += len(picked & set(best)) / TOPK
                rows += 1
        assert measured.score_recall == pytest.approx(score / rows, rel=1e-4)
        assert measured.block_recall == pytest.approx(block / rows, rel=1e-4)


def test_a_layer_without_sparse_rows_has_no_recall(pair):
    _model, result = pair
    for layer in measure_recall(result.model, tokens(1, SIZE * TOPK)):
        assert (layer.score_recall, layer.block_recall, layer.rows) == (None, None, 0)


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


def test_nothing_passes_when_the_planned_sites_ran_dense(pair, monkeypatch):
    monkeypatch.setattr(attention, "_fallback", lambda *a: "of a test")
    report = run(pair, "V3", "V5", "V6")
    assert {c.status for c in report.checks} == {"failed"}
    assert all("ran dense" in c.summary for c in report.checks)


def test_a_disabled_model_cannot_be_verified(pair, monkeypatch):
    monkeypatch.setenv("SPARSIFY_DISABLE", "1")
    with pytest.raises(sp.UsageError, match="SPARSIFY_DISABLE"):
        run(pair, "V3")


def test_quality_below_min_context_is_measured_as_if_sparse(pair):
    _model, result = pair
    plain = by_name(run(pair, "V6"))["V6 quality"].metrics["runs"][0]["score_recall"]
    layers = [dataclasses.replace(p, min_context=400) if p.sparse else p for p in result.plan]
    host.apply(result.model, sp.Plan(tuple(layers)))
    found = by_name(run(pair, "V3", "V5", "V6"))
    quality = found["V6 quality"]
    assert quality.status == "passed"
    assert quality.metrics["runs"][0]["score_recall"] == plain
    assert quality.metrics["min_context"] == 400
    assert "fewer than 400 tokens dense" in quality.summary
    assert found["V3 dense limit"].status == found["V5 determinism"].status == "passed"


def test_a_layer_with_a_larger_budget_must_be_reached_too(pair):
    _model, result = pair
    layers = list(result.plan)
    layers[1] = dataclasses.replace(layers[1], block_size=128, topk=4)
    host.apply(result.model, sp.Plan(tuple(layers)))
    found = by_name(run(pair, "V3", "V6"))
    assert "512 tokens" in found["V3 dense limit"].summary
    assert "512 tokens" in found["V6 quality"].summary


def test_structure_fails_when_a_buffer_differs_or_a_site_was_not_detected(pair):
    _model, result = pair
    keys = [p.key for p in result.plan]
    assert run(pair, "V1", detected=keys).ok
    assert "detected" in run(pair, "V1", detected=keys[:-1]).checks[0].summary
    result.model.model.rotary_emb.inv_freq += 1e-3
    assert "inv_freq" in run(pair, "V1").checks[0].summary


def test_phases_fail_when_too_many_rows_choose_otherwise(pair, monkeypatch):
    real = equality._differences
    monkeypatch.setattr(equality, "_differences", lambda a, b: (real(a, b)[1], *real(a, b)[1:]))
    assert "other blocks" in by_name(run(pair, "V5"))["V5 chunks and decode"].summary


def test_sixteen_bit_models_are_held_to_twice_the_error_of_eager_attention(monkeypatch):
    model = build("llama", dtype=torch.bfloat16)
    policy = sp.Policy.moba(block_size=SIZE, topk=TOPK, dense_last=1)
    pair = model, sp.sparsify(model, policy)
    assert run(pair, "V3", greedy_tokens=0).ok
    real = attention.run_sparse
    monkeypatch.setattr(attention, "run_sparse", lambda *a, **k: real(*a, **k) * 1.2)
    assert not run(pair, "V3", greedy_tokens=0).ok


def test_the_artefact_check_fails_for_a_folder_of_other_weights(pair, tmp_path):
    _model, _result = pair
    other = build("llama", seed=1)
    policy = sp.Policy.moba(block_size=SIZE, topk=TOPK, dense_last=1)
    folder = sp.export(sp.sparsify(other, policy), tmp_path / "other")
    assert "other outputs" in run(pair, "V7", directory=folder).checks[0].summary
    assert "failed" in run(pair, "V7", directory=tmp_path / "nowhere").checks[0].summary


@pytest.mark.parametrize(
    "sample", [torch.zeros(2, 9, dtype=torch.long), torch.zeros(1, 0).long(), "text", [], [0.5]]
)
def test_unusable_samples_are_user_errors(pair, sample):
    model, result = pair
    with pytest.raises(sp.UsageError):
        checks.run(model, result.model, sample, checks=["V1"])


def test_verify_detects_again_and_knows_the_number_of_layers():
    model = build("llama")
    result = sp.sparsify(model, sp.Policy.moba(block_size=SIZE, topk=TOPK))
    found = result.verify(tokens(1, 60), checks=["V1"]).checks[0]
    assert (found.status, found.metrics["detected"], found.metrics["expected"]) == ("passed", 3, 3)
    stripped = sp.Plan(result.plan.layers[:2])
    host.apply(result.model, stripped)
    assert result.verify(tokens(1, 60), checks=["V1"]).checks[0].status == "failed"
