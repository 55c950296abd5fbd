"""Load a saved folder in a process of its own and write what it computes: check V7.

Called as `python -m sparsify.hosts.reload FOLDER INPUTS OUTPUTS DEVICE THREADS`.
"""

from __future__ import annotations

import sys

import torch
from torch.utils import _pytree as pytree

__all__ = ["main"]


def main(folder: str, inputs: str, outputs: str, device: str, threads: str) -> None:
    """Call the model with the args and kwargs in file `inputs`; its tensors go to `outputs`."""
    import sparsify

    torch.set_num_threads(int(threads))
    model = sparsify.load(folder).to(device).eval()
    given = torch.load(inputs, weights_only=True, map_location=device)
    with torch.no_grad():
        out = model(*given["args"], **given["kwargs"])
    leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    torch.save([leaf.cpu() for leaf in leaves], outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
