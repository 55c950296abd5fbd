"""Ctrl-C at any stage ends with 130, SIGTERM with 143; a sentence is told, nothing is left."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests._util.commands import environment, finish, spawn_cli
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
        assert err.endswith("sparsify: interrupted\n")


@pytest.fixture
def waiting(tmp_path):
    """A spawned command whose factory says "ready" and then waits."""
    (tmp_path / "cli_waits.py").write_text(
        "import sys, time\n"
        "def make():\n"
        "    print('ready', file=sys.stderr, flush=True)\n"
        "    time.sleep(60)\n"
    )

    def spawn():
        process = spawn_cli("inspect", "cli_waits:make", cwd=tmp_path)
        while "ready" not in process.stderr.readline():
            assert process.poll() is None
        return process

    return spawn


@pytest.mark.parametrize(
    ("number", "text", "times"),
    [
        (signal.SIGINT, "interrupted", 1),
        (signal.SIGTERM, "terminated by SIGTERM", 1),
        (signal.SIGTERM, "terminated by SIGTERM", 8),  # the next test repeats Ctrl-C
        (signal.SIGHUP, "terminated by SIGHUP", 8),
    ],
)
def test_signals_while_a_model_is_loaded(waiting, number, text, times):
    process = waiting()
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.01)
    assert finish(process) == (128 + number, "", f"sparsify: {text}\n")


def test_interrupts_until_the_very_end(waiting):
    process = waiting()
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.002)
    assert finish(process) == (130, "", "sparsify: interrupted\n")


def test_an_interrupt_while_modules_are_imported():
    code = """
import os, signal, sys
from sparsify.cli import main
class Interrupting:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["sparsify", "doctor"]
main.run()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "sparsify: interrupted\n")


def test_signals_that_the_parent_ignores_stay_ignored():
    process = spawn_cli("doctor", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    os.kill(process.pid, signal.SIGHUP)
    time.sleep(0.3)
    process.send_signal(signal.SIGHUP)
    assert finish(process)[0] == 0
