"""Phases from lengths and caches."""

import pytest

from sparsify.ir import Phase
from tests._util.attention import sdpa, site_of, tokens


@pytest.mark.parametrize(
    ("length", "rows", "phase"),
    [
        (20, slice(None), Phase.PREFILL),
        (20, slice(-1, None), Phase.DECODE),
        (1, slice(None), Phase.PREFILL),
    ],
    ids=["all", "last", "a_single_token"],
)
def test_phases_without_a_cache(length, rows, phase):
    def attend(self, q, k, v, x):
        q = q[:, :, rows]
        return sdpa(q, k, v, is_causal=rows == slice(None))

    assert site_of(attend, tokens(length=length)).phase == phase
