"""`sparsify plan`."""

import json

import pytest

from tests._util.plan_gpus import write_gpu
from tests._util.published_models import LLAMA
from tests._util.tiny_folders import save_llama

CONFIG = dict(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=4,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=32000,
    torch_dtype="bfloat16",
)


@pytest.fixture
def gpu(tmp_path):
    return write_gpu(tmp_path / "gpu.yaml")


@pytest.fixture
def config(tmp_path):
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    return tmp_path / "tiny.json"


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A tiny Llama whose heads the kernels take, and whose context is long."""
    folder = tmp_path_factory.mktemp("wide") / "wide-llama"
    return save_llama(folder, head_dim=16, max_position_embeddings=1 << 18)


def test_a_table_for_people(cli, config, gpu):
    words = ("--policy", "auto", "--gpu", gpu, "--context", "128k")
    code, out, err = cli("plan", config, *words)
    assert code == 0, err
    assert "prefill of 1 x 131,072 tokens on Round-100, 4 of 4 attention layers sparse" in out
    assert "model.layers.{0..3}.self_attn" in out and "chosen by policy" in out
    for column in (
        "layers",
        "method",
        "b/k",
        "min_context",
        "dense ms",
        "sparse ms (range)",
        "why",
    ):
        assert column in out
    assert "alternatives" in out and "if sparse kernels are more or less efficient" in out
    assert "note: Nothing of this is proved" in out and "nothing was written" in out


def test_a_plan_file_and_what_is_in_the_way(cli, config, gpu, tmp_path):
    target = tmp_path / "plans" / "plan.json"
    words = ("plan", config, "--policy", "auto", "--gpu", gpu, "--context", "128k", "-o", target)
    code, out, _ = cli(*words)
    assert code == 0 and f"written to {target}" in out
    plan = json.loads(target.read_text())
    assert plan["schema"] == 2 and plan["estimate"]["gpu"] == "Round-100"
    target.write_text("mine")
    code, _, err = cli(*words)
    assert code == 2 and "exists" in err and "--force" in err and target.read_text() == "mine"
    assert cli(*words, "--force")[0] == 0
    assert json.loads(target.read_text()) == plan
    assert [path.name for path in target.parent.iterdir()] == ["plan.json"]


def test_json_is_one_document(cli, config, gpu):
    words = ("--policy", "auto", "--gpu", gpu, "--context", "128k", "--json")
    code, out, _ = cli("plan", config, *words)
    data = json.loads(out)
    assert code == 0 and data["schema"] == 1
    assert len(data["layers"]) == 4 and len(data["front"]) > 1
    assert [s["efficiency"] for s in data["sensitivity"]] == [0.5, 1.0, 2.0]
    assert all(entry["reason"] for entry in data["infeasible"])
    assert {"bound", "low", "expected", "high", "source"} == set(data["layers"][0]["dense_ms"])


def test_a_fixed_policy_stays_dense_where_dense_is_faster(cli, config, gpu):
    words = ("--policy", "kimi-1m", "--gpu", gpu, "--context", "64k")
    code, out, _ = cli("plan", config, *words)
    assert code == 0 and "0 of 4 attention layers sparse" in out
    text = " ".join(out.split())
    assert "but dense is faster below" in text and "dense by rule '-3:'" in text


def test_plan_then_rewrite(cli, wide, gpu, tmp_path):
    plan = tmp_path / "plan.json"
    words = ("--policy", "auto", "--gpu", gpu, "--context", "128k", "-o", plan)
    code, out, err = cli("plan", wide, *words)
    assert code == 0 and "3 of 3 attention layers sparse" in out, err
    assert "Nothing of this is proved" not in out
    code, _, err = cli("rewrite", wide, "--plan", plan, "-o", tmp_path / "out")
    assert code == 0, err
    kept = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert kept == json.loads(plan.read_text())
    # a folder with such a plan is read like any other
    code, out, err = cli("verify", tmp_path / "out", "--against", wide, "--checks", "V1")
    assert code == 0, err


def test_the_plan_of_a_config_is_held_against_the_model(cli, wide, gpu, tmp_path):
    config, plan = tmp_path / "wide.json", tmp_path / "plan.json"
    told = json.loads((wide / "config.json").read_text())
    config.write_text(json.dumps(told))
    words = ("--policy", "auto", "--gpu", gpu, "--context", "128k", "-o", plan, "--force")
    assert cli("plan", config, *words)[0] == 0
    assert cli("rewrite", wide, "--plan", plan, "--dry-run")[0] == 0
    config.write_text(json.dumps(told | {"num_hidden_layers": 5, "layer_types": None}))
    assert cli("plan", config, *words)[0] == 0
    code, _, err = cli("rewrite", wide, "--plan", plan, "--dry-run")
    assert code == 2 and "model.layers.3.self_attn" in err


def test_prompts_measure_quality(cli, wide, gpu, tmp_path):
    (tmp_path / "prompts.txt").write_text("some text to read. " * 60)
    (tmp_path / "policy.yaml").write_text(
        "method: {name: moba, block_size: 128, topk: 4}\nquality: {min_score_recall: 0.1}\n"
    )
    words = ("--policy", tmp_path / "policy.yaml", "--gpu", gpu, "--context", "128k")
    code, out, err = cli("plan", wide, *words, "--prompts", tmp_path / "prompts.txt")
    assert code == 0, err
    assert "Measured on the samples: mean score recall" in out
    assert "recall on sample 1 of 1" in err
    code, _, err = cli("plan", wide, *words)
    assert code == 2 and "quality budget" in err and "--prompts" in err


def faults(gpu, config):
    auto = ("plan", config, "--policy", "auto")
    full = (*auto, "--gpu", gpu, "--context", "128k")
    return {
        "no policy": (("plan", config, "--gpu", gpu), 2, "What to do is missing"),
        "no gpu": ((*auto, "--context", "128k"), 2, "A GPU to plan for is missing"),
        "no context": ((*auto, "--gpu", gpu), 2, "A context to plan for is missing"),
        "unknown gpu": ((*auto, "--gpu", "h2o0", "--context", "1k"), 7, "H200"),
        "no gpu file": ((*auto, "--gpu", "x.yaml", "--context", "1k"), 2, "x.yaml"),
        "context": ((*full[:-1], "128q"), 2, "--context is '128q'"),
        "batch": ((*full, "--batch", "0"), 2, "batch is 0"),
        "batch text": ((*full, "--batch", "many"), 2, "--batch is 'many'"),
        "gpus": ((*full, "--tensor-parallel", "3"), 2, "cannot be split"),
        "speedup": ((*full, "--min-speedup", "0.5"), 2, "--min-speedup is '0.5'"),
        "unreachable": ((*full, "--min-speedup", "1e6"), 8, "cannot be reached at 131,072 tokens"),
        "memory": ((*full, "--batch", "9999"), 8, "does not hold the weights"),
        "prompts": ((*full, "--prompts", "none.txt"), 2, "none.txt"),
        "policy": ((*full[:2], "--policy", "kimi", "--gpu", gpu), 2, "kimi-1m"),
        "model": (("plan", "none.json", *full[2:]), 2, "none.json"),
        "empty": (("plan", "", *full[2:]), 2, "MODEL is empty"),
        "calibration": ((*full, "--calibration", "none.json"), 2, "none.json"),
        "phase": ((*full, "--phase", "prefil"), 2, "prefill"),
    }


@pytest.mark.parametrize("name", faults("", ""))
def test_what_a_user_can_get_wrong(cli, gpu, config, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, wanted, text = faults(gpu, config)[name]
    code, out, err = cli(*words, "-o", tmp_path / "plan.json")
    assert code == wanted and text in err and out == "", err
    assert not (tmp_path / "plan.json").exists()


def test_prompts_need_the_model(cli, gpu, config, tmp_path):
    (tmp_path / "p.txt").write_text("text")
    words = ("--policy", "auto", "--gpu", gpu, "--context", "128k", "--prompts", tmp_path / "p.txt")
    code, _, err = cli("plan", config, *words)
    assert code == 2 and "--prompts needs the model itself" in err


def test_a_context_beyond_the_models_own_is_told(cli, config, gpu):
    config.write_text(json.dumps(CONFIG | {"max_position_embeddings": 65536}))
    words = ("plan", config, "--policy", "auto", "--gpu", gpu, "--context")
    told = "note: The model is made for 65,536 tokens; 131,072 are beyond."
    assert told in cli(*words, "128k")[1]
    assert "made for" not in cli(*words, "64k")[1]


def test_what_is_not_calibrated_is_called_a_range(cli, config, gpu):
    out = cli("plan", config, "--policy", "auto", "--gpu", gpu, "--context", "128k")[1]
    row = next(line for line in out.splitlines() if "self_attn" in line).split()
    assert "range" in row and "bound" not in row
    data = cli("plan", config, "--policy", "auto", "--gpu", gpu, "--context", "128k", "--json")[1]
    assert json.loads(data)["layers"][0]["planned_ms"]["source"] == "bound"


def test_a_fixed_policy_is_named_where_other_kernels_would_change_the_plan(cli):
    words = ("--policy", "kimi-1m", "--gpu", "h200", "--context", "64k")
    code, out, _ = cli("plan", LLAMA, *words)
    assert code == 0 and "x1: 1.00x (best: dense)" in out
    assert "2 times as efficient as expected it would be MoBA 4096/12." in out
