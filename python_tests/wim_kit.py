"""Tokenizers, models and texts for the tests of the method: all tiny, none from a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from wim_ext.errors import StaleSequenceError
from wim_ext.prompts import Prompts
from wim_ext.work import Work, check_work

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKERS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>", "<repo_name>"]

SENTENCES = (
    "The tower was built in 1889. ",
    "Its keeper is called Ada Quill. ",
    "Nobody knows who painted the door.\n\n",
    "The bridge is closed on Mondays! ",
    "Does the river freeze? Rarely.\n",
    "Bread is sold in the market hall; fish is not. ",
)


def long_text(sentences: int) -> str:
    return "".join(SENTENCES[i % len(SENTENCES)] for i in range(sentences))


@lru_cache
def byte_level_tokenizer(template: str | None = CHATML, bos: bool = False) -> Any:
    """A byte-level BPE as GPT-2's: any text can be encoded. With `bos` texts begin with one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=MARKERS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = ["YES NO yes no Yes No YES NO yes no"] * 50
    tokenizer.train_from_iterator([*SENTENCES, *words], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
        )
    return _wrapped(tokenizer, template, bos_token="<|im_start|>")


@lru_cache
def byte_fallback_tokenizer(template: str | None = None) -> Any:
    """A character BPE as Llama-2's: spaces as ▁, unknown characters as bytes, BOS <s> on texts."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,?!<>/|_"]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return _wrapped(tokenizer, template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@lru_cache
def word_tokenizer() -> Any:
    """Whole words only: everything else is the unknown token."""
    words = ["[UNK]", "[SEP]", "tower", "built", "the", "was", "."]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _wrapped(tokenizer, None, unk_token="[UNK]", sep_token="[SEP]", eos_token="[SEP]")


def _wrapped(tokenizer: Tokenizer, template: str | None, **names: str) -> Any:
    names.setdefault("eos_token", "<|im_end|>")
    extra = [m for m in MARKERS if tokenizer.token_to_id(m) is not None and m not in names.values()]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=extra, **names
    )
    wrapped.chat_template = template
    return wrapped


def tiny_llama(vocab_size: int, max_length: int = 4096, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=max_length,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        # Large weights: a random model of the usual scale repeats one token for ever.
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


class ScriptedSequence:
    """A list of tokens with the operations of a sequence."""

    def __init__(self, model: ScriptedModel, tokens: Sequence[int]) -> None:
        self._model = model
        self.tokens = list(tokens)
        self.alive = True
        model.live.append(self)

    @property
    def length(self) -> int:
        self._check()
        return len(self.tokens)

    def fork(self, length: int | None = None) -> ScriptedSequence:
        self._check()
        if not self._model.can_roll_back and length not in (None, len(self.tokens)):
            raise ValueError("this model cannot go back")
        return ScriptedSequence(self._model, self.tokens[:length])

    def release(self) -> None:
        if self.alive:
            self.alive = False
            self._model.live.remove(self)
            self._model.released.append(self)

    def _check(self) -> None:
        if not self.alive:
            raise StaleSequenceError("released")


class ScriptedModel:
    """A model that replies as told: `script` maps the text before a reply to the reply.

    It keeps what every sequence has seen, so that tests can ask for the very tokens.
    """

    is_fallback = False
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(
        self,
        tokenizer: Any,
        script: Callable[[str], str],
        max_length: int | None = None,
        can_roll_back: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.max_length = max_length
        self.can_roll_back = can_roll_back
        self.vocab_size = len(tokenizer)
        self.tokens_processed = 0
        self.forwards: list[list[tuple[int, int]]] = []  # per forward: (length before, tokens)
        self.live: list[ScriptedSequence] = []
        self.released: list[ScriptedSequence] = []
        self.fail_at: int | None = None
        self.header = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
        self.lead = tokenizer(Prompts().probed_lead, add_special_tokens=False)["input_ids"]
        # Logits of tokens that a test wants to look likely after a text.
        self.likely: Callable[[list[int]], dict[int, float]] = lambda tokens: {}

    def new_sequence(self) -> ScriptedSequence:
        return ScriptedSequence(self, [])

    def forward(self, work: Sequence[Work]) -> list[torch.Tensor]:
        check_work(work, self.vocab_size, self.max_length)
        if self.fail_at is not None and len(self.forwards) >= self.fail_at:
            raise RuntimeError("the model failed")
        self.forwards.append([(item.sequence.length, len(item.tokens)) for item in work])
        rows = []
        for item in work:
            item.sequence.tokens += item.tokens
            self.tokens_processed += len(item.tokens)
            total = len(item.sequence.tokens)
            wanted = range(total - item.logits + 1, total + 1)
            seen = [self._logits(item.sequence.tokens[:n]) for n in wanted]
            rows.append(torch.stack(seen) if seen else torch.empty(0, self.vocab_size))
        return rows

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        logits = torch.zeros(self.vocab_size)
        for token, value in self.likely(tokens).items():
            logits[token] = value
        at = _last(tokens, self.header)
        if at is not None:
            begin = at + len(self.header)
            if tokens[begin : begin + len(self.lead)] == self.lead:
                begin += len(self.lead)
            prompt, reply = tokens[:begin], tokens[begin:]
            text = self.script(self.tokenizer.decode(prompt))
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            done = len(reply) >= len(ids)
            logits[self.tokenizer.eos_token_id if done else ids[len(reply)]] += 10.0
        return logits


def _last(tokens: list[int], part: list[int]) -> int | None:
    for at in range(len(tokens) - len(part), -1, -1):
        if tokens[at : at + len(part)] == part:
            return at
    return None
