"""`package.module:factory`: run the user's own code to get a module, and example inputs with it."""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from sparsify.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["call_factory", "first_line", "looks_like_factory", "named"]

Made = tuple["torch.nn.Module", tuple[Any, ...] | None, dict[str, Any] | None]


def looks_like_factory(spec: str) -> bool:
    """Whether a MODEL argument is spelt `package.module:name`."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", spec) is not None


def call_factory(spec: str) -> Made:
    """The module that a factory returns (or the module of that name), and its example inputs.

    Raises:
        UsageError: there is no such factory, it raised, or it returned something else.
    """
    import torch

    factory = _find_factory(spec)
    made = factory
    if not isinstance(factory, torch.nn.Module):
        if not callable(factory):
            raise UsageError(f"{spec} is a {type(factory).__name__}; expected a function.")
        try:
            made = factory()
        except (Exception, SystemExit) as error:
            raise UsageError(f"{spec} raised {named(error)}.") from error
    model, args, kwargs = _with_inputs(made)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"{spec} returned {type(model).__name__}; expected a torch.nn.Module.",
            "With example inputs it is (module, args) or (module, args, kwargs).",
        )
    return model, args, kwargs


def _with_inputs(made: Any) -> tuple[Any, tuple[Any, ...] | None, dict[str, Any] | None]:
    """A factory returns a module; (module, args), (module, args, kwargs) or a dict of these names
    bring example inputs along."""
    if isinstance(made, dict) and "model" in made:
        made = (made["model"], made.get("args", ()), made.get("kwargs") or {})
    if not isinstance(made, tuple) or not 2 <= len(made) <= 3:
        return made, None, None
    model, args, kwargs = (*made, {})[:3]
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        return made, None, None
    return model, tuple(args), kwargs


def _find_factory(spec: str) -> Any:
    module_name, _, attributes = spec.partition(":")
    if os.getcwd() not in sys.path:  # as `python -m` has it
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"There is no Python module {error.name}.", "Check PYTHONPATH."
            ) from None
        raise UsageError(f"Importing {module_name} raised {named(error)}.") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"Importing {module_name} raised {named(error)}.") from error
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise UsageError(f"The module {module_name} has no {attributes}.")
        found = getattr(found, attribute)
    return found


def named(error: BaseException) -> str:
    """Type and text of an exception, on one line."""
    text = first_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_line(error: BaseException) -> str:
    """What an exception says, on one line of bearable length."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
