"""A GPU made up for tests of plans: round figures, and never calibrated."""

import yaml

from sparsify.cost_model.hardware import Gpu

FIGURES = {
    "name": "Round-100",
    "vendor": "none",
    "architecture": "none",
    "bf16_dense_tflops": {"value": 1000, "source": "made up"},
    "memory_gb": {"value": 100, "source": "made up"},
    "memory_bandwidth_gbs": {"value": 4000, "source": "made up"},
}


def make_gpu(**changes):
    """The GPU, with figures changed."""
    return Gpu(**{**FIGURES, **changes})


def write_gpu(path, **changes):
    """Write it as a user's file."""
    path.write_text(yaml.safe_dump({**FIGURES, **changes}))
    return path
