"""`sparsify policy`: show, validate and describe policy files."""

from __future__ import annotations

from typing import Annotated

import typer

from sparsify.cli import streams
from sparsify.cli.options import Json

__all__ = ["app"]

app = typer.Typer(
    help="Show, validate and describe policies.", no_args_is_help=True, rich_markup_mode=None
)

Source = Annotated[
    str, typer.Argument(metavar="NAME|FILE", help="A preset or a file.", show_default=False)
]


@app.command("show")
def show(
    policy: Annotated[
        str | None,
        typer.Argument(metavar="[NAME|FILE]", help="A preset or a file; none lists the presets."),
    ] = None,
    json: Json = False,
) -> None:
    """Print a policy with all its fields, as a file would hold it."""
    from sparsify.policy import PRESETS, load_policy

    if policy is None:
        everything = {name: preset.to_json() for name, preset in PRESETS.items()}
        if json:
            streams.show_json(everything)
        else:
            for name in PRESETS:
                streams.write(name)
    elif json:
        streams.show_json(load_policy(policy).to_json())
    else:
        streams.write(load_policy(policy).to_yaml().rstrip())


@app.command("validate")
def validate(policy: Source, json: Json = False) -> None:
    """Check a policy; exit code 2 and one sentence when it is wrong."""
    from sparsify.policy import load_policy

    found = load_policy(policy)
    if json:
        streams.show_json({"schema": 1, "valid": True, "policy": found.to_json()})
    else:
        count = len(found.layers)
        rules = f", {count} layer rule{'s' if count > 1 else ''}" if count else ""
        streams.write(f"{policy} is a valid policy: {found.method.name}{rules}")


@app.command("schema")
def schema() -> None:
    """Print the JSON schema of policy files."""
    from sparsify.policy import Policy

    streams.show_json(Policy.model_json_schema())
