"""`sparsify bench` on a CPU: its tables, JSON, refusals; what a GPU adds is faked."""

import json

import pytest
import torch

from sparsify.benches import calibration_runs
from sparsify.benches.attention import AttentionRow, Question
from sparsify.benches.calibration_runs import CASES, Case, Sizes, measured_runs
from sparsify.benches.shapes import parse_shape
from sparsify.cli import render_bench
from sparsify.cost_model.calibrating import fitted, plain_run, stage_run
from sparsify.cost_model.calibration import load_calibration
from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.hardware import load_gpu
from sparsify.cost_model.workload import AttentionShape, Phase, Workload
from sparsify.errors import UsageError
from sparsify.timing import Timing, time_call

SHAPE = "heads=4/2,dim=16,block=16,topk=2"
H200 = load_gpu("h200")


def test_shapes():
    heads, configuration = parse_shape("heads=32/8, dim=128,block=512 ,topk=3,value=64")
    assert heads == AttentionShape(32, 8, 128, 64)
    assert (configuration.method, configuration.block_size, configuration.topk) == ("moba", 512, 3)
    assert parse_shape("heads=4,dim=8,block=2,topk=1")[0] == AttentionShape(4, 4, 8, 8)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "'' is none of heads=, dim="),
        ("heads=4/2,dim=16,block=16", "topk is missing"),
        ("heads=4/2,dim=16,block=16,topk=2,window=4", "'window=4' is none of"),
        ("heads=4/2,heads=4/2,dim=16,block=16,topk=2", "heads is given twice"),
        ("heads=4/3,dim=16,block=16,topk=2", "4 query heads over 3 key/value heads"),
        ("heads=4/x,dim=16,block=16,topk=2", "heads is 'x'"),
        ("heads=4/2,dim=-1,block=16,topk=2", "dim is '-1'"),
        ("heads=4/2,dim=0,block=16,topk=2", "is impossible"),
        ("heads=4/2,dim=16,block=0,topk=2", "block_size"),
        ("heads=4/2,dim=16,block=16,topk=0", "topk"),
        ("heads=4/2,dim=1.5,block=16,topk=2", "dim is '1.5'"),
    ],
)
def test_wrong_shapes_are_one_sentence(cli, text, part):
    with pytest.raises(UsageError) as caught:
        parse_shape(text)
    assert part in str(caught.value)
    if text:
        code, out, err = cli("bench", "--shape", text, "--device", "cpu")
        assert code == 2 and out == "" and len(err.strip().splitlines()) == 1


def test_one_op_on_a_cpu(cli, tmp_path):
    target = tmp_path / "out.json"
    words = ("--context", "64,16,128", "--device", "cpu", "--repeats", "2", "-o", target)
    code, out, err = cli("bench", "--shape", SHAPE, *words)
    assert code == 0, err
    assert "MoBA 16/2, 4/2 heads of size 16, batch 1, bf16, prefill, on " in out
    assert "dense sdpa_flash" in out and "reference implementation" in out
    assert "At 16 tokens top-k covers every block" in out
    assert "MoBA, 64 tokens" in err and f"written to {target}" in err
    data = json.loads(target.read_text())
    assert data["schema"] == 1 and data["q_heads"] == 4 and data["software"]["torch"]
    assert [row["context_tokens"] for row in data["rows"]] == [64, 16, 128]
    for row in data["rows"]:
        assert row["implementation"] == "reference" and row["extra_bytes"] is None
        assert row["speedup"] == pytest.approx(
            row["dense"]["sdpa_flash"]["median_ms"] / row["sparse"]["median_ms"]
        )
        assert row["sparse"]["samples"] == 2 and row["sparse_graph"] is None


def test_json_is_one_document(cli):
    words = ("--context", "32", "--device", "cpu", "--repeats", "1", "--dtype", "fp32", "--json")
    code, out, _ = cli("bench", "--shape", SHAPE, *words, "--batch", "2")
    data = json.loads(out)
    assert code == 0 and data["dtype"] == "fp32" and data["batch"] == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--shape", SHAPE, "--context", "64", "--queries", "65"), "65 queries are more than"),
        (("--shape", SHAPE, "--index-dtype", "fp8"), "--index-dtype is for MSA"),
        (("--shape", SHAPE + ",keys=group"), "keys= belongs to --method msa"),
        (("--shape", SHAPE, "--context", "64"), "no CUDA device"),
    ],
)
def test_other_faults_are_told_before_a_missing_gpu(cli, words, part):
    code, out, err = cli("bench", *words)
    assert code == 2 and out == "" and part in err


def test_a_cpu_gets_one_context_that_it_can_do(cli):
    words = ("--shape", SHAPE, "--device", "cpu", "--repeats", "1", "--json")
    code, out, _ = cli("bench", *words)
    assert code == 0 and [row["context_tokens"] for row in json.loads(out)["rows"]] == [4096]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("words", [("--shape", SHAPE), ("--calibrate", "--json")])
