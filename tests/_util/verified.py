"""One tiny model, rewritten on one host, saved, and held to every check."""

import torch

import sparsify as sp
from tests._util.tiny_models import build, tokens

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "opt", "phi3")
FORMS = (("sdpa", "eager"), ("eager", "sdpa"))
LENGTH = 96  # longest input of the model


def pairs(families):
    """Every family on both hosts and in both forms of attention, and both forms on both hosts."""
    return [
        (family, attention, host)
        for number, family in enumerate(families)
        for host, attention in zip(("transformers", "graph"), FORMS[number % 2], strict=True)
    ]


def small(family, attention):
    """Two layers, short inputs: the checks derive their lengths from them."""
    if family == "gpt2":
        return build(family, attention=attention, n_layer=2, n_positions=LENGTH)
    changes = dict(num_hidden_layers=2, max_position_embeddings=LENGTH)
    return build(family, attention=attention, **changes)


def verified(family, attention, host, method, folder, checks=None):
    """The report of all checks of a saved and reloaded model."""
    model = small(family, attention)
    policy = getattr(sp.Policy, method)(block_size=8, topk=2)
    result = sp.sparsify(model, policy, host=host)
    sp.export(result, folder)
    with torch.random.fork_rng():
        return sp.verify(
            model,
            sp.load(folder),
            tokens(1, LENGTH),
            directory=folder,
            greedy_tokens=4,
            checks=checks,
        )
