"""Tiny random models of many architectures, and the script of steps that each must get right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf

from wim_ext.work import Work

VOCAB = 61
WINDOW = 6  # shorter than every text of the script

_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS_OF_8 = {**_LLAMA, "head_dim": 8}
_TWO_KINDS = {**_HEADS_OF_8, "layer_types": ["sliding_attention", "full_attention"]}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 4,
    "factor": 64.0,
    "partial_rotary_factor": 1.0,
}
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
_DEEPSEEK = {
    **_LLAMA,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_NEXT = {
    **_HEADS_OF_8,
    **_MOE,
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}

# name -> (config class of transformers, its arguments)
PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _LLAMA),
    "llama_mqa": ("LlamaConfig", {**_LLAMA, "num_key_value_heads": 1}),
    "llama_group_of_three": (
        "LlamaConfig",
        {**_LLAMA, "hidden_size": 48, "num_attention_heads": 6},
    ),
    "llama_dynamic_ntk": (
        "LlamaConfig",
        {**_LLAMA, "max_position_embeddings": 16, "rope_parameters": _DYNAMIC},
    ),
    "qwen2": ("Qwen2Config", _LLAMA),
    "qwen2_sliding": (
        "Qwen2Config",
        {
            **_LLAMA,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": _TWO_KINDS["layer_types"],
        },
    ),
    "qwen3": ("Qwen3Config", _HEADS_OF_8),
    "qwen3_moe": ("Qwen3MoeConfig", {**_HEADS_OF_8, **_MOE}),
    "mistral": ("MistralConfig", {**_HEADS_OF_8, "sliding_window": WINDOW}),
    "mixtral": (
        "MixtralConfig",
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "gemma2": (
        "Gemma2Config",
        {
            **_TWO_KINDS,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {**_TWO_KINDS, "sliding_window": WINDOW, "query_pre_attn_scalar": 24},
    ),
    "phi3": ("Phi3Config", {**_LLAMA, "sliding_window": WINDOW}),
    "phi3_longrope": (
        "Phi3Config",
        {
            **_LLAMA,
            "original_max_position_embeddings": 4,
            "rope_parameters": _LONGROPE,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", {**_LLAMA, "rotary_pct": 0.5}),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_TWO_KINDS,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "olmo2": ("Olmo2Config", _LLAMA),
    "smollm3": ("SmolLM3Config", {**_LLAMA, "no_rope_layer_interval": 2}),
    "stablelm": ("StableLmConfig", {**_LLAMA, "partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2Config", {**_LLAMA, "sliding_window": WINDOW}),
    "cohere": ("CohereConfig", {**_LLAMA, "logit_scale": 0.5}),
    "granite": (
        "GraniteConfig",
        {**_LLAMA, "attention_multiplier": 0.6, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "glm4": ("Glm4Config", {**_HEADS_OF_8, "partial_rotary_factor": 0.5}),
    "deepseek_v3": ("DeepseekV3Config", _DEEPSEEK),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    ),
}
FALLBACK: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("FalconConfig", {**_LLAMA, "new_decoder_architecture": False}),
    "falcon_alibi": ("FalconConfig", {**_LLAMA, "alibi": True}),
    "bloom": ("BloomConfig", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mpt": (
        "MptConfig",
        {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            **_HEADS_OF_8,
            "num_hidden_layers": 4,
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", _NEXT),
    "lfm2": ("Lfm2Config", {**_LLAMA, "layer_types": ["conv", "full_attention"]}),
    "mamba": (
        "MambaConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
}
RECURRENT = ("qwen3_next", "lfm2", "mamba")

# From transformers 5.25 on Falcon attends through the AttentionInterface, its ALiBi form by a mask.
FALCON_PACKS = hf.FalconForCausalLM._can_set_attn_implementation()
if FALCON_PACKS:
    PACKED["falcon"] = FALLBACK.pop("falcon")


def make(name: str, **changes: Any) -> Any:
    """A tiny model in eval mode, float32, eager attention, weights large enough to matter."""
    config_class, arguments = {**PACKED, **FALLBACK}[name]
    config = getattr(hf, config_class)(**{**arguments, **changes})
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def plain_logits(hf_model: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab] of one forward of the model itself."""
    with torch.no_grad():
        return hf_model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@dataclass
class Text:
    """A sequence beside the list of tokens that it must be worth."""

    sequence: Any
    tokens: list[int] = field(default_factory=list)

    def fork(self, length: int | None = None) -> Text:
        return Text(self.sequence.fork(length), self.tokens[:length])

    def rollback(self, length: int) -> None:
        self.sequence.rollback(length)
        del self.tokens[length:]

    def commit(self, branch: Text) -> None:
        self.sequence.commit(branch.sequence)
        self.tokens = branch.tokens


class Script:
    """Runs steps and keeps the logits of every row with the tokens that lead to it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows: list[tuple[list[int], torch.Tensor]] = []
        self._next = 0

    def text(self) -> Text:
        return Text(self.model.new_sequence())

    def step(self, *items: tuple[Text, int]) -> None:
        work = [Work(text.sequence, self._draw(count), count) for text, count in items]
        logits = self.model.forward(work)
        for (text, _), item, rows in zip(items, work, logits, strict=True):
            text.tokens += item.tokens
            assert text.sequence.length == len(text.tokens)
            assert rows.shape == (item.logits, self.model.vocab_size)
            self.rows.append((list(text.tokens), rows))

    def _draw(self, count: int) -> list[int]:
        begin, self._next = self._next, self._next + count
        return [(7 * i * i + 13 * i + 3) % VOCAB for i in range(begin, begin + count)]

    def worst(self, hf_model: Any) -> float:
        """The largest |difference| over the largest |logit| of the plain forward, of all steps."""
        worst = 0.0
        for tokens, rows in self.rows:
            if rows.shape[0]:
                expected = plain_logits(hf_model, tokens)[-rows.shape[0] :]
                error = (rows - expected).abs().max() / expected.abs().max()
                worst = max(worst, error.item() if torch.isfinite(error) else float("inf"))
        return worst


def run_script(model: Any) -> Script:
    """Prefill, forks, mixed steps, rollbacks, refills and commits, as DESIGN's picture has them."""
    script = Script(model)
    trunk = script.text()
    script.step((trunk, 11))
    script.step((trunk, 8))
    a, b = trunk.fork(), trunk.fork(7)
    script.step((trunk, 5), (a, 1), (b, 4))
    script.step((a, 1), (trunk, 6))
    a.rollback(12)
    script.step((b, 1), (a, 9), (trunk, 0))
    c = trunk.fork()
    script.step((c, 3), (a, 1))
    trunk.commit(c)
    script.step((trunk, 4), (a, 1))
    d = trunk.fork()
    trunk.rollback(5)
    script.step((trunk, 18), (b, 1))
    script.step((d, 2), (trunk, 1))
    return script


def run_forward_only_script(model: Any) -> Script:
    """The same without a step back, for models whose states cannot return to an earlier token."""
    script = Script(model)
    trunk = script.text()
    script.step((trunk, 11))
    a = trunk.fork()
    script.step((trunk, 8), (a, 1))
    b = trunk.fork()
    script.step((a, 1), (trunk, 5), (b, 4))
    script.step((b, 1), (trunk, 0))
    c = trunk.fork()
    script.step((c, 3), (a, 1))
    trunk.commit(c)
    script.step((trunk, 4), (b, 1))
    return script
