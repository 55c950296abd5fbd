"""`sparsify estimate`: tables, verdicts, warnings, explanations, plots, and what can go wrong."""

import json
import re
import subprocess
import sys
import time

import pytest

from tests._util.commands import environment
from tests._util.published_models import LLAMA, QWEN

BLOCKED = """
import sys
for name in ("torch", "transformers", "triton", "onnx", "matplotlib"):
    sys.modules[name] = None
from sparsify.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
CALIBRATION = {
    "schema": 1,
    "gpu": "A100-SXM4-80GB",
    "date": "2026-11-30",
    "source": "made up for a test",
    "families": [
        {"family": "dense_prefill", "kernel": "own", "efficiency": 0.5, "overhead_us": 10.0,
         "error": 0.1, "points": 5, "contexts": [1024, 65536]},
    ],
}  # fmt: skip


def report(cli, *words):
    code, out, err = cli("estimate", *words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_a_table_with_a_verdict(cli):
    code, out, err = cli("estimate", LLAMA, "--gpu", "h100-sxm", "--context", "32k,128k")
    assert (code, err.count("\n")) == (0, err.count("WARNING"))
    lines = [line.split() for line in out.splitlines()]
    assert "llama-3.1-8b on H100-SXM5-80GB, prefill: 32 layers of full attention" in out
    assert "expect" in out and "end to end (bound" in out
    assert sum(line[:2] == ["32k", "dense"] for line in lines) == 1
    for name in ("MoBA 128/8", "MoBA 512/3", "MoBA 4096/12", "MSA proxy", "MSA learned"):
        assert out.count(name) >= 3, name  # two contexts, and the second table
    for part in ("attention", "speed-up", "memory GB", "at 128k", "source", "assumed: "):
        assert part in out
    assert "range: nothing was calibrated" in out and "what-if" in out


def test_sources_are_named_apart(cli):
    """Dense attention of the H200 is calibrated, the same on the H100 is not."""
    dense = {}
    for gpu in ("h200", "h100-sxm"):
        out = cli("estimate", LLAMA, "--gpu", gpu, "--context", "64k", "--policy", "msa-m3")[1]
        row = next(line for line in out.splitlines() if " dense (" in line)
        dense[gpu] = row.split()[-1]
    assert dense == {"h200": "calibrated", "h100-sxm": "range"}


def test_json_is_one_document(cli):
    data = report(cli, LLAMA, "--gpu", "h200", "--context", "32k,128k", "--policy", "msa-m3")
    assert data["schema"] == 1 and data["gpu"] == "H200-SXM-141GB"
    assert [row["context"] for row in data["rows"]] == [32_768, 131_072]
    row = data["rows"][1]
    assert row["method"] == "msa" and row["indexer"] == "learned" and row["topk"] == 16
    assert row["speedup"]["low"] <= row["speedup"]["expected"] <= row["speedup"]["high"]
    assert row["end_to_end"]["low"] < row["speedup"]["high"] and "explanations" not in data


def test_only_what_a_policy_names_is_sparse(cli):
    code, out, _ = cli("estimate", LLAMA, "--gpu", "b200", "--context", "1m", "--policy", "kimi-1m")
    assert code == 0 and "32 layers of full attention, 29 of them sparse" in out
    assert "MSA" not in out


def test_memory_that_does_not_suffice_is_a_warning(cli):
    words = ("--context", "128k", "--phase", "decode", "--policy", "msa-m3")
    code, out, err = cli("estimate", QWEN, "--gpu", "a100-80gb", "--batch", "8", *words)
    assert code == 0 and " > 80.0" in out
    assert "sparsify: WARNING: At 128K" in err and "do not fit the 80 GB" in err
    code, out, err = cli("estimate", LLAMA, "--gpu", "a100-80gb", *words)
    assert code == 0 and " > " not in out and "do not fit" not in err


def test_smaller_elements_need_less(cli):
    words = ("--gpu", "h200", "--context", "128k", "--phase", "decode", "--policy", "msa-m3")
    wide, kv, index = (
        report(cli, LLAMA, *words, *more)["rows"][0]["memory"]
        for more in ((), ("--kv-dtype", "fp8"), ("--index-dtype", "fp8"))
    )
    assert kv["kv_cache_bytes"] * 2 == wide["kv_cache_bytes"] == index["kv_cache_bytes"]
    assert index["index_cache_bytes"] * 2 == wide["index_cache_bytes"]


def test_several_gpus_share_a_model(cli):
    one, two = (
        report(cli, LLAMA, "--gpu", "h200", "--context", "64k", "--tensor-parallel", count)
        for count in ("1", "2")
    )
    assert (
        two["rows"][0]["memory"]["weights_bytes"] * 2 == one["rows"][0]["memory"]["weights_bytes"]
    )
    assert two["rows"][0]["dense"]["flops"] < one["rows"][0]["dense"]["flops"]


@pytest.mark.parametrize("phase", ["prefill", "decode", "training"])
def test_phases(cli, phase):
    data = report(cli, LLAMA, "--gpu", "h100-sxm", "--context", "64k", "--phase", phase)
    assert {row["phase"] for row in data["rows"]} == {phase}


def test_a_calibration_of_the_users(cli, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(CALIBRATION))
    words = (LLAMA, "--gpu", "a100-80gb", "--context", "64k")
    assert report(cli, *words)["rows"][0]["dense"]["source"] == "bound"
    with_it = report(cli, *words, "--calibration", path)["rows"][0]["dense"]
    assert with_it["source"] == "calibrated" and with_it["low_ms"] < with_it["ms"]
    code, out, err = cli("estimate", LLAMA, "--gpu", "h200", "--calibration", path)
    assert (code, out) == (2, "") and "was measured on A100-SXM4-80GB, not on H200" in err


def test_a_gpu_of_the_users(cli, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: Mine\nvendor: me\narchitecture: own\nbf16_dense_tflops: 100\n"
        "memory_gb: 48\nmemory_bandwidth_gbs: 1000\n"
    )
    code, out, err = cli("estimate", LLAMA, "--gpu", path, "--context", "32k")
    assert code == 0 and "llama-3.1-8b on Mine" in out
    assert "Figures of Mine not traced to its vendor: bf16_dense_tflops" in err


def test_a_family_says_which_gpu_was_taken(cli):
    _, _, err = cli("estimate", LLAMA, "--gpu", "h100", "--context", "32k", "--json")
    assert "h100 is taken as H100-SXM5-80GB; there are also" in err


def test_a_policy_that_is_all_dense(cli, tmp_path):
    policy = tmp_path / "dense.yaml"
    policy.write_text("method: dense\n")
    words = (LLAMA, "--gpu", "h200", "--context", "32k", "--policy", policy)
    code, out, _ = cli("estimate", *words, "--explain")
    starts = [line.split()[:2] for line in out.splitlines()]
    assert code == 0 and "Nothing is sparse" in out and starts.count(["32k", "dense"]) == 1
    assert sum(line[:1] == ["dense"] for line in starts) == 1  # in the table of memory
    code, _, err = cli("estimate", *words, "--plot", tmp_path / "a.png")
    assert code == 2 and "nothing to draw" in err and not (tmp_path / "a.png").exists()


def test_below_its_least_context_a_policy_is_dense(cli, tmp_path):
    policy = tmp_path / "late.yaml"
    policy.write_text("method: {name: moba, block_size: 512, topk: 3}\nmin_context: 100000\n")
    words = (LLAMA, "--gpu", "h200", "--context", "32k,128k", "--policy", policy)
    short, long = report(cli, *words, "--plot", tmp_path / "a.png")["rows"]
    assert short["speedup"]["expected"] == 1 and long["speedup"]["expected"] > 1


VERBS = (
    ("estimate", LLAMA, "--gpu", "b200", "--context", "128k", "--policy", "msa-m3", "--explain"),
    ("compare", LLAMA, "--gpu", "b200,a100", "--context", "128k", "--policy", "msa-m3"),
    ("plan", LLAMA, "--gpu", "b200", "--context", "64k", "--policy", "kimi-1m"),
    ("gpus",),
    ("gpus", "b200"),
)
NUMBER = re.compile(r"[\d,.]+(?:-[\d,.]+)?x?")


@pytest.mark.parametrize(
    "words", VERBS, ids=lambda words: "-".join(map(str, words[:1] + words[3:4]))
)
def test_no_number_is_cut_in_narrow_terminals(cli, monkeypatch, words):
    """What a wide terminal shows is in a narrow one, too, but for columns left out by design."""

    def shown(columns):
        monkeypatch.setenv("COLUMNS", columns)
        code, out, _ = cli(*words)
        assert code == 0
        return out

    wide = shown("300")
    for columns in ("40", "60", "80", "100", "132"):
        narrow = shown(columns)
        assert "…" not in narrow
        assert set(NUMBER.findall(narrow)) <= set(NUMBER.findall(wide)) | {"", ".", ","}


@pytest.mark.parametrize("columns", ["40", "100", "200"])
def test_a_row_stays_together(cli, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = cli(
        "estimate", LLAMA, "--gpu", "b200", "--context", "128k", "--policy", "msa-m3"
    )
    assert code == 0
    row = r"[\d.,]{3,}-[\d.,]{3,}[ ;](.* )?[\d.]+-[\d.]+x[ ;](.* )?[\d.]+-[\d.]+x[ ;](.* )?range"
    assert re.search(row, " ".join(out.split()))


# --- MODEL


def test_a_folder_and_a_captured_factory(cli, llama, factories):
    folder = report(cli, llama, "--gpu", "h200", "--context", "32k")
    assert folder["model"] == llama.name and folder["rows"][0]["layers"]["sparse"] == 3
    factory = report(cli, "cli_models:attention", "--gpu", "h200", "--context", "32k")
    assert factory["rows"][0]["layers"]["sparse"] == 1


def test_a_gguf_file_and_a_cached_id(cli, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    from tests._util.tiny_gguf import LAYERS, write_gguf

    words = ("--gpu", "h200", "--context", "32k", "--policy", "msa-m3")
    found = report(cli, write_gguf(tmp_path / "tiny.gguf"), *words)
    assert found["model"] == "tiny" and found["rows"][0]["layers"]["sparse"] == LAYERS
    hub = tmp_path / "models--some--llama"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("abc")
    (hub / "snapshots" / "abc").mkdir(parents=True)
    (hub / "snapshots" / "abc" / "config.json").write_bytes(LLAMA.read_bytes())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert report(cli, "some/llama", *words)["model"] == "some/llama"


def test_a_plan(cli, rewritten, llama):
    data = report(cli, llama, "--gpu", "h200", "--context", "4k", "--plan", rewritten / "plan.json")
    assert [(row["method"], row["block_size"]) for row in data["rows"]] == [("moba", 8)]
    assert data["rows"][0]["layers"] == {
        "sparse": 2, "dense": 1, "sliding": 0, "recurrent": 0, "feed_forward": 0,
    }  # fmt: skip


def test_nothing_to_make_sparse(cli, tmp_path):
    config = json.loads(LLAMA.read_text()) | {"model_type": "mistral", "sliding_window": 4096}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    code, out, err = cli("estimate", path, "--gpu", "h200")
    assert (code, out) == (3, "") and "no full attention" in err


def test_without_torch_and_quickly():
    """A decision before deployment needs neither the model's weights nor its frameworks."""
    words = ["estimate", LLAMA, "--gpu", "h200", "--explain", "--json"]
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *map(str, words)],
        capture_output=True, text=True, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] and time.perf_counter() - started < 5


