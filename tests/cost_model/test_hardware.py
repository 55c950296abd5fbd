"""Figures of GPUs: what they are, where they come from, and how files and names are read."""

import json
import math

import pytest
import yaml

from sparsify.cost_model import hardware
from sparsify.cost_model.hardware import Figure, list_gpus, load_gpu, other_variants
from sparsify.errors import UnknownGpuError, UsageError

ALL = list_gpus()
MINE = {
    "name": "My GPU",
    "aliases": ["mine"],
    "vendor": "me",
    "architecture": "own",
    "bf16_dense_tflops": {"value": 10, "source": "measured by me"},
    "memory_gb": {"value": 8, "source": "printed on it"},
    "memory_bandwidth_gbs": {"value": 100.5, "source": "measured by me"},
}


def values(gpu):
    return {name: figure.value for name, figure in gpu.figures.items()}


def file_of(folder, data, name="mine.yaml"):
    path = folder / name
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSIFY_GPU_SPECS", str(tmp_path))
    return tmp_path


# --- the packaged figures


def test_there_are_29_with_distinct_names_and_aliases():
    keys = [key for gpu in ALL for key in (gpu.name, *gpu.aliases)]
    plain = [hardware._plain(key) for key in keys]
    assert len(ALL) == 29 and len(set(plain)) == len(plain)


@pytest.mark.parametrize("gpu", ALL, ids=lambda gpu: gpu.name)
def test_every_figure_has_a_source_and_a_possible_value(gpu):
    assert gpu.file is None and gpu.vendor and gpu.architecture
    for name, figure in gpu.figures.items():
        assert figure.source != hardware.NO_SOURCE and len(figure.source) > 8, name
        assert name in hardware.UNITS
        assert figure.value > 0 or name == "nvlink_gbs_total_bidirectional"
        assert figure.verified or name in gpu.unverified
    for _, measured in gpu.measured:
        assert measured is None or len(measured.source) > 8


@pytest.mark.parametrize("gpu", ALL, ids=lambda gpu: gpu.name)
def test_figures_are_dense_and_in_their_units(gpu):
    """A sparse peak, a rate in FLOP/s or memory in bytes would fall out of these ranges."""
    assert 36 < gpu.ridge_flop_per_byte < 460
    if gpu.fp8_dense_tflops is not None:
        ratio = gpu.fp8_dense_tflops.value / gpu.bf16_dense_tflops.value
        assert gpu.name == "Gaudi3" or 1.99 < ratio < 2.03
    assert 20 < gpu.memory_gb.value < 300 and 290 < gpu.memory_bandwidth_gbs.value < 8001


def test_h200():
    gpu = load_gpu("h200")
    assert values(gpu) == {
        "bf16_dense_tflops": 989.4,
        "fp8_dense_tflops": 1978.9,
        "memory_gb": 141,
        "memory_bandwidth_gbs": 4800,
        "l2_mb": 50,
        "l2_bandwidth_gbs": 8770,
        "sm_count": 132,
        "shared_memory_kb_per_sm": 228,
        "nvlink_gbs_total_bidirectional": 900,
    }
    assert gpu.unverified == ("l2_mb",)
    assert (gpu.memory_bytes, gpu.dram_bytes_per_s, gpu.l2_bytes_per_s) == (141e9, 4.8e12, 8.77e12)
    assert (gpu.flops_per_s("bf16"), gpu.flops_per_s("fp8")) == (989.4e12, 1978.9e12)
    assert gpu.link_bytes_per_s == 450e9
    assert gpu.ridge_flop_per_byte == pytest.approx(206.125)
    assert gpu.bf16_matmul_efficiency.value == 0.803
    assert gpu.measured.decode_read_gbs.low == 3940


