"""Time and memory of the reference at 8,192 tokens, and of one decode step over a long cache.

The budget holds for two idle cores. Time is measured as the processor time of one thread, which a
busy machine stretches little, against three times the budget; memory as the peak of a process of
its own.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MEMORY_BYTES = 1.5e9
SECONDS = {"float32": 20.0, "float64": 60.0}
SLACK = 3.0

PROGRAM = """
import json, resource, sys, time
import torch
from sparsify.kernels import schemas
kind, dtype, queries, keys, backward = sys.argv[1:6]
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
def normal(heads, length):
    x = torch.randn(1, length, heads, 64, generator=generator, dtype=getattr(torch, dtype))
    return x.transpose(1, 2)
q, k, v = normal(9, int(queries)), normal(3, int(keys)), normal(3, int(keys))
iq = q.unflatten(1, (3, 3)).mean(2)
leaves = [x.requires_grad_(backward == "1") for x in (q, k, v)]
def attend(q, k, v, iq):
    if kind == "moba":
        return schemas.moba_attention(q, k, v, block_size=64, topk=8)[0]
    return schemas.msa_attention(q, k, v, iq, k.detach(), block_size=64, topk=8)[0]
warm = [x[:, :, :70].detach() for x in (q, k, v, iq)]
attend(*warm)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, start = peak(), time.process_time()
out = attend(q, k, v, iq)
if backward == "1":
    out.sum().backward()
print(json.dumps({"seconds": time.process_time() - start, "bytes": peak() - before}))
"""


def measured(kind, dtype, queries, keys, backward=False):
    arguments = [kind, dtype, str(queries), str(keys), str(int(backward))]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"), [("moba", "float32"), ("moba", "float64"), ("msa", "float32")]
)
def test_prefill_of_8192_tokens(kind, dtype):
    cost = measured(kind, dtype, 8192, 8192)
    assert cost["bytes"] < MEMORY_BYTES
    assert cost["seconds"] < SLACK * SECONDS[dtype]


@pytest.mark.slow
def test_training_step_of_8192_tokens():
    cost = measured("moba", "float32", 8192, 8192, backward=True)
    assert cost["bytes"] < MEMORY_BYTES
    assert cost["seconds"] < 3 * SLACK * SECONDS["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["moba", "msa"])
def test_decode_step_over_131072_tokens(kind):
    """Reads the cache once for the choice and attends to the chosen blocks only."""
    cost = measured(kind, "float32", 1, 131_072)
    assert cost["bytes"] < 0.3e9
    assert cost["seconds"] < SLACK * 1.0