def test_without_a_gpu_it_says_so(cli, words):
    code, out, err = cli("bench", *words)
    assert code == 2 and out == "" and len(err.strip().splitlines()) == 1
    assert "CUDA device" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "Nothing to measure"),
        (("DIR",), "DIR and --against MODEL belong together"),
        (("--against", "m"), "Nothing to measure"),
        (("--shape", SHAPE, "--against", "m"), "belong together"),
        (("DIR", "--against", "m", "--shape", SHAPE), "does not go with --shape"),
        (("DIR", "--against", "m", "--calibrate"), "does not go with --shape or --calibrate"),
        (("DIR", "--against", "m", "--context", "1k"), "--context is for --shape"),
        (("--shape", SHAPE, "--seq", "1k"), "--seq is for DIR"),
        (("--shape", SHAPE, "--into", "f"), "--into is for --calibrate"),
        (("--calibrate",), "has no place to go"),
        (("--calibrate", "-o", "f", "--into", "g"), "either -o or --into"),
        (("--calibrate", "--device", "cpu", "--json"), "measured on a GPU"),
        (("--calibrate", "--json", "--batch", "2"), "--calibrate does not use --batch"),
        (("DIR", "--against", "m", "--dtype", "fp16"), "DIR does not use --dtype"),
        (("--shape", ""), "The value of --shape is empty"),
        (("--shape", SHAPE, "--device", "cpu", "--repeats", "0"), "--repeats is 0"),
        (("--shape", SHAPE, "--device", "cpu", "--batch", "x"), "--batch is 'x'"),
        (("--shape", SHAPE, "--device", "tpu9"), "'tpu9' is no device"),
        (("--shape", SHAPE, "--device", "cpu", "--context", "1x"), "--context is '1x'"),
        (("--shape", SHAPE, "--method", "nsa"), "'nsa' is not"),
        (("none/here", "--against", "m"), "There is no folder none/here"),
    ],
)
def test_wrong_options_are_one_sentence(cli, words, part):
    code, out, err = cli("bench", *words)
    assert code == 2 and out == "" and part in err
    assert len(err.strip().splitlines()) == 1


def test_an_existing_target_is_refused_before_any_work(cli, tmp_path):
    target = tmp_path / "out.json"
    target.write_text("mine")
    words = ("--shape", SHAPE, "--device", "cpu", "--context", "32", "--repeats", "1", "-o", target)
    code, _, err = cli("bench", *words)
    assert code == 2 and "exists" in err and target.read_text() == "mine"
    code, _, err = cli("bench", *words, "--force")
    assert code == 0 and json.loads(target.read_text())["rows"], err


def test_a_rewritten_folder_against_its_original(cli, llama, rewritten, tmp_path):
    target = tmp_path / "out.json"
    words = ("--device", "cpu", "--seq", "48,96", "--repeats", "2", "-o", target)
    code, out, err = cli("bench", rewritten, "--against", llama, *words)
    assert code == 0, err
    assert "prefill" in out and "decode step" in out and "2 of 3 planned layers ran sparse" in out
    assert "rewritten: prefill of 96 tokens" in err
    rows = json.loads(target.read_text())["rows"]
    assert [row["tokens"] for row in rows] == [48, 96]
    for row in rows:
        dense, sparse = (
            row["dense"]["prefill"]["median_ms"],
            row["rewritten"]["prefill"]["median_ms"],
        )
        assert row["prefill_speedup"] == pytest.approx(dense / sparse)
        assert row["decode_speedup"] > 0 and row["rewritten"]["decode"]["samples"] == 2


def test_a_folder_that_was_not_rewritten(cli, llama):
    code, out, err = cli("bench", llama, "--against", llama, "--device", "cpu")
    assert code == 2 and out == "" and "was not written by `sparsify rewrite`" in err


def test_a_module_runs_on_its_own_inputs(cli, factories, tmp_path):
    folder = tmp_path / "out"
    words = ("--method", "moba", "--block-size", "8", "--topk", "2", "-o", folder)
    code, _, err = cli("rewrite", "cli_models:seeded", *words)
    assert code == 0, err
    words = ("--against", "cli_models:seeded", "--device", "cpu", "--repeats", "1")
    code, out, err = cli("bench", folder, *words)
    assert code == 0, err
    assert "forward" in out and "example inputs of the factory" in out


def timed(*ms):
    return Timing(ms, "CUDA events", 3)


def test_rows_of_a_gpu_show_graphs_and_stages():
    heads, configuration = parse_shape("heads=16/16,dim=128,block=128,topk=8")
    question = Question(heads, configuration, (131072,), torch.device("cuda:0"))
    row = AttentionRow(
        131072,
        "triton",
        {"sdpa_flash": timed(60.0), "sdpa_cudnn": timed(48.0)},
        timed(8.0, 8.2),
        timed(6.0, 6.1),
        {"gate": 1.5, "attention": 3.0},
        2 << 30,
        False,
    )
    assert row.dense_best == "sdpa_cudnn" and row.dense_once
    assert row.speedup == pytest.approx(48 / 6.05)
    about = {"gpu": "NVIDIA H200", "date": "2026-11-30", "software": {"torch": "2.11"}}
    head, table, *notes = render_bench.attention(question, [row], about)
    assert "on NVIDIA H200" in head and table.tables[0].row_count == 6
    assert any("Timed once" in note for note in notes)
    assert not any("reference" in note for note in notes)
    assert json.dumps(row.to_json())


