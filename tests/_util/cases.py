"""The attention cases: small models with the right verdict, in tests/cases/INDEX.json."""

import importlib.util
import json
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "cases"


@cache
def index():
    """Entries of the index by name."""
    entries = json.loads((FOLDER / "INDEX.json").read_text())["cases"]
    return {entry["name"]: entry for entry in entries}


def build(name):
    """The case dict: model, args, kwargs, expect, ref, naive; expect completed from the index."""
    entry = index()[name]
    case = getattr(_module(entry["file"]), entry["func"])()
    return {**case, "expect": {**entry["expect"], **case["expect"]}, "family": entry["family"]}


@cache
def _module(path):
    spec = importlib.util.spec_from_file_location(
        "case_" + path.replace("/", "_")[:-3], FOLDER / path
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main_out(outputs, expect):
    """The output that a case is about."""
    if isinstance(outputs, dict):
        outputs = outputs[expect["out_key"]]
    return outputs[0] if isinstance(outputs, tuple | list) else outputs


def gap(a, b, expect):
    """Largest difference relative to the largest value, on the rows that count."""
    a, b = a.double(), b.double()
    if "real" in expect:
        a, b = a[expect["real"]], b[expect["real"]]
    if a.numel() == 0:
        return 0.0 if a.shape == b.shape else float("inf")
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-6)).item()
