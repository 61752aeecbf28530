"""Writing in the Margins from end to end: wim_ext, wim_ext without margins, plain transformers.

    python benchmarks/wim_end_to_end.py --tokens 6144 --repeats 3

Every run has a process of its own; the repeats of the sides take turns, so that a slow minute of
the machine falls on all of them; figures are medians. Prints a table, writes JSON to results/.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from wim_sides import SIDES

from wim_ext.events import PHASES
from wim_ext.info import collect

HERE = Path(__file__).resolve().parent
QUESTION = "What does the with statement do?"


def parse_arguments(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=None, help="default: torch's own number")
    parser.add_argument("--tokens", type=int, default=6144, help="length of the document")
    parser.add_argument("--document", type=Path, help="a text file; default: Python's own help")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--segment-tokens", type=int, default=1024)
    parser.add_argument("--max-margin-tokens", type=int, default=64)
    parser.add_argument("--max-answer-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "wim_end_to_end.json")
    arguments = parser.parse_args(args)
    if arguments.threads is None:
        import torch

        arguments.threads = torch.get_num_threads()
    return arguments


def document_text(arguments: argparse.Namespace) -> str:
    """The document, cut to the wanted number of tokens."""
    from wim_ext.loading import load
    from wim_ext.tokens import TextCodec

    if arguments.document:
        text = arguments.document.read_text("utf-8")
    else:
        from pydoc_data.topics import topics

        text = "\n\n".join(str(topics[name]) for name in sorted(topics))
    codec = TextCodec(load(arguments.model, dtype=arguments.dtype, device="cpu").tokenizer)
    offsets = codec.encode_with_offsets(text).offsets
    if len(offsets) < arguments.tokens:
        sys.exit(f"--tokens {arguments.tokens}: the document has only {len(offsets)}")
    return text[: offsets[arguments.tokens - 1][1]]


def run_sides(document: str, arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Every side `repeats` times, taking turns."""
    names = "model dtype threads question segment_tokens max_margin_tokens max_answer_tokens"
    settings = {name: getattr(arguments, name) for name in names.split()}
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "document.txt"
        path.write_text(document, "utf-8")
        for repeat in range(arguments.repeats):
            for side in SIDES:
                print(f"repeat {repeat + 1} of {arguments.repeats}: {side}", file=sys.stderr)
                command = [str(HERE / "wim_sides.py"), side, str(path), json.dumps(settings)]
                done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True)
                if done.returncode != 0:
                    sys.exit(f"{side} failed with code {done.returncode}")
                runs[side].append(json.loads(done.stdout.splitlines()[-1]))
    return runs


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of one side's runs; its tokens and texts, which every repeat must agree on."""
    first = runs[0]
    for run in runs[1:]:
        if any(run[key] != first[key] for key in ("tokens", "margins", "answer")):
            sys.exit(f"{first['side']}: greedy runs differ from each other")
    growth = [run["memory_bytes"]["peak"] - run["memory_bytes"]["before"] for run in runs]
    return {
        "tokens": first["tokens"],
        "margins": first["margins"],
        "answer": first["answer"],
        "seconds": {p: median(run["seconds"][p] for run in runs) for p in PHASES},
        "wall_seconds": median(run["wall_seconds"] for run in runs),
        "cpu_seconds": median(run["cpu_seconds"] for run in runs),
        "wall_seconds_all": [run["wall_seconds"] for run in runs],
        "peak_memory_bytes": median(run["memory_bytes"]["peak"] for run in runs),
        "memory_growth_bytes": median(growth),
    }


def table(sides: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row a phase with tokens and seconds of every side, then totals and memory."""
    header = "| phase | " + " | ".join(f"{side}: tokens | s" for side in sides) + " |"
    rows = [header, "|---" * (1 + 2 * len(sides)) + "|"]
    for phase in PHASES:
        cells = [f"{s['tokens'][phase]:,} | {s['seconds'][phase]:.2f}" for s in sides.values()]
        rows.append(f"| {phase.replace('_', ' ')} | " + " | ".join(cells) + " |")
    totals = [f"{sum(s['tokens'].values()):,} | {s['wall_seconds']:.2f}" for s in sides.values()]
    rows.append("| **all, wall clock** | " + " | ".join(totals) + " |")
    spread = [
        f"| {min(s['wall_seconds_all']):.2f}–{max(s['wall_seconds_all']):.2f}"
        for s in sides.values()
    ]
    rows.append("| fastest–slowest | " + " | ".join(spread) + " |")
    for label, key, unit in (
        ("CPU time of all threads", "cpu_seconds", 1),
        ("peak memory, MB", "peak_memory_bytes", 1e6),
        ("of it for the run, MB", "memory_growth_bytes", 1e6),
    ):
        cells = [f"| {side[key] / unit:,.1f}" for side in sides.values()]
        rows.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main(args: list[str] | None = None) -> None:
    arguments = parse_arguments(args)
    sides = {side: summary(r) for side, r in run_sides(document_text(arguments), arguments).items()}
    ours, theirs = sides["wim_ext"], sides["transformers"]
    same = {key: ours[key] == theirs[key] for key in ("margins", "answer", "tokens")}
    facts = collect()
    settings = {**vars(arguments), "output": str(arguments.output.name)}
    report = {
        "when": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": {"system": platform.platform(), **facts["cpu"], "kernels": facts["kernels"]},
        "versions": facts["versions"],
        "settings": {name: str(v) if isinstance(v, Path) else v for name, v in settings.items()},
        "same_as_transformers": same,
        "sides": sides,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    cpu = facts["cpu"]
    print(f"{cpu['model']}, {arguments.threads} threads, {arguments.dtype}, ", end="")
    print(f"torch {facts['versions']['torch']}, transformers {facts['versions']['transformers']}\n")
    print(table(sides))
    print(f"\nsame as transformers: {same}; {ours['answer']!r}")
    if arguments.dtype == "float32" and not all(same.values()):
        sys.exit("float32 greedy: wim_ext and transformers must agree")


if __name__ == "__main__":
    main()
