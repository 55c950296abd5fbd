"""Policies: what is accepted, what is refused and in which words, files and presets."""

import copy
import json
import pickle

import numpy as np
import pytest
from pydantic import ValidationError

from sparsify.errors import UsageError
from sparsify.policy import (
    MSA,
    PRESETS,
    Auto,
    Dense,
    LayerRule,
    MoBA,
    Policy,
    Quality,
    dump_policy,
    load_policy,
)

SIZES = {"block_size": 64, "topk": 8}


def test_constructors():
    assert Policy.moba(**SIZES).method == MoBA(block_size=64, topk=8, decode="sparse")
    assert Policy.dense().method == Dense()
    assert Policy.auto(gpu="h200").method == Auto(gpu="h200")
    msa = Policy.msa(**SIZES, decode="dense", local="union").method
    assert msa == MSA(block_size=64, topk=8, decode="dense", local="union", indexer="proxy")


def test_dense_last_becomes_the_first_rule():
    rule = {"match": "*.0.*", "method": "dense"}
    policy = Policy.moba(**SIZES, dense_last=3, layers=[rule])
    assert [r.match for r in policy.layers] == ["-3:", "*.0.*"]
    assert policy.layers[0].method == Dense()
    assert Policy.moba(**SIZES, dense_last=0).layers == ()


def test_topk_may_be_huge_and_integers_may_be_numpy():
    assert Policy.moba(block_size=1, topk=10**6).method.topk == 10**6
    assert Policy.moba(block_size=np.int64(4), topk=2).method.block_size == 4


@pytest.mark.parametrize(
    "value", [0, -1, True, False, 64.0, 1.5, "64", None, [64], float("nan"), 2**31, 10**30]
)
def test_block_size_is_a_positive_integer(value):
    with pytest.raises(UsageError, match=r"^method\.block_size is "):
        Policy.moba(block_size=value, topk=1)


@pytest.mark.parametrize("value", [0, -1, True, 8.0, "8", 4097, 10**9])
def test_index_dim_is_a_size_that_an_indexer_can_have(value):
    with pytest.raises(UsageError, match=r"^method\.index_dim is .*expected"):
        Policy.msa(block_size=4, topk=2, indexer="learned", index_dim=value)
    assert Policy.msa(block_size=4, topk=2, indexer="learned", index_dim=4096).method.index_dim


@pytest.mark.parametrize("value", [0, -1, True, 8.0, "8", None, 10**6 + 1])
def test_topk_is_a_positive_integer(value):
    with pytest.raises(UsageError, match=r"^method\.topk is .*expected"):
        Policy.moba(block_size=4, topk=value)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({}, ["method is missing"]),
        ({"method": None}, ["method is None", "moba"]),
        ({"method": 3}, ["method is 3"]),
        ({"method": {}}, ["method has no name"]),
        ({"method": "mobo"}, ["'mobo'", "did you mean 'moba'"]),
        ({"method": "moba"}, ["without its fields", "block_size: 64"]),
        ({"method": {"name": "moba", "block_size": 4}}, ["method.topk is missing"]),
        (
            {"method": {"name": "moba", "blocksize": 4, "topk": 1}},
            ["method has no field 'blocksize'", "'block_size'"],
        ),
        ({"method": {"name": "dense", "topk": 1}}, ["method has no field 'topk'"]),
        ({"method": "dense", "layer": []}, ["Policy has no field 'layer'", "'layers'"]),
        ({"method": "dense", "layers": "x"}, ["layers is 'x'", "list"]),
        ({"method": "dense", "layers": ["x"]}, ["layers[0] is 'x'"]),
        ({"method": "dense", "layers": [{"match": "x"}]}, ["layers[0].method is missing"]),
        ({"method": "dense", "layers": [{"method": "dense"}]}, ["layers[0].match is missing"]),
        (
            {"method": "dense", "layers": [{"match": "x", "method": {"name": "moba"}}]},
            ["layers[0].method.block_size is missing", "1 more fault"],
        ),
        ({"method": "dense", "layers": [{"match": "", "method": "dense"}]}, ["layers[0].match"]),
        ({"method": "dense", "layers": [{"match": "::0", "method": "dense"}]}, ["'::0'", "range"]),
        ({"method": "dense", "layers": [{"match": "1:2:3:4", "method": "dense"}]}, ["range"]),
        ({"method": "dense", "layers": [{"match": True, "method": "dense"}]}, ["True", "text"]),
        ({"method": "dense", "min_context": -1}, ["min_context is -1"]),
        ({"method": "dense", "min_context": 1.0}, ["min_context is 1.0"]),
        ({"method": "dense", "dense_last": -1}, ["dense_last -1"]),
        ({"method": "dense", "dense_last": True}, ["dense_last True"]),
        ({"method": "dense", "dense_last": "3"}, ["dense_last 3"]),
        ({"method": "dense", "on_unproved": "ignore"}, ["on_unproved is 'ignore'", "'refuse'"]),
        ({"method": "dense", "quality": {"min_score_recall": 1.5}}, ["min_score_recall is 1.5"]),
        ({"method": "dense", "quality": {"max_kl_nats": float("inf")}}, ["max_kl_nats is inf"]),
        ({"method": "dense", "quality": {"max_kl_nats": True}}, ["max_kl_nats is True"]),
        ({"method": "dense", "quality": 3}, ["quality is 3"]),
        ({"method": {"name": "msa", **SIZES, "index_dim": 4}}, ["index_dim", "proxy"]),
        ({"method": {"name": "msa", **SIZES, "indexer": "learned"}}, ["needs index_dim"]),
        ({"method": {"name": "msa", **SIZES, "local": "in"}}, ["method.local is 'in'", "union"]),
        ({"method": {"name": "moba", **SIZES, "decode": "x"}}, ["method.decode is 'x'"]),
        ({"method": {"name": "auto", "gpu": 3}}, ["method.gpu is 3", "text"]),
    ],
)
def test_faults_name_the_field_what_was_given_and_what_is_expected(fields, parts):
    for build in (lambda: Policy(**fields), lambda: Policy.from_json(fields)):
        with pytest.raises(UsageError) as caught:
            build()
        message = str(caught.value)
        assert all(part in message for part in parts), message
        assert "\n" not in message and message[-1] in ".?" and "pydantic" not in message


