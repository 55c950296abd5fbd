"""`sparsify verify`: the named checks of a rewritten folder against its original."""

from __future__ import annotations

import contextlib
import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsify.cli import render, streams
from sparsify.cli.options import Json, check_given, check_settings, parse_sizes
from sparsify.documents import read_text
from sparsify.errors import UsageError, VerificationError
from sparsify.files import check_target, output_file
from sparsify.report import CHECK_NAMES

if TYPE_CHECKING:
    from sparsify.report import VerificationReport

__all__ = ["read_prompts", "verify"]


def verify(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A folder that `sparsify rewrite` wrote.", show_default=False
        ),
    ],
    against: Annotated[
        str,
        typer.Option("--against", metavar="MODEL", help="The original.", show_default=False),
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help='Text to judge quality on; .jsonl holds "text" fields.',
        ),
    ] = None,
    seq: Annotated[
        str | None, typer.Option("--seq", help="Lengths to judge quality at, such as 1k,4k.")
    ] = None,
    checks: Annotated[
        str | None, typer.Option("--checks", help="Checks to run, such as V1,V3; all by default.")
    ] = None,
    dump_selection: Annotated[
        Path | None,
        typer.Option(
            "--dump-selection", metavar="FILE", help="Write the selected blocks of a V6 run (.npz)."
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Check the rewritten model in DIR against its original."""
    check_given(**{"--against": against, "--checks": checks})
    check_settings()
    lengths = None if seq is None else parse_sizes(seq, "--seq")
    names = None if checks is None else _check_names(checks)
    samples = None if prompts is None else read_prompts(prompts)
    if dump_selection is not None:
        if names is not None and "V6" not in names:
            raise UsageError("--dump-selection needs the check V6.")
        check_target(dump_selection, force=True, directory=False)
    if not directory.is_dir():
        raise UsageError(f"There is no folder {directory}.")
    with streams.progress() as say, _dump(dump_selection) as dump:
        found = _verify(
            directory,
            against,
            say,
            samples=samples,
            lengths=lengths,
            checks=names,
            dump_selection=dump,
        )
    streams.show_json(found.to_json()) if json else streams.show(*render.verification(found))
    if not found.ok:
        failed = ", ".join(check.check for check in found.failed) or "no check ran"
        raise VerificationError(f"{directory} failed verification: {failed}.")
    return 0


def _check_names(text: str) -> list[str]:
    names = [name.strip().upper() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError(f"--checks is {text!r}; known are {', '.join(CHECK_NAMES)}.")
    for name in names:
        if name not in CHECK_NAMES:
            raise UsageError(f"Unknown check {name}; known are {', '.join(CHECK_NAMES)}.")
    return names


def _verify(directory: Path, against: str, say: Any, **options: Any) -> VerificationReport:
    from sparsify import api
    from sparsify.cli.pairs import load_pair
    from sparsify.passes.examples import is_transformers_model

    rewritten, original = load_pair(directory, against, say, with_tokenizer=True)
    common = {
        "directory": directory,
        "checks": options.pop("checks"),
        "model_name": str(directory),
        "against": original.name,
        "progress": say,
    }
    if not is_transformers_model(original.model):
        _refuse_texts(options)
        inputs = (original.args or (), original.kwargs or {})
        return api.verify(original.model, rewritten.model, inputs, **common)
    return api.verify(
        original.model,
        rewritten.model,
        options.pop("samples"),
        tokenizer=rewritten.tokenizer or original.tokenizer,
        expected=api.expected_layers(original.model),
        **common,
        **options,
    )


def _refuse_texts(options: dict[str, Any]) -> None:
    """A module that is no language model is verified on the inputs that its factory gives."""
    names = {"samples": "--prompts", "lengths": "--seq", "dump_selection": "--dump-selection"}
    for name, option in names.items():
        if options[name] is not None:
            raise UsageError(f"{option} is for language models.", "Leave it out.")


@contextlib.contextmanager
def _dump(target: Path | None) -> Any:
    if target is None:
        yield None
        return
    with output_file(target, force=True) as temporary:
        yield temporary


def read_prompts(path: Path) -> list[str]:
    """The texts of a prompts file: one of plain text, or the "text" of every line of .jsonl.

    Raises:
        UsageError: missing, not UTF-8, empty, or a line without a text.
    """
    text = read_text(path, "prompts file")
    if path.suffix.lower() != ".jsonl":
        texts = [text]
    else:
        lines = enumerate(text.splitlines(), start=1)
        texts = [_text_of(path, number, line) for number, line in lines if line.strip()]
    if not any(t.strip() for t in texts):
        raise UsageError(f"The prompts file {path} is empty.")
    return texts


def _text_of(path: Path, number: int, line: str) -> str:
    try:
        data = json_module.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(
            f"The prompts file {path} is malformed: line {number} is not JSON."
        ) from None
    found = data.get("text") if isinstance(data, dict) else None
    if not isinstance(found, str):
        raise UsageError(f'The prompts file {path}: line {number} has no field "text".')
    return found
