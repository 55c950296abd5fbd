"""Triton's interpreter without the work that it repeats at every call of a device function.

What a kernel computes stays the interpreter's own: only what is found out twice is found out once.
"""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

from triton import language
from triton.runtime import interpreter

LANGUAGES = (language, language.core)


@contextlib.contextmanager
def quick():
    """The interpreter looks through the whole of `triton.language` for builtins whenever a device
    function is called, and makes a table of all dtypes whenever it needs one of them."""
    seen: set[tuple[bool, ...]] = set()
    run, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    kind_of = interpreter._get_np_dtype
    kind_of_scalar = functools.cache(kind_of)

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

    def kind(dtype):
        if isinstance(dtype, language.block_type):
            dtype = dtype.element_ty
        return kind_of_scalar(dtype) if type(dtype) is language.dtype else kind_of(dtype)

    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", run_one_kernel),
        mock.patch.object(interpreter, "_patch_lang", patch_once),
        mock.patch.object(interpreter, "_get_np_dtype", kind),
    ):
        yield
