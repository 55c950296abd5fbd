"""`sparsify bench` of MSA, of chunks and of decode steps, on a CPU; what a GPU adds is faked."""

import json
from pathlib import Path

import pytest
import torch

from sparsify.benches import calibration_runs, dense
from sparsify.benches.attention import Question, _kept_between_calls, index_inputs, random_inputs
from sparsify.benches.calibration_runs import CASES, LEARNED, PROXY, Case, Sizes, measured_runs
from sparsify.benches.shapes import parse_shape
from sparsify.cost_model import counts_msa
from sparsify.cost_model.calibrating import (
    calibration_of,
    fitted,
    plain_run,
    stage_run,
    to_document,
)
from sparsify.cost_model.configuration import DENSE
from sparsify.cost_model.hardware import load_gpu
from sparsify.cost_model.layer_cost import layer_cost
from sparsify.cost_model.stages import stage_formulas
from sparsify.cost_model.times import Source
from sparsify.cost_model.workload import AttentionShape, Phase, Workload
from sparsify.errors import UsageError
from sparsify.estimates import estimate
from sparsify.policy import Policy
from sparsify.timing import time_call

SHAPE = "heads=4/2,dim=16,block=16,topk=2"
H200 = load_gpu("h200")
LLAMA = Path(__file__).parents[1] / "cost_model" / "configs" / "llama-3.1-8b.json"
ON_CPU = ("--device", "cpu", "--repeats", "2")
NEEDS_TRITON = "kernels are started by triton"


def test_shapes():
    heads, learned = parse_shape("heads=64/4,dim=128,block=128,topk=16,index=64", "msa")
    assert heads == AttentionShape(64, 4, 128, 128)
    assert (learned.method, learned.indexer, learned.index_dim) == ("msa", "learned", 64)
    assert parse_shape(SHAPE, "msa")[1].index_dim == 16
    proxy = parse_shape(f"{SHAPE},keys=group", "msa")[1]
    assert (proxy.indexer, proxy.index_dim) == ("proxy", None)


@pytest.mark.parametrize(
    ("method", "more", "part"),
    [
        ("moba", ",index=16", "index= belongs to --method msa"),
        ("msa", ",keys=none", "keys is 'none'; it is shared or group"),
        ("msa", ",keys=group,index=16", "with keys=group the layer's own keys are scored"),
        ("msa", ",index=0", "index_dim"),
        ("msa", ",index=x", "index is 'x'"),
    ],
)
def test_wrong_shapes_are_one_sentence(cli, method, more, part):
    with pytest.raises(UsageError) as caught:
        parse_shape(SHAPE + more, method)
    assert part in str(caught.value)
    code, out, err = cli("bench", "--method", method, "--shape", SHAPE + more, *ON_CPU)
    assert code == 2 and out == "" and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("more", "words", "told", "index"),
    [
        ("", (), "one index key of size 16 in bf16", ("learned", 1, "bf16")),
        (",index=32", ("--index-dtype", "fp8"), "of size 32 in fp8", ("learned", 1, "fp8")),
        (",keys=group", (), "2 index keys of size 16 with queries in fp32", ("proxy", 2, "fp32")),
    ],
)
def test_msa_on_a_cpu(cli, tmp_path, more, words, told, index):
    target = tmp_path / "out.json"
    words = (*words, "--context", "64,128", *ON_CPU, "-o", target)
    code, out, err = cli("bench", "--method", "msa", "--shape", SHAPE + more, *words)
    assert code == 0, err
    assert told in out.replace("\n", " ") and "Index queries and keys are given" in out
    assert "MSA ran as the reference" in out and "MoBA" not in out and "MSA, 64 tokens" in err
    data = json.loads(target.read_text())
    assert (data["indexer"], data["index_keys"], data["index_dtype"]) == index
    assert data["method"] == "msa" and data["queries"] is None
    for row in data["rows"]:
        assert row["speedup"] == pytest.approx(
            row["dense"]["sdpa_flash"]["median_ms"] / row["sparse"]["median_ms"]
        )


