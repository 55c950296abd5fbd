"""What a user gets: a wheel of sparsify/* and nothing else."""

import subprocess
import sys
import zipfile

import pytest

from tests._util.commands import ROOT


@pytest.mark.slow
def test_the_wheel_holds_only_the_package(tmp_path):
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    for name in filter(None, tracked.stdout.decode().split("\0")):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("sparsify_attention-")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {
        "sparsify",
        "sparsify_attention",
    }
    for needed in (
        "sparsify/py.typed",
        "sparsify/cli/main.py",
        "sparsify/cost_model/counts.py",
        "sparsify/cost_model/gpus/h200-sxm-141gb.yaml",
        "sparsify/kernels/schemas.py",
        "sparsify/passes/detect.py",
    ):
        assert needed in names
    assert all(
        name.endswith((".py", ".typed", ".yaml", ".json"))
        for name in names
        if "dist-info" not in name
    )
