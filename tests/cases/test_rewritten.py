"""Every case that may be replaced, replaced: at top-k = all it equals the original, at top-k = 1 it
does not where there is more than one block."""

import pytest
import torch
from torch.utils import _pytree as pytree

import sparsify as sp
from sparsify.errors import NothingToDoError
from tests._util.cases import build, gap, index, main_out

BLOCK = 8
NOT_CAPTURED = {"causal_lower_right_bias_object"}  # torch.export cannot take the bias object
ALIKE = {"identical_tokens_all_scores_tie"}  # all values are equal, so any choice gives the same
ALLOWED = {name for name, entry in index().items() if max(entry["expect"]["allowed"]) > 0}
NAMES = sorted(ALLOWED - NOT_CAPTURED)


def rewritten(case, topk, method="moba"):
    """The case's model on the graph host; None when no site may be replaced."""
    policy = getattr(sp.Policy, method)(block_size=BLOCK, topk=topk)
    try:
        result = sp.sparsify(case["model"], policy, case["args"], case["kwargs"], host="graph")
    except NothingToDoError:
        return None
    return result.model


def outputs(case, model):
    args, kwargs = pytree.tree_map(lambda x: x, (case["args"], case["kwargs"]))
    with torch.no_grad():
        return main_out(model(*args, **kwargs), case["expect"])


@pytest.mark.parametrize("method", ["moba", "msa"])
@pytest.mark.parametrize("name", NAMES)
def test_with_all_blocks_it_equals_the_original(name, method):
    case = build(name)
    model = rewritten(case, 10**6, method)
    if model is None:
        assert 0 in case["expect"]["allowed"]
        return
    wanted = outputs(case, case["model"])
    if case["expect"].get("model_itself_leaks"):
        wanted = case["ref"]()  # the model reads NaN where nothing may be read
    got = outputs(case, model)
    assert got.dtype == wanted.dtype or case["expect"].get("model_itself_leaks")
    assert gap(got, wanted, case["expect"]) <= case["expect"].get("tol", 2e-5)


@pytest.mark.parametrize("name", sorted(set(NAMES) - ALIKE))
def test_with_one_block_it_differs_where_there_are_more(name):
    case = build(name)
    model = rewritten(case, 1)
    if model is None or case["expect"].get("kv_len", 0) <= BLOCK:
        return
    wanted = outputs(case, case["model"])
    assert gap(outputs(case, model), wanted, case["expect"]) > 1e-3
