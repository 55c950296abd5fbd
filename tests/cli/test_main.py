"""Exit codes, messages and streams of the command line as a whole."""

import json
import signal
import subprocess
import sys
import time

import pytest

from sparsify import errors
from sparsify.cli import main as cli_main
from sparsify.cli import stopping, streams
from tests._util.commands import ROOT, environment, finish, spawn_cli


def test_version_and_help(cli):
    code, out, err = cli("--version")
    assert (code, err) == (0, "") and out.startswith("sparsify ")
    for words in (["--help"], ["-h"], ["inspect", "--help"], ["policy", "--help"]):
        code, out, err = cli(*words)
        assert code == 0 and "Usage: sparsify" in out and err == ""


def test_the_verbs_are_these(cli):
    """Frozen: a verb or option that goes away breaks scripts."""
    _, out, _ = cli("--help")
    listed = out.split("Commands:")[1].split()
    for verb in ("inspect", "estimate", "compare", "rewrite", "verify", "bench", "gpus", "policy",
                 "doctor"):  # fmt: skip
        assert verb in listed
    options = {
        "inspect": ["--seq", "--explain", "--json", "--debug", "--dtype"],
        "rewrite": ["--policy", "--plan", "--method", "--block-size", "--topk", "--dense-last",
                    "--decode", "--indexer", "--index-dim", "-o", "--dry-run", "--force",
                    "--json", "--dtype"],
        "verify": ["--against", "--prompts", "--seq", "--checks", "--dump-selection", "--json"],
        "estimate": ["--gpu", "--context", "--phase", "--batch", "--policy", "--plan",
                     "--tensor-parallel", "--kv-dtype", "--index-dtype", "--calibration",
                     "--explain", "--plot", "--force", "--json"],
        "compare": ["--gpu", "--context", "--phase", "--batch", "--policy", "--tensor-parallel",
                    "--kv-dtype", "--index-dtype", "--json"],
        "bench": ["--against", "--shape", "--calibrate", "--context", "--seq", "--method",
                  "--batch", "--dtype", "--device", "--repeats", "--output", "--into", "--force",
                  "--json"],
        "gpus": ["--json"],
        "doctor": ["--json"],
    }  # fmt: skip
    for verb, names in options.items():
        _, out, _ = cli(verb, "--help")
        assert all(name in out for name in names), verb


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["export", "m"], "No such command 'export'"),
        (["estimate", "m"], "Missing option '--gpu'"),
        (["inspec"], "No such command 'inspec'"),
        (["inspect"], "Missing argument 'MODEL'"),
        (["inspect", "a", "b"], "unexpected extra argument"),
        (["inspect", "a", "--jsn"], "No such option"),
        (["inspect", "none/here/at/all"], "There is no file or folder"),
        (["policy", "nothing"], "No such command"),
        (["inspect", "m", "--dtype", "int8"], "'--dtype': 'int8' is not one of 'auto'"),
        (["inspect", ""], "The value of MODEL is empty"),
        (["rewrite", "", "-o", "o"], "The value of MODEL is empty"),
        (["rewrite", "m", "-o", ""], "The value of -o is empty"),
        (["verify", "m", "--against", ""], "The value of --against is empty"),
        (["verify", "m", "--against", "m", "--checks", " "], "The value of --checks is empty"),
        (
            ["verify", "m", "--against", "m", "--checks", "V1,V8"],
            "Unknown check V8; known",
        ),
        (["verify", "m", "--against", "m", "--checks", ","], "--checks is ','; known are V1"),
        (["verify", "m", "--against", "m", "--checks", "v1,v7"], "There is no folder m"),
    ],
)
def test_usage_errors_are_one_line(cli, words, part):
    code, out, err = cli(*words)
    assert code == 2 and out == "" and part in err
    assert err.startswith("sparsify: ") and len(err.strip().splitlines()) == 1


ERRORS = [
    (errors.UsageError, 2),
    (errors.ArtefactError, 2),
    (errors.NothingToDoError, 3),
    (errors.VerificationError, 4),
    (errors.CaptureError, 5),
    (errors.StrictError, 5),
    (errors.MissingExtraError, 6),
    (errors.UnknownGpuError, 7),
    (errors.InfeasibleError, 8),
]


def failing(monkeypatch, error):
    def raise_it(*_):
        raise error

    monkeypatch.setattr("sparsify.policy.load_policy", raise_it)
    return ["policy", "show", "x"]


@pytest.mark.parametrize(("kind", "code"), ERRORS)
def test_every_error_has_its_exit_code(cli, monkeypatch, kind, code):
    words = failing(monkeypatch, kind("Something is wrong.", "Do this."))
    assert cli(*words) == (code, "", "sparsify: Something is wrong. Do this.\n")


