"""In which types numbers of a tensor are worked with on their way to their reader.

A formula compares numbers exactly. A cast to a type that cannot hold all of them lets different
numbers collide, which the formula does not show.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Node

from sparsify.passes.graphs import behind, dtype_of, is_tensor, op_name
from sparsify.passes.index_ops import RULES
from sparsify.passes.views import is_view

__all__ = ["compared_in"]


def compared_in(source: Node, reader: Node, types: Collection[torch.dtype]) -> bool:
    """Whether the numbers of `source`, and what is calculated from them, stay within `types` until
    they become truth values, as far as `reader` depends on them."""
    before = set(behind(reader, lambda node: node.all_input_nodes))
    todo, seen = [source], {source}
    while todo:
        node = todo.pop()
        for user in node.users:
            if user in seen or user not in before or not _passes_on(user, node):
                continue
            seen.add(user)
            if dtype_of(user) == torch.bool:
                continue
            if dtype_of(user) not in types:
                return False
            todo.append(user)
    return True


def _passes_on(user: Node, node: Node) -> bool:
    """Whether values of the user's result are made of the node's values: what takes them for
    indices, or has no rule to be read by, does not count."""
    if not is_tensor(user) or not (op_name(user) in RULES or is_view(user)):
        return False
    return op_name(user) != "aten.index" or user.args[0] is node
