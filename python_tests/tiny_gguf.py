"""Writes a GGUF file of a random two-layer llama, a few kilobytes large."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 32, 4, 2, 64, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


def write(path: Path, seed: int = 0) -> None:
    """A byte-level vocabulary, three special tokens, weights in float32 and Q8_0."""
    tokens = [*SPECIAL, *_byte_letters(), "ab"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    _add_tensors(writer, np.random.default_rng(seed), len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(writer: gguf.GGUFWriter, random: np.random.Generator, vocab: int) -> None:
    def add(name: str, *shape: int, packed: bool = False) -> None:
        data = (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        if packed:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)

    kv = HIDDEN // HEADS * KV_HEADS
    add("token_embd.weight", vocab, HIDDEN, packed=True)
    add("output_norm.weight", HIDDEN)
    for i in range(LAYERS):
        add(f"blk.{i}.attn_norm.weight", HIDDEN)
        add(f"blk.{i}.ffn_norm.weight", HIDDEN)
        add(f"blk.{i}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{i}.attn_k.weight", kv, HIDDEN)
        add(f"blk.{i}.attn_v.weight", kv, HIDDEN)
        add(f"blk.{i}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{i}.ffn_gate.weight", FEED_FORWARD, HIDDEN)
        add(f"blk.{i}.ffn_up.weight", FEED_FORWARD, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, FEED_FORWARD)


def _byte_letters() -> list[str]:
    """The printable letter of each byte in byte-level BPE: itself, or one from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (b for b in range(256) if b not in plain)
    letters = {byte: byte for byte in plain} | {byte: 256 + i for i, byte in enumerate(others)}
    return [chr(letters[byte]) for byte in range(256)]
