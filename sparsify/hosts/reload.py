"""Load a saved folder in a process of its own and write its logits: check V7.

Called as `python -m sparsify.hosts.reload FOLDER IDS OUTPUT DEVICE THREADS`.
"""

from __future__ import annotations

import sys

import torch

__all__ = ["main"]


def main(folder: str, ids: str, output: str, device: str, threads: str) -> None:
    """Write the logits of the token ids in file `ids` to file `output`."""
    import sparsify

    torch.set_num_threads(int(threads))
    model = sparsify.load(folder).to(device).eval()
    given = torch.load(ids, weights_only=True).to(device)
    with torch.no_grad():
        logits = model(given, use_cache=False).logits
    torch.save(logits.cpu(), output)


if __name__ == "__main__":
    main(*sys.argv[1:])
