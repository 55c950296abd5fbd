"""Ctrl-C at any stage ends with 130 and leaves nothing behind."""

import signal

import pytest

from tests._util.commands import finish, spawn_cli
from tests.cli.conftest import MOBA


@pytest.mark.parametrize("stage", ["loading", "capturing", "rewriting", "writing", "hashing"])
def test_interrupt_of_a_rewrite(llama, tmp_path, stage):
    process = spawn_cli("rewrite", llama, *MOBA, "-o", tmp_path / "deep" / "out")
    seen = []
    for line in process.stderr:
        seen.append(line)
        if stage in line:
            process.send_signal(signal.SIGINT)
            break
    code, out, err = finish(process)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    if code == 0:  # the signal came when the work was done
        assert stage == "hashing" and (tmp_path / "deep" / "out" / "manifest.json").exists()
    else:
        assert code == 130, (seen, err)
        assert left == [] and "Traceback" not in err and "written to" not in out