@pytest.mark.parametrize("method", ["moba", "msa"])
@pytest.mark.parametrize(
    ("queries", "told"), [("1", "decode"), ("40", "the last 40 queries"), ("64", "last 64")]
)
def test_queries_at_the_end_of_a_context(cli, method, queries, told):
    words = ("--context", "64", *ON_CPU, "--queries", queries)
    code, out, err = cli("bench", "--method", method, "--shape", SHAPE, *words)
    assert code == 0, err
    assert told in out.replace("\n", " ")
    assert ("only FlashAttention takes" in out) == (queries == "40")
    code, out, _ = cli("bench", "--method", method, "--shape", SHAPE, *words, "--json")
    assert code == 0 and json.loads(out)["queries"] == int(queries)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--shape", SHAPE, "--context", "64,128", "--queries", "65"), "more than a context of 64"),
        (("--shape", SHAPE, "--queries", "0"), "--queries is 0"),
        (("--shape", SHAPE, "--index-dtype", "fp8"), "--index-dtype is for MSA"),
        (
            ("--shape", f"{SHAPE},keys=group", "--method", "msa", "--index-dtype", "bf16"),
            "--index-dtype is for MSA",
        ),
        (("--calibrate", "--json", "--method", "msa"), "--calibrate does not use --method"),
        (
            ("--calibrate", "--json", "--shape", SHAPE, "--index-dtype", "fp8"),
            "--calibrate --shape does not use --index-dtype",
        ),
        (("DIR", "--against", "m", "--queries", "1"), "DIR does not use --queries"),
        (("--tune", "--shape", SHAPE, "--queries", "1"), "--tune does not use --queries"),
    ],
)
def test_wrong_options_are_one_sentence(cli, words, part):
    code, out, err = cli("bench", *words, "--device", "cpu")
    assert code == 2 and out == "" and part in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(("queries", "keys"), [(5, 12), (1, 12), (12, 12)])
def test_dense_queries_are_the_last_of_the_keys(queries, keys):
    q, (k, v) = torch.randn(1, 4, queries, 8), torch.randn(2, 1, 2, keys, 8)
    out = dense.dense_call(q, k, v, dense.BACKENDS["sdpa_flash"])()
    wide = (x.repeat_interleave(2, 1).double() for x in (k, v))
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    wanted = torch.nn.functional.scaled_dot_product_attention(q.double(), *wide, attn_mask=seen)
    assert (out - wanted).abs().max() < 1e-5


@pytest.mark.parametrize(("queries", "names"), [(5, {"sdpa_flash"}), (12, {"sdpa_flash", "b"})])
def test_other_dense_kernels_are_no_part_of_chunks(monkeypatch, queries, names):
    two = {"sdpa_flash": dense.SDPBackend.FLASH_ATTENTION, "b": dense.SDPBackend.MATH}
    monkeypatch.setattr(dense, "_backends", lambda _: two)
    q, k = torch.randn(1, 2, queries, 8), torch.randn(1, 2, 12, 8)
    assert set(dense.dense_times(q, k, k, lambda run: run())) == names
    assert set(dense.dense_times(q, k, k, lambda run: run(), ["b"])) == names - {"sdpa_flash"}


def question(method="msa", queries=None, **options):
    shape, configuration = parse_shape(SHAPE, method)
    return Question(shape, configuration, (64,), torch.device("cpu"), queries=queries, **options)


def test_inputs_of_chunks():
    asked = question(queries=10, index_dtype="fp8", dtype="fp32")
    q, k, v = random_inputs(asked, 64)
    assert q.shape == (1, 4, 10, 16) and k.shape == v.shape == (1, 2, 64, 16)
    assert k.is_contiguous() and not random_inputs(question(), 64)[1].is_contiguous()
    iq, ik = index_inputs(asked, q, k)
    assert iq.shape == (1, 2, 10, 16) and ik.shape == (1, 1, 64, 16)
    assert iq.dtype == ik.dtype == torch.float8_e4m3fn
    assert index_inputs(question("moba"), q, k) is None


def test_caches_hold_the_means_of_blocks():
    for queries, names in ((None, set()), (10, {"block_means"}), (1, {"block_means"})):
        asked = question("moba", queries)
        assert set(_kept_between_calls(random_inputs(asked, 64), asked)) == names
    asked = question(queries=10)
    assert _kept_between_calls(random_inputs(asked, 64), asked) == {}


PREFILL = ("reverse_index", "msa_attention", "msa_combine")
SMALL = Sizes(
    cases=(
        Case(AttentionShape(4, 2, 16, 16), parse_shape(SHAPE, "msa")[1]),
        *Case.of(*parse_shape("heads=4/1,dim=16,block=16,topk=2", "msa"))[1:],
        Case(*parse_shape(f"{SHAPE},keys=group", "msa"), choice_alone=True),
    ),
    contexts=(48, 64, 96, 128),
    dense_contexts=(32, 64, 96, 128),
    decode_batches=(1, 2),
    product_rows=(16, 32, 64, 128),
    weights=((16, 32),),
    copy_bytes=(1 << 10, 1 << 12, 1 << 14, 1 << 16),
)


