"""Outputs appear whole or not at all, whatever happens on the way."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparsify.errors import UsageError
from sparsify.files import check_target, output_directory, output_file, write_text
from tests._util.commands import environment


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fill(target, content="new", **options):
    with output_directory(target, **options) as folder:
        (folder / "a").write_text(content)


def test_a_folder_appears_with_its_content(tmp_path):
    with output_directory(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
        assert names(tmp_path) == [folder.name] and folder.name.startswith(".out.")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["a"]


def test_an_empty_folder_is_no_obstacle(tmp_path):
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out")
    assert names(tmp_path / "out") == ["a"]


def test_parents_are_made_and_removed_again_on_failure(tmp_path):
    fill(tmp_path / "x" / "y" / "out")
    assert names(tmp_path / "x" / "y") == ["out"]
    with pytest.raises(ZeroDivisionError), output_directory(tmp_path / "p" / "q" / "out"):
        raise ZeroDivisionError
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("force", [False, True])
def test_a_failure_leaves_what_was_there(tmp_path, error, force):
    if force:
        fill(tmp_path / "out", "old")
    with pytest.raises(error), output_directory(tmp_path / "out", force=force) as folder:
        (folder / "a").write_text("half")
        raise error
    assert names(tmp_path) == (["out"] if force else [])
    assert not force or (tmp_path / "out" / "a").read_text() == "old"


def test_a_full_folder_needs_force(tmp_path):
    fill(tmp_path / "out", "old")
    with pytest.raises(UsageError, match=r"is not empty.*--force"):
        fill(tmp_path / "out")
    (tmp_path / "out" / "left").write_text("over")
    fill(tmp_path / "out", force=True)
    assert names(tmp_path / "out") == ["a"] and (tmp_path / "out" / "a").read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_the_old_folder_stays_until_the_new_one_is_complete(tmp_path):
    fill(tmp_path / "out", "old")
    with output_directory(tmp_path / "out", force=True) as folder:
        (folder / "a").write_text("new")
        assert (tmp_path / "out" / "a").read_text() == "old"


def test_a_failed_rename_brings_the_old_folder_back(tmp_path, monkeypatch):
    fill(tmp_path / "out", "old")
    real, calls = Path.rename, []

    def second_fails(self, target):
        calls.append(self)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(UsageError, match="No space left"):
        fill(tmp_path / "out", force=True)
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "a").read_text() == "old"


def test_a_target_that_appears_meanwhile_is_not_overwritten(tmp_path):
    with pytest.raises(UsageError, match="appeared meanwhile"):  # noqa: SIM117
        with output_directory(tmp_path / "out") as folder:
            (folder / "a").write_text("new")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "b").write_text("other")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["b"]


def test_a_file_in_the_way_of_a_folder_is_never_replaced(tmp_path):
    (tmp_path / "out").write_text("x")
    for force in (False, True):
        with pytest.raises(UsageError, match="is a file; the output is a folder"):
            check_target(tmp_path / "out", force=force)
    with pytest.raises(UsageError, match="not a folder"):
        check_target(tmp_path / "out" / "deeper")
    with pytest.raises(UsageError, match="is a folder; the output is a file"):
        check_target(tmp_path, directory=False, force=True)


@pytest.mark.parametrize("up", [".", ".."])
def test_the_working_directory_is_never_replaced(tmp_path, monkeypatch, up):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mine").write_text("x")
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(UsageError, match="working directory"):
        check_target(up, force=True)


def test_a_mount_point_is_refused():
    with pytest.raises(UsageError, match="mount point"):
        check_target("/proc", force=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="no permission"):
        check_target(tmp_path / "out")


def test_a_symbolic_link_stays_and_its_folder_is_replaced(tmp_path):
    fill(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to("real")
    fill(tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "a").read_text() == "new"


def test_files_are_as_open_as_the_umask_allows(tmp_path):
    before = os.umask(0o022)
    try:
        with output_directory(tmp_path / "out") as folder:
            (folder / "a").touch(mode=0o600)
            (folder / "x").touch(mode=0o700)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out" / "a").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "out" / "x").stat().st_mode) == 0o744
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755


def test_files_too(tmp_path):
    write_text(tmp_path / "f", "ä")
    assert (tmp_path / "f").read_bytes() == "ä".encode()
    with pytest.raises(UsageError, match="exists"):
        write_text(tmp_path / "f", "b", force=False)
    with pytest.raises(ValueError), output_file(tmp_path / "f", force=True) as temporary:
        temporary.write_text("half")
        raise ValueError
    assert names(tmp_path) == ["f"] and (tmp_path / "f").read_text() == "ä"
    write_text(tmp_path / "f", "b")
    assert (tmp_path / "f").read_text() == "b"


@pytest.mark.parametrize(
    "error",
    [OSError(28, "x"), RuntimeError("Error while serializing: No space left (os error 28)")],
)
def test_a_full_disk_is_not_an_internal_error(tmp_path, error):
    with pytest.raises(UsageError, match=r"Cannot write .*out: No space left on device\.$"):  # noqa: SIM117
        with output_directory(tmp_path / "out"):
            raise error
    assert names(tmp_path) == []


SCRIPT = """
import sys, time
from sparsify.files import output_directory
with output_directory(sys.argv[1], force=True) as folder:
    (folder / "a").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_remove_the_temporary(tmp_path, number):
    fill(tmp_path / "out", "old")
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    code = process.wait(timeout=30)
    assert code in (-number, 128 + number)
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "a").read_text() == "old"


def test_interrupts_during_the_renames_wait_for_their_end(tmp_path, monkeypatch):
    fill(tmp_path / "out", "old")
    real = Path.rename

    def interrupted(self, target):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return real(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path / "out", force=True)
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "a").read_text() == "new"


def test_handlers_are_given_back(tmp_path):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    fill(tmp_path / "out")
    assert before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize("name", ["n" * 300, "new/" + "n" * 300, "é" * 150])
def test_names_too_long_are_refused_before_the_work(tmp_path, name):
    with pytest.raises(UsageError, match="File name too long"):
        check_target(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127])
def test_names_of_the_greatest_length_are_written(tmp_path, name):
    write_text(tmp_path / name, "text")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_empty_name_is_refused():
    with pytest.raises(UsageError, match="name of the output is empty"):
        check_target("")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_file_systems_that_take_no_files_are_refused_before_the_work():
    with pytest.raises(UsageError, match="Cannot write /proc/zz: "):
        check_target("/proc/zz")


def test_a_folder_that_goes_away_is_told(tmp_path):
    (tmp_path / "in").mkdir()
    target = tmp_path / "in" / "out"
    with pytest.raises(UsageError, match="No such file or directory"), output_file(target):
        (tmp_path / "in").rmdir()


def test_other_missing_files_are_no_fault_of_the_target(tmp_path):
    with pytest.raises(FileNotFoundError), output_file(tmp_path / "out"):
        (tmp_path / "other").read_text()
