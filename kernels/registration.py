"""What makes an op of a schema: dispatch, shapes for tracing, gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsify.kernels import selection, validation
from sparsify.kernels.dispatch import implementation, with_topk_in_force
from sparsify.kernels.layout import Layout, key_slots, list_width

__all__ = ["Op", "call", "register"]

_LAYOUT_SIZE = len(Layout._fields)


@dataclass(frozen=True, slots=True)
class Op:
    """Schema of an op. Its positional arguments: own tensors, layout tensors, further tensors."""

    name: str
    schema: str
    own: int
    further: int = 0

    @property
    def chooses(self) -> bool:
        """Whether the op chooses blocks and attends them."""
        return self.name.startswith(("moba_attention", "msa_attention"))

    @property
    def first(self) -> int:
        """Place of q; k follows it."""
        return 2 if self.name.endswith("_backward") else 0

    def split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Layout, tuple[Any, ...]]:
        """The three parts; arguments left out at the end are None."""
        missing = self.own + _LAYOUT_SIZE + self.further - len(args)
        full = args + (None,) * missing
        border = self.own + _LAYOUT_SIZE
        return full[: self.own], Layout(*full[self.own : border]), full[border:]


def call(name: str, *args: Any, **options: Any) -> Any:
    """Call an op by its name."""
    validation.check_options(options)
    return getattr(torch.ops.sparsify, name)(*args, **options)


def _body(op: Op) -> Callable[..., Any]:
    def body(*args: Any, **options: Any) -> Any:
        validation.check_options(options)
        own, layout, further = op.split(args)
        if op.chooses:
            options = with_topk_in_force(options, own[op.first], own[op.first + 1], layout)
        with torch.no_grad():
            run = getattr(implementation(op.name, own, layout, options), op.name)
            return run(*own, layout, *further, **options)

    return body


def _fake_lists(op: Op) -> Callable[..., Tensor]:
    def fake(*args: Any, **options: Any) -> Tensor:
        (q, k), layout, further = op.split(args)
        block_size, topk = options["block_size"], options["topk"]
        local = options.get("local", "inside")
        if op.name == "moba_select":
            validation.check_moba(q, k, None, layout, further[0], block_size, topk)
        else:
            validation.check_msa(q, k, None, None, None, layout, block_size, topk, local)
        width = list_width(key_slots(k, layout), block_size, topk, local)
        blocks: Tensor = q.new_empty((*q.shape[:3], width), dtype=torch.int32)
        return blocks

    return fake


def _fake_attention(op: Op) -> Callable[..., tuple[Tensor, Tensor]]:
    def fake(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        own, layout, further = op.split(args)
        q, k, v = own[:3]
        block_size = options["block_size"]
        if op.name == "block_attention":
            validation.check_blocks(q, k, v, own[3], layout, block_size)
        elif op.name == "moba_attention":
            validation.check_moba(q, k, v, layout, further[0], block_size, options["topk"])
        else:
            local = options.get("local", "inside")
            iq, ik = own[3:]
            validation.check_msa(iq, ik, q, k, v, layout, block_size, options["topk"], local)
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=lse_dtype)

    return fake


def _fake_gradients(op: Op) -> Callable[..., tuple[Tensor, ...]]:
    def fake(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        q, k, v = op.split(args)[0][2:5]
        return tuple(x.new_empty(x.shape) for x in (q, k, v))

    return fake


def _keep_for_backward(op: Op) -> Callable[..., None]:
    def setup(
        ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
    ) -> None:
        ctx.save_for_backward(*inputs[: op.own], *output, *inputs[op.own :])
        ctx.options = keyword_only_inputs
        ctx.replayed = selection.current_replay()

    return setup


def _backward(op: Op) -> Callable[..., tuple[Any, ...]]:
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        with selection.resume(ctx.replayed):
            grads = call(
                f"{op.name}_backward", grad_out, grad_lse, *ctx.saved_tensors, **ctx.options
            )
        return (*grads, *(None,) * (op.own - 3 + _LAYOUT_SIZE + op.further))

    return backward


def _no_gradient(op: Op) -> Callable[..., tuple[None, ...]]:
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        return (None,) * (op.own + _LAYOUT_SIZE + op.further)

    return backward


def _no_second_gradient(op: Op) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"sparsify::{op.name} has no derivative: second derivatives of "
            "block-sparse attention are not implemented."
        )

    return backward


def register(op: Op) -> None:
    """Make `torch.ops.sparsify` know the op."""
    name = f"sparsify::{op.name}"
    torch.library.define(name, op.schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "default", _body(op))
    if op.name.endswith("_select"):
        torch.library.register_fake(name, _fake_lists(op))
        torch.library.register_autograd(name, _no_gradient(op))
    elif op.name.endswith("_backward"):
        torch.library.register_fake(name, _fake_gradients(op))
        torch.library.register_autograd(name, _no_second_gradient(op))
    else:
        torch.library.register_fake(name, _fake_attention(op))
        setup = _keep_for_backward(op)
        torch.library.register_autograd(name, _backward(op), setup_context=setup)