def fake_stages(q, k, v, iq, ik, *, block_size, topk, timer, proxy, choice_alone):
    """Times that grow with the work; index tensors must be those of the indexer."""
    assert ik.shape[1] == (2 if proxy else 1) and iq.shape[:3] == (*k.shape[:2], q.shape[2])
    decode, scores = q.shape[2] == 1, "msa_proxy_index" if proxy else "msa_index"
    choice = ("msa_decode_scores", "msa_decode_topk") if decode else (scores, "msa_topk")
    rest = ("msa_decode_attention",) if decode else PREFILL
    names = choice if choice_alone else choice + rest
    return {name: timer(lambda: None) + q.shape[0] * k.shape[2] / 1e3 for name in names}


def cpu_timer(run):
    return time_call(run, device="cpu", repeats=1, warm_up=0)


def test_every_family_of_msa_is_measured(monkeypatch):
    monkeypatch.setattr(calibration_runs, "msa_stages_ms", fake_stages)
    said = []
    entries = fitted(measured_runs(H200, torch.device("cpu"), SMALL, cpu_timer, said.append))
    found = {(e.family, e.dtype, e.group_size) for e in entries if "msa" in e.family}
    assert found == {
        ("msa_index", "bf16", None),
        ("msa_index", "fp8", None),
        ("msa_proxy_index", "bf16", None),
        ("msa_topk", "bf16", None),
        ("msa_attention", "bf16", 2),
        ("msa_combine", "bf16", 2),
        ("msa_decode_index", "bf16", None),
        ("msa_decode_index", "fp8", None),
        ("msa_decode_proxy_index", "bf16", None),
        ("msa_decode_attention", "bf16", 2),
    }
    assert "MSA learned 16/2, group 4, index in fp8, prefill of 96 tokens" in said


@pytest.mark.parametrize(("capability", "fp8"), [((9, 0), True), ((8, 0), False)])
def test_gpus_without_products_of_eight_bits_have_no_such_entry(monkeypatch, capability, fp8):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert calibration_runs._has_fp8(torch.device("cuda:0")) == fp8


def test_what_is_calibrated_has_every_family_of_its_layers():
    """A run for each family that the cost model asks for, at each group."""
    for configuration, groups in ((LEARNED, {16, 8, 4}), (PROXY, {16})):
        mine = [case for case in CASES if case.configuration == configuration]
        assert {c.shape.group_size for c in mine} == groups
    assert [c.fp8 for c in CASES if c.configuration == LEARNED] == [False] * 3 + [True]
    assert Sizes().contexts_of(LEARNED) == calibration_runs.CONTEXTS
    assert max(Sizes().contexts_of(PROXY)) == 128 << 10


TRUTH = {"reverse_index": (0.2, 25.0), "msa_topk": (0.3, 5.0), "msa_attention": (0.5, 12.0)}
DEFAULT = (0.4, 7.0)


def invented():
    """Runs of all stages of MSA at group 4, with known efficiencies and overheads (us)."""
    shape = AttentionShape(32, 8, 128, 128)
    for tokens in (8192, 16384, 32768, 65536, 131072):
        yield plain_run("copy", 0, tokens * 1000, tokens, tokens / 4e6, H200, "torch")
        yield plain_run("gemm", tokens * 10**8, tokens, tokens, tokens / 4e3, H200, "torch")
        for phase in (Phase.PREFILL, Phase.DECODE):
            for configuration in (DENSE, LEARNED, PROXY):
                call = (shape, Workload.of(phase, tokens), configuration)
                for formula in stage_formulas(configuration, call[1]):
                    if formula.family in ("copy", "gemm"):
                        continue
                    bound = stage_run(formula.family, *call, 1.0, H200).bound_ms
                    efficiency, overhead_us = TRUTH.get(formula.family, DEFAULT)
                    ms = overhead_us / 1e3 + bound / efficiency
                    yield stage_run(formula.family, *call, ms, H200, "invented")


@pytest.fixture(scope="module")
def calibration():
    return calibration_of(invented(), H200, date="2026-12-01", software={}, source="invented")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("indexer", ["learned", "proxy"])
