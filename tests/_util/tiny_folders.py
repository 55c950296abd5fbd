"""Tiny random model folders, as save_pretrained writes them, with a tokenizer of single bytes."""

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 260


def byte_tokenizer():
    """A tokenizer with one token per byte, and three special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>"]
    vocabulary = {token: number for number, token in enumerate(special + letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def tiny_llama(layers=3, dtype=torch.float32, **changes):
    """A random Llama whose attention is far from uniform."""
    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(3)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**sizes, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    return model.to(dtype).eval()


def save_llama(folder, *, tokenizer=True, **options):
    """Write a tiny Llama to `folder` and return the folder."""
    tiny_llama(**options).save_pretrained(folder)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder


def save_bert(folder):
    """Write a tiny bidirectional encoder to `folder`: attention that must be refused."""
    config = tf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    tf.BertForMaskedLM(config).save_pretrained(folder)
    return folder
