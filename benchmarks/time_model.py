"""How well the time model predicts runs that it has not seen; and the dense part of a calibration.

    python benchmarks/time_model.py [MEASUREMENTS.json] [--write CALIBRATION.json]

For every kernel of the file, efficiencies are fitted on every other run and the rest is predicted;
errors are printed, whatever they are. `--write` saves what was measured of dense attention: per
phase the kernel that is fastest in most runs, fitted on all its runs, with the error of the halves.
"""

import argparse
import json
import statistics
from collections import Counter
from pathlib import Path

from sparsify.cost_model.fitting import fit, halves
from sparsify.cost_model.hardware import load_gpu
from sparsify.cost_model.measurements import load_measurements, model_row
from sparsify.files import write_text

RESULTS = Path(__file__).parent / "results" / "public_kernels_h200.json"
FAMILIES = {"prefill": "dense_prefill", "decode": "dense_decode", "backward": "dense_backward"}


def report(runs, gpu):
    """Print the held-out half of one kernel's runs; return the mean error."""
    seen, unseen = halves([model_row(run, gpu) for run in runs])
    found = fit(seen)
    factors = ", ".join(
        f"{name} {1e3 * value:.1f} us" if name == "overhead" else f"{name} {1 / value:.3f}"
        for name, value in found.factors.items()
        if value > 0
    )
    print(f"\n{runs[0].kernel}, {runs[0].phase}: fitted on {len(seen)} runs: {factors}")
    if len(seen) <= len(found.factors):
        print(f"{len(found.factors)} unknowns: too many for the runs to tell its parts apart")
    print(f"{'held out':44} {'measured ms':>12} {'predicted ms':>12} {'error':>8}")
    for row, error in zip(unseen, found.errors(unseen), strict=True):
        predicted = found.predict_ms(row.bounds_ms)
        print(f"{row.label:44} {row.measured_ms:12.4f} {predicted:12.4f} {error:+8.1%}")
    errors = sorted(abs(error) for error in found.errors(unseen))
    mean = found.mean_error(unseen)
    print(f"mean error {mean:.1%}, median {statistics.median(errors):.1%}, worst {errors[-1]:.1%}")
    return mean


def fastest(measured, phase):
    """The dense kernel that is fastest in most of the runs of a phase."""
    best = {}
    for run in measured.runs:
        if run.phase == phase and not run.configuration.sparse:
            key = (run.shape, run.workload)
            best[key] = min(best.get(key, run), run, key=lambda one: one.ms)
    return Counter(run.kernel for run in best.values()).most_common(1)[0][0]


def dense_families(measured, gpu):
    """Entries of a calibration for the dense phases."""
    for phase, family in FAMILIES.items():
        runs = measured.of(fastest(measured, phase), phase)
        rows = [model_row(run, gpu) for run in runs]
        seen, unseen = halves(rows)
        whole = fit(rows)
        contexts = [run.workload.context_tokens for run in runs]
        yield {
            "family": family,
            "kernel": runs[0].kernel,
            "efficiency": round(whole.efficiency(family), 4),
            "overhead_us": round(1e3 * whole.overhead_ms, 2),
            "error": round(fit(seen).mean_error(unseen), 4),
            "points": len(rows),
            "contexts": [min(contexts), max(contexts)],
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measurements", nargs="?", default=RESULTS)
    parser.add_argument("--write", metavar="CALIBRATION.json")
    args = parser.parse_args()
    measured = load_measurements(args.measurements)
    gpu = load_gpu(measured.gpu)
    for kernel, phase in dict.fromkeys((run.kernel, run.phase) for run in measured.runs):
        runs = measured.of(kernel, phase)
        if len(runs) >= 6:
            report(runs, gpu)
    if args.write:
        data = {"schema": 1, "gpu": gpu.name, "date": measured.date, "software": measured.software}
        data |= {"source": measured.what, "families": list(dense_families(measured, gpu))}
        write_text(args.write, json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