def cpu_timer(run):
    return time_call(run, device="cpu", repeats=1, warm_up=0)


SMALL = Sizes(
    cases=(Case(AttentionShape(4, 2, 16, 16), Configuration("moba", 16, 2)),),
    contexts=(48, 64, 96, 128),
    dense_contexts=(32, 64, 96, 128),
    decode_batches=(1, 2),
    product_rows=(16, 32, 64, 128),
    weights=((16, 32),),
    copy_bytes=(1 << 10, 1 << 12, 1 << 14, 1 << 16),
)


PREFILL = ("moba_means", "moba_gate", "reverse_index", "moba_attention", "combine")
DECODE = ("moba_decode_gate", "moba_decode_attention")


def fake_stages(q, k, v, *, block_size, topk, timer):
    names = DECODE if q.shape[2] == 1 else PREFILL
    return {name: timer(lambda: None) + q.shape[0] * k.shape[2] / 1e3 for name in names}


def test_every_family_of_a_calibration_is_measured(monkeypatch):
    monkeypatch.setattr(calibration_runs, "moba_stages_ms", fake_stages)
    said = []
    runs = list(measured_runs(H200, torch.device("cpu"), SMALL, cpu_timer, said.append))
    families = {entry.family for entry in fitted(runs)}
    wanted = {*PREFILL, *DECODE}
    assert families == wanted | {"copy", "gemm", "dense_prefill", "dense_decode"}
    assert "MoBA 16/2, group 2, prefill of 96 tokens" in said
    batches = [run for run in runs if run.family == "moba_decode_gate"]
    assert len(batches) == 8


def test_contexts_leave_something_out():
    small, large = Configuration("moba", 128, 8), Configuration("moba", 4096, 12)
    assert Sizes().contexts_of(small)[0] == 8192
    assert Sizes().contexts_of(large) == tuple(n << 10 for n in (64, 96, 128, 192, 256))
    assert Sizes(contexts=(1024, 8192)).contexts_of(small) == (8192,)
    with pytest.raises(UsageError, match="keeps 49152 tokens, all of every context"):
        Sizes(contexts=(1024, 8192)).contexts_of(large)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is told of, and runs that are invented."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "NVIDIA H200")
    monkeypatch.setattr(
        calibration_runs, "machine", lambda _: {"date": "2026-11-30", "software": {"torch": "2"}}
    )
    monkeypatch.setattr(calibration_runs, "measured_runs", invented)


def invented(gpu, device, sizes, timer, say):
    say("inventing")
    for tokens in (8192, 16384, 32768, 65536):
        yield plain_run("copy", 0, tokens * 1000, tokens, tokens / 4e6, gpu, "torch")
        for case in sizes.cases:
            if case.configuration.method == "moba":
                call = (case.shape, Workload.of(Phase.PREFILL, tokens), case.configuration)
                bound = stage_run("combine", *call, 1.0, gpu).bound_ms
                yield stage_run("combine", *call, 0.01 + bound / 0.5, gpu, "sparsify")


def test_a_calibration_is_written_and_merged(cli, gpu, tmp_path):
    target, shown = tmp_path / "calibration.json", "heads=16/4,dim=128,block=128,topk=8"
    code, out, err = cli("bench", "--calibrate", "--shape", shown, "-o", target)
    assert code == 0, err
    assert "combine" in out and "0.500" in out and "inventing" in err
    found = load_calibration(target, H200)
    assert {(f.family, f.group_size, f.block_size) for f in found.families} == {
        ("copy", None, None),
        ("combine", 4, 128),
    }
    code, out, err = cli("bench", "--calibrate", "--into", target, "--json")
    assert code == 0, err
    merged = load_calibration(target, H200)
    assert len(merged.families) == 1 + sum(c.configuration.method == "moba" for c in CASES)
    assert json.loads(out)["gpu"] == "H200-SXM-141GB"
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]


def test_a_calibration_of_another_gpu_is_not_merged_into(cli, gpu, tmp_path, monkeypatch):
    target = tmp_path / "calibration.json"
    assert cli("bench", "--calibrate", "-o", target)[0] == 0
    before = target.read_text()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "NVIDIA L40S")
    code, _, err = cli("bench", "--calibrate", "--into", target)
    assert code == 2 and "was measured on H200-SXM-141GB, not on L40S" in err
    assert "inventing" not in err and target.read_text() == before
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "Something 9000")
    code, _, err = cli("bench", "--calibrate", "--json")
    assert code == 7 and "No figures are known" in err


def test_memory_that_does_not_suffice_is_a_sentence(cli, monkeypatch):
    def run(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr("sparsify.benches.attention.bench_attention", run)
    code, out, err = cli("bench", "--shape", SHAPE, "--device", "cpu")
    assert code == 2 and out == "" and "too little memory" in err
