"""Whole models on one H200: prefill, dense against rewritten; and the GPU against the CPU.

    python benchmarks/prefill_h200.py [--contexts 32k,128k] [--json OUT]
        [--no-equality] [--no-speed] [--model FILE_OR_FOLDER]

Speed: a model of the shape of Llama-3.1-8B with random weights, bfloat16, batch 1, with a KV cache,
logits of the last token only. Dense is transformers' `sdpa` attention with either of torch's
kernels (FlashAttention-2, cuDNN). The plan is proved on a model with the same layers and few
weights.

Equality: a model of the shape of SmolLM2-135M with seeded weights and random tokens, and that of
`--model` with this project's licence to read; float32, rewritten on GPU and CPU. The CPU attends
with the blocks that the GPU chose; how many rows it would have chosen otherwise is counted.
"""

import argparse
import copy
import gc
import json
from pathlib import Path

import torch
from common import DEVICE, tokens_of
from torch.nn.attention import sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig

import sparsify as sp
from sparsify.benches.dense import BACKENDS
from sparsify.files import write_text
from sparsify.hosts.transformers import call_counts
from sparsify.policy import PRESETS
from sparsify.sources import load_model
from sparsify.timing import machine, time_call

RESULTS = Path(__file__).parent / "results" / "prefill_h200.json"
TEXT = Path(__file__).parent.parent / "LICENSE"
TOLERANCE = 1e-4  # max|a - b| / max|b| of float32 models, given the same blocks
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
}
SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
}
EQUALITY = {"block_size": 64, "topk": 4, "tokens": 1024}
POLICIES = {
    "moba 128/8": sp.Policy.moba(block_size=128, topk=8),
    "moba 512/3": sp.Policy.moba(block_size=512, topk=3),
    "kimi-1m (4096/12, last 3 layers dense)": PRESETS["kimi-1m"],
}


def make(shape, device, dtype):
    """A model with random weights, made where it is used."""
    torch.manual_seed(0)
    config = LlamaConfig(**shape, attn_implementation="sdpa")
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def proved(shape):
    """What is proved of the model's attention: that of a model with the same layers and heads."""
    small = {"vocab_size": 128, "hidden_size": 8 * shape["num_attention_heads"]}
    return sp.inspect(make(shape | small | {"intermediate_size": 64}, "cpu", torch.float32))


def measured(run):
    """Time of a prefill in ms, and peak memory in GiB, weights included."""
    with torch.inference_mode():
        torch.cuda.reset_peak_memory_stats()
        timing = time_call(run, device=DEVICE, repeats=3, warm_up=1, flush_l2=False, budget_s=15.0)
    peak = torch.cuda.max_memory_allocated() / 2**30
    gc.collect()
    torch.cuda.empty_cache()
    return {"ms": timing.median_ms, "samples_ms": list(timing.samples_ms), "peak_gib": peak}


def prefill(model, tokens):
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=DEVICE)
    return lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1).logits


def dense_prefills(model, tokens):
    """Rows of the kernels that run the model; each is the only one that torch may take."""
    run = prefill(model, tokens)
    for name, backend in BACKENDS.items():

        def call(backend=backend):
            with sdpa_kernel(backend):
                return run()

        try:
            taken = measured(call)
        except RuntimeError as error:
            print(f"dense {name} does not run: {str(error).splitlines()[0]}", flush=True)
            continue
        yield {"model": "dense", "kernel": name, "context_tokens": tokens, **taken}


def kept_tokens(policy):
    return policy.method.block_size * policy.method.topk


def speed(contexts, keep):
    """Rows of dense and rewritten prefills; `keep` is given the rows after each."""
    model = make(LLAMA_8B, DEVICE, torch.bfloat16)
    found = proved(LLAMA_8B)
    rows = []
    for tokens in contexts:
        dense = list(dense_prefills(model, tokens))
        for row in dense:
            show(row)
        best = min(dense, key=lambda row: row["ms"])
        rows += dense
        for name, policy in POLICIES.items():
            if kept_tokens(policy) >= tokens:
                continue  # every block would be kept
            row = {"model": name, "context_tokens": tokens, "dense_best": best["kernel"]}
            row |= rewritten_prefill(model, policy, found, tokens)
            row["speedup"] = best["ms"] / row["ms"]
            rows.append(row)
            show(row)
        keep(rows)
    return rows


