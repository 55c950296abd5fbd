"""How well the time model predicts runs that it has not seen; and two parts of a calibration.

    python benchmarks/time_model.py [MEASUREMENTS.json] [--into CALIBRATION.json]

For every kernel of the file, efficiencies are fitted on every other run and the rest is predicted;
errors are printed, whatever they are. `--into` puts these into a calibration, in place of entries
of the same kind:

* dense attention: per phase the kernel that is fastest in most runs, fitted on all its runs, with
  the error of the halves;
* decode steps of MSA, from `results/msa_decode_h200.json`, whose calls follow each other in a graph
  as in a model: the choice of blocks fitted on single queries, the attention on all calls.
  `sparsify bench --calibrate` times stages of one call alone, which takes some 2 us more; these
  steps took 4-25% less than its entries predict, batches with several queries 21-36%.
"""

import argparse
import json
import statistics
from collections import Counter, defaultdict
from pathlib import Path

from predicted import decode_calls

from sparsify.cost_model.calibrating import stage_run
from sparsify.cost_model.fitting import Row, fit, halves
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
        contexts = [run.workload.context_tokens for run in runs]
        about = {"family": family, "kernel": runs[0].kernel}
        yield about | fitted([model_row(run, gpu) for run in runs], family, contexts)


def decode_families(gpu):
    """Entries for the choice of blocks and the attention of MSA's decode steps."""
    found = defaultdict(list)
    for call, choice_ms in decode_calls():
        about = (call.shape, call.workload, call.configuration)
        times = {"msa_decode_attention": call.ms - choice_ms}
        if call.workload.new_tokens == 1:
            times["msa_decode_index"] = choice_ms
        for family, ms in times.items():
            run = stage_run(family, *about, ms, gpu, "sparsify", elements=call.elements)
            found[run.key].append(run)
    for (family, dtype, group, block), runs in sorted(found.items(), key=str):
        runs.sort(key=lambda run: run.bound_ms)
        sizes = {"dtype": dtype, "group_size": group, "block_size": block}
        about = {"family": family, "kernel": "sparsify", **sizes}
        rows = [Row({family: run.bound_ms}, run.ms) for run in runs]
        entry = about | fitted(rows, family, [run.tokens for run in runs])
        yield {name: value for name, value in entry.items() if value is not None}


def fitted(rows, family, contexts):
    """What a fit on all rows gives, with the error of the halves."""
    seen, unseen = halves(rows)
    whole = fit(rows)
    return {
        "efficiency": round(whole.efficiency(family), 4),
        "overhead_us": round(1e3 * whole.overhead_ms, 2),
        "error": round(fit(seen).mean_error(unseen), 4),
        "points": len(rows),
        "contexts": [min(contexts), max(contexts)],
    }


def put_into(path, entries):
    """Entries take the places of those of the same kind, or come last."""
    data = json.loads(Path(path).read_text())
    found = {key(entry): entry for entry in data["families"]}
    data["families"] = list((found | {key(entry): entry for entry in entries}).values())
    write_text(path, json.dumps(data, indent=2) + "\n")


def key(entry):
    sizes = (entry.get("group_size"), entry.get("block_size"))
    return (entry["family"], entry.get("dtype", "bf16"), *sizes)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measurements", nargs="?", default=RESULTS)
    parser.add_argument("--into", metavar="CALIBRATION.json")
    args = parser.parse_args()
    measured = load_measurements(args.measurements)
    gpu = load_gpu(measured.gpu)
    for kernel, phase in dict.fromkeys((run.kernel, run.phase) for run in measured.runs):
        runs = measured.of(kernel, phase)
        if len(runs) >= 6:
            report(runs, gpu)
    if args.into:
        put_into(args.into, [*dense_families(measured, gpu), *decode_families(gpu)])


if __name__ == "__main__":
    main()
