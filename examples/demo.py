"""The main job on a real model: inspect, rewrite, verify, generate. Called by `make demo`.

Usage: demo.py MODEL TEXT OUTPUT_FOLDER [PROMPT_TOKENS [BLOCK_SIZE TOPK DENSE_LAST]]
"""

import subprocess
import sys
import time
from pathlib import Path

import torch

import sparsify as sp
from sparsify.sources import load_model

NEW_TOKENS = 48


def cli(*words: str) -> None:
    print(f"\n$ sparsify {' '.join(words)}", flush=True)
    started = time.perf_counter()
    code = subprocess.run([sys.executable, "-m", "sparsify.cli.main", *words]).returncode
    print(f"[{time.perf_counter() - started:.0f} s, exit code {code}]", flush=True)
    if code != 0:
        sys.exit(code)


def continuation(model: torch.nn.Module, tokenizer, ids: torch.Tensor) -> str:
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()


def main(model: str, text: str, output: str, prompt_tokens: int = 1500, *shape: int) -> None:
    size, topk, dense_last = map(str, shape or (64, 8, 3))
    budget = ["--block-size", size, "--topk", topk, "--dense-last", dense_last]
    folders = {method: str(Path(output) / method) for method in ("moba", "msa")}

    cli("inspect", model)
    for method, folder in folders.items():
        cli("rewrite", model, "--method", method, *budget, "-o", folder, "--force")
    cli("verify", folders["moba"], "--against", model, "--prompts", text)  # all checks
    cli("verify", folders["msa"], "--against", model, "--prompts", text, "--checks", "V1,V6")

    loaded = load_model(model)
    ids = loaded.tokenizer(Path(text).read_text(), return_tensors="pt")["input_ids"]
    ids = ids[:, :prompt_tokens]
    print(f"\nGreedy continuations of the first {ids.shape[1]} tokens of {Path(text).name}:")
    print(f"\n  dense: {continuation(loaded.model, loaded.tokenizer, ids)!r}")
    for method, folder in folders.items():
        print(f"\n  {method}: {continuation(sp.load(folder), loaded.tokenizer, ids)!r}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
