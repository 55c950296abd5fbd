"""Bytes that a weight takes as it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsify.cost_model.config_fields import Fields

__all__ = ["weight_bytes"]

_DTYPES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
# Bits of a weight with its scales: mxfp4 has one byte of scale per 32 values (OCP MX
# specification), nvfp4 one per 16.
_METHODS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "nvfp4": 4.5}


def weight_bytes(fields: Fields) -> float:
    """Bytes per parameter, from the quantisation if there is one, else from the dtype.

    Raises:
        UsageError: the dtype is none that weights have.
    """
    quantised = fields.value("quantization_config")
    if isinstance(quantised, Mapping):
        return _quantised(fields, quantised)
    name = fields.text("dtype", "torch_dtype").removeprefix("torch.")
    if not name or name == "auto":
        fields.assume("The config does not tell a dtype; weights are counted as bfloat16.")
        return 2
    if name not in _DTYPES:
        raise fields.fail(f"dtype is {name!r:.60}; expected one of {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _quantised(fields: Fields, told: Mapping[str, Any]) -> float:
    method = str(told.get("quant_method") or "")
    bits = told.get("bits", told.get("w_bit", _METHODS.get(method)))
    if told.get("load_in_4bit"):
        bits = 4
    elif told.get("load_in_8bit"):
        bits = 8
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not 1 <= bits <= 32:
        fields.assume(
            f"How many bits the quantisation {method or '(unnamed)'} takes is not known; "
            "weights are counted as 8 bits."
        )
        return 1
    fields.assume(
        f"Weights are counted with {bits:g} bits ({method or 'quantised'}), embeddings and scales "
        "included; products are counted in bfloat16."
    )
    return bits / 8
