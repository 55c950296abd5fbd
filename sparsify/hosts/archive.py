"""Programs of the graph host as torch.export archives.

Each program is an archive of its own; how it is called stands in it as JSON. The first holds the
weights, the others share them. Reading runs no stranger's code: archives whose entries torch would
unpickle are refused.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sparsify.errors import ArtefactError, SparsifyError
from sparsify.hosts.archive_entries import check_entries
from sparsify.hosts.graph_model import GraphModel
from sparsify.hosts.program import Program
from sparsify.hosts.signature import Signature
from sparsify.hosts.sizes import holds
from sparsify.hosts.state import State, state_of, with_state
from sparsify.passes.retune import follows
from sparsify.plans import Plan

__all__ = ["ARCHIVES", "from_bytes", "load", "save", "to_bytes"]

# The first program takes whole prompts, the second what follows a cache.
ARCHIVES = ("model.pt2", "model_with_past.pt2")
CALL_FILE = "sparsify.json"
# Version 2 adds "indexed". A model without learned indexers is written as version 1.
CALL_SCHEMA = 2
LANGUAGE_MODEL = "LanguageGraphModel"  # by name: its module imports transformers


def save(model: GraphModel, directory: Path) -> None:
    """Write the programs into a folder that exists."""
    for name, data in zip(ARCHIVES, to_bytes(model)["programs"], strict=False):
        (directory / name).write_bytes(data)


def load(directory: Path, plan: Plan, config: Any = None) -> GraphModel:
    """Read the programs of a folder.

    Raises:
        ArtefactError: an archive is missing or damaged, or a newer version wrote it.
    """
    found = [directory / name for name in ARCHIVES if (directory / name).is_file()]
    if not found or found[0].name != ARCHIVES[0]:
        raise ArtefactError(f"{directory} has no {ARCHIVES[0]}.")
    return _model([(path.read_bytes(), str(path)) for path in found], plan, config)


def to_bytes(model: GraphModel) -> dict[str, Any]:
    """The whole model: a plan document, and an archive for every program."""
    state = model.sparsify_state
    any_indexed = any(program.indexed for program in model.sparsify_programs)
    schema = CALL_SCHEMA if any_indexed else 1
    call = {"schema": schema, "signature": model.sparsify_signature.parameters}
    call["tied"] = _tied(state)
    archives: list[bytes] = []
    for program in model.sparsify_programs:
        document = {**call, **program.call_document(), "class": type(model).__name__}
        held = state if not archives else _stand_ins(state)
        archives.append(_archived(program, held, document))
    return {"plan": model.sparsify_plan.to_json(), "programs": archives}


def from_bytes(data: dict[str, Any], config: Any = None) -> GraphModel:
    """Inverse of `to_bytes`."""
    programs = [(archive, "the model") for archive in data["programs"]]
    return _model(programs, Plan.from_json(data["plan"]), config)


def _archived(program: Program, state: State, document: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    exported = with_state(program.exported, state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about stand-ins, whose storage holds one element
        torch.export.save(exported, buffer, extra_files={CALL_FILE: json.dumps(document)})
    return buffer.getvalue()


def _tied(state: State) -> list[list[str]]:
    """Names of parameters that are one and the same, in groups."""
    names: dict[int, list[str]] = {}
    for name, parameter in state.parameters.items():
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _stand_ins(state: State) -> State:
    """Tensors of one stored element in the shapes of the state, whose values stand elsewhere."""

    def small(value: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), dtype=value.dtype).expand(value.shape)

    return State(
        {
            name: torch.nn.Parameter(small(value), value.requires_grad)
            for name, value in state.parameters.items()
        },
        {name: small(value) for name, value in state.buffers.items()},
        state.volatile,
    )


def _model(archives: Sequence[tuple[bytes, str]], plan: Plan, config: Any) -> GraphModel:
    read = [_read(data, name) for data, name in archives]
    for (program, _), (_, name) in zip(read, archives, strict=True):
        if not follows(program.exported, plan):
            raise ArtefactError(f"{name} was not rewritten by this plan: other sites or sizes.")
    document, name = read[0][1], archives[0][1]
    state = state_of([program.exported for program, _ in read])
    with _readable(name):
        signature = Signature(tuple((n, k, d) for n, k, d in document["signature"]))
        signature.spelt  # noqa: B018 - its kinds are known
        for names in document["tied"]:
            state.parameters.update(dict.fromkeys(names, state.parameters[names[0]]))
    return _class(document, name)([program for program, _ in read], plan, signature, state, config)


def _class(call: dict[str, Any], name: str) -> type[GraphModel]:
    """The class of the saved model; what its outputs are made of is known to torch afterwards.

    Raises:
        ArtefactError: there is no such class.
    """
    if call["class"] == GraphModel.__name__:
        return GraphModel
    if call["class"] != LANGUAGE_MODEL:
        raise ArtefactError(f"{name} holds a model of the unknown class {call['class']!r}.")
    from sparsify.hosts.graph_transformers import LanguageGraphModel, register_caches

    register_caches()
    return LanguageGraphModel


def _read(data: bytes, name: str) -> tuple[Program, dict[str, Any]]:
    with _readable(name):
        call = _call(data)
        _check_schema(call, name)
        check_entries(data, name)
        _class(call, name)
        with _quiet():
            exported = torch.export.load(io.BytesIO(data))
        program = Program.from_document(exported, call)
        for guard in program.guards:
            holds(guard, {str(symbol): 2 for symbol in exported.range_constraints})
        return program, call


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    """Whatever goes wrong within it is a fault of the archive."""
    try:
        yield
    except SparsifyError:
        raise
    except Exception as error:  # torch raises whatever its readers raise
        raise ArtefactError(f"{name} cannot be read: {type(error).__name__}.") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks on unused sizes, and without its tracebacks."""
    loggers = [
        logging.getLogger(name) for name in ("torch._export.serde.serialize", "torch.export")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            # torch 2.11 reads weights into byte strings, which nobody holds but the tensors
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _call(data: bytes) -> dict[str, Any]:
    """How the program is called, read before torch reads the archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = [entry for entry in archive.namelist() if entry.endswith(f"/{CALL_FILE}")]
        call: dict[str, Any] = json.loads(archive.read(found[0]))
        return call


def _check_schema(call: dict[str, Any], name: str) -> None:
    if call.get("schema", 0) > CALL_SCHEMA:
        raise ArtefactError(
            f"{name} has schema {call['schema']}, this version reads up to {CALL_SCHEMA}.",
            "Update sparsify-attention.",
        )
