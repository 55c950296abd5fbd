"""Invented stage times to a calibration, and what an estimate makes of it."""

import json
import random
from pathlib import Path

import pytest

from sparsify.cost_model.calibrating import (
    FAR_OFF,
    FamilyRun,
    calibration_of,
    fitted,
    merged,
    plain_run,
    stage_run,
    to_document,
)
from sparsify.cost_model.calibration import load_calibration
from sparsify.cost_model.configuration import DENSE, PUBLISHED, Configuration
from sparsify.cost_model.hardware import load_gpu
from sparsify.cost_model.layer_cost import layer_cost
from sparsify.cost_model.stages import stage_formulas
from sparsify.cost_model.times import Source
from sparsify.cost_model.workload import AttentionShape, Phase, Workload
from sparsify.errors import UsageError
from sparsify.estimates import estimate
from sparsify.policy import Policy

H200 = load_gpu("h200")
LLAMA = Path(__file__).parent / "configs" / "llama-3.1-8b.json"
MOBA = tuple(c for c in PUBLISHED if c.method == "moba")
PACKAGED = Path(__file__).parents[2] / "cost_model" / "calibrations" / "h200-sxm-141gb.json"
MEANT = {"date": "2026-11-30", "software": {"torch": "2.11.0"}, "source": "invented"}
# Efficiencies and overheads (us) that the invented times are made with.
TRUTH = {
    "dense_prefill": (0.6, 40.0),
    "dense_decode": (0.9, 10.0),
    "moba_means": (0.8, 3.0),
    "moba_gate": (0.3, 8.0),
    "reverse_index": (0.2, 25.0),
    "moba_attention": (0.45, 12.0),
    "combine": (0.35, 6.0),
    "moba_decode_gate": (0.1, 9.0),
    "moba_decode_attention": (0.5, 7.0),
}


def invented(configuration, phase, group=4, noise=0.0, contexts=None):
    """Runs of all stages at some lengths."""
    draw = random.Random(3)
    shape = AttentionShape(4 * group, 4, 128, 128)
    kept = max(configuration.block_size * configuration.topk, 4096)
    for tokens in contexts or [kept * n // 2 for n in (3, 4, 6, 8, 12, 16)]:
        workload = Workload.of(phase, tokens)
        for formula in stage_formulas(configuration, workload):
            family = formula.family
            efficiency, overhead_us = TRUTH[family]
            bound = stage_run(family, shape, workload, configuration, 1.0, H200).bound_ms
            ms = (overhead_us / 1e3 + bound / efficiency) * (1 + draw.uniform(-noise, noise))
            yield stage_run(family, shape, workload, configuration, ms, H200, "invented")


def every_run(noise=0.0):
    runs = [*invented(DENSE, Phase.PREFILL, noise=noise)]
    runs += invented(DENSE, Phase.DECODE, noise=noise)
    sparse_decode = [Configuration(c.method, c.block_size, c.topk) for c in MOBA]
    for configuration in sparse_decode:
        runs += invented(configuration, Phase.PREFILL, noise=noise)
        runs += invented(configuration, Phase.DECODE, noise=noise)
    return runs


@pytest.fixture
def file(tmp_path):
    found = calibration_of(every_run(), H200, **MEANT)
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(to_document(found)))
    return path


def test_a_fit_finds_what_the_times_were_made_with():
    for entry in fitted(every_run()):
        efficiency, overhead_us = TRUTH[entry.family]
        assert entry.efficiency == pytest.approx(efficiency, abs=2e-3), entry.family
        assert entry.overhead_us == pytest.approx(overhead_us, abs=0.05), entry.family
        assert entry.error < 1e-3 and entry.points >= 6 and entry.kernel == "invented"


def test_the_error_is_that_of_runs_that_the_fit_did_not_see():
    noisy = {(e.family, e.group_size, e.block_size): e.error for e in fitted(every_run(0.1))}
    assert 0.01 < max(noisy.values()) < 0.3


def test_what_does_not_depend_on_the_group_serves_every_group():
    entries = {entry.family: entry for entry in fitted(every_run())}
    assert entries["moba_means"].group_size is None and entries["moba_means"].block_size is None
    assert entries["reverse_index"].group_size is None and entries["reverse_index"].block_size
    assert entries["moba_attention"].group_size == 4
    assert entries["dense_prefill"].block_size is None


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
@pytest.mark.parametrize("published", MOBA, ids=lambda c: c.label)
def test_layers_are_calibrated_and_predict_the_times(file, phase, published):
    configuration = Configuration("moba", published.block_size, published.topk)
    found = load_calibration(file, H200)
    shape = AttentionShape(16, 4, 128, 128)
    workload = Workload.of(phase, 2 * published.block_size * published.topk)
    cost = layer_cost(shape, workload, configuration, H200, calibration=found)
    assert cost.time.source is Source.CALIBRATED
    for stage in cost.stages:
        efficiency, overhead_us = TRUTH[stage.family]
        run = stage_run(stage.family, shape, workload, configuration, 1.0, H200)
        wanted = overhead_us / 1e3 + run.bound_ms / efficiency
        assert stage.time.expected_ms == pytest.approx(wanted, rel=0.01)


