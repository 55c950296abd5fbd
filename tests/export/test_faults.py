"""Hundreds of random faults: whatever happens to a saved folder, it loads right or not at all.

Every fault is drawn from a seed. After it the folder is loaded in every way there is: either an
error is told, or the model computes the very bits of the undamaged one under the very same plan.
Another kind of artefact is one more entry of `KINDS` in `tests._util.artefacts`.
"""

import builtins
import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import transformers

import sparsify as sp
from sparsify import files, manifests
from sparsify.cli.main import main
from sparsify.hosts import transformers as host
from tests._util.artefacts import KINDS, outcome, states
from tests._util.tiny_folders import save_llama

SEED = 20_240_702
DAMAGES, STOPS, KILLS, REWRITES = 300, 60, 16, 5


# Damages: each changes the folder by means of a random generator and says what it did.


def any_file(folder, rng):
    return rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))


def truncated(folder, rng):
    path = any_file(folder, rng)
    length = rng.randrange(path.stat().st_size)
    os.truncate(path, length)
    return f"{path.name} cut to {length} bytes"


def flipped(folder, rng):
    path = any_file(folder, rng)
    content, bits = bytearray(path.read_bytes()), []
    for _ in range(rng.randint(1, 8)):
        bits.append(rng.randrange(8 * len(content)))
        content[bits[-1] // 8] ^= 1 << bits[-1] % 8
    path.write_bytes(content)
    return f"{path.name} with bits {bits} flipped"


def deleted(folder, rng):
    path = any_file(folder, rng)
    path.unlink()
    return f"{path.name} deleted"


def swapped(folder, rng):
    one, two = rng.sample(sorted(path for path in folder.rglob("*") if path.is_file()), 2)
    one.rename(folder / "x")
    two.rename(one)
    (folder / "x").rename(two)
    return f"{one.name} and {two.name} swapped"


def stale_temporary(folder, rng):
    stale = folder.with_name(f".{folder.name}.{rng.randrange(16**8):08x}.partial")
    shutil.copytree(folder, stale)
    return f"a stale temporary, {truncated(stale, rng)}"


def appended(folder, rng):
    path = any_file(folder, rng)
    with path.open("ab") as handle:
        handle.write(rng.randbytes(rng.randint(1, 64)))
    return f"garbage behind {path.name}"


def digit_changed(folder, rng):
    path = rng.choice(sorted(folder.glob("*.json")))
    text = path.read_text()
    places = [i for i, letter in enumerate(text) if letter.isdigit()]
    place = rng.choice(places)
    digit = rng.choice([d for d in "0123456789" if d != text[place]])
    path.write_text(text[:place] + digit + text[place + 1 :])
    return f"{path.name}: digit {text[place]} at {place} is {digit}"


def stranger(folder, rng):
    name = rng.choice(["model-00002-of-00002.safetensors", "pytorch_model.bin", "modeling_x.py"])
    (folder / name).write_bytes(rng.randbytes(50))
    return f"{name} added"


DAMAGED = (
    *(truncated, flipped, flipped, flipped, deleted, swapped, stale_temporary, appended),
    *(digit_changed, stranger),
)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def sound(kind, tmp_path_factory):
    """An undamaged folder and what its model is known by."""
    folder = tmp_path_factory.mktemp("sound") / "out"
    result = kind.make(0)
    kind.save(result, folder)
    return folder, kind.facts(result.model)


@pytest.fixture(autouse=True)
def quiet():
    logging = transformers.utils.logging
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def damage(kind, sound, folder, seed):
    """What was done to a copy, and what every loader made of it."""
    rng = random.Random(seed)
    shutil.rmtree(folder.parent, ignore_errors=True)
    shutil.copytree(sound[0], folder)
    done = rng.choice(DAMAGED)(folder, rng)
    return done, {
        name: outcome(kind, load, folder, sound[1]) for name, load in kind.loaders.items()
    }


def test_damaged_folders_load_right_or_not_at_all(kind, sound, tmp_path):
    counts, wrong = Counter(), []
    for seed in range(SEED, SEED + DAMAGES // kind.slower):
        done, found = damage(kind, sound, tmp_path / "in" / "out", seed)
        counts.update(f"{how}: {what}" for how, what in found.items())
        wrong += [
            f"seed {seed}: {done}: {how}: {what}"
            for how, what in found.items()
            if what not in ("refused", "right")
        ]
    print(dict(counts))
    assert not wrong, "\n".join([str(dict(counts)), *wrong])
    # Both kinds of outcome were seen: stale temporaries and notes do no harm, the others do.
    for how in kind.loaders:
        assert counts[f"{how}: refused"] > DAMAGES // kind.slower // 2, counts
        assert counts[f"{how}: right"] > 0, counts


def test_without_the_manifest_some_damage_does_load_wrong(kind, sound, tmp_path, monkeypatch):
    """The control: what the test above looks for does happen when nothing is verified."""
    nothing = contextlib.nullcontext()
    monkeypatch.setattr(host, "_is_ours", lambda folder: False)
    monkeypatch.setattr(kind.unverified, lambda folder: nothing)
    weight = kind.make(0).model.state_dict()["lm_head.weight"].numpy().tobytes()
    counts, faults = Counter(), 40 // kind.slower
    for seed in range(faults):
        rng = random.Random(seed)
        folder = shutil.copytree(sound[0], tmp_path / str(seed) / "out")
        path = max(folder.iterdir(), key=lambda path: path.stat().st_size)
        content = bytearray(path.read_bytes())
        # The highest byte but one of a random number of a weight: exponent and leading digits.
        content[content.index(weight) + 4 * rng.randrange(len(weight) // 4) + 2] ^= 64
        path.write_bytes(content)
        load = rng.choice(list(kind.loaders.values()))
        counts[outcome(kind, load, folder, sound[1])] += 1
    assert counts["WRONG"] > faults // 4, counts


def test_a_changed_number_of_the_plan_is_found(kind, sound, tmp_path):
    for name in sorted({"plan.json", "config.json"} & {path.name for path in sound[0].iterdir()}):
        folder = shutil.copytree(sound[0], tmp_path / name / "out")
        text = (folder / name).read_text()
        changed = text.replace('"block_size": 16', '"block_size": 17', 1)
        assert changed != text
        (folder / name).write_text(changed)
        for load in kind.loaders.values():
            with pytest.raises(sp.ArtefactError, match=f"{name} was changed"):
                load(folder)


def test_a_changed_version_in_the_manifest_does_no_harm(kind, sound, tmp_path):
    folder = shutil.copytree(sound[0], tmp_path / "out")
    data = json.loads((folder / "manifest.json").read_text())
    data["versions"]["torch"] += "x"
    (folder / "manifest.json").write_text(json.dumps(data))
    for load in kind.loaders.values():
        assert outcome(kind, load, folder, sound[1]) == "right"


# Stops: the process ends in the middle of writing, at a random call that changes the disk.


class Killed(BaseException):
    """As SIGKILL: nothing is cleared up after it."""


CALLS = (
    (os, "fsync"),
    (Path, "rename"),
    (Path, "mkdir"),
    (Path, "write_text"),
    (Path, "chmod"),
    (builtins, "open"),
    (manifests, "_sha256"),
)


def stop_at(monkeypatch, place):
    """From call number `place` on every call of `CALLS` raises, and nothing is removed any more."""
    counter = iter(range(10**9))

    def watch(owner, name):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            if next(counter) >= place:
                if name == "write_text":
                    real(args[0], args[1][: len(args[1]) // 2], **kwargs)
                raise Killed
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name in CALLS:
        watch(owner, name)
    monkeypatch.setattr(files, "_remove", lambda path: None)
    return counter


@pytest.fixture(scope="module")
def renewed(kind):
    """A result whose folder replaces the sound one, and what its model is known by."""
    result = kind.make(1)
    return result, kind.facts(result.model)


def prepare(sound, folder, over):
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.parent.mkdir(parents=True)
    if over:
        shutil.copytree(sound[0], folder)


def test_a_save_stopped_anywhere_leaves_the_old_or_the_new_or_an_error(
    kind, sound, renewed, tmp_path, monkeypatch
):
    folder = tmp_path / "in" / "out"
    prepare(sound, folder, False)
    with monkeypatch.context() as patch:
        counter = stop_at(patch, 10**9)
        kind.save(renewed[0], folder)
        calls = next(counter)
    counts, rng = Counter(), random.Random(SEED)
    for number in range(STOPS // kind.slower):
        over = number % 2 == 0
        prepare(sound, folder, over)
        place = rng.randrange(calls + over)
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            stop_at(patch, place)
            kind.save(renewed[0], folder)
        found = states(kind, folder, sound[1], renewed[1])
        assert set(found.values()) <= {"right", "refused"}, (number, place, found)
        if over and folder.exists():
            assert set(found.values()) == {"right"}, (number, place, found)
        counts.update(found.values())
    print(dict(counts))
    assert counts["right"] and counts["refused"], counts


def test_a_process_killed_while_it_saves_leaves_the_old_or_the_new_or_an_error(
    kind, sound, renewed, tmp_path
):
    folder = tmp_path / "in" / "out"
    prepare(sound, folder, False)
    started = time.perf_counter()
    kind.save(renewed[0], folder)
    usual = time.perf_counter() - started
    counts, rng = Counter(), random.Random(SEED)
    for number in range(KILLS // kind.slower):
        over = number % 2 == 0
        prepare(sound, folder, over)
        killed = killed_after(rng.random() * usual, lambda: kind.save(renewed[0], folder))
        counts["killed" if killed else "done before"] += 1
        found = states(kind, folder, sound[1], renewed[1])
        assert set(found.values()) <= {"right", "refused"}, (number, found)
        counts.update(found.values())
        # What the killed one left does not disturb the next.
        kind.save(renewed[0], folder)
        assert set(states(kind, folder, renewed[1], renewed[1]).values()) == {"right"}
    print(dict(counts))
    assert counts["killed"], counts


def test_a_process_killed_while_it_rewrites_leaves_the_old_or_the_new_or_nothing(tmp_path):
    kind, model = KINDS["transformers"], save_llama(tmp_path / "model")
    old = kind.save(kind.make(0), tmp_path / "old")
    sound, folder = (old, kind.facts(kind.make(0).model)), tmp_path / "in" / "out"
    words = ["rewrite", str(model), "--method", "moba", "--block-size", "8", "--topk", "2"]
    words += ["-o", str(folder), "--force"]
    started = time.perf_counter()
    assert main(words) == 0
    usual, new = time.perf_counter() - started, kind.facts(sp.load(folder))
    counts, rng = Counter(), random.Random(SEED)
    for number in range(REWRITES):
        over = number % 2 == 0
        prepare(sound, folder, over)
        killed = killed_after(usual * (0.2 + rng.random()), lambda: main(words))
        counts["killed" if killed else "done before"] += 1
        found = states(kind, folder, sound[1], new)
        assert set(found.values()) <= {"right", "refused"}, (number, found)
        assert not folder.exists() or set(found.values()) == {"right"}, (number, found)
    print(dict(counts))
    assert counts["killed"], counts


def killed_after(delay_s, work):
    """Run `work` in a forked process and kill it; whether it was still at work."""
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            work()
        os._exit(0)
    time.sleep(delay_s)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)