def test_internal_errors_have_no_traceback_unless_asked(cli, monkeypatch):
    words = failing(monkeypatch, ZeroDivisionError("a\nb"))
    code, out, err = cli(*words)
    assert (code, out) == (1, "") and "Traceback" not in err
    assert err == (
        "sparsify: internal error: ZeroDivisionError: a b; "
        "run with SPARSIFY_LOG_LEVEL=DEBUG for the traceback\n"
    )
    monkeypatch.setenv("SPARSIFY_LOG_LEVEL", "debug")
    code, _, err = cli(*words)
    assert code == 1 and "Traceback" in err


def test_an_interrupt_is_130(cli, monkeypatch):
    words = failing(monkeypatch, KeyboardInterrupt())
    for _ in range(2):
        assert cli(*words) == (130, "", "sparsify: interrupted\n")


def test_an_interrupt_is_told_as_one_whatever_ended_the_command_before(cli, monkeypatch):
    words = failing(monkeypatch, KeyboardInterrupt())
    monkeypatch.setattr(stopping._State, "number", int(signal.SIGTERM))
    assert cli(*words) == (130, "", "sparsify: interrupted\n")


def test_a_factory_that_raises_an_interrupt(cli, tmp_path, monkeypatch):
    (tmp_path / "cli_stops.py").write_text("def make(): raise KeyboardInterrupt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code, out, err = cli("inspect", "cli_stops:make")
    assert (code, out) == (130, "") and err.endswith("sparsify: interrupted\n")


def test_a_wrong_log_level_is_told(cli, monkeypatch):
    monkeypatch.setenv("SPARSIFY_LOG_LEVEL", "loud")
    code, _, err = cli("policy", "show")
    assert code == 0 and "SPARSIFY_LOG_LEVEL is 'LOUD'" in err


def test_a_wrong_setting_is_a_usage_error(cli, monkeypatch, llama, tmp_path):
    monkeypatch.setenv("SPARSIFY_IMPL", "cuda")
    words = ("--method", "moba", "--block-size", "4", "--topk", "1", "-o", tmp_path / "out")
    code, _, err = cli("rewrite", llama, *words)
    assert code == 2 and "SPARSIFY_IMPL is 'cuda'" in err and not (tmp_path / "out").exists()


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m sparsify.cli.main policy schema | head -1"
    done = subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "{\n" and done.stderr == ""


def test_closed_streams_do_not_break_a_command():
    for redirect in (">&-", "2>&-", ">&- 2>&-"):
        command = f"{sys.executable} -m sparsify.cli.main policy show kimi-1m {redirect}"
        done = subprocess.run(
            command, shell=True, cwd=ROOT, env=environment(), capture_output=True, check=False
        )
        assert b"Traceback" not in done.stderr


def test_what_c_code_prints_goes_to_stderr():
    code = """
import os, sys
from sparsify.cli import stopping, streams
with streams.own_stdout(), streams.working():
    os.write(1, b"from C\\n")
    with streams.progress() as say:
        print("from a library")
        say("a stage")
    streams.show_json({"a": 1})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {"a": 1}
    assert "from C" in done.stderr and "from a library" in done.stderr and "a stage" in done.stderr


def test_json_has_no_nan(capsys):
    streams.show_json({"a": [float("nan"), 1.5, (float("inf"), "x")], "b": {"c": -float("inf")}})
    data = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert data == {"a": [None, 1.5, [None, "x"]], "b": {"c": None}}


def test_help_is_quick():
    best = 9.0
    for _ in range(3):
        started = time.perf_counter()
        code, out, _ = finish(spawn_cli("--help"))
        best = min(best, time.perf_counter() - started)
        assert code == 0 and "Usage" in out
    assert best < 1.0


def test_a_terminal_gets_a_bar_and_a_pipe_plain_lines(monkeypatch, capsys):
    import os
    import pty

    with streams.progress() as say:
        say("first")
    err = capsys.readouterr().err
    assert "first" in err and "\x1b" not in err and "\r" not in err
    main_end, terminal = pty.openpty()
    code = """
from sparsify.cli import stopping, streams
with streams.progress(stages=2) as say:
    say("first"); say("second")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=terminal, env=environment(TERM="xterm")
    )
    assert process.wait(timeout=60) == 0
    seen = os.read(main_end, 65536).decode()
    os.close(main_end)
    os.close(terminal)
    assert "second" in seen and "\x1b" in seen


@pytest.fixture
def kept_signals():
    """Handlers of the test process stay what they are."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_run_ends_the_process_with_the_code(monkeypatch, kept_signals):
    monkeypatch.setattr(sys, "argv", ["sparsify", "policy", "show", "none"])
    monkeypatch.setattr(streams, "own_stdout", streams.working)
    with pytest.raises(SystemExit) as caught:
        cli_main.run()
    assert caught.value.code == 2


def test_the_package_runs_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "sparsify", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("sparsify ")
