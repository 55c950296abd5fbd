"""Runs files of `tests/interpreted` with Triton's interpreter, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))
OF_MSA = [name for name in FILES if name.startswith(("test_msa", "test_shared"))]
OTHERS = [name for name in FILES if name not in OF_MSA]


def assert_passes_and_ran(name: str, folder: Path) -> None:
    """All tests of a file pass, none is skipped, and there are some."""
    report = folder / "report.xml"
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
    assert suite is not None
    assert int(suite.get("tests", 0)) >= 5
    assert int(suite.get("skipped", 1)) == 0
