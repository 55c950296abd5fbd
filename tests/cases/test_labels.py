"""The labels of the cases, checked by numbers: a wrong label would make a wrong verdict pass."""

import pytest
import torch

from tests._util.cases import build, gap, index, main_out

NAMES = sorted(index())


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_what_its_label_says(name):
    case = build(name)
    expect = case["expect"]
    with torch.no_grad():
        got = main_out(case["model"](*case["args"], **case["kwargs"]), expect)
    tolerance = expect.get("tol", 2e-5)
    if case["ref"] and not expect.get("model_itself_leaks"):
        assert gap(got, case["ref"](), expect) <= tolerance
    if case["naive"] is None or expect.get("differs") is None:
        return
    naive = gap(got, case["naive"](), expect)
    if expect["differs"]:
        assert naive > 1e-3, "taken for plain causal attention it would not differ"
    else:
        assert naive <= tolerance


def test_most_labels_have_a_reference():
    with_reference = [name for name in NAMES if build(name)["ref"]]
    assert len(with_reference) > len(NAMES) // 2