def rewritten_prefill(model, policy, found, tokens):
    result = sp.sparsify(model, policy, inspection=found)
    taken = measured(prefill(result.model, tokens))
    counts = call_counts(result.model).values()
    ran = sum(any(what == "sparse" for what in count) for count in counts)
    return {**taken, "layers_rewritten": len(result.plan.rewritten), "layers_run_sparse": ran}


def show(row):
    gain = f", {row['speedup']:.2f}x over dense {row['dense_best']}" if "speedup" in row else ""
    what = f"{row['model']} {row.get('kernel', '')}".strip()
    print(
        f"{row['context_tokens']:8} tokens  {what:42} {row['ms']:10.1f} ms, "
        f"peak {row['peak_gib']:.1f} GiB{gain}",
        flush=True,
    )


def subject(source):
    """A float32 model and what it reads: seeded and random, or trained weights and a text."""
    if source is None:
        model = make(SMOLLM2_135M, "cpu", torch.float32)
        return model, torch.randint(0, SMOLLM2_135M["vocab_size"], (1, EQUALITY["tokens"]))
    loaded = load_model(source)
    ids = loaded.tokenizer(TEXT.read_text(), return_tensors="pt")["input_ids"]
    return loaded.model.float().eval(), ids[:, : EQUALITY["tokens"]]


def equality(source=None):
    """Logits of the rewritten model on GPU and CPU, given the same blocks."""
    on_cpu, ids = subject(source)
    on_gpu = copy.deepcopy(on_cpu).to(DEVICE)
    policy = sp.Policy.moba(block_size=EQUALITY["block_size"], topk=EQUALITY["topk"])
    found = sp.inspect(on_cpu)
    gpu = sp.sparsify(on_gpu, policy, inspection=found).model
    cpu = sp.sparsify(on_cpu, policy, inspection=found).model
    with torch.inference_mode():
        with sp.record_selection() as chosen:
            a = gpu(input_ids=ids.to(DEVICE)).logits.cpu()
        with sp.replay_selection(chosen):
            b = cpu(input_ids=ids).logits
        with sp.record_selection() as own:
            c = cpu(input_ids=ids).logits
    diffs = chosen.diff(own)
    rows = sum(diff.total for diff in diffs.values())
    off = sum(diff.differing for diff in diffs.values())
    first = next(iter(diffs.values()))
    error = ((a - b).abs().max() / b.abs().max()).item()
    return {
        **EQUALITY,
        "weights": "seeded" if source is None else Path(source).name,
        "replayed_error": error,
        "tolerance": TOLERANCE,
        "met": error <= TOLERANCE,
        "error_without_replay": ((a - c).abs().max() / c.abs().max()).item(),
        "loss_difference": abs(loss(a, ids) - loss(c, ids)),
        "rows": rows,
        "rows_off": off,
        "rows_off_in_first_layer": first.differing,
        "greedy_tokens_equal": (a.argmax(-1) == b.argmax(-1)).float().mean().item(),
    }


def loss(logits, ids):
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", default="32k,128k")
    parser.add_argument("--json", default=RESULTS, metavar="OUT")
    parser.add_argument("--no-equality", action="store_true")
    parser.add_argument("--no-speed", action="store_true")
    parser.add_argument("--model", metavar="FILE_OR_FOLDER")
    args = parser.parse_args()
    result = {**machine(DEVICE), "what": __doc__.split("\n\n", 2)[2].strip()}

    def keep(rows=None):
        if rows is not None:
            result["rows"] = rows
        write_text(args.json, json.dumps(result, indent=1) + "\n", force=True)

    if not args.no_equality:
        result["gpu_against_cpu"] = []
        for source in [None] + [args.model] * (args.model is not None):
            result["gpu_against_cpu"].append(equality(source))
            print(result["gpu_against_cpu"][-1], flush=True)
            keep()
    if not args.no_speed:
        keep(speed([tokens_of(text) for text in args.contexts.split(",")], keep))


if __name__ == "__main__":
    main()
