"""Tiles that were measured: in memory for this process, in a file between processes.

The file `tiles.json` lies in SPARSIFY_CACHE_DIR; without that variable nothing is read or written.
It is looked at when tiles of a kind are first asked for, and what was found stays in force: a row's
last bits depend on its tiles. Only tuning in this process changes them.

Tiles were measured for one GPU, one Triton and one version of these kernels, and are used for no
other. They override those of `tiling`, never lengths, so that a row still does not depend on its
neighbours.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparsify import settings, versions
from sparsify.errors import UsageError
from sparsify.files import check_target, write_text
from sparsify.kernels import tiling
from sparsify.kernels.tiling import AttentionTiles, padded, span

__all__ = [
    "FIELDS",
    "FILE",
    "SCHEMA",
    "Key",
    "Sizes",
    "attention_tiles",
    "cache_file",
    "check_writable",
    "forget",
    "is_measured",
    "keep",
    "misfit",
    "save",
    "untuned",
]

FILE = "tiles.json"
SCHEMA = 1
FIELDS = tuple(field.name for field in fields(AttentionTiles) if field.name != "small")
_MOST_BYTES = 1 << 24
_HINT = "Delete the file, or measure again with `sparsify bench --shape TEXT --tune`."
# The least and the most of a field, and whether it is a power of two.
_RANGES = {
    "rows": (16, 256, True),
    "columns": (16, 256, True),
    "warps": (1, 16, True),
    "stages": (1, 8, False),
    "chunk": (1, 1 << 16, False),
    "max_registers": (32, 255, False),
    "combine_rows": (16, 256, True),
    "combine_columns": (16, 256, True),
    "combine_warps": (1, 16, True),
    "combine_stages": (1, 8, False),
    "merge_stages": (1, 8, False),
}


class Sizes(NamedTuple):
    """What tiles depend on: keys of a block, sizes of a key and a value, bytes of an element, and
    query heads that share a list."""

    block: int
    head_dim: int
    value_dim: int
    item_bytes: int
    heads_per_list: int


class Key(NamedTuple):
    """What measured tiles hold for."""

    gpu: str
    triton: str
    sparsify: str
    sizes: Sizes


_Entries = dict[Key, tuple[dict[str, int | None], str]]

_in_force: dict[tuple[torch.device, Sizes], AttentionTiles] = {}
_measured: dict[Key, AttentionTiles] = {}
_file_read: tuple[tuple[object, ...], _Entries] | None = None


def attention_tiles(device: torch.device, sizes: Sizes) -> AttentionTiles:
    """The tiles in force on a device: measured ones, or those of `tiling`.

    Raises:
        UsageError: the file of measured tiles is damaged, newer than this package, or holds tiles
            that are impossible for this GPU.
    """
    found = _in_force.get((device, sizes))
    if found is None:
        if device.type != "cuda":
            return untuned(device, sizes)
        found = _looked_up(device, sizes)
        _in_force[device, sizes] = found
    return found


def untuned(device: torch.device, sizes: Sizes) -> AttentionTiles:
    """The tiles of `tiling`."""
    shape, share = sizes[:4], sizes.heads_per_list
    return tiling.attention_tiles(*shape, tiling.shared_bytes(device), share)


def is_measured(device: torch.device, sizes: Sizes) -> bool:
    """Whether the tiles in force were measured, by this process or an earlier one."""
    attention_tiles(device, sizes)
    return _key(device, sizes) in _measured


def keep(device: torch.device, sizes: Sizes, tiles: AttentionTiles) -> None:
    """Put measured tiles in force for the rest of this process."""
    key = _key(device, sizes)
    _measured[key] = tiles
    for other, its_sizes in list(_in_force):
        if its_sizes == sizes and _key(other, sizes) == key:
            _in_force[other, sizes] = tiles
    _in_force[device, sizes] = tiles


def save(device: torch.device, sizes: Sizes, tiles: AttentionTiles, how: str) -> Path | None:
    """Write measured tiles into the file, beside those of other keys, and return its path; None
    where SPARSIFY_CACHE_DIR is not set. `how` tells people how they were measured.

    Two processes that write at the same time may lose one entry, never the file.

    Raises:
        UsageError: the file that is there is damaged or newer, or cannot be written.
    """
    path = cache_file()
    if path is not None:
        kept: dict[str, int | None] = {name: getattr(tiles, name) for name in FIELDS}
        entries = _entries(path) | {_key(device, sizes): (kept, how)}
        write_text(path, json.dumps(_document(entries), indent=2) + "\n")
    return path


def cache_file() -> Path | None:
    """The file of measured tiles, which need not be there; None without SPARSIFY_CACHE_DIR."""
    folder = settings.cache_dir()
    return None if folder is None else folder / FILE


def check_writable() -> Path:
    """The file of measured tiles, before the long work of filling it.

    Raises:
        UsageError: SPARSIFY_CACHE_DIR is not set, or the file cannot be read or written.
    """
    path = cache_file()
    if path is None:
        raise UsageError(
            "Measured tiles have no place to go.", "Set SPARSIFY_CACHE_DIR to a folder."
        )
    check_target(path, force=True, directory=False)
    _entries(path)
    return path


def forget() -> None:
    """Start anew, as another process would: for tests, and after the file was changed by hand."""
    global _file_read
    _in_force.clear()
    _measured.clear()
    _file_read = None


def misfit(tiles: AttentionTiles, sizes: Sizes, shared_bytes: int) -> str | None:
    """Why the kernels cannot take these tiles; None when they can."""
    heads = span(sizes.heads_per_list)
    if tiles.small and tiles.columns != padded(sizes.block):
        return f"columns is {tiles.columns}; a whole block takes {padded(sizes.block)}"
    if not tiles.small and tiles.chunk > tiles.rows // heads:
        return f"chunk is {tiles.chunk}; a tile holds {tiles.rows // heads} entries"
    if tiles.max_registers is not None and 32 * tiles.warps * tiles.max_registers > 1 << 16:
        return f"{tiles.warps} warps of {tiles.max_registers} registers are too many"
    needed = _needed_bytes(tiles, sizes)
    if needed > shared_bytes:
        return f"they need {needed:,} bytes of shared memory of {shared_bytes:,}"
    return None


def _needed_bytes(tiles: AttentionTiles, sizes: Sizes) -> int:
    """Shared memory of the hungrier of both kernels, as `tiling` counts it."""
    query, value = (padded(x) * sizes.item_bytes for x in (sizes.head_dim, sizes.value_dim))
    queries, keys = tiles.rows * query, tiles.columns * (query + value)
    if not tiles.small:
        keys *= tiles.stages
    elif sizes.heads_per_list > 1:
        queries *= tiles.stages
    own = tiles.combine_stages * tiles.combine_columns * (query + value)
    past = tiles.merge_stages * tiles.combine_rows * value
    return max(queries + keys, tiles.combine_rows * query + max(own, past))


def _looked_up(device: torch.device, sizes: Sizes) -> AttentionTiles:
    key = _key(device, sizes)
    tiles = untuned(device, sizes)
    path = cache_file()
    if key in _measured:
        return _measured[key]
    if path is None:
        return tiles
    found = _entries(path).get(key)
    if found is None:
        return tiles
    tiles = replace(tiles, **found[0])  # type: ignore[arg-type]
    why = misfit(tiles, sizes, tiling.shared_bytes(device))
    if why is not None:
        raise _wrong(path, f"tiles for blocks of {sizes.block} do not fit {key.gpu}: {why}")
    _measured[key] = tiles
    return tiles


def _key(device: torch.device, sizes: Sizes) -> Key:
    return Key(_gpu(device), _triton(), versions.VERSION, sizes)


@functools.cache
def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


@functools.cache
def _triton() -> str:
    for name in ("triton", "pytorch-triton-rocm", "pytorch-triton"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def _entries(path: Path) -> _Entries:
    """What the file holds; read once, and again only after it was replaced."""
    global _file_read
    try:
        told = path.stat()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from None
    identity = (path, told.st_dev, told.st_ino, told.st_size, told.st_mtime_ns)
    if _file_read is None or _file_read[0] != identity:
        _file_read = (identity, _parsed(path, told.st_size))
    return _file_read[1]


def _parsed(path: Path, size: int) -> _Entries:
    if size > _MOST_BYTES:
        raise _wrong(path, f"{size:,} bytes are too many")
    try:
        data = json.loads(path.read_bytes().decode(), object_pairs_hook=_unique)
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"it is no JSON ({error})") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if type(schema) is not int or schema < 1:
        raise _wrong(path, "it has no number of its schema")
    if schema > SCHEMA:
        raise UsageError(
            f"{path} was written by a newer version of sparsify.",
            "Update this one, or set SPARSIFY_CACHE_DIR to another folder.",
        )
    if set(data) != {"schema", "tiles"} or not isinstance(data["tiles"], list):
        raise _wrong(path, "it does not hold a list of tiles")
    return dict(_entry(path, number, given) for number, given in enumerate(data["tiles"], 1))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice")
    return found


def _entry(path: Path, number: int, given: Any) -> tuple[Key, tuple[dict[str, int | None], str]]:
    """One entry, checked for types and ranges; whether it fits the GPU is seen when it is used."""
    names = {*Key._fields, *Sizes._fields, "tiles", "measured"} - {"sizes"}
    if not isinstance(given, dict) or set(given) != names:
        raise _wrong(path, f"entry {number} does not hold {', '.join(sorted(names))}")
    for name in ("gpu", "triton", "sparsify", "measured"):
        if not isinstance(given[name], str):
            raise _wrong(path, f"{name} of entry {number} is no text")
    for name in Sizes._fields:
        if type(given[name]) is not int or given[name] < 1:
            raise _wrong(path, f"{name} of entry {number} is no positive whole number")
    if not isinstance(given["tiles"], dict):
        raise _wrong(path, f"tiles of entry {number} are no fields and values")
    for name, value in given["tiles"].items():
        _check_field(path, number, name, value)
    sizes = Sizes(*(given[name] for name in Sizes._fields))
    key = Key(given["gpu"], given["triton"], given["sparsify"], sizes)
    return key, (given["tiles"], given["measured"])


def _check_field(path: Path, number: int, name: str, value: Any) -> None:
    if name not in _RANGES:
        raise _wrong(path, f"entry {number} has an unknown field {name!r}")
    if value is None and name == "max_registers":
        return
    least, most, power = _RANGES[name]
    if type(value) is not int or not least <= value <= most:
        raise _wrong(path, f"{name} of entry {number} is no whole number from {least} to {most}")
    if power and value & (value - 1):
        raise _wrong(path, f"{name} of entry {number} is {value}, no power of two")


def _document(entries: Mapping[Key, tuple[dict[str, int | None], str]]) -> dict[str, Any]:
    rows = []
    for key, (tiles, how) in sorted(entries.items()):
        about = {"gpu": key.gpu, "triton": key.triton, "sparsify": key.sparsify}
        rows.append({**about, **key.sizes._asdict(), "tiles": tiles, "measured": how})
    return {"schema": SCHEMA, "tiles": rows}


def _wrong(path: Path, why: str) -> UsageError:
    return UsageError(f"The measured tiles in {path} cannot be used: {why}.", _HINT)
