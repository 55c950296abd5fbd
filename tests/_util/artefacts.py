"""Kinds of saved folders: how one is made, written and loaded, and what a model is known by."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import sparsify as sp
from sparsify.hosts.transformers import plan_of
from tests._util.tiny_folders import byte_tokenizer, tiny_llama

IDS = torch.arange(40)[None] % 200 + 3


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of artefact: making one of two models, writing it, the ways to load it, and what a
    loaded model is known by. `slower` divides the number of faults.
    """

    make: Callable[[int], Any]
    save: Callable[[Any, Path], Any]
    loaders: dict[str, Callable[[Path], Any]]
    facts: Callable[[Any], tuple[Any, ...]]
    unverified: str
    slower: int = 1


def altered(model, seed):
    with torch.no_grad():
        model.lm_head.weight.add_(0.01 * seed)
    return model


@functools.cache
def folder_result(seed):
    policy = sp.Policy.moba(block_size=8 if seed else 16, topk=2, dense_last=1)
    return sp.sparsify(altered(tiny_llama(), seed), policy)


@functools.cache
def archive_result(seed):
    policy = sp.Policy.moba(block_size=8 if seed else 16, topk=2)
    return sp.sparsify(altered(tiny_llama(layers=1), seed), policy, host="graph")


def save_folder(result, folder):
    return sp.export(result, folder, tokenizer=byte_tokenizer(), force=True)


def save_archive(result, folder):
    return sp.export(result, folder, format="pt2", force=True)


@torch.no_grad()
def archive_facts(model):
    return model(IDS).logits, model.sparsify_plan


@torch.no_grad()
def logits_and_plan(model):
    return model(IDS, use_cache=False).logits, plan_of(model)


def plainly(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


KINDS = {
    "transformers": Kind(
        folder_result,
        save_folder,
        {"sp.load": sp.load, "from_pretrained": plainly},
        logits_and_plan,
        "sparsify.exporters.hf_folder.intact",
    ),
    "pt2": Kind(
        archive_result,
        save_archive,
        {"sp.load": sp.load},
        archive_facts,
        "sparsify.exporters.pt2.intact",
        slower=4,
    ),
}
# OSError: transformers' own clear error for a config.json that is not there.
CLEAR = (sp.SparsifyError, OSError)


def same(a, b):
    pairs = zip(a, b, strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def outcome(kind, load, folder, *right):
    """ "refused", or "right"; anything else is what the tests are for."""
    try:
        model = load(folder)
    except CLEAR as error:
        assert str(error).strip(), f"{type(error).__name__} without a word"
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    found = kind.facts(model)
    return "right" if any(same(found, facts) for facts in right) else "WRONG"


def states(kind, folder, *right):
    """What every loader makes of a folder."""
    return {name: outcome(kind, load, folder, *right) for name, load in kind.loaders.items()}
