"""A signal in any stage of `rewrite` and `verify`: the right exit code, nothing half-written."""

import functools
import importlib
import itertools
import os
import shutil
import signal
import tempfile

import pytest

from sparsify import checks
from sparsify.cli import stopping
from sparsify.manifests import check_manifest
from sparsify.plans import Plan
from tests._util.tiny_folders import save_llama
from tests.cli.conftest import MOBA

REWRITE = {
    "loading": "sparsify.sources._from_pretrained",
    "loading the tokenizer": "sparsify.sources._tokenizer",
    "capturing": "sparsify.hosts.graph.capture",
    "inside the capture": "transformers.models.llama.modeling_llama.LlamaMLP.forward",
    "proving": "sparsify.hosts.graph.detect",
    "planning": "sparsify.planner.make_plan",
    "rewriting": "sparsify.hosts.transformers.apply",
    "inside the rewritten model": "sparsify.hosts.attention.run_sparse",
    "reporting": "sparsify.planner.build_report",
    "making the folder": "pathlib.Path.mkdir",
    "writing weights": "transformers.modeling_utils.safe_save_file",
    "writing the tokenizer": "transformers.PreTrainedTokenizerBase.save_pretrained",
    "writing the plan": "pathlib.Path.write_text",
    "hashing": "sparsify.manifests._sha256",
    "flushing": "sparsify.files._sync",
    "flushing a file": "os.fsync",
    "renaming": "sparsify.files._put_in_place",
    "inside the renaming": "pathlib.Path.rename",
}
SIGNALS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated by SIGTERM")}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A Llama of one layer, which is quickly rewritten."""
    return save_llama(tmp_path_factory.mktemp("small") / "small", layers=1)


@pytest.fixture
def listening(monkeypatch):
    """Signals are heard as in a process of its own."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    monkeypatch.setattr(stopping._State, "heard_at", None)
    stopping.listen()
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def owner_of(path):
    """The module or class that holds the last name of a dotted path."""
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        return functools.reduce(getattr, parts[count:-1], module), parts[-1]
    raise AssertionError(path)


def signal_in(monkeypatch, path, number, *, late=False):
    """The first call of `path` sends this process a signal, before its work or behind it."""
    owner, name = owner_of(path)
    real, sent = getattr(owner, name), []

    @functools.wraps(real)
    def call(*args, **kwargs):
        done = real(*args, **kwargs) if late else None
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        return done if late else real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return sent


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def ends_well(code, out, err, number):
    wanted, text = SIGNALS[number]
    assert code == wanted and "written to" not in out and "Traceback" not in err, err
    assert err.endswith(f"sparsify: {text}\n") and err.count("sparsify: ") == 1


@pytest.mark.parametrize("stage", REWRITE)
@pytest.mark.parametrize("late", [False, True])
def test_a_signal_while_a_new_folder_is_written(
    cli, small, tmp_path, monkeypatch, listening, stage, late
):
    number = signal.SIGTERM if late else signal.SIGINT
    sent = signal_in(monkeypatch, REWRITE[stage], number, late=late)
    code, out, err = cli("rewrite", small, *MOBA, "-o", tmp_path / "deep" / "out")
    assert sent
    ends_well(code, out, err, number)
    if "renaming" in stage:  # the renames belong together: the folder is complete
        assert names(tmp_path / "deep") == ["out"]
        check_manifest(tmp_path / "deep" / "out")
    else:
        assert names(tmp_path) == []


@pytest.mark.parametrize("stage", [s for s in REWRITE if "ing" in s and "load" not in s])
def test_a_signal_while_a_folder_is_replaced(
    cli, small, rewritten, tmp_path, monkeypatch, listening, stage
):
    shutil.copytree(rewritten, tmp_path / "out")
    sent = signal_in(monkeypatch, REWRITE[stage], signal.SIGTERM)
    code, out, err = cli("rewrite", small, *MOBA, "-o", tmp_path / "out", "--force")
    assert sent
    ends_well(code, out, err, signal.SIGTERM)
    assert names(tmp_path) == ["out"]
    check_manifest(tmp_path / "out")
    assert len(Plan.load(tmp_path / "out" / "plan.json")) == (1 if "renaming" in stage else 3)


VERIFY = {
    "loading the rewritten model": "sparsify.api.load",
    "hashing": "sparsify.manifests._sha256",
    "loading the original": "sparsify.sources._from_pretrained",
    "capturing": "sparsify.hosts.graph.capture",
    "running": "sparsify.hosts.attention.run_sparse",
    "measuring quality": "sparsify.quality.measure",
    "dumping the selection": "sparsify.kernels.selection.Selection.save",
    "reloading": "subprocess.run",
    "reporting": "sparsify.cli.render.verification",
}


@pytest.mark.parametrize(
    ("stage", "number"), [*zip(VERIFY, itertools.cycle(SIGNALS), strict=False)]
)
def test_a_signal_while_a_folder_is_verified(
    cli, llama, rewritten, tmp_path, monkeypatch, listening, stage, number
):
    dump, temporaries = tmp_path / "chosen.npz", tmp_path / "temporary"
    dump.write_text("old")
    temporaries.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporaries))
    sent = signal_in(monkeypatch, VERIFY[stage], number)
    names_ = "V7" if stage == "reloading" else "V1,V6"
    words = ("verify", rewritten, "--against", llama, "--checks", names_, "--seq", "40")
    words += () if stage == "reloading" else ("--dump-selection", dump)
    code, out, err = cli(*words)
    assert sent
    ends_well(code, out, err, number)
    assert out == "" and names(tmp_path) == ["chosen.npz", "temporary"]
    assert names(temporaries) == []
    # When the report is drawn, the dump is complete.
    assert (dump.read_bytes() == b"old") == (stage != "reporting")


@pytest.mark.parametrize("name", checks.CHECKS)
def test_a_signal_in_any_check(cli, llama, rewritten, monkeypatch, listening, name):
    def stopped(context):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setitem(checks.CHECKS, name, (stopped,))
    code, out, err = cli("verify", rewritten, "--against", llama, "--checks", name)
    ends_well(code, out, err, signal.SIGTERM)
    assert out == ""
