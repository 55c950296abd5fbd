"""Sparse-attention compiler for PyTorch.

Importing this package is cheap: every name below is loaded on first use, so that `import sparsify`
brings in neither torch, triton, transformers nor onnx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparsify.versions import VERSION as __version__

if TYPE_CHECKING:
    from sparsify.api import (
        Inspection,
        Result,
        estimate,
        export,
        inspect,
        load,
        plan,
        sparsify,
        verify,
    )
    from sparsify.errors import (
        ArtefactError,
        CaptureError,
        InfeasibleError,
        MissingExtraError,
        NothingToDoError,
        SparsifyError,
        StrictError,
        UnknownGpuError,
        UsageError,
        VerificationError,
    )
    from sparsify.estimate_report import Estimate
    from sparsify.ir import (
        AttentionSite,
        HeadLayout,
        MaskKind,
        MaskProof,
        Phase,
        Refusal,
        StreamProof,
    )
    from sparsify.kernels.selection import record_selection, replay_selection
    from sparsify.plans import LayerPlan, Plan
    from sparsify.policy import (
        MSA,
        Auto,
        Dense,
        LayerRule,
        MoBA,
        Policy,
        Quality,
        dump_policy,
        load_policy,
    )
    from sparsify.report import CheckResult, SiteReport, SparsifyReport, VerificationReport

_EXPORTS = {
    "sparsify.api": "Inspection Result estimate export inspect load plan sparsify verify",
    "sparsify.errors": (
        "ArtefactError CaptureError InfeasibleError MissingExtraError NothingToDoError "
        "SparsifyError StrictError UnknownGpuError UsageError VerificationError"
    ),
    "sparsify.estimate_report": "Estimate",
    "sparsify.ir": "AttentionSite HeadLayout MaskKind MaskProof Phase Refusal StreamProof",
    "sparsify.kernels.selection": "record_selection replay_selection",
    "sparsify.plans": "LayerPlan Plan",
    "sparsify.policy": ("MSA Auto Dense LayerRule MoBA Policy Quality dump_policy load_policy"),
    "sparsify.report": "CheckResult SiteReport SparsifyReport VerificationReport",
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names.split()}

__all__ = [
    "MSA",
    "ArtefactError",
    "AttentionSite",
    "Auto",
    "CaptureError",
    "CheckResult",
    "Dense",
    "Estimate",
    "HeadLayout",
    "InfeasibleError",
    "Inspection",
    "LayerPlan",
    "LayerRule",
    "MaskKind",
    "MaskProof",
    "MissingExtraError",
    "MoBA",
    "NothingToDoError",
    "Phase",
    "Plan",
    "Policy",
    "Quality",
    "Refusal",
    "Result",
    "SiteReport",
    "SparsifyError",
    "SparsifyReport",
    "StreamProof",
    "StrictError",
    "UnknownGpuError",
    "UsageError",
    "VerificationError",
    "VerificationReport",
    "__version__",
    "dump_policy",
    "estimate",
    "export",
    "inspect",
    "load",
    "load_policy",
    "plan",
    "record_selection",
    "replay_selection",
    "sparsify",
    "verify",
]


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'sparsify' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
