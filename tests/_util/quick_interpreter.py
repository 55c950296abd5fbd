"""Triton's interpreter without the work that it does again and again.

What a kernel computes stays the interpreter's own, but for sorting whole numbers, which is numpy's:
`tests/interpreted/test_quick_interpreter.py` compares the two.
"""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import numpy
from triton import language
from triton.language import standard
from triton.runtime import interpreter

LANGUAGES = (language, language.core)
OWN_SORT = standard.sort_impl
OWN_TYPE = language.block_type.__init__


@contextlib.contextmanager
def quick():
    """Builtins are looked for once per kernel, not at every call of a device function; dtypes,
    shapes and sizes are found once; sorting is numpy's."""
    with (
        _builtins_once(),
        mock.patch.object(interpreter, "_get_np_dtype", _kinds(interpreter._get_np_dtype)),
        mock.patch.object(language.core.tensor, "__init__", _make_tensor),
        mock.patch.object(language.block_type, "__init__", _make_type),
        mock.patch.object(standard, "sort_impl", sort),
    ):
        yield


@contextlib.contextmanager
def _builtins_once():
    run, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    seen: set[tuple[bool, ...]] = set()

    def run_one_kernel(self, *args, **kwargs):
        seen.clear()  # builtins are put back when a kernel ends
        return run(self, *args, **kwargs)

    def patch_once(fn):
        values = fn.__globals__.values()
        found = tuple(any(x is lang for x in values) for lang in LANGUAGES)
        if found in seen:
            return interpreter._LangPatchScope()
        seen.add(found)
        return patch(fn)

    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", run_one_kernel),
        mock.patch.object(interpreter, "_patch_lang", patch_once),
    ):
        yield


def _kinds(own):
    """numpy's dtypes; the interpreter makes a table of all to look one up."""
    of_scalar = functools.cache(own)

    def kind(dtype):
        if isinstance(dtype, language.block_type):
            dtype = dtype.element_ty
        return of_scalar(dtype) if type(dtype) is language.dtype else own(dtype)

    return kind


@functools.cache
def _sizes(shape):
    """What every tensor of a shape carries: the shape and its product as constants."""
    product = 1
    for size in shape:
        product *= size
    constants = [language.constexpr(size) for size in shape]
    return language.core.tuple(constants), language.constexpr(product)


def _make_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _sizes(tuple(type.shape) if type.is_block() else ())


def _plain(value):
    return value.value if isinstance(value, language.constexpr) else value


@functools.cache
def _type_of(shape):
    """The type of a block of some dtype, and the shape as its name says it."""
    kind = object.__new__(language.block_type)
    OWN_TYPE(kind, language.int1, list(shape))
    return vars(kind), str(kind.shape)


def _make_type(self, element_ty, shape):
    known, text = _type_of(tuple(_plain(size) for size in shape))
    vars(self).update(known, element_ty=element_ty, name=f"<{text}, {element_ty}>")


def sort(x, k=None, dim=None, descending=0):
    """Triton's `sort_impl`."""
    data = x.handle.data
    if data.dtype.kind not in "iu":  # NaN has a place of its own in each
        return OWN_SORT(x, k=k, dim=dim, descending=descending)
    assert _plain(dim) in (None, data.ndim - 1, -1)
    found = numpy.sort(data, axis=-1)
    found = found[..., ::-1] if _plain(descending) else found
    found = numpy.ascontiguousarray(found[..., : _plain(k)])
    kind = language.block_type(x.dtype, list(found.shape))
    return language.core.tensor(interpreter.TensorHandle(found, x.dtype), kind)
