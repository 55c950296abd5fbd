"""Runs `tests/interpreted`; `tests/conftest.py` lets each of these tests go to any process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests._util.interpreting import (
    FILES,
    FOLDER,
    ROOT,
    SHORT_BYTES,
    assert_pass_and_ran,
    together,
)

SIZES = {name: (FOLDER / name).stat().st_size for name in FILES}


def test_every_file_runs_once():
    ran = [name for names in together(SIZES) for name in names.split()]
    assert sorted(ran) == FILES and len(FILES) >= 10


def test_long_files_run_alone_and_short_ones_together():
    long = SHORT_BYTES + 1
    files = {"a.py": 1, "b.py": long, "c.py": 2, "d.py": 2 * long}
    assert together(files) == ["d.py", "b.py", "c.py a.py"]
    assert together({"b.py": long}) == ["b.py"]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # each test of a file has its own time
@pytest.mark.parametrize("names", together(SIZES))
def test_files_pass_and_ran(names, tmp_path):
    pytest.importorskip("triton")
    assert_pass_and_ran(names, tmp_path)


def test_nothing_is_collected_without_the_interpreter():
    """A process without the interpreter must not pretend to have run these tests."""
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(FOLDER)], cwd=ROOT, env=environment, capture_output=True, check=False
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
