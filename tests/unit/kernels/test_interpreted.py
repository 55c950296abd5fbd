"""Runs `tests/interpreted` with Triton's interpreter, each file in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests" / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


def test_there_are_files():
    assert len(FILES) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_file_passes_and_ran(name, tmp_path):
    pytest.importorskip("triton")
    report = tmp_path / "report.xml"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("SPARSIFY_IMPL", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--junitxml={report}", str(FOLDER / name)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert int(suite.get("tests")) >= 5
    assert int(suite.get("skipped")) == 0


def test_nothing_is_collected_without_the_interpreter():
    """A process without the interpreter must not pretend to have run these tests."""
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(FOLDER)], cwd=ROOT, env=environment, capture_output=True, check=False
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
