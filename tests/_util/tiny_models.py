"""Tiny random transformers models, built from their configs; nothing is downloaded."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import functools
import inspect

import torch
import transformers as tf

import sparsify as sp

# What a forward calls its cache; transformers 5.17 and 5.24 differ.
CACHE = (
    "cache"
    if "cache" in inspect.signature(tf.LlamaForCausalLM.forward).parameters
    else "past_key_values"
)

SMALL = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def build(name, seed=0, dtype=torch.float32, attention="sdpa", **changes):
    """A random model of the family, in eval mode, its attention far from uniform."""
    config = _config(name, changes)
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model.to(dtype).eval()


def _config(name, changes):
    if name == "gpt2":
        sizes = dict(n_embd=48, n_layer=3, n_head=6, n_positions=512, vocab_size=97)
        ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
        return tf.GPT2Config(**{**sizes, **ids, **changes})
    if name == "opt":
        sizes = dict(hidden_size=48, word_embed_proj_dim=48, ffn_dim=64, vocab_size=97)
        counts = dict(num_hidden_layers=3, num_attention_heads=6, max_position_embeddings=512)
        ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
        return tf.OPTConfig(**{**sizes, **counts, **ids, **changes})
    classes = {
        "llama": tf.LlamaConfig,
        "qwen2": tf.Qwen2Config,
        "qwen3": tf.Qwen3Config,
        "mistral": tf.MistralConfig,
        "phi3": tf.Phi3Config,
    }
    extra = {"mistral": dict(sliding_window=None), "qwen3": dict(head_dim=8)}.get(name, {})
    return classes[name](**{**SMALL, **extra, **changes})


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt2")


@functools.cache
def inspected(name):
    """What `sp.inspect` finds in such a model; whatever its weights, it is captured once."""
    return sp.inspect(build(name))


def tokens(batch, length, seed=0):
    """Random token ids `[batch, length]`, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (batch, length), generator=generator)