@pytest.mark.parametrize(
    ("name", "bf16", "fp8", "memory", "bandwidth", "efficiency"),
    [
        ("a100", 312, None, 80, 2039, 0.869),
        ("h100", 989.4, 1978.9, 80, 3350, 0.803),
        ("b200", 2250, 4500, 180, 8000, 0.776),
        ("gb200", 2500, 5000, 186, 8000, 0.729),
        ("mi300x", 1307.4, 2614.9, 192, 5300, 0.514),
        ("l40s", 362.05, 733, 48, 864, None),
        ("h20", 148, 296, 96, 4000, None),
        ("rtx5090", 209.5, 419, 32, 1792, None),
    ],
)
def test_known_figures(name, bf16, fp8, memory, bandwidth, efficiency):
    gpu = load_gpu(name)
    assert gpu.bf16_dense_tflops.value == bf16 and gpu.memory_gb.value == memory
    assert (gpu.fp8_dense_tflops and gpu.fp8_dense_tflops.value) == fp8
    assert gpu.memory_bandwidth_gbs.value == bandwidth
    measured = gpu.bf16_matmul_efficiency
    assert (measured and measured.value) == efficiency


UNVERIFIED = {
    "a100-pcie-40gb": {"memory_bandwidth_gbs"},
    "a10": {"memory_bandwidth_gbs", "l2_mb"},
    "a40": {"l2_mb", "nvlink_gbs_total_bidirectional"},
    "l4": {"l2_mb", "sm_count"},
    "l40s": {"l2_mb"},
    "3090": {"l2_mb", "nvlink_gbs_total_bidirectional"},
    "5090": {"l2_mb"},
    "rtx 6000 ada": {"fp8_dense_tflops", "l2_mb"},
    "rtx-pro-6000-server": {"l2_mb", "memory_bandwidth_gbs"},
    "rtx-pro-6000-workstation": {"fp8_dense_tflops", "l2_mb"},
    "h100-pcie": {"sm_count"},
    "h100-nvl": {
        "bf16_dense_tflops",
        "fp8_dense_tflops",
        "memory_bandwidth_gbs",
        "sm_count",
        "nvlink_gbs_total_bidirectional",
    },
    "h800": {"l2_mb", "sm_count"},
    "h20": {"l2_mb", "memory_bandwidth_gbs"},
    "h200": {"l2_mb"},
    "gb200": {"sm_count"},
    "b300": {"l2_mb", "sm_count"},
    "gb300": {"l2_mb", "sm_count"},
    "gaudi3": {"nvlink_gbs_total_bidirectional"},
}


def test_what_was_not_traced_to_the_vendor_is_marked():
    wanted = {load_gpu(name).name: figures for name, figures in UNVERIFIED.items()}
    assert {gpu.name: set(gpu.unverified) for gpu in ALL if gpu.unverified} == wanted


# --- where public tables go wrong


def test_consumer_cards_have_the_rate_with_fp32_accumulation():
    assert load_gpu("4090").bf16_dense_tflops.value == 165.2  # headline 330
    assert load_gpu("5090").bf16_dense_tflops.value == 209.5  # reviews: 838, sparse, fp16
    assert load_gpu("3090").bf16_dense_tflops.value == 71.2  # headline 142
    assert "FP32 accumulation" in load_gpu("4090").notes


def test_l40s_is_not_read_as_twice_its_rate():
    """Both were measured above 181 TFLOP/s, half of the figure."""
    gpu = load_gpu("l40s")
    assert gpu.measured.attention_tflops.high > gpu.bf16_dense_tflops.value / 2
    assert gpu.measured.matmul_tflops.high > gpu.bf16_dense_tflops.value / 2


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("rtx-pro-6000-server", ("1597", "1792")),
        ("b200", ("8000", "7700")),
        ("b300", ("8000", "7750")),
        ("h200", ("50 MiB", "60 MB", "141 GiB")),
        ("h20", ("4000", "4096")),
        ("l4", ("3350", "242")),
        ("gb200", ("13400", "4500")),
        ("a10", ("28 GB",)),
        ("h100-nvl", ("4.8 TB/s", "133")),
    ],
)
def test_disagreements_are_in_the_notes(name, told):
    assert all(text in load_gpu(name).notes for text in told)


def test_server_and_workstation_cards_differ():
    server, workstation = load_gpu("rtx-pro-6000-server"), load_gpu("rtx-pro-6000")
    assert workstation.name == "RTX PRO 6000 Blackwell Workstation"
    assert server.bf16_dense_tflops.value < workstation.bf16_dense_tflops.value
    assert not server.memory_bandwidth_gbs.verified and workstation.memory_bandwidth_gbs.verified


