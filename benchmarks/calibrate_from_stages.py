"""Put the stage times of `moba_h200.py` into a calibration file.

    python benchmarks/calibrate_from_stages.py [RESULT.json] --into CALIBRATION.json

`sparsify bench --calibrate` measures more sizes; this serves what was timed at four lengths at
least, which is block 128 with as many key/value heads as query heads.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

from sparsify.benches.stages import PREFILL_STAGES
from sparsify.cost_model.calibrating import LEAST_RUNS, calibration_of, merged, stage_run
from sparsify.cost_model.configuration import Configuration
from sparsify.cost_model.hardware import load_gpu
from sparsify.cost_model.workload import AttentionShape, Phase, Workload
from sparsify.files import write_text

RESULT = Path(__file__).parent / "results" / "moba_h200.json"
HEAD_DIM = 128


def stage_runs(rows, gpu):
    """Runs of every family of the rows that were timed at enough lengths."""
    by_case = defaultdict(list)
    for row in rows:
        by_case[row["case"].split(":")[0], tuple(row["heads"])].append(row)
    for (sizes, heads), mine in by_case.items():
        if len(mine) < LEAST_RUNS:
            continue
        block, topk = map(int, sizes.split("/"))
        shape = AttentionShape(*heads, HEAD_DIM, HEAD_DIM)
        for row in mine:
            workload = Workload.of(Phase.PREFILL, row["context_tokens"])
            for family, stage in PREFILL_STAGES.items():
                configuration = Configuration("moba", block, topk)
                ms = row["stages_ms"][stage]
                yield stage_run(family, shape, workload, configuration, ms, gpu, "sparsify")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", nargs="?", default=RESULT)
    parser.add_argument("--into", required=True, metavar="CALIBRATION.json")
    args = parser.parse_args()
    data = json.loads(Path(args.result).read_text())
    gpu = load_gpu(data["gpu"])
    found = calibration_of(
        stage_runs(data["rows"], gpu),
        gpu,
        date=data["date"],
        software=data["software"],
        source="stages of benchmarks/moba_h200.py",
    )
    for entry in found.families:
        print(
            f"{entry.family:16} efficiency {entry.efficiency:.3f}, "
            f"overhead {entry.overhead_us:.1f} us, error {entry.error:.1%} on {entry.points} runs"
        )
    write_text(args.into, json.dumps(merged(args.into, found), indent=2) + "\n")


if __name__ == "__main__":
    main()