def test_other_groups_are_not_calibrated(file):
    shape, workload = AttentionShape(16, 2, 128, 128), Workload.of(Phase.PREFILL, 65536)
    cost = layer_cost(shape, workload, MOBA[0], H200, calibration=load_calibration(file, H200))
    assert cost.time.source is Source.BOUND


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_estimates_say_calibrated(file, phase):
    policy = Policy.moba(block_size=128, topk=8)
    options = {"gpu": "h200", "context": [131072], "phase": phase}
    (row,) = estimate(LLAMA, policy, calibration=file, **options).to_json()["rows"]
    assert row["sparse"]["source"] == "calibrated"
    (without,) = estimate(LLAMA, policy, calibration=PACKAGED, **options).to_json()["rows"]
    if not any("moba" in e["family"] for e in json.loads(PACKAGED.read_text())["families"]):
        assert without["sparse"]["source"] == "bound"


def test_products_and_copies():
    runs = []
    for rows in (1024, 2048, 4096, 8192):
        flops, n_bytes = 2 * rows * 4096 * 4096, 2 * (2 * rows * 4096 + 4096 * 4096)
        bound = plain_run("gemm", flops, n_bytes, rows, 1.0, H200).bound_ms
        runs.append(plain_run("gemm", flops, n_bytes, rows, 0.005 + bound / 0.7, H200))
        copy_ms = plain_run("copy", 0, rows * 4096, rows, 1.0, H200).bound_ms
        runs.append(plain_run("copy", 0, rows * 4096, rows, copy_ms / 0.8, H200))
    entries = {entry.family: entry for entry in fitted(runs)}
    assert entries["gemm"].efficiency == pytest.approx(0.7, abs=1e-3)
    assert entries["gemm"].overhead_us == pytest.approx(5, abs=0.05)
    assert entries["copy"].efficiency == pytest.approx(0.8, abs=1e-3)


@pytest.mark.parametrize("share", [2.0, 1e9])
def test_faster_than_anything_is_held_at_the_most_that_a_file_may_say(share):
    """Counts of bytes may be too large for a kernel, or its time all overhead."""
    runs = [
        plain_run("copy", 0, n * 10**6, n, 0.01 + n * 1e-3 / 4.8 / share, H200) for n in range(1, 9)
    ]
    (entry,) = fitted(runs)
    assert entry.efficiency == 1.25 and 0 <= entry.overhead_us <= 10.01


def test_slower_than_a_file_may_say_is_held_at_the_least():
    runs = [plain_run("copy", 0, n * 10, n, n * 1.0, H200) for n in range(1, 9)]
    (entry,) = fitted(runs)
    assert entry.efficiency == 1e-4 and entry.error > 0.1


def test_too_few_lengths_are_refused():
    with pytest.raises(UsageError, match="dense_prefill was timed at 3 lengths"):
        fitted(invented(DENSE, Phase.PREFILL, contexts=[8192, 16384, 32768]))
    assert len(fitted(invented(DENSE, Phase.PREFILL, contexts=[4096, 8192, 16384, 32768]))) == 1


def test_times_must_be_positive():
    runs = [plain_run("copy", 0, n * 10**6, n, 0.0, H200) for n in range(1, 9)]
    with pytest.raises(UsageError, match="A time of copy is not positive"):
        fitted(runs)


def test_a_stage_that_a_configuration_does_not_have():
    shape, workload = AttentionShape(16, 4, 128, 128), Workload.of(Phase.PREFILL, 8192)
    with pytest.raises(KeyError, match="dense has no stage combine"):
        stage_run("combine", shape, workload, DENSE, 1.0, H200)


def test_merging_keeps_dense_entries_and_replaces_the_same_ones(tmp_path):
    path = tmp_path / "packaged.json"
    path.write_text(PACKAGED.read_text())
    before = {e["family"]: e for e in json.loads(PACKAGED.read_text())["families"]}
    found = calibration_of(every_run(), H200, **MEANT)
    data = merged(path, found)
    path.write_text(json.dumps(data))
    load_calibration(path, H200)
    for family in ("dense_prefill", "dense_decode", "dense_backward"):
        assert [e for e in data["families"] if e["family"] == family] == [before[family]]
    assert {"moba_attention", "combine"} <= {e["family"] for e in data["families"]}
    assert data["source"].endswith("; invented")
    assert merged(path, found) == data  # once more changes nothing


def test_merging_into_the_file_of_another_gpu_is_refused(tmp_path):
    found = calibration_of(every_run(), load_gpu("h100"), **MEANT)
    with pytest.raises(UsageError, match="was measured on H200-SXM-141GB, not on H100"):
        merged(PACKAGED, found)
    with pytest.raises(UsageError, match=r"none\.json"):
        merged(tmp_path / "none.json", found)


def test_what_misses_by_too_much_is_left_out_and_told():
    def run(tokens, ms):
        return FamilyRun("moba_gate", tokens / 1e4, ms, tokens, 4, 128, "invented")

    wild = [run(tokens, ms) for tokens, ms in ((1000, 5.0), (2000, 0.1), (4000, 40.0), (8000, 0.2))]
    left_out = []
    found = calibration_of([*every_run(), *wild], H200, **MEANT, leave_out=left_out.append)
    assert [(entry.family, entry.error > FAR_OFF) for entry in left_out] == [("moba_gate", True)]
    assert all(entry.error <= FAR_OFF for entry in found.families)
    everything = calibration_of(every_run(), H200, **MEANT, leave_out=left_out.append)
    assert len(left_out) == 1 and len(everything.families) == len(fitted(every_run()))
