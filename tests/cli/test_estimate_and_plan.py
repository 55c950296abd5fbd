"""What `estimate` only warns of, `plan` refuses: on every config at every usual context."""

import json
import time

import pytest

from tests._util import published_models

CONFIGS = sorted(published_models.CONFIGS.glob("*.json"))
CONTEXTS = ("32k", "128k", "1m")
MOST_S = 5


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_beyond_the_memory_an_estimate_warns_and_a_plan_fails(cli, config, context):
    words = (config, "--gpu", "h200", "--context", context)
    start = time.perf_counter()
    code, out, err = cli("estimate", *words, "--json")
    assert time.perf_counter() - start < MOST_S
    rows = json.loads(out)["rows"]
    full = not any(row["dense_memory"]["fits"] for row in rows)
    assert code == 0 and ("do not fit the 141 GB" in err) == full
    planned, shown, why = cli("plan", *words, "--policy", "auto")
    assert planned == (8 if full else 0)
    assert ("The memory of H200-SXM-141GB (141.0 GB) does not hold" in why) == full
    assert (shown == "") == full
    if config.stem == "llama-3.1-8b":
        learned = [row for row in rows if row["indexer"] == "learned"]
        assert learned and all(row["speedup"]["high"] <= 8 for row in learned)
        assert all(row["speedup"]["bound"] < 8 for row in learned)


def test_the_configs_cover_both():
    assert {path.stem for path in CONFIGS} >= {"llama-3.1-8b", "minimax-m3-text", "smollm2-135m"}
