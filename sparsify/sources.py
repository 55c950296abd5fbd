"""MODEL arguments: from a folder, a file, a Python factory or a cached id to a module in memory.

Nothing is ever downloaded and nothing unpickles a stranger's data: weights come from safetensors
and GGUF only, `trust_remote_code` is off. `package.module:factory` runs the user's own code.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sparsify.errors import CaptureError, MissingExtraError, SparsifyError, UsageError
from sparsify.exporters.folder import saved_again
from sparsify.factories import call_factory, first_line, looks_like_factory
from sparsify.files import check_utf8
from sparsify.gguf_files import check_gguf

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "LoadedModel", "load_model"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
HF_EXTRA = 'Run: pip install "sparsify-attention[hf]"'
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)

_log = logging.getLogger(__name__)

Kind = Literal["hf", "gguf", "python", "sparsified"]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory.

    `tokenizer` is None when the source holds none. `kind` "sparsified" is a folder that
    `sparsify rewrite` or a rewritten model's `save_pretrained` wrote, loaded with its plan applied.
    `args` and `kwargs` are example inputs, when a factory gave some.
    """

    model: torch.nn.Module
    tokenizer: Any
    name: str
    kind: Kind
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Wanted:
    dtype: str
    tokenizer: bool
    say: Progress