# --- explanations


def test_explain(cli):
    words = ("--gpu", "h200", "--context", "32k,128k", "--policy", "msa-m3", "--explain")
    code, out, _ = cli("estimate", LLAMA, *words)
    assert code == 0
    for part in (
        "dense, prefill at 131,072 tokens, one layer of model.layers.{0..31}.self_attn:",
        "MSA learned 128/16, prefill at 131,072 tokens",
        "attended_pairs (keys of the blocks read) = ",
        "index scores, FLOP = 2*batch_sequences*dense_pairs*index_dim*index_query_heads = 17,592",
        "query_heads = 32",
        "memory bandwidth",
        "####",
        "what it rests on:",
        "H200-SXM-141GB bf16_dense_tflops: 989.4 TFLOP/s (",
        "half as efficient",
        "twice as efficient",
    ):
        assert part in out, part
    assert "fp8_dense_tflops" not in out


def test_explain_as_json(cli):
    data = report(cli, LLAMA, "--gpu", "h200", "--context", "64k", "--explain")
    dense, sparse = data["explanations"]
    assert dense["configuration"] == "dense" and dense["sensitivity"] == []
    assert sparse["configuration"] in data["verdict"]
    assert sum(stage["share_of_time"] for stage in sparse["stages"]) == pytest.approx(1)
    assert [line["efficiency_scale"] for line in sparse["sensitivity"]] == [0.5, 1, 2]


