"""Strict reading of small YAML and JSON files: every fault becomes one sentence with its place.

Stricter than the parsers' defaults: duplicate keys are refused, and of YAML's implicit types only
null, true/false, decimal integers and floats are recognised (YAML 1.1 reads 1:30 as 90).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from sparsify.errors import UsageError

__all__ = ["read_document", "read_text"]

MAX_BYTES = 1 << 20


def read_document(path: str | Path, what: str) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; `what` names it in messages ("policy").

    Raises:
        UsageError: missing, unreadable, too large, not UTF-8, empty, malformed (with the line),
            a duplicate key, or not a mapping.
    """
    text = read_text(path, what, max_bytes=MAX_BYTES)
    if not text.strip():
        raise UsageError(f"The {what} {path} is empty.")
    try:
        data = _parse_json(text) if str(path).lower().endswith(".json") else _parse_yaml(text)
    except _Fault as fault:
        raise UsageError(f"The {what} {path} is malformed: {fault}.") from None
    except RecursionError:
        raise UsageError(f"The {what} {path} is nested too deeply.") from None
    if not isinstance(data, dict):
        raise UsageError(f"The {what} {path} holds a {_kind(data)}; expected fields and values.")
    return data


def read_text(path: str | Path, what: str, *, max_bytes: int | None = None) -> str:
    """The text of a UTF-8 file, a byte-order mark removed.

    Raises:
        UsageError: missing, unreadable, too large, or not UTF-8.
    """
    file = Path(path)
    try:
        if file.is_dir():
            raise UsageError(f"The {what} {path} is a folder; expected a file.")
        if max_bytes is not None and file.stat().st_size > max_bytes:
            raise UsageError(f"{path} has {file.stat().st_size} bytes, too many for a {what}.")
        return file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"There is no {what} {path}.") from None
    except OSError as error:
        raise UsageError(f"Cannot read the {what} {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"The {what} {path} is not UTF-8 text (byte {error.start} is wrong)."
        ) from None


class _Fault(Exception):
    """What is wrong, with its line."""


def _parse_json(text: str) -> Any:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise _Fault(f"the field {key!r} is given twice")
            found[key] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=no_duplicates)
    except json.JSONDecodeError as error:
        raise _Fault(
            f"line {error.lineno}, column {error.colno}: {error.msg.removesuffix(' at')}"
        ) from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise _Fault(str(error)) from None


def _parse_yaml(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = " ".join((error.problem or error.context or "not valid YAML").split())
        hint = ""
        if "mapping values are not allowed" in problem:
            hint = ' (a value that ends in or holds a colon needs quotes, such as "-3:")'
        raise _Fault(f"{place}{problem}{hint}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise _Fault(" ".join(str(error).split())) from None


class _Loader(yaml.SafeLoader):
    """SafeLoader without duplicate keys and without YAML 1.1's surprising implicit types."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name is None:
                raise yaml.constructor.ConstructorError(
                    None, None, "a field name must be a plain text", key.start_mark
                )
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the field {name!r} is given twice", key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep=deep)


_IMPLICIT = {
    "tag:yaml.org,2002:null": (r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    "tag:yaml.org,2002:bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    "tag:yaml.org,2002:int": (r"^[-+]?(?:0|[1-9][0-9]*)$", list("-+0123456789")),
    "tag:yaml.org,2002:float": (
        r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+0123456789."),
    ),
    "tag:yaml.org,2002:merge": (r"^<<$", ["<"]),
}
_Loader.yaml_implicit_resolvers = {}
for _tag, (_pattern, _first) in _IMPLICIT.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), _first)


def _kind(data: Any) -> str:
    names = {list: "list", str: "text", type(None): "null", bool: "true/false"}
    return names.get(type(data), "number")