def load_model(
    spec: str,
    *,
    dtype: str = "auto",
    with_tokenizer: bool = True,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a MODEL argument, in evaluation mode, on the CPU.

    Args:
        spec: a Hugging Face folder, a folder written by `sparsify rewrite`, a .gguf file,
            `package.module:factory`, or the id of a model in the local Hugging Face cache.
        dtype: "auto" keeps the checkpoint's (float32 for GGUF, which is dequantised).
        with_tokenizer: whether to load the tokenizer too.

    Raises:
        UsageError: there is no such thing, or it is damaged.
        ArtefactError: a rewritten folder is damaged.
        MissingExtraError: transformers or gguf is not installed.
        CaptureError: a kind of file that this version cannot read yet.
    """
    if dtype not in DTYPES:
        raise UsageError(f"Unknown dtype {dtype!r}; use {', '.join(DTYPES)}.")
    want = _Wanted(dtype, with_tokenizer, progress or (lambda _: None))
    path = Path(spec)
    if path.is_dir():
        check_utf8(path)
        return _load_folder(path, _text(path.resolve().name or str(path)), want)
    if path.exists():
        return _load_file(path, want)
    if looks_like_factory(spec):
        return _load_factory(spec, want)
    return _load_cached(spec, want)


def _load_folder(path: Path, name: str, want: _Wanted) -> LoadedModel:
    written = (path / "plan.json").is_file() and (path / "manifest.json").is_file()
    if written or saved_again(path):
        return _load_rewritten(path, name, want)
    config = _read_config(path)
    _check_weights(path)
    want.say(f"loading {name}")
    with _transformers() as transformers:
        cls = _model_class(transformers, path, config)
        model = _from_pretrained(cls, path, str(path), dtype=want.dtype)
        return LoadedModel(model, _tokenizer(transformers, path, want), name, "hf")


def _load_rewritten(path: Path, name: str, want: _Wanted) -> LoadedModel:
    from sparsify import api

    want.say(f"loading {name}, which sparsify wrote")
    options = {} if want.dtype == "auto" else {"dtype": want.dtype}
    if (path / "model.pt2").is_file() and not _has_tokenizer(path):
        return LoadedModel(api.load(path, **options), None, name, "sparsified")
    with _transformers() as transformers:
        try:
            model = api.load(path, **options)
        except SparsifyError:
            raise
        except Exception as error:
            raise UsageError(f"Cannot load {path}: {first_line(error)}") from error
        return LoadedModel(model, _tokenizer(transformers, path, want), name, "sparsified")


def _load_file(path: Path, want: _Wanted) -> LoadedModel:
    suffix = path.suffix.lower()
    if suffix in (".pt2", ".onnx"):
        raise CaptureError(f"{path}: {suffix} models cannot be read by this version yet.")
    if suffix == ".gguf":
        return _load_gguf(path, want)
    if suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl"):
        raise UsageError(
            f"{path} is a pickle, which may run code when it is loaded.",
            "Save the model as safetensors, or give package.module:factory.",
        )
    if suffix in (".safetensors", ".json"):
        raise UsageError(f"{path} is only a part of a model.", "Give the folder that holds it.")
    raise UsageError(
        f"{path} is not a model.",
        "Expected a Hugging Face folder, a .gguf file, package.module:factory, or a cached id.",
    )


def _load_gguf(path: Path, want: _Wanted) -> LoadedModel:
    with path.open("rb") as handle:
        if handle.read(4) != b"GGUF":
            raise UsageError(f"{path} is damaged: it does not begin as a GGUF file does.")
    want.say(f"loading and dequantising {path.name}")
    with _transformers("gguf") as transformers:
        folder, shown = path.resolve().parent, str(path)
        check_gguf(path)
        options: dict[str, Any] = {"gguf_file": path.name}
        plain = {}
        if hasattr(transformers, "GgufConfig"):  # else some releases keep the weights packed
            plain = {"quantization_config": transformers.GgufConfig(dequantize=True)}
        model = _from_pretrained(
            transformers.AutoModelForCausalLM,
            folder,
            shown,
            dtype="float32" if want.dtype == "auto" else want.dtype,
            **options,
            **plain,
        )
        _forget_quantisation(model)
        tokenizer = _tokenizer(transformers, folder, want, **options)
        return LoadedModel(model, tokenizer, _text(path.stem), "gguf")


def _text(name: str) -> str:
    """A file's name as text that can be written anywhere; names may hold any bytes."""
    return os.fsencode(name).decode(errors="replace")


def _forget_quantisation(model: Any) -> None:
    """The weights are plain tensors now; the marks of their origin would forbid saving them."""
    model.hf_quantizer = None
    model.is_quantized = False
    for holder, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if name in vars(holder):
            delattr(holder, name)


def _load_cached(spec: str, want: _Wanted) -> LoadedModel:
    is_id = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", spec) is not None
    if not is_id or spec.lower().endswith((".gguf", ".pt2", ".onnx", ".json", ".safetensors")):
        raise UsageError(f"There is no file or folder {spec}.")
    with _transformers():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(spec, "config.json")
    download = f"To download it, run: hf download {spec}"
    if not isinstance(found, str):
        raise UsageError(
            f"There is no folder {spec}, and no model of that id in the local cache.", download
        )
    try:
        return _load_folder(Path(found).parent, spec, want)
    except UsageError as error:
        raise UsageError(f"The cached {spec} cannot be used: {error.message}", download) from None


def _load_factory(spec: str, want: _Wanted) -> LoadedModel:
    import torch

    want.say(f"calling {spec}")
    model, args, kwargs = call_factory(spec)
    if want.dtype != "auto":
        model = model.to(getattr(torch, want.dtype))
    return LoadedModel(model.eval(), None, spec, "python", args, kwargs)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        gguf = sorted(path.glob("*.gguf"))
        hint = f"Give the file {gguf[0]}." if gguf else "Expected a Hugging Face model folder."
        raise UsageError(f"{path} has no config.json.", hint)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"Cannot read {file}: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{file} is damaged: not valid JSON.") from None
    if not isinstance(config, dict):
        raise UsageError(f"{file} is damaged: not a JSON object.")
    return config


