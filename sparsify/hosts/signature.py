"""How a captured program is called: by the names of the model's own forward.

torch.export keeps the arguments exactly as they were in the example; a program called through this
module takes them by position or by name, in any spelling that the model itself takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from sparsify.errors import UsageError

__all__ = ["Signature", "signature_of"]

_KINDS = {
    kind.name: kind
    for kind in (
        Parameter.POSITIONAL_ONLY,
        Parameter.POSITIONAL_OR_KEYWORD,
        Parameter.VAR_POSITIONAL,
        Parameter.KEYWORD_ONLY,
        Parameter.VAR_KEYWORD,
    )
}
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Signature:
    """Parameters of a forward, as triples (name, kind, default).

    [] stands for no default, a list with the name of a type for one that cannot be written down.
    """

    parameters: tuple[tuple[str, str, Any], ...]

    @property
    def spelt(self) -> inspect.Signature:
        """The same as Python's own signature."""
        found = []
        for name, kind, default in self.parameters:
            value = Parameter.empty if default == [] else default
            found.append(Parameter(name, _KINDS[kind], default=value))
        return inspect.Signature(found)

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults that can be written down."""
        return {name: d for name, _, d in self.parameters if not isinstance(d, list)}

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The given arguments by name.

        Raises:
            UsageError: the call does not fit the model's forward.
        """
        try:
            bound = self.spelt.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"The call does not fit the model's forward: {error}.") from None
        found: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self.spelt.parameters[name].kind
            if kind is Parameter.VAR_KEYWORD:
                found.update(value)
            elif kind is Parameter.VAR_POSITIONAL:
                found.update({f"{name}_{n}": entry for n, entry in enumerate(value)})
            else:
                found[name] = value
        return found


def signature_of(forward: Callable[..., Any]) -> Signature:
    """The signature of a model's forward."""
    rows: list[tuple[str, str, Any]] = []
    for name, entry in inspect.signature(forward).parameters.items():
        default = entry.default
        if default is Parameter.empty:
            rows.append((name, entry.kind.name, []))
        else:
            plain = type(default) in _PLAIN
            rows.append((name, entry.kind.name, default if plain else [type(default).__name__]))
    return Signature(tuple(rows))
