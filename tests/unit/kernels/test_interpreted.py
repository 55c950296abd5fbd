"""Runs `tests/interpreted`, what is MSA's excepted: two files, for two processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests._util.interpreting import FOLDER, OF_MSA, OTHERS, ROOT, assert_passes_and_ran


def test_there_are_files():
    assert len(OTHERS) >= 6 and len(OF_MSA) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_file_passes_and_ran(name, tmp_path):
    pytest.importorskip("triton")
    assert_passes_and_ran(name, tmp_path)


def test_nothing_is_collected_without_the_interpreter():
    """A process without the interpreter must not pretend to have run these tests."""
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(FOLDER)], cwd=ROOT, env=environment, capture_output=True, check=False
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