def _check_weights(path: Path) -> None:
    index = path / WEIGHTS[1]
    if not any((path / name).is_file() for name in WEIGHTS):
        if any(path.glob("*.bin")) or any(path.glob("*.pth")):
            raise UsageError(
                f"{path} holds its weights as pickles only, which are not loaded.",
                "Save the model as safetensors.",
            )
        raise UsageError(f"{path} holds no weights: there is no {WEIGHTS[0]}.")
    if not (path / WEIGHTS[0]).is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            raise UsageError(f"{index} is damaged.") from None
        for name in sorted(map(str, names)):
            if not (path / name).is_file():
                raise UsageError(f"{path} is incomplete: {name} is missing.")


def _model_class(transformers: Any, path: Path, config: dict[str, Any]) -> Any:
    """The class that the config names, if transformers has it and it fits the config's type."""
    try:
        kind = type(transformers.AutoConfig.from_pretrained(path, local_files_only=True))
    except Exception as error:
        raise UsageError(f"Cannot read the config of {path}: {first_line(error)}") from error
    names = config.get("architectures") or [""]
    cls = getattr(transformers, str(names[0]), None) if isinstance(names, list) else None
    fits = getattr(cls, "config_class", None) is kind and hasattr(cls, "from_pretrained")
    return cls if fits else transformers.AutoModelForCausalLM


def _check_safetensors(path: Path) -> None:
    import safetensors

    for file in sorted(path.glob("*.safetensors")):
        try:
            with safetensors.safe_open(file, framework="pt"):
                pass
        except Exception as error:
            raise UsageError(f"{file} is damaged: {first_line(error)}.") from None


def _from_pretrained(cls: Any, folder: Path, shown: str, **options: Any) -> Any:
    """Load weights; missing ones are an error, since transformers would make them up."""
    gguf_file = options.get("gguf_file")
    if gguf_file is None:
        options["use_safetensors"] = True
        _check_safetensors(folder)
    try:
        with _quiet():
            model, info = cls.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
                **options,
            )
    except ImportError as error:
        raise MissingExtraError(
            f"{shown} needs more packages: {first_line(error)}", HF_EXTRA
        ) from None
    except Exception as error:
        if gguf_file is not None and not _is_gguf(folder / gguf_file):
            raise UsageError(f"{shown} is damaged: it ends early or holds no GGUF data.") from error
        raise UsageError(f"Cannot load {shown}: {first_line(error)}") from error
    _check_loaded(info, shown)
    return model.eval()


def _check_loaded(info: dict[str, Any], shown: str) -> None:
    for name, held, wanted in sorted(info.get("mismatched_keys", ())):
        raise UsageError(
            f"Cannot load {shown}: its weight {name} has shape {list(held)}, "
            f"its config asks for {list(wanted)}."
        )
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        raise UsageError(f"{shown} lacks {len(missing)} weights, such as {missing[0]}.")


@contextmanager
def _quiet() -> Iterator[None]:
    """No tables of what transformers made up: that is an error, told in a sentence."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _is_gguf(path: Path) -> bool:
    import gguf

    try:
        gguf.GGUFReader(path)
    except Exception:
        return False
    return True


def _tokenizer(transformers: Any, folder: Path, want: _Wanted, **options: Any) -> Any:
    """The tokenizer, or None when it is not wanted or the folder has no tokenizer files."""
    if not want.tokenizer:
        return None
    if not options and not _has_tokenizer(folder):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:
        said = f"The tokenizer of {folder} cannot be read: {first_line(error)}"
        if not options:
            raise UsageError(said) from error
        # transformers converts some kinds of GGUF tokenizers only; the model is usable without.
        _log.warning("%s; going on without it", said)
        return None


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


@contextmanager
def _transformers(*more: str) -> Iterator[Any]:
    """transformers, offline and without progress bars of its own."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        os.environ[name] = "1"
    for name in ("transformers", "safetensors", *more):
        try:
            importlib.import_module(name)
        except ImportError:
            raise MissingExtraError(f"{name} is not installed.", HF_EXTRA) from None
    import transformers
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        if bars:
            logging.enable_progress_bar()
