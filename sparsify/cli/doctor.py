"""`sparsify doctor`: what is installed, which devices there are, which settings are in force."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

from rich.table import Table

from sparsify import settings
from sparsify.cli import streams
from sparsify.cli.options import Json
from sparsify.errors import UsageError
from sparsify.versions import CORE, EXTRAS, VERSION, installed_version

__all__ = ["diagnose", "doctor"]

CHECKED: tuple[Callable[[], Any], ...] = (settings.impl, settings.disabled, settings.strict)


def doctor(json: Json = False) -> None:
    """Report versions, devices, missing extras and settings. Always exits with 0."""
    with streams.progress() as say:
        say("looking around")
        found = diagnose()
    streams.show_json(found) if json else streams.show(*_tables(found))


def diagnose() -> dict[str, Any]:
    """Everything `doctor` reports, as JSON."""
    devices, problems = _devices()
    problems += _bad_settings()
    packages = {name: installed_version(name) for name in CORE}
    problems += [
        f"{name} is not installed"
        for name, version in packages.items()
        if version is None and not (name == "triton" and platform.system() != "Linux")
    ]
    extras = {}
    for extra, names in EXTRAS.items():
        packages |= {name: installed_version(name) for name in names}
        missing = [name for name in names if packages[name] is None]
        command = f'pip install "sparsify-attention[{extra}]"' if missing else None
        extras[extra] = {"missing": missing, "install": command}
    return {
        "schema": 1,
        "sparsify": VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "extras": extras,
        "devices": devices,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("SPARSIFY_")},
        "problems": problems,
    }


def _devices() -> tuple[list[dict[str, Any]], list[str]]:
    try:
        import torch
    except Exception as error:  # a broken installation is what doctor is for
        return [], [f"torch cannot be imported: {error}"]
    devices: list[dict[str, Any]] = [{"device": "cpu", "threads": torch.get_num_threads()}]
    try:
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            devices.append(
                {
                    "device": f"cuda:{index}",
                    "name": facts.name,
                    "memory_bytes": facts.total_memory,
                    "capability": f"{facts.major}.{facts.minor}",
                }
            )
    except Exception as error:
        return devices, [f"CUDA devices cannot be read: {error}"]
    return devices, []


def _bad_settings() -> list[str]:
    found = []
    for read in CHECKED:
        try:
            read()
        except UsageError as error:
            found.append(error.message)
    return found


def _tables(found: dict[str, Any]) -> list[Any]:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("sparsify", found["sparsify"])
    table.add_row("python", f"{found['python']} ({found['platform']})")
    for name, version in found["packages"].items():
        table.add_row(name, version or "missing")
    for device in found["devices"]:
        facts = (f"{k} {v}" for k, v in device.items() if k != "device")
        table.add_row(device["device"], ", ".join(facts))
    for name, value in found["environment"].items():
        table.add_row(name, value)
    lines: list[Any] = [table]
    for extra, state in found["extras"].items():
        if state["missing"]:
            lines.append(
                f"extra {extra}: {', '.join(state['missing'])} missing; {state['install']}"
            )
    return lines + [f"problem: {text}" for text in found["problems"]]
