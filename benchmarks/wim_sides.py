"""The sides of wim_end_to_end.py. Run as a script, it measures one side once and prints JSON.

All sides get the same token ids: document, segment borders and prompts come from wim_ext's own
tokenizing and templates. Everything is greedy.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from wim_ext.events import PHASES
from wim_ext.loading import load
from wim_ext.margins import WritingInTheMargins
from wim_ext.prompts import Layout, Prompts, fill
from wim_ext.segments import segment_tokens
from wim_ext.stopping import stop_ids
from wim_ext.tokens import TextCodec
from wim_ext.verdicts import first_verdict, says_no

SIDES = ("wim_ext", "wim_ext plain", "transformers")
WARM_UP = "The lighthouse was built in 1871. It is forty metres high. Nobody lives there. " * 12


class TransformersWim:
    """Writing in the Margins as one writes it with transformers alone.

    One DynamicCache holds the trunk. An extraction prompt and its margin are appended to it and
    cropped off again, so nothing is read twice; attention is transformers' own ("sdpa").
    """

    def __init__(self, model: Any, tokenizer: Any, settings: argparse.Namespace) -> None:
        self.model = model
        self.codec = TextCodec(tokenizer)
        self.prompts = Prompts()
        self.layout = Layout.of(self.codec, self.prompts)
        self.settings = settings
        self.stop_ids = stop_ids(SimpleNamespace(hf_model=model), self.codec, self.layout)
        # transformers 5 calls past_key_values `cache`.
        names = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"

    def run(self, document: str, question: str) -> dict[str, Any]:
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config)
        self.tokens = dict.fromkeys(PHASES, 0)
        self.seconds = dict.fromkeys(PHASES, 0.0)
        encoded = self.codec.encode_with_offsets(document)
        before = self.layout.opening + self.codec.encode(fill(self.prompts.intro))
        margins = []
        for segment in segment_tokens(document, encoded, self.settings.segment_tokens):
            self.feed(before + encoded.ids[segment.begin : segment.end], "document")
            before = []
            margins.append(self.margin(question))
        kept = [text for verdict, text in margins if verdict is not False and text]
        notes = "".join(fill(self.prompts.margin, margin=text) for text in kept)
        final = self.prompts.final_both if kept else self.prompts.final_context
        texts = {"margins": notes} if kept else {}
        answer = self.generate(
            fill(final, question=question, **texts),
            ("final_prompt", "answer"),
            self.settings.max_answer_tokens,
        )
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "margins": [text for _, text in margins],
            "answer": answer.lstrip(),
        }

    def margin(self, question: str) -> tuple[bool | None, str]:
        prompts, before = self.prompts, self.cache.get_seq_length()
        text = self.generate(
            fill(prompts.extract_fused, question=question),
            ("extraction_prompts", "margins"),
            self.settings.max_margin_tokens,
            lambda text: says_no(text, prompts.yes, prompts.no),
        )
        self.cache.crop(before - self.cache.get_seq_length())
        verdict, text = first_verdict(text, prompts.yes, prompts.no)
        # As wim_ext does: never more tokens than were reserved, should encoding again give more.
        limit, offsets = (
            self.settings.max_margin_tokens,
            self.codec.encode_with_offsets(text).offsets,
        )
        return verdict, text[: offsets[limit][0]] if len(offsets) > limit else text

    def generate(
        self,
        prompt: str,
        phases: tuple[str, str],
        limit: int,
        enough: Callable[[str], bool] = lambda text: False,
    ) -> str:
        logits = self.feed(self.codec.encode(prompt) + self.layout.closing, phases[0])
        chosen: list[int] = []
        while True:
            token = int(logits.argmax())
            if token in self.stop_ids:
                break
            chosen.append(token)
            if len(chosen) == limit or enough(self.codec.decode(chosen)):
                break
            logits = self.feed([token], phases[1])
        return self.codec.decode(chosen)

    @torch.inference_mode()
    def feed(self, tokens: list[int], phase: str) -> Tensor:
        start = time.perf_counter()
        logits: Tensor = self.model(
            input_ids=torch.tensor([tokens]),
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: self.cache},
        ).logits[0, -1]
        self.seconds[phase] += time.perf_counter() - start
        self.tokens[phase] += len(tokens)
        return logits


def run_wim_ext(engine: WritingInTheMargins, document: str, question: str) -> dict[str, Any]:
    result = engine.answer(document, question)
    return {
        "tokens": result.stats.tokens,
        "seconds": result.stats.seconds,
        "margins": [margin.text for margin in result.margins],
        "answer": result.answer,
    }


def side_runner(side: str, settings: argparse.Namespace) -> Callable[[str], dict[str, Any]]:
    """Loads the model for a side; the returned function answers the question about a document."""
    loaded = load(settings.model, dtype=settings.dtype, device="cpu", on_progress=lambda text: None)
    if side == "transformers":
        wim = TransformersWim(loaded.model, loaded.tokenizer, settings)
        return lambda document: wim.run(document, settings.question)
    engine = WritingInTheMargins(
        loaded.model,
        loaded.tokenizer,
        segment_tokens=settings.segment_tokens,
        max_margin_tokens=settings.max_margin_tokens,
        max_answer_tokens=settings.max_answer_tokens,
        relevance="fused",
        use="context" if side == "wim_ext plain" else "context+margins",
    )
    return lambda document: run_wim_ext(engine, document, settings.question)


def memory(field: str) -> int:
    """VmRSS or VmHWM (its peak) of this process in bytes; 0 where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


@contextmanager
def peak_reset() -> Iterator[None]:
    """Starts the peak anew, so that loading the model (which peaks higher) is not measured."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("the peak of memory could not be reset; it includes loading", file=sys.stderr)
    yield


def measure(side: str, document: str, settings: argparse.Namespace) -> dict[str, Any]:
    """One run of one side: tokens, seconds, memory, and what it wrote."""
    torch.set_num_threads(settings.threads)
    answer = side_runner(side, settings)
    answer(WARM_UP)
    before = memory("VmRSS")
    with peak_reset():
        start, cpu_start = time.perf_counter(), time.process_time()
        measured = answer(document)
        measured["wall_seconds"] = time.perf_counter() - start
        measured["cpu_seconds"] = time.process_time() - cpu_start
    measured["memory_bytes"] = {"before": before, "peak": memory("VmHWM")}
    return {"side": side, **measured}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("document", type=Path)
    parser.add_argument("settings", help="the settings of wim_end_to_end.py as JSON")
    arguments = parser.parse_args()
    settings = argparse.Namespace(**json.loads(arguments.settings))
    print(json.dumps(measure(arguments.side, arguments.document.read_text("utf-8"), settings)))


if __name__ == "__main__":
    main()
