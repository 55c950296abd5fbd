"""Calibration files: what is read, what is refused, which entry serves."""

import json

import pytest

from sparsify.cost_model.calibration import load_calibration, packaged_calibration
from sparsify.cost_model.hardware import list_gpus, load_gpu
from sparsify.errors import UsageError

ENTRY = {
    "family": "moba_attention",
    "efficiency": 0.5,
    "error": 0.05,
    "points": 6,
    "contexts": [8192, 131072],
}
FILE = {
    "schema": 1,
    "gpu": "H200-SXM-141GB",
    "date": "2026-11-30",
    "software": {"torch": "2.11.0"},
    "source": "a test",
}


@pytest.fixture
def write(tmp_path):
    def write(*families, **changes):
        path = tmp_path / "calibration.json"
        path.write_text(json.dumps({**FILE, "families": families, **changes}))
        return path

    return write


def entry(**changes):
    return {**ENTRY, **changes}


def test_a_file_is_read_back(write):
    found = load_calibration(write(ENTRY), load_gpu("h200"))
    (family,) = found.families
    assert (family.efficiency, family.overhead_us, family.group_size) == (0.5, 0, None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"efficiency": 0}, "efficiency"),
        ({"efficiency": 1.3}, "efficiency"),
        ({"efficiency": True}, "efficiency"),
        ({"error": -1}, "error"),
        ({"points": 0}, "points"),
        ({"dtype": "int4"}, "dtype"),
        ({"colour": "red"}, "colour"),
        ({"efficiency": 1e-320}, "efficiency"),
        ({"error": 1e300}, "error"),
        ({"error": float("nan")}, "error"),
        ({"overhead_us": 1e300}, "overhead_us"),
        ({"family": ""}, "family"),
        ({"family": []}, r"family is \[\]; expected one of combine"),
        ({"family": "nonsense"}, "family is 'nonsense'; expected one of combine, copy, dense_"),
        ({"contexts": [8192]}, "contexts"),
    ],
)
def test_an_impossible_entry_is_one_sentence(write, change, named):
    with pytest.raises(UsageError, match=named) as caught:
        load_calibration(write(entry(**change)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("families", "changes", "text"),
    [
        ([ENTRY], {"schema": 2}, "schema 2"),
        ([ENTRY], {"schema": True}, "not a calibration"),
        ([ENTRY], {"schema": None}, "it has no schema"),
        ([ENTRY], {"software": 3}, "software is 3; expected fields and values"),
        ([ENTRY], {"source": ""}, "source"),
        ([ENTRY, ENTRY], {}, "two entries"),
    ],
)
def test_newer_schemas_empty_sources_and_doubles_are_refused(write, families, changes, text):
    with pytest.raises(UsageError, match=text):
        load_calibration(write(*families, **changes))


def test_what_is_written_is_read_back(write, tmp_path):
    found = load_calibration(write(ENTRY))
    again = tmp_path / "again.json"
    again.write_text(json.dumps(found.to_json()))
    assert load_calibration(again) == found


def test_a_calibration_of_another_gpu_is_refused(write):
    with pytest.raises(UsageError, match="H200-SXM-141GB, not on H100-SXM5-80GB"):
        load_calibration(write(ENTRY), load_gpu("h100"))


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(UsageError, match="There is no calibration"):
        load_calibration(tmp_path / "none.json")


def test_the_exact_group_wins_over_the_entry_for_all(write):
    found = load_calibration(write(entry(), entry(group_size=16, efficiency=0.9)))
    assert found.efficiency("moba_attention", group_size=16).efficiency == 0.9
    assert found.efficiency("moba_attention", group_size=4).efficiency == 0.5
    assert found.efficiency("msa_attention", group_size=4) is None


def test_efficiency_is_not_carried_over_to_another_group_or_dtype(write):
    found = load_calibration(write(entry(group_size=16)))
    assert found.efficiency("moba_attention", group_size=4) is None
    assert found.efficiency("moba_attention", group_size=16, dtype="fp8") is None


def test_blocks_between_two_are_interpolated_and_far_ones_refused(write):
    found = load_calibration(
        write(entry(block_size=128, efficiency=0.2), entry(block_size=512, efficiency=0.4))
    )

    def at(block):
        return found.efficiency("moba_attention", group_size=1, block_size=block)

    assert at(128).efficiency == 0.2
    assert at(256).efficiency == pytest.approx(0.3)
    assert at(64).efficiency == 0.2
    assert at(1024).efficiency == 0.4
    assert at(32) is None
    assert at(2048) is None


def test_packaged_calibrations_are_of_their_gpu_and_complete():
    known = {gpu.name: packaged_calibration(gpu) for gpu in list_gpus()}
    h200 = known["H200-SXM-141GB"]
    assert {"dense_prefill", "dense_decode"} <= {f.family for f in h200.families}
    assert known["Gaudi3"] is None
    for found in filter(None, known.values()):
        for family in found.families:
            assert family.kernel
            assert family.error < 0.5


def test_a_gpu_of_the_users_has_no_packaged_calibration(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: H200-SXM-141GB\nvendor: NVIDIA\narchitecture: Hopper\n"
        "bf16_dense_tflops: 900\nmemory_gb: 141\nmemory_bandwidth_gbs: 4000\n"
    )
    assert packaged_calibration(load_gpu(str(path))) is None
