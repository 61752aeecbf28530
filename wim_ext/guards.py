"""Decides whether a model runs right, before anybody relies on it.

Two kinds of check. The first read the model: what it is, where its weights are. The second run it:
a few tokens go through chunks, a fork and a mixed step, and every row's logits are compared with a
plain forward of the same tokens. A model that attends in a way of its own fails the second,
whatever its config says.
"""

from __future__ import annotations

from typing import Any

import torch

from wim_ext.borrow import borrowed
from wim_ext.errors import ModelNotSupported
from wim_ext.rope import RopePin
from wim_ext.work import Work

__all__ = ["check_causal_lm", "check_packable", "parity_check", "probe_length"]

_PROBE_TOKENS = 12
_LONGEST_PROBE = 80

# Root mean square, over the probe's rows, of rms(difference) / std(row). Rounding stays a factor of
# three and more below; a fault in a single row of one text lies above.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.15, torch.float64: 1e-6}
_MOST_ROUNDING = 0.5  # no rounding excuses more than this

_PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# What models raise when they are fed in a way that they do not know. A full cache or memory, and
# whatever else may happen to a good model, is not among them.
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


def check_causal_lm(hf_model: Any) -> None:
    """Refuses, in words, what is no decoder-only language model with its weights at hand."""
    name = type(hf_model).__name__
    config = getattr(hf_model, "config", None)
    if config is None or not callable(getattr(hf_model, "get_output_embeddings", None)):
        raise ModelNotSupported(
            f"{name} is not a Hugging Face model; load one with AutoModelForCausalLM"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelNotSupported(
            f"{name} is an encoder-decoder model ({config.model_type}); "
            "Writing in the Margins needs a decoder-only model"
        )
    if hf_model.get_output_embeddings() is None:
        raise ModelNotSupported(
            f"{name} has no language-model head; load it with AutoModelForCausalLM"
        )
    meta = next((key for key, p in hf_model.named_parameters() if p.is_meta), None)
    if meta is not None:
        raise ModelNotSupported(
            f"{name}'s weights are not loaded: {meta} is on the meta device; "
            "load it without offloading and without init_empty_weights"
        )
    if hf_model.training:
        raise ModelNotSupported(
            f"{name} is in training mode, where dropout changes the answer; call .eval() first"
        )


def check_packable(hf_model: Any) -> None:
    """Refuses what the packed path cannot serve and what is seen without running the model."""
    name = type(hf_model).__name__
    if not hf_model._can_set_attn_implementation():
        raise ModelNotSupported(f"{name} does not attend through transformers' AttentionInterface")
    if hf_model.dtype not in _PACKED_DTYPES:
        allowed = ", ".join(map(str, _PACKED_DTYPES))
        raise ModelNotSupported(f"{name} computes in {hf_model.dtype}; allowed are {allowed}")
    devices = sorted({str(p.device) for p in hf_model.parameters()})
    if len(devices) > 1:
        raise ModelNotSupported(
            f"{name} is spread over {', '.join(devices)}; load it onto one device"
        )


def shortest_window(config: Any) -> int | None:
    """The shortest attention window or chunk that the config names, None where there is none."""
    text = config.get_text_config(decoder=True)
    sizes = (getattr(text, key, None) for key in ("sliding_window", "attention_chunk_size"))
    return min((size for size in sizes if isinstance(size, int) and size > 0), default=None)


def probe_length(config: Any) -> int:
    """Tokens of the probe: long enough to leave a short window behind."""
    window = shortest_window(config)
    if window is None or window + 8 > _LONGEST_PROBE:
        return _PROBE_TOKENS
    return max(_PROBE_TOKENS, window + 8)


def parity_check(model: Any, hf_model: Any, pin: RopePin | None) -> None:
    """Raises ModelNotSupported where `model` does not repeat the plain forward of `hf_model`.

    Args:
        model: the wrapper to check: `new_sequence`, `forward`, `can_roll_back`, `vocab_size`.
        pin: rotary frequencies that both run with, since a short text would choose others.
    """
    name = type(hf_model).__name__
    trunk, branch = _probe_texts(probe_length(hf_model.config), model.vocab_size)
    try:
        with borrowed(hf_model, pin=pin):
            expected = torch.cat([_plain(hf_model, trunk), _plain(hf_model, branch)])
            found = torch.cat(_run_probe(model, trunk, branch))
            limit = max(_TOLERANCE.get(hf_model.dtype, 0.15), 3 * _rounding(hf_model, trunk))
    except ModelNotSupported as refusal:
        raise ModelNotSupported(f"{name}: {refusal}") from refusal
    except _FAILURES as error:
        raise ModelNotSupported(f"{name} fails in chunks and forks: {error}") from error
    worst = _relative_error(found, expected)
    if worst > limit:
        raise ModelNotSupported(
            f"{name} in chunks and forks differs from its plain forward "
            f"(relative error {worst:.1e}, allowed {limit:.0e})"
        )


def _probe_texts(length: int, vocab_size: int) -> tuple[list[int], list[int]]:
    """Two texts of `length` tokens that share their first half."""
    trunk = [(37 * i + 11) % vocab_size for i in range(length)]
    shared = length // 2
    return trunk, trunk[:shared] + [(53 * i + 29) % vocab_size for i in range(length - shared)]


def _run_probe(model: Any, trunk_text: list[int], branch_text: list[int]) -> list[torch.Tensor]:
    """Chunks, a fork, mixed steps and, where `model` can, a rollback: all rows of both texts."""
    length = len(trunk_text)
    shared = length // 2
    with model.new_sequence() as trunk:
        rows = model.forward([Work(trunk, trunk_text[:3], 3)])
        rows += model.forward([Work(trunk, trunk_text[3:shared], shared - 3)])
        branch_rows = list(rows)
        with trunk.fork() as branch:
            if model.can_roll_back:
                model.forward([Work(branch, trunk_text[:2], 0)])
                branch.rollback(shared - 1)
                model.forward([Work(branch, branch_text[shared - 1 : shared], 0)])
            for begin, end in (
                (shared, shared + 1),
                (shared + 1, length - 1),
                (length - 1, length),
            ):
                step = [(branch, branch_text[begin:end]), (trunk, trunk_text[begin:end])]
                ours, theirs = model.forward([Work(s, text, len(text)) for s, text in step])
                branch_rows.append(ours)
                rows.append(theirs)
    return [*rows, *branch_rows]


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square over the rows of rms(difference) / std(row); inf where one is not finite."""
    found, expected = found.double(), expected.double()
    mean_square = (found - expected).square().mean(-1) / expected.var(-1).clamp_min(1e-24)
    error = mean_square.mean().sqrt()
    return error.item() if torch.isfinite(error) else float("inf")


def _rounding(hf_model: Any, text: list[int]) -> float:
    """How far two ways of transformers' own to attend differ in half precision; 0 if unknown."""
    own = hf_model.config._attn_implementation
    if hf_model.dtype not in (torch.bfloat16, torch.float16) or own == "eager":
        return 0.0
    expected = _plain(hf_model, text)
    with borrowed(hf_model, implementation="eager"):
        error = _relative_error(_plain(hf_model, text), expected)
    return min(error, _MOST_ROUNDING / 3)


def _plain(hf_model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits [len(tokens), vocab] of one forward of the model itself, without any cache."""
    ids = torch.tensor([tokens], device=hf_model.device)
    with torch.no_grad():
        logits: torch.Tensor = hf_model(input_ids=ids, use_cache=False).logits
    return logits[0]
