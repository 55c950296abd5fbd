"""Tiny models of every family, fused and written out, on both hosts: all checks pass."""

import pytest

from tests._util.verified import FAMILIES, pairs, verified

CHECKS = {"V1", "V2", "V3", "V4", "V5", "V6", "V7"}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "attention", "host"), pairs(FAMILIES))
def test_all_checks_pass(family, attention, host, tmp_path):
    method = "msa" if family in ("qwen2", "gpt2") else "moba"
    report = verified(family, attention, host, method, tmp_path / "out")
    assert {check.check for check in report.checks} == CHECKS
    bad = [(c.check, c.name, c.summary) for c in report.checks if c.status == "failed"]
    assert report.ok and not bad
    skipped = [c.name for c in report.checks if c.status == "skipped"]
    assert skipped in ([], ["documents"])
