"""Estimates by the packaged calibration against measured runs, `benchmarks/predicted.py`."""

import importlib.util
from statistics import mean

import pytest

from sparsify.cost_model.times import Source
from tests._util.commands import ROOT

SPARSE = ("MSA prefill", "MSA decode", "MoBA prefill")


@pytest.fixture(scope="module")
def predicted():
    spec = importlib.util.spec_from_file_location("predicted", ROOT / "benchmarks/predicted.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(predicted):
    return list(predicted.rows())


def of(rows, *kinds):
    found = [row for row in rows if row.kind in kinds]
    assert found
    return found


def test_every_measured_call_has_a_row_and_is_calibrated(predicted, rows):
    names = ("msa_h200", "msa_decode_h200", "moba_h200")
    assert len(of(rows, *SPARSE)) == sum(len(predicted.read(name)) for name in names)
    assert {row.source for row in rows} == {Source.CALIBRATED}
    assert len(of(rows, "model speed-up")) == 5


@pytest.mark.parametrize("kind", SPARSE)
def test_what_was_measured_is_near_what_is_expected(rows, kind):
    """In the mean and at worst as far off as the fits of kernels (`test_time_model`)."""
    errors = [abs(row.error) for row in of(rows, kind)]
    print(f"{kind}: mean {mean(errors):.1%}, worst {max(errors):.1%}")
    assert mean(errors) < 0.10 and max(errors) < 0.25


def test_a_range_that_does_not_hold_has_a_reason(rows):
    assert [row.case for row in rows if not row.holds and row.reason is None] == []


def test_no_reason_is_left_without_a_case(predicted, rows):
    outside = {row.reason for row in rows if not row.holds}
    assert outside == {why for _, _, why in predicted.OUTSIDE}


def test_torchs_dense_attention_is_not_faster_than_the_calibrated_one(rows):
    assert all(row.measured >= row.low for row in of(rows, "dense prefill"))


def test_an_8_bit_index_is_never_predicted_slower(rows):
    expected = {(row.kind, row.case): row.expected for row in of(rows, *SPARSE)}
    eights = [key for key in expected if key[1].endswith(":fp8")]
    assert len(eights) == 7
    assert all(expected[k, c] < expected[k, c.removesuffix(":fp8")] for k, c in eights)


def test_the_table_marks_what_is_outside(predicted, rows, capsys):
    predicted.show(rows)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(rows)
    assert sum("outside: " in line for line in lines) == sum(not row.holds for row in rows)
    assert "None" not in "".join(lines)
