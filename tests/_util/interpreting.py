"""Runs files of `tests/interpreted` with Triton's interpreter, each in a process of its own."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))
SHORT_BYTES = 7_000  # a process takes longer to start than to run so short a file


def together(files: dict[str, int]) -> list[str]:
    """What runs in one process each, as names with spaces between: long files by themselves, the
    longest first, and all short ones together."""
    by_length = sorted(files, key=lambda name: (-files[name], name))
    short = [name for name in by_length if files[name] < SHORT_BYTES]
    return [name for name in by_length if name not in short] + [" ".join(short)] * bool(short)


def assert_pass_and_ran(names: str, folder: Path) -> None:
    """All tests of files pass, none is skipped, and there are some in each."""
    report = folder / "report.xml"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("SPARSIFY_IMPL", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--junitxml={report}", *(str(FOLDER / name) for name in names.split())],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    ran = collections.Counter(case.get("classname", "").split(".")[-1] for case in suite)
    assert {Path(name).stem for name in names.split()} == set(ran)
    assert min(ran.values()) >= 5
    assert int(suite.get("skipped", 1)) == 0
