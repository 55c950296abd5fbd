"""Reports: verdicts, totals and the JSON form."""

import json

import pytest

from sparsify.errors import ArtefactError
from sparsify.report import (
    CheckResult,
    PairCount,
    SiteReport,
    SparsifyReport,
    VerificationReport,
)


def checks(*states):
    results = tuple(CheckResult(f"V{i}", "name", state, "s") for i, state in enumerate(states))
    return VerificationReport("a", "b", results)


@pytest.mark.parametrize(
    ("states", "ok"),
    [
        (["passed"], True),
        (["passed", "skipped"], True),
        (["passed", "failed"], False),
        (["skipped"], False),
        ([], False),
    ],
)
def test_ok_means_that_something_ran_and_nothing_failed(states, ok):
    report = checks(*states)
    assert report.ok is ok and report.to_json()["ok"] is ok
    assert len(report.failed) == states.count("failed")


def test_verification_round_trip():
    report = VerificationReport(
        "a", "b", (CheckResult("V6", "quality", "passed", "fine", {"runs": [{"tokens": 3}]}),)
    )
    assert VerificationReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_report_round_trip_with_verification():
    site = SiteReport("m", 1, "rewritten", "moba", "r", pairs=(PairCount(8, 36, 20),))
    report = SparsifyReport("m", (site,), ("n",), checks("passed"), {"torch": "2"})
    assert SparsifyReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert (site.key, site.name) == ("m#1", "m#1")


def test_totals_by_context():
    counts = [PairCount(8, 36, 20), PairCount(16, 136, 50), PairCount(8, 36, 36)]
    assert PairCount.total(counts) == (PairCount(8, 72, 56), PairCount(16, 136, 50))
    assert PairCount(0, 0, 0).share == 1.0


GOOD = SparsifyReport("m", (SiteReport("m", 0, "refused", "dense", "r"),)).to_json()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "no schema"),
        ([], "no schema"),
        ({}, "no schema"),
        ({**GOOD, "schema": True}, "no schema"),
        ({**GOOD, "schema": 2}, "reads up to 1"),
        ({**GOOD, "sites": None}, "expected a list"),
        ({**GOOD, "sites": [3]}, "unknown fields"),
        ({**GOOD, "sites": [{"fqn": "m"}]}, "missing"),
        ({**GOOD, "sites": [{**GOOD["sites"][0], "x": 1}]}, "unknown fields"),
        ({**GOOD, "sites": [{**GOOD["sites"][0], "pairs": 1}]}, "pairs is a int"),
        ({**GOOD, "notes": None}, "notes is a NoneType"),
        ({**GOOD, "versions": "x"}, "versions is a str"),
    ],
)
def test_wrong_documents(data, message):
    with pytest.raises(ArtefactError, match=message):
        SparsifyReport.from_json(data)


def test_the_names_of_the_checks_are_those_that_can_be_run():
    from sparsify.checks import CHECKS
    from sparsify.report import CHECK_NAMES

    assert tuple(CHECKS) == CHECK_NAMES