def test_huge_values_do_not_make_huge_messages():
    with pytest.raises(UsageError) as caught:
        Policy(method={"name": "x" * 10_000})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("model", [MoBA, MSA, LayerRule])
def test_single_models_speak_the_same_way(model):
    with pytest.raises(UsageError, match="is missing"):
        model()


def test_models_are_frozen_hashable_and_copyable():
    policy = Policy.msa(**SIZES, dense_last=1, quality={"min_score_recall": 0.5})
    with pytest.raises(ValidationError):
        policy.min_context = 3
    assert copy.deepcopy(policy) == pickle.loads(pickle.dumps(policy)) == policy
    assert hash(policy) == hash(copy.deepcopy(policy))


def test_json_round_trip():
    for policy in (*PRESETS.values(), Policy.auto(), Policy.moba(**SIZES, quality={})):
        data = json.loads(json.dumps(policy.to_json()))
        assert Policy.from_json(data) == policy


@pytest.mark.parametrize("name", ["p.yaml", "p.yml", "p.json", "p"])
def test_file_round_trip(tmp_path, name):
    policy = Policy.moba(**SIZES, dense_last=2, min_context=10, on_unproved="error")
    dump_policy(policy, tmp_path / name)
    assert load_policy(tmp_path / name) == policy
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_file_of_the_documentation(tmp_path):
    from sparsify import policy as module

    text = module.__doc__.split("::\n", 1)[1]
    path = tmp_path / "p.yaml"
    path.write_text(text)
    policy = load_policy(path)
    assert policy.method == MoBA(block_size=64, topk=8)
    assert [rule.match for rule in policy.layers] == ["-3:", "model.layers.0.*"]
    assert policy.quality == Quality(min_score_recall=0.8)


def test_presets_are_as_published():
    kimi, m3 = load_policy("kimi-1m"), load_policy("msa-m3")
    assert kimi.method == MoBA(block_size=4096, topk=12, decode="dense")
    assert [(rule.match, rule.method) for rule in kimi.layers] == [("-3:", Dense())]
    assert m3.method == MSA(block_size=128, topk=16, indexer="learned", index_dim=128)
    assert m3.method.local == "inside" and m3.layers == ()


def test_a_preset_wins_over_a_file_and_a_path_over_the_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dump_policy(Policy.dense(), "kimi-1m")
    assert load_policy("kimi-1m") == PRESETS["kimi-1m"]
    assert load_policy("./kimi-1m") == Policy.dense()


def test_unknown_names_and_wrong_files(tmp_path):
    with pytest.raises(UsageError, match=r"no preset of that name; did you mean 'kimi-1m'\?"):
        load_policy("kimi-1M")
    with pytest.raises(UsageError, match=r"there are kimi-1m, msa-m3\.$"):
        load_policy("zzz.yaml")
    path = tmp_path / "p.yaml"
    path.write_text("method: {name: moba, block_size: 0, topk: 1}\n")
    with pytest.raises(UsageError, match=r"p\.yaml is wrong: method\.block_size is 0; expected"):
        load_policy(path)


def test_indices_and_ranges():
    def indices(match, count):
        return LayerRule(match=match, method="dense").indices(count)

    assert indices("-3:", 10) == {7, 8, 9}
    assert indices("-3:", 2) == {0, 1}
    assert indices("0", 3) == indices(-3, 3) == {0}
    assert indices("5", 3) == set()
    assert indices("::2", 5) == {0, 2, 4}
    assert indices("2:8", 4) == {2, 3}
    assert indices("model.*", 4) is None
    assert indices("[0]", 4) is None


def test_quality_budget():
    run = {
        "score_recall": 0.9,
        "kl_nats": 0.1,
        "dense_loss_nats": 2.0,
        "sparse_loss_nats": 2.3,
    }
    assert Quality().faults(run) == []
    assert Quality(min_score_recall=0.9, max_kl_nats=0.1).faults(run) == []
    faults = Quality(min_score_recall=0.95, max_kl_nats=0.05, max_loss_increase_nats=0.2)
    assert len(faults.faults(run)) == 3
    nan = dict.fromkeys(run, float("nan"))
    assert len(faults.faults(nan)) == 3


def test_schema_describes_the_short_forms():
    schema = Policy.model_json_schema()
    assert "dense_last" in schema["properties"]
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["MoBA"]["properties"]["topk"]["maximum"] == 10**6
