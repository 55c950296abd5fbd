"""`sparsify gpus`."""

import json

import pytest

FILE = """
name: My GPU
vendor: me
architecture: own
bf16_dense_tflops: {value: 10, source: measured by me}
memory_gb: 8
memory_bandwidth_gbs: {value: 100, source: measured by me}
"""


def test_all_in_a_table(cli):
    code, out, err = cli("gpus")
    rows = {line.split("  ")[0].strip(): line for line in out.splitlines()}
    assert (code, err) == (0, "")
    h200 = rows["H200-SXM-141GB"].split()
    assert h200[1:] == ["Hopper", "GH100", "989.4", "1978.9", "141", "4800", "50?", "132", "206.1"]
    assert "TFLOP/s" in out and "FLOP/byte" in out and "not traced to the vendor" in out
    assert rows["Gaudi3"].split()[-2:] == ["-", "453.2"]


def test_all_as_json(cli):
    code, out, _ = cli("gpus", "--json")
    data = json.loads(out)
    assert code == 0 and data["schema"] == 1 and len(data["gpus"]) == 29
    h200 = next(gpu for gpu in data["gpus"] if gpu["name"] == "H200-SXM-141GB")
    assert h200["l2_mb"]["verified"] is False and h200["unverified"] == ["l2_mb"]
    assert h200["ridge_flop_per_byte"] == pytest.approx(206.125) and h200["file"] is None


def test_one_with_its_sources(cli):
    code, out, err = cli("gpus", "h200")
    assert (code, err) == (0, "")
    for part in ("H200-SXM-141GB: NVIDIA Hopper", "8770", "measured on one H200 SXM", "50?",
                 "note: ", "677-740", "TFLOP/s", "also known as h200"):  # fmt: skip
        assert part in out


def test_one_as_json(cli):
    code, out, _ = cli("gpus", "mi300x", "--json")
    data = json.loads(out)
    assert code == 0 and data["gpu"]["bf16_dense_tflops"]["value"] == 1307.4
    assert data["gpu"]["l2_bandwidth_gbs"] is None


def test_a_family_says_which_was_taken(cli):
    code, out, err = cli("gpus", "a100", "--json")
    assert code == 0 and json.loads(out)["gpu"]["name"] == "A100-SXM4-80GB"
    assert err.startswith(
        "sparsify: a100 is taken as A100-SXM4-80GB; there are also A100-PCIe-40GB"
    )
    assert cli("gpus", "a100-80gb", "--json")[2] == ""


def test_a_file_of_the_users(cli, tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    path.write_text(FILE)
    code, out, _ = cli("gpus", path)
    assert code == 0 and "8?" in out and "no source given" in out and f"read from {path}" in out
    monkeypatch.setenv("SPARSIFY_GPU_SPECS", str(tmp_path))
    assert "My GPU (own file)" in cli("gpus")[1]
    path.write_text(FILE.replace("100", "fast"))
    code, out, err = cli("gpus")
    assert (code, out) == (
        2,
        "",
    ) and f"{path} is wrong: memory_bandwidth_gbs.value is 'fast'" in err


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["h20o"], 7, "did you mean H20-96GB or H200-SXM-141GB?"),
        (["tpu"], 7, "No figures are known for the GPU 'tpu'"),
        ([""], 2, "The value of NAME is empty"),
        (["none.yaml"], 2, "There is no GPU file none.yaml"),
        (["h200", "h100"], 2, "unexpected extra argument"),
    ],
)
def test_faults_are_one_sentence(cli, words, code, part):
    got, out, err = cli("gpus", *words)
    assert (got, out) == (code, "") and part in err and len(err.strip().splitlines()) == 1


def test_help_says_what_a_file_needs(cli, tmp_path):
    """And no more: a file of just these figures is read."""
    fields = ("bf16_dense_tflops", "memory_gb", "memory_bandwidth_gbs")
    out = " ".join(cli("gpus", "--help")[1].split())
    assert "needs name, vendor, architecture, bf16_dense_tflops" in out
    assert all(field in out for field in fields)
    path = tmp_path / "mine.yaml"
    text = "name: Mine\nvendor: me\narchitecture: own\n"
    path.write_text(text + "".join(f"{field}: 100\n" for field in fields))
    code, out, _ = cli("gpus", path)
    assert code == 0 and "no source given" in out