def test_layers_that_a_policy_keeps_dense_are_not_explained_as_sparse(cli):
    words = ("--gpu", "h200", "--context", "1m", "--policy", "kimi-1m", "--explain")
    _, out, _ = cli("estimate", LLAMA, *words)
    assert "MoBA 4096/12, prefill at 1,048,576 tokens, one layer of model.layers.{0..28}" in out


# --- faults


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["--context", "32k"], 2, "Missing option '--gpu'"),
        (["--gpu", "h2000"], 7, "No figures are known for the GPU 'h2000'; did you mean H200"),
        (["--gpu", "none.yaml"], 2, "There is no GPU file none.yaml"),
        (["--gpu", ""], 2, "The value of --gpu is empty"),
        (["--gpu", "h200", "--context", "0"], 2, "is '0'; expected a size of at least 1, such as"),
        (["--gpu", "h200", "--context", "32k,"], 2, "--context is ''; expected a size"),
        (["--gpu", "h200", "--context", "-5"], 2, "--context is '-5'; expected a size"),
        (["--gpu", "h200", "--context", "9999999m"], 2, "expected a whole number from 1 to"),
        (["--gpu", "h200", "--phase", "learn"], 2, "is not one of 'prefill', 'decode', 'training'"),
        (["--gpu", "h200", "--batch", "0"], 2, "The batch is 0"),
        (["--gpu", "h200", "--batch", "many"], 2, "--batch is 'many'; expected a whole number"),
        (["--gpu", "h200", "--tensor-parallel", "7"], 2, "cannot be split over"),
        (["--gpu", "h200", "--kv-dtype", "int3"], 2, "'int3' is not one of 'bf16'"),
        (["--gpu", "h200", "--policy", "auto"], 2, "`sparsify plan MODEL --policy auto"),
        (["--gpu", "h200", "--policy", "nothing"], 2, "no preset of that name"),
        (["--gpu", "h200", "--plan", "none.json"], 2, "none.json"),
        (["--gpu", "h200", "--plan", "p", "--policy", "msa-m3"], 2, "one is enough"),
        (["--gpu", "h200", "--calibration", "none.json"], 2, "There is no calibration none.json"),
        (["--gpu", "h200", "--plot", "out.gif"], 2, "must end in .png, .svg or .pdf"),
        (["--gpu", "h200", "--plot", ""], 2, "The value of --plot is empty"),
    ],
)
def test_faults_are_one_sentence(cli, words, code, part):
    got, out, err = cli("estimate", LLAMA, *words)
    assert (got, out) == (code, "") and part in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("none", "no model of that id in the local cache. To download its config"),
        ("none/at/all.json", "There is no file or folder none/at/all.json"),
        ("no_such_module:factory", "There is no Python module no_such_module"),
        ("", "The value of MODEL is empty"),
    ],
)
def test_models_that_are_not_there(cli, model, part):
    code, out, err = cli("estimate", model, "--gpu", "h200")
    assert (code, out) == (2, "") and part in err


def test_a_broken_config_is_told(cli, tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama"}')
    code, out, err = cli("estimate", path, "--gpu", "h200")
    assert (code, out) == (2, "") and str(path) in err and len(err.strip().splitlines()) == 1
