"""Building blocks of the pydantic models: strict field types, and faults as one sentence each."""

from __future__ import annotations

import difflib
import math
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from sparsify.errors import UsageError

__all__ = [
    "Context",
    "Fraction",
    "FrozenModel",
    "IndexDim",
    "NonNegative",
    "PositiveInt",
    "TopK",
    "did_you_mean",
    "fault",
    "tagged",
]

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlevel = 2


class FrozenModel(BaseModel):
    """Base of the policy models: frozen, no unknown fields, `UsageError` instead of pydantic's."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    tags: ClassVar[frozenset[str]] = frozenset({"moba", "msa", "dense", "auto"})
    shorthands: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise UsageError(_sentence(error, self.tags)) from None

    # Nested models are validated by pydantic's core, which then keeps the path of the field.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        known = [*cls.model_fields, *cls.shorthands]
        for name in data:
            if name not in known:
                raise fault(f"has no field {_SHORT.repr(name)}{did_you_mean(name, known)}")
        return data


def fault(text: str) -> PydanticCustomError:
    """A fault of a value; `text` continues the sentence that begins with the field's name."""
    return PydanticCustomError("fault", "{text}", {"text": text})


def did_you_mean(given: Any, known: Iterable[str]) -> str:
    """ "; did you mean 'topk'?"-like ending, or the list of what there is."""
    names = list(known)
    close = difflib.get_close_matches(str(given), names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(names)}"


def _whole(least: int, most: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        try:
            number = None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = None
        if number is None or not least <= number <= most:
            raise fault(
                f"is {_SHORT.repr(value)}; expected a whole number of at least {least}"
                if number is None or number < least
                else f"is {number}; expected at most {most}"
            )
        return number

    return check


def _real(least: float, most: float) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most or math.isinf(value):
            wanted = (
                f"from {least:g} to {most:g}" if math.isfinite(most) else f"of at least {least:g}"
            )
            raise fault(f"is {_SHORT.repr(value)}; expected a number {wanted}")
        return float(value)

    return check


def tagged(tag: str, bare: Iterable[str], examples: Mapping[str, str]) -> BeforeValidator:
    """Accept a bare name for models without fields, and name the alternatives when `tag` is wrong.

    Args:
        tag: the field that tells the alternatives apart.
        bare: names that may stand alone ("dense" for {name: dense}).
        examples: how to write every alternative.
    """
    alone = frozenset(bare)

    def check(value: Any) -> Any:
        if isinstance(value, BaseModel):
            return value
        name = value.get(tag) if isinstance(value, Mapping) else value
        if isinstance(value, str) and value in alone:
            return {tag: value}
        if isinstance(value, str) and value in examples:
            raise fault(f"is {value!r} without its fields; expected {examples[value]}")
        if isinstance(value, Mapping) and name is None:
            raise fault(f"has no {tag}; expected one of {', '.join(examples)}")
        if not isinstance(name, str) or name not in examples:
            close = difflib.get_close_matches(str(name), examples, n=1)
            wanted = f"did you mean {close[0]!r}?" if close else f"expected {', '.join(examples)}"
            raise fault(f"is {_SHORT.repr(name)}; {wanted}")
        return value

    return BeforeValidator(check)


def _sentence(error: ValidationError, tags: frozenset[str]) -> str:
    """The first fault as a sentence, and how many more there are."""
    faults = error.errors(include_url=False)
    first = faults[0]
    where = _path(first["loc"], tags)
    text = f"{where} {_what(first)}" if where else f"{error.title} {_what(first)}"
    more = len(faults) - 1
    if more:
        text += f" ({more} more fault{'s' if more > 1 else ''})"
    return text if text.endswith("?") else text + "."


def _path(loc: tuple[int | str, ...], tags: frozenset[str]) -> str:
    text = ""
    for before, part in zip((None, *loc), loc, strict=False):
        if isinstance(part, int):
            text += f"[{part}]"
        elif not (before == "method" and part in tags):
            text += f".{part}" if text else part
    return text


def _what(found: ErrorDetails) -> str:
    kind, given = found["type"], _SHORT.repr(found["input"])
    if kind == "fault":
        return found["msg"]
    if kind == "missing":
        return "is missing"
    expected = {
        "literal_error": str(found.get("ctx", {}).get("expected", "")),
        "string_type": "text",
        "tuple_type": "a list",
        "dict_type": "fields and values",
        "bool_type": "true or false",
        "model_type": "fields and values",
        "model_attributes_type": "fields and values",
    }.get(kind)
    return f"is {given}; expected {expected or found['msg']}"


PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(_whole(1, 2**31 - 1))]
TopK = Annotated[int, Field(ge=1, le=10**6), BeforeValidator(_whole(1, 10**6))]
# Projections of a mistyped size would fill the memory.
IndexDim = Annotated[int, Field(ge=1, le=4096), BeforeValidator(_whole(1, 4096))]
Context = Annotated[int, Field(ge=0), BeforeValidator(_whole(0, 2**62))]
Fraction = Annotated[float, Field(ge=0, le=1), BeforeValidator(_real(0, 1))]
NonNegative = Annotated[float, Field(ge=0), BeforeValidator(_real(0, math.inf))]
