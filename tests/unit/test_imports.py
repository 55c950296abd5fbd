"""What importing costs, and that no module hides a verb."""

import importlib
import pkgutil
import subprocess
import sys
import tomllib

import pytest

import sparsify
from sparsify.versions import CORE, EXTRAS, VERSION
from tests._util.commands import ROOT, environment

HEAVY = ("torch", "triton", "transformers", "onnx", "onnxscript", "onnxruntime")
VERBS = ("inspect", "plan", "estimate", "sparsify", "verify", "export", "load")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def python(code, *options, **changes):
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        env=environment(**changes),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["sparsify", "sparsify.cli.main", "sparsify.planner"])
def test_importing_is_light(name):
    code = f"import {name}, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert python(code).strip() == "[]"


def test_the_package_itself_needs_nothing():
    code = (
        "import sparsify, sys; print([m for m in ('pydantic','yaml','rich') if m in sys.modules])"
    )
    assert python(code).strip() == "[]"


def test_the_ops_need_neither_pydantic_nor_transformers():
    code = """
import sys
for name in ("pydantic", "yaml", "rich", "typer", "transformers", "triton", "onnx"):
    sys.modules[name] = None
from sparsify.kernels import schemas
import torch
q = torch.randn(1, 2, 8, 4)
out, lse = schemas.moba_attention(q, q, q, block_size=4, topk=1)
print(tuple(out.shape))
"""
    assert python(code).strip() == "(1, 2, 8, 4)"


def submodules():
    found = []
    for part in ("sparsify", "sparsify.passes", "sparsify.kernels", "sparsify.cost_model"):
        paths = importlib.import_module(part).__path__
        found += [m.name for m in pkgutil.walk_packages(paths, f"{part}.")]
    return sorted(set(found))


def test_verbs_stay_callable_after_every_module_is_imported():
    code = f"""
import importlib
import sparsify
for name in {submodules()!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        if error.name not in ("triton", "onnxscript"):
            raise
for verb in {VERBS!r}:
    function = getattr(sparsify, verb)
    assert callable(function) and function.__module__ == "sparsify.api", (verb, function)
    assert function.__doc__
print("fine")
"""
    assert python(code).strip() == "fine"


def test_no_module_of_the_package_is_named_as_a_verb():
    reserved = {*VERBS, "estimate", "compare", "bench", "backend", "restore"}
    tops = {name.split(".")[1] for name in submodules()}
    assert not tops & reserved


def test_every_exported_name_exists_and_is_listed():
    for name in sparsify.__all__:
        assert getattr(sparsify, name) is not None, name
    assert set(sparsify.__all__) <= set(dir(sparsify))
    assert sorted(set(sparsify.__all__) - {"__version__"}) == sorted(sparsify._HOME)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = sparsify.nothing
    with pytest.raises(ImportError):
        exec("from sparsify import nothing")


def test_every_module_has_a_place_in_the_layers():
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers")
    placed = {
        name for layer in layers for name in layer.replace("|", ":").replace(" ", "").split(":")
    }
    tops = {".".join(name.split(".")[:2]) for name in submodules()}
    assert tops - placed == set()


def test_extras_and_versions_are_those_of_the_project():
    def names(requirements):
        separators = ">=< ;["
        return tuple(
            "".join(r if r not in separators else " " for r in text).split()[0].lower()
            for text in requirements
        )

    project = PROJECT["project"]
    assert names(project["dependencies"]) == CORE
    extras = {k: names(v) for k, v in project["optional-dependencies"].items() if k != "dev"}
    assert extras == EXTRAS
    assert sparsify.__version__ == VERSION


def test_the_root_does_not_shadow_other_packages():
    code = "import sys, kernels; print(getattr(kernels, '__file__', None))"
    for folder in ("passes", "kernels", "cost_model"):
        assert not (ROOT / folder / "__init__.py").exists(), code
