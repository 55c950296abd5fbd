"""The time model against measured runs: fitted on one half, tried on the other."""

import json
import random
import subprocess
import sys

import pytest

from sparsify.cost_model.fitting import OVERHEAD, Row, fit, halves
from sparsify.cost_model.hardware import load_gpu
from sparsify.cost_model.measurements import load_measurements, model_row
from sparsify.errors import UsageError
from tests._util.commands import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "public_kernels_h200.json"
PACKAGED = ROOT / "cost_model" / "calibrations" / "h200-sxm-141gb.json"


@pytest.fixture(scope="module")
def measured():
    return load_measurements(RESULTS)


def held_out_error(measured, kernel):
    rows = [model_row(run, load_gpu(measured.gpu)) for run in measured.of(kernel, "prefill")]
    seen, unseen = halves(rows)
    assert len(unseen) >= len(rows) // 2
    return fit(seen).mean_error(unseen), len(rows)


@pytest.mark.parametrize(("kernel", "count", "most"), [("fa3", 17, 0.06), ("flash_moba", 18, 0.25)])
def test_half_of_the_runs_predict_the_other_half(measured, kernel, count, most):
    error, runs = held_out_error(measured, kernel)
    print(f"{kernel}: mean error of the held-out half {error:.1%}")
    assert runs == count
    assert error < most


def test_the_benchmark_prints_its_errors_and_puts_in_what_is_packaged(tmp_path):
    packaged = json.loads(PACKAGED.read_text())
    mine = {"dense_prefill", "dense_decode", "dense_backward", "msa_decode_index"}
    changed = [dict(e, efficiency=0.01) if e["family"] in mine else e for e in packaged["families"]]
    target = tmp_path / "calibration.json"
    target.write_text(json.dumps({**packaged, "families": changed}))
    command = [sys.executable, "benchmarks/time_model.py", "--into", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.count("mean error") >= 6
    assert changed != packaged["families"]
    assert json.loads(target.read_text()) == packaged


def test_a_fit_finds_the_efficiencies_that_made_the_rows():
    draw = random.Random(5)
    rows = []
    for _ in range(12):
        a, b = draw.uniform(0.1, 100), draw.uniform(0.1, 100)
        rows.append(Row({"a": a, "b": b}, 0.05 + a / 0.4 + b / 0.8))
    found = fit(rows)
    assert found.efficiency("a") == pytest.approx(0.4)
    assert found.efficiency("b") == pytest.approx(0.8)
    assert found.overhead_ms == pytest.approx(0.05)
    assert found.mean_error(rows) < 1e-9


def test_no_factor_is_negative_and_an_idle_family_has_no_efficiency():
    rows = [Row({"a": x, "b": 1 / x}, 2 * x) for x in (1.0, 2.0, 4.0, 8.0)]
    found = fit(rows)
    assert min(found.factors.values()) >= 0
    assert found.efficiency("b") is None
    assert found.efficiency("a") == pytest.approx(0.5)
    assert OVERHEAD in found.factors


@pytest.mark.parametrize("rows", [[], [Row({"a": 1.0}, 0.0)]])
def test_a_fit_of_nothing_is_an_error(rows):
    with pytest.raises(ValueError, match="positive times"):
        fit(rows)


def test_a_row_without_its_sizes_is_named(tmp_path):
    data = json.loads(RESULTS.read_text())
    del data["rows"][3]["q_heads"]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="q_heads"):
        load_measurements(path)
