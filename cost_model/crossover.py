"""The context from which on sparse attention is expected to be faster than dense."""

from __future__ import annotations

from collections.abc import Callable

from sparsify.cost_model.calibration import Calibration
from sparsify.cost_model.configuration import DENSE, Configuration
from sparsify.cost_model.hardware import Gpu
from sparsify.cost_model.layer_cost import layer_cost
from sparsify.cost_model.workload import BF16, AttentionShape, ElementBytes, Phase, Workload

__all__ = ["crossover_tokens"]

MOST_TOKENS = 1 << 24
# Borders of blocks beyond a crossing that are looked at.
MOST_BORDERS = 8


def crossover_tokens(
    shape: AttentionShape,
    configuration: Configuration,
    gpu: Gpu,
    *,
    phase: Phase,
    batch: int = 1,
    most_tokens: int = MOST_TOKENS,
    element_bytes: ElementBytes = BF16,
    hidden_size: int | None = None,
    calibration: Calibration | None = None,
    efficiency_scale: float = 1.0,
) -> int | None:
    """The shortest context from which on the configuration is expected to be faster than dense.

    None when it is not faster at `most_tokens` either.
    """

    def cost(tokens: int, of: Configuration) -> float:
        found = layer_cost(
            shape,
            Workload.of(phase, tokens, batch),
            of,
            gpu,
            element_bytes=element_bytes,
            hidden_size=hidden_size,
            calibration=calibration,
            efficiency_scale=efficiency_scale,
        )
        return found.time.expected_ms

    def pays(tokens: int) -> bool:
        return cost(tokens, configuration) < cost(tokens, DENSE)

    found = _last_crossing(pays, most_tokens)
    if found is None or phase is not Phase.DECODE:
        return found
    return _past_borders(pays, found, configuration.block_size, most_tokens)


def _last_crossing(pays: Callable[[int], bool], most: int) -> int | None:
    """The smallest n from which on `pays` holds, up to `most`; looked for from above."""
    if not pays(most):
        return None
    above = most
    while above > 1 and pays(max(int(above / 1.5), 1)):
        above = max(int(above / 1.5), 1)
    below = max(int(above / 1.5), 1)
    if above == 1:
        return 1
    return _bisect(pays, below, above)


def _bisect(pays: Callable[[int], bool], below: int, above: int) -> int:
    """The n at which `pays` begins to hold between `below`, where it does not, and `above`."""
    while above - below > 1:
        middle = (above + below) // 2
        above, below = (middle, below) if pays(middle) else (above, middle)
    return above


def _past_borders(pays: Callable[[int], bool], found: int, block_size: int, most: int) -> int:
    """A decode step reads whole blocks, so its cost jumps where a block begins, and what paid just
    before may not for a while."""
    first = found // block_size
    for block in range(first + MOST_BORDERS, first - 1, -1):
        border = block * block_size + 1
        if found < border <= most and not pays(border):
            above = min(border + block_size - 1, most)
            return _bisect(pays, border, above) if pays(above) else above
    return found
