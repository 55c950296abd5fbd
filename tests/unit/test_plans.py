"""Plan files: what is refused, and that the message names the file and the fault."""

import json

import pytest

from sparsify.errors import ArtefactError
from sparsify.plans import PLAN_SCHEMA, LayerPlan, Plan

LAYER = LayerPlan("layers.0", 0, "moba", "rewritten", "by policy", 8, 2)
PLAN = Plan((LAYER,), {}, "m")
LEARNED = {"method": "msa", "indexer": "learned", "index_dim": 16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": {}}, "Not a plan: expected a JSON object"),
        ({"schema": "1"}, "Not a plan: schema is '1'"),
        ({"schema": PLAN_SCHEMA + 1}, "Update sparsify-attention"),
        ({"layres": [], "extra": 1}, "The plan has unknown fields: extra, layres"),
        ({"estimate": {}}, "The plan has unknown fields: estimate"),
        ({"schema": 2, "estimate": []}, '"estimate" must be an object'),
        ({"schema": 2, "estimates": {}}, "The plan has unknown fields: estimates"),
        ({"layers": [1]}, "A layer of the plan is 1; expected an object"),
        ({"layers": [LAYER.to_json() | {"size": 1}]}, "has unknown fields: size"),
        ({"layers": [LAYER.to_json() | {"topk": 0}]}, "from 1 to 2147483647"),
        ({"layers": [LAYER.to_json() | {"topk": 2**31}]}, "from 1 to 2147483647"),
        ({"layers": [LAYER.to_json() | {"block_size": 2**31}]}, "from 1 to 2147483647"),
        *(
            ({"layers": [LAYER.to_json() | LEARNED | {"index_dim": size}]}, "index_dim")
            for size in (None, 0, -3, "16", 2.0, True, 4097, 2**31)
        ),
        ({"layers": [LAYER.to_json() | {"indexer": "learned"}]}, "'moba' does not use"),
        ({"layers": [LAYER.to_json() | LEARNED | {"indexer": "proxy"}]}, "only indexer 'learned'"),
        ({"layers": [LAYER.to_json() | {"index_dim": 8}]}, "only indexer 'learned'"),
    ],
)
def test_wrong_plans_are_refused_by_name(tmp_path, change, message):
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(PLAN.to_json() | change))
    with pytest.raises(ArtefactError) as caught:
        Plan.load(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("change", [{}, {"topk": 2**31 - 1}, {"block_size": 2**31 - 1}, LEARNED])
def test_right_plans_are_read(tmp_path, change):
    path = tmp_path / "plan.json"
    wanted = Plan((LayerPlan.from_json(LAYER.to_json() | change),), {}, "m")
    path.write_text(json.dumps(wanted.to_json()))
    assert Plan.load(path) == wanted


def test_only_plans_with_an_estimate_need_the_newer_schema(tmp_path):
    assert PLAN.to_json()["schema"] == 1 and "estimate" not in PLAN.to_json()
    with_estimate = Plan(PLAN.layers, {}, "m", {"gpu": "G"})
    assert with_estimate.to_json()["schema"] == PLAN_SCHEMA == 2
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(with_estimate.to_json()))
    assert Plan.load(path) == with_estimate != PLAN
