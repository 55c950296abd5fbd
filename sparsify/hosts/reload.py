"""What a saved folder computes in a process of its own: both ends of check V7.

The process is `python -m sparsify.hosts.reload FOLDER INPUTS OUTPUTS DEVICE THREADS`.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sparsify.errors import UsageError

__all__ = ["main", "reloaded"]


def reloaded(
    directory: Path, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor] | str:
    """Tensors that a fresh process gets from the saved folder for one call, or what went wrong."""
    leaves = pytree.tree_leaves((args, kwargs))
    device = next((str(x.device) for x in leaves if isinstance(x, torch.Tensor)), "cpu")
    with tempfile.TemporaryDirectory() as folder:
        given, answer = Path(folder) / "inputs.pt", Path(folder) / "outputs.pt"
        data = io.BytesIO()
        torch.save({"args": args, "kwargs": kwargs}, data)
        try:
            given.write_bytes(data.getbuffer())
        except OSError as error:
            raise UsageError(f"Cannot write to {folder}: {error.strerror}.") from error
        command = [sys.executable, "-m", "sparsify.hosts.reload", str(directory.resolve())]
        command += [str(given), str(answer), device, str(torch.get_num_threads())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return f"reloading failed: {last}"
        found: list[torch.Tensor] = torch.load(answer, weights_only=True)
        return found


def main(folder: str, inputs: str, outputs: str, device: str, threads: str) -> None:
    """The other process: call the model with the args and kwargs in file `inputs`; its tensors go
    to file `outputs`."""
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
