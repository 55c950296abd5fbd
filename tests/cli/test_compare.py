"""`sparsify compare`."""

import json

import pytest

from tests._util.published_models import LLAMA


def test_a_row_per_gpu_and_configuration(cli):
    words = ("--gpu", "a100,h100,h200", "--context", "128k")
    code, out, err = cli("compare", LLAMA, *words)
    lines = out.splitlines()
    assert code == 0 and "llama-3.1-8b, prefill: 32 layers of full attention" in out
    for gpu in ("A100-SXM4-80GB", "H100-SXM5-80GB", "H200-SXM-141GB"):
        assert sum(line.startswith(f" {gpu} ") for line in lines) == 1
        assert sum(gpu in line and "expect" in line for line in lines) == 1
    assert sum(line.split()[:2] == ["MoBA", "128/8"] for line in lines) == 3
    assert err.count("is taken as") == 2  # a100 and h100


def test_faster_gpus_are_faster(cli):
    words = ("--gpu", "a100-80gb,b200", "--context", "128k", "--policy", "msa-m3", "--json")
    code, out, _ = cli("compare", LLAMA, *words)
    slow, fast = json.loads(out)["estimates"]
    assert code == 0 and (slow["gpu"], fast["gpu"]) == ("A100-SXM4-80GB", "B200-SXM-180GB")
    assert slow["rows"][0]["dense"]["ms"] > 5 * fast["rows"][0]["dense"]["ms"]


def test_every_gpu_has_its_own_calibration(cli):
    words = ("--gpu", "h200,a100-80gb", "--context", "64k", "--policy", "msa-m3", "--json")
    estimates = json.loads(cli("compare", LLAMA, *words)[1])["estimates"]
    assert [one["rows"][0]["dense"]["source"] for one in estimates] == ["calibrated", "bound"]


def test_the_same_as_estimate(cli):
    words = ("--context", "32k,64k", "--phase", "decode", "--batch", "4", "--json")
    compared = json.loads(cli("compare", LLAMA, "--gpu", "h200", *words)[1])["estimates"]
    assert compared == [json.loads(cli("estimate", LLAMA, "--gpu", "h200", *words)[1])]


def test_one_gpu_named_twice_is_compared_once(cli):
    words = ("--gpu", "h200,h200", "--context", "32k", "--json")
    assert len(json.loads(cli("compare", LLAMA, *words)[1])["estimates"]) == 1


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["--gpu", "h200,tpu"], 7, "No figures are known for the GPU 'tpu'"),
        (["--gpu", "h200,,a100-80gb"], 2, "--gpu is 'h200,,a100-80gb'; expected names"),
        (["--gpu", "h200", "--context", "none"], 2, "--context is 'none'; expected a size"),
        ([], 2, "Missing option '--gpu'"),
        (["--gpu", "h200", "--policy", "auto"], 2, "sparsify plan"),
    ],
)
def test_faults_are_one_sentence(cli, words, code, part):
    got, out, err = cli("compare", LLAMA, *words)
    assert (got, out) == (code, "") and part in err and len(err.strip().splitlines()) == 1


def test_a_gpu_of_two_names_is_compared_once(cli):
    words = ("--gpu", "h200,a100-80gb,H200-SXM-141GB,h200", "--context", "64k", "--json")
    estimates = json.loads(cli("compare", LLAMA, *words)[1])["estimates"]
    assert [one["gpu"] for one in estimates] == ["H200-SXM-141GB", "A100-SXM4-80GB"]


@pytest.mark.parametrize("degree", ["3", "64"])
def test_degrees_that_do_not_split_the_heads_name_those_that_do(cli, degree):
    words = ("--gpu", "h200", "--tensor-parallel", degree)
    code, out, err = cli("compare", LLAMA, *words)
    assert (code, out) == (2, "") and "Possible are 1, 2, 4, 8, 16, 32." in err
