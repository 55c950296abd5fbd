"""Tiny models of every family, fused and written out, on both hosts: all checks pass."""

import pytest

from tests._util.verified import FAMILIES, verified

CHECKS = {"V1", "V2", "V3", "V4", "V5", "V6", "V7"}


# Every family on both hosts and in both forms of attention, and both forms on both hosts.
FORMS = (("sdpa", "eager"), ("eager", "sdpa"))
CASES = [
    (family, attention, host)
    for number, family in enumerate(FAMILIES)
    for host, attention in zip(("transformers", "graph"), FORMS[number % 2], strict=True)
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "attention", "host"), CASES)
def test_all_checks_pass(family, attention, host, tmp_path):
    method = "msa" if family in ("qwen2", "gpt2") else "moba"
    report = verified(family, attention, host, method, tmp_path / "out")
    assert {check.check for check in report.checks} == CHECKS
    bad = [(c.check, c.name, c.summary) for c in report.checks if c.status == "failed"]
    assert report.ok and not bad
    skipped = [c.name for c in report.checks if c.status == "skipped"]
    assert skipped in ([], ["documents"])
