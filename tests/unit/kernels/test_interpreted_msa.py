"""Runs the files of `tests/interpreted` that are MSA's."""

from __future__ import annotations

import pytest

from tests._util.interpreting import OF_MSA, assert_passes_and_ran


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_MSA)
def test_file_passes_and_ran(name, tmp_path):
    pytest.importorskip("triton")
    assert_passes_and_ran(name, tmp_path)