def test_estimates_of_msa_say_calibrated(calibration, tmp_path, phase, indexer):
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(to_document(calibration)))
    index = {"index_dim": 128} if indexer == "learned" else {}
    policy = Policy.msa(block_size=128, topk=16, indexer=indexer, **index)
    options = {"gpu": "h200", "context": [131072], "phase": phase}
    (row,) = estimate(LLAMA, policy, calibration=file, **options).to_json()["rows"]
    assert row["sparse"]["source"] == "calibrated"
    file.write_text(json.dumps(without(to_document(calibration), "msa_")))
    (row,) = estimate(LLAMA, policy, calibration=file, **options).to_json()["rows"]
    assert row["sparse"]["source"] == "bound"


def without(document, part):
    kept = [entry for entry in document["families"] if part not in entry["family"]]
    return document | {"families": kept}


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
@pytest.mark.parametrize("configuration", [LEARNED, PROXY], ids=lambda c: c.label)
def test_stages_sum_to_the_layer(calibration, phase, configuration):
    workload = Workload.of(phase, 100_000)
    shape = AttentionShape(32, 8, 128, 128)
    cost = layer_cost(shape, workload, configuration, H200, calibration=calibration)
    assert cost.time.source is Source.CALIBRATED
    total = sum(stage.time.expected_ms for stage in cost.stages)
    assert cost.time.expected_ms == pytest.approx(total, rel=1e-12)
    for stage in cost.stages:
        if stage.family in ("copy", "gemm"):
            continue
        efficiency, overhead_us = TRUTH.get(stage.family, DEFAULT)
        bound = stage_run(stage.family, shape, workload, configuration, 1.0, H200).bound_ms
        wanted = overhead_us / 1e3 + bound / efficiency
        assert stage.time.expected_ms == pytest.approx(wanted, rel=0.02), stage.family


def test_an_interrupted_calibration_loses_nothing(cli, calibration, tmp_path, monkeypatch):
    def interrupted(*_):
        yield from ()
        raise KeyboardInterrupt

    target = tmp_path / "calibration.json"
    target.write_text(json.dumps(to_document(calibration)))
    before = target.read_bytes()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "NVIDIA H200")
    monkeypatch.setattr(calibration_runs, "measured_runs", interrupted)
    code, out, _ = cli("bench", "--calibrate", "--into", target)
    assert code == 130 and out == "" and target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]


def test_few_queries_are_as_few_for_the_cost_model():
    forward = pytest.importorskip("sparsify.kernels.attend.forward", reason=NEEDS_TRITON)
    assert forward.FEW_QUERIES + 1 == counts_msa.SHORT_QUERIES


def started(run):
    from tests._util.compiling import launches

    with launches() as found:
        run()
    return {launch.name for launch in found}


@pytest.mark.parametrize(
    ("queries", "most_ranked", "scores", "ranks"),
    [
        (40, 0, "msa_scores_fwd_kernel", {"msa_best_fwd_kernel", "msa_choice_fwd_kernel"}),
        (1, 0, "decode_score_fwd_kernel", {"decode_top_fwd_kernel"}),
        (1, 128, "decode_score_fwd_kernel", set()),  # by programs of the attention
    ],
)
def test_scores_are_timed_without_what_ranks_them(queries, most_ranked, scores, ranks, monkeypatch):
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    from sparsify.benches import stages
    from sparsify.kernels import decoding

    monkeypatch.setattr(decoding, "MOST_RANKED", most_ranked)
    asked = question(queries=queries)
    q, k, v = random_inputs(asked, 64)
    tensors = (q, k, v, *index_inputs(asked, q, k))
    call = stages._decode_step(tensors, 16, 2) if queries == 1 else None
    with_launches = {}
    started(lambda: with_launches.update(call=call or stages._msa_stages(tensors, 16, 2, None)))
    assert started(with_launches["call"].score) == {scores}
    assert started(with_launches["call"].choose) == {scores, *ranks}


def test_tiles_of_msa_are_those_of_shared_lists():
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    from sparsify.cli import bench_tune

    found = {}
    for method, share in (("msa", 2), ("moba", 1)):
        asked = question(method)
        q, k, v = random_inputs(asked, 64)
        started(lambda a=asked, x=(q, k, v): found.update(call=bench_tune._call(*x, a)))
        assert found["call"].sizes.heads_per_list == share and found["call"].chosen == 1
