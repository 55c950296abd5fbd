"""Running the command line, in this process or in one of its own."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_cli(capsys, *words):
    """Exit code, stdout and stderr of one command, run in this process."""
    from sparsify.cli.main import main

    capsys.readouterr()
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def spawn_cli(*words, **options):
    """A process that runs one command; its streams are pipes of text."""
    given = {"cwd": ROOT, "env": environment(), "text": True, **options}
    command = [sys.executable, "-m", "sparsify.cli.main", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **given)


def fork_cli(*words, before=lambda: None):
    """Exit code and stderr of one command in a forked process: imports are not paid again."""
    import torch

    from sparsify.cli.main import main

    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 99
        with contextlib.suppress(BaseException):
            torch.set_num_threads(1)  # the threads of the parent are not there
            os.dup2(writing, 2)
            sys.stdout = open(os.devnull, "w", errors="backslashreplace")  # noqa: SIM115
            sys.stderr = open(2, "w", errors="backslashreplace")  # noqa: SIM115
            before()
            code = main([str(word) for word in words])
            sys.stderr.flush()
        os._exit(code)
    os.close(writing)
    with open(reading, errors="replace") as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def finish(process, timeout=120):
    """Exit code, stdout and stderr of a spawned process."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def environment(**changes):
    """This environment with the repository importable from any folder."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **changes}
