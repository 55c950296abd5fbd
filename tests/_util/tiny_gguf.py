"""A tiny random Llama as one GGUF file, written with the gguf package."""

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, LAYERS, INNER = 32, 4, 2, 2, 48


def write_gguf(path, tokenizer=True):
    """Write the file and return its path."""
    letters = [chr(c) for c in range(0x21, 0x7F)] + ["\u0120", "\u010a"]
    tokens = ["<pad>", "<s>", "</s>", *letters, "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(letters) + 1))
    if tokenizer:
        writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    for name, shape in _shapes(len(tokens)).items():
        writer.add_tensor(name, _values(name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(vocabulary):
    key_width = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (vocabulary, HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes["output.weight"] = (vocabulary, HIDDEN)
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (key_width, HIDDEN),
            "attn_v": (key_width, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return shapes


def _values(name, shape):
    generator = np.random.default_rng(len(name) * 7 + sum(shape))
    spread = 0.1 if len(shape) == 1 else 1.0
    centre = 1.0 if len(shape) == 1 else 0.0
    return (centre + spread * generator.standard_normal(shape)).astype(np.float32)