def test_l2_bandwidth_is_known_where_it_was_measured_and_nowhere_else():
    known = [gpu for gpu in ALL if gpu.l2_bytes_per_s is not None]
    assert [gpu.name for gpu in known] == ["H200-SXM-141GB"]
    assert known[0].l2_bandwidth_gbs.source.startswith("measured on one H200")


def test_a_gpu_without_some_figures_works():
    gaudi = load_gpu("gaudi3")
    assert gaudi.sm_count is None and gaudi.shared_memory_kb_per_sm is None
    assert gaudi.compute_capability is None and gaudi.flops_per_s("fp8") == 1677e12
    assert load_gpu("mi250x").link_bytes_per_s is None and load_gpu("l4").link_bytes_per_s == 0


def test_fp8_without_fp8_units_runs_at_the_bf16_rate():
    gpu = load_gpu("a100")
    assert gpu.fp8_dense_tflops is None and gpu.flops_per_s("fp8") == gpu.flops_per_s("bf16")


# --- names


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("h200", "H200-SXM-141GB"),
        ("H200-SXM-141GB", "H200-SXM-141GB"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("a100", "A100-SXM4-80GB"),
        ("A100_80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("a100-40gb", "A100-SXM4-40GB"),
        ("h100", "H100-SXM5-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("h100-pcie", "H100-PCIe-80GB"),
        ("H20", "H20-96GB"),
        ("b200", "B200-SXM-180GB"),
        ("GB200 (per GPU)", "GB200 (per GPU)"),
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("gaudi-3", "Gaudi3"),
    ],
)
def test_names(asked, name):
    assert load_gpu(asked).name == name


def test_the_name_of_a_family_says_what_else_it_could_mean():
    assert other_variants("A100", load_gpu("a100")) == (
        "A100-PCIe-40GB",
        "A100-PCIe-80GB",
        "A100-SXM4-40GB",
    )
    assert other_variants("a100-80gb", load_gpu("a100-80gb")) == ()
    assert other_variants("h200", load_gpu("h200")) == ()


@pytest.mark.parametrize(
    ("asked", "near"), [("h20o", "H200-SXM-141GB"), ("mi300", "MI300X"), ("rtx4091", "RTX 4090")]
)
def test_an_unknown_name_gets_the_nearest(asked, near):
    with pytest.raises(UnknownGpuError) as caught:
        load_gpu(asked)
    assert near in str(caught.value) and repr(asked) in str(caught.value)
    assert caught.value.exit_code == 7


@pytest.mark.parametrize("asked", ["tpu-v5", "", "---", "显卡"])
def test_a_name_like_no_other_gets_the_way_on(asked):
    with pytest.raises(UnknownGpuError, match="`sparsify gpus` lists all"):
        load_gpu(asked)


# --- the user's files


def test_a_file_by_path(tmp_path):
    gpu = load_gpu(str(file_of(tmp_path, MINE)))
    assert gpu.name == "My GPU" and gpu.memory_bytes == 8e9 and gpu.file.endswith("mine.yaml")
    assert gpu.unverified == () and gpu.l2_mb is None
    as_json = file_of(tmp_path, json.dumps(MINE), "mine.json")
    assert load_gpu(str(as_json)).figures == gpu.figures


def test_a_bare_number_is_a_figure_without_source(tmp_path):
    gpu = load_gpu(str(file_of(tmp_path, {**MINE, "memory_gb": 12})))
    assert gpu.memory_gb == Figure(value=12, source="no source given", verified=False)
    assert gpu.unverified == ("memory_gb",)


def test_the_folder_of_the_user(own_folder):
    file_of(own_folder, MINE)
    (own_folder / "notes.txt").write_text("not read")
    assert load_gpu("my-gpu").name == load_gpu("MINE").name == "My GPU"
    assert len(list_gpus()) == 30 and load_gpu("h200").file is None


def test_a_users_file_wins(own_folder):
    file_of(own_folder, {**MINE, "name": "H200-SXM-141GB", "aliases": ["h100"]})
    assert load_gpu("h200-sxm-141gb").memory_gb.value == 8
    assert load_gpu("h100").name == "H200-SXM-141GB" and len(list_gpus()) == 29
    assert load_gpu("h100-pcie").file is None


def test_two_files_of_one_name_are_an_error(own_folder):
    file_of(own_folder, MINE, "a.yaml")
    file_of(own_folder, {**MINE, "name": "Other"}, "b.yaml")
    with pytest.raises(UsageError, match=r"a\.yaml and .*b\.yaml share the name 'mine'"):
        load_gpu("h200")


def test_a_broken_file_in_the_folder_is_named(own_folder):
    file_of(own_folder, {**MINE, "memory_gb": -1}, "bad.yaml")
    with pytest.raises(UsageError, match=r"bad\.yaml is wrong: memory_gb\.value is -1"):
        load_gpu("h200")


def test_a_missing_folder_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSIFY_GPU_SPECS", str(tmp_path / "none"))
    with pytest.raises(UsageError, match=r"SPARSIFY_GPU_SPECS is .*none, which is no folder"):
        list_gpus()


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(UsageError, match=r"There is no GPU file .*none\.yaml"):
        load_gpu(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory_gb": None}, "memory_gb is None"),
        ({"memory_gb": {"value": "80", "source": "x"}}, "memory_gb.value is '80'; expected a num"),
        ({"memory_gb": {"value": 0, "source": "x"}}, "memory_gb.value is 0"),
        ({"memory_gb": {"value": 1e-300, "source": "x"}}, "memory_gb.value is 1e-300; expected"),
        ({"memory_gb": {"value": True, "source": "x"}}, "memory_gb.value is True"),
        ({"memory_gb": {"value": 80e9, "source": "x"}}, "to 1e6"),
        ({"memory_gb": {"value": math.inf, "source": "x"}}, "memory_gb.value is inf"),
        ({"memory_gb": {"value": math.nan, "source": "x"}}, "memory_gb.value is nan"),
        ({"memory_gb": {"value": 80}}, "memory_gb.source is missing"),
        ({"memory_gb": {"value": 80, "source": ""}}, "memory_gb.source is ''"),
        ({"memory": {"value": 80, "source": "x"}}, "has no field 'memory'; did you mean"),
        ({"memory_gb": {"value": 8, "unit": "GB", "source": "x"}}, "has no field 'unit'"),
        ({"name": 4090}, "name is 4090; expected text"),
        ({"aliases": [4090]}, "aliases[0] is 4090; expected text"),
        ({"measured": {"bf16_matmul_efficiency": {"value": 1.2, "source": "x"}}}, "1e-6 to 1"),
        ({"measured": {"matmul_tflops": {"low": 3, "high": 2, "source": "x"}}}, "low 3 above high"),
        ({"sm_count": {"value": 8, "source": "x", "verified": "perhaps"}}, "sm_count.verified"),
        (
            {"sm_count": {"value": 8, "source": "x", "verified": 0}},
            "sm_count.verified is 0; expected true or false",
        ),
    ],
)
def test_wrong_files_are_told_in_one_sentence(tmp_path, change, said):
    path = file_of(tmp_path, {**MINE, **change})
    with pytest.raises(UsageError) as caught:
        load_gpu(str(path))
    text = str(caught.value)
    assert said in text and str(path) in text and "\n" not in text


@pytest.mark.parametrize(
    "field", ["bf16_dense_tflops", "memory_gb", "memory_bandwidth_gbs", "name"]
)
def test_what_a_file_must_have(tmp_path, field):
    data = {name: value for name, value in MINE.items() if name != field}
    with pytest.raises(UsageError, match=f"{field} is missing"):
        load_gpu(str(file_of(tmp_path, data)))


def test_all_that_is_missing_is_named_at_once(tmp_path):
    path = file_of(tmp_path, {"name": "Mine", "bf16_dense_tflops": 100})
    lacking = "vendor, architecture, memory_gb and memory_bandwidth_gbs are missing"
    with pytest.raises(UsageError, match=lacking):
        load_gpu(str(path))


def test_text_that_is_no_yaml(tmp_path):
    with pytest.raises(UsageError, match="malformed: line 1"):
        load_gpu(str(file_of(tmp_path, "name: a: b")))
