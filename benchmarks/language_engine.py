"""A trained language model word by word on the CPU: egru.EventEngine against the same model in torch.

    python benchmarks/language_engine.py RUN                    # the whole test split
    python benchmarks/language_engine.py RUN --words 5000       # its beginning

RUN is a run's folder, or what `egru export` made of it; the data come from EGRU_DATA. Every contestant reads the same
words, batch 1, one thread, its state carried from the first word to the last: the model in plain torch (the reference
backend, which is faster than the compiled layers for a single step), and the engine with float32 and with int8 weights.
The first --timed words they read one at a time, in turns of --turn words in one process; the time of a word is that of
the call from its id to the scores of the next, and the median over turns is reported. The rest they read in stretches,
off the clock. Perplexities, in float64, are over all of them. Exit status 1 where an engine's perplexity is further
from torch's than LIMITS allow.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import platform
import statistics
import sys
import time
from typing import Any, Protocol

import torch
from torch import Tensor

import egru
from egru import runs
from egru.data import Text
from egru.models import LanguageModel

LIMITS = {"float32": 0.1, "int8": 0.5}
"""How far an engine's perplexity may be from the torch model's."""


STRETCH = 256
"""Words in a call off the clock."""


class Reader(Protocol):
    def step(self, word: int) -> Tensor:
        """From a word to the scores of the next."""
        ...

    def run(self, words: Tensor) -> Tensor:
        """The same for many words."""
        ...


class Contestant:
    """Reads words, keeps the time of every turn and the loss of every word."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.turns, self.loss = reader, [], 0.0

    def turn(self, words: list[int], following: list[int]) -> None:
        spent = 0.0
        for word, target in zip(words, following, strict=True):
            start = time.perf_counter()
            scores = self.reader.step(word)
            spent += time.perf_counter() - start
            self.loss -= scores.double().log_softmax(0)[target].item()
        self.turns.append(spent / len(words))

    def rest(self, words: Tensor, following: Tensor) -> None:
        scores = self.reader.run(words)
        self.loss -= scores.double().log_softmax(1).gather(1, following[:, None]).sum().item()

    def result(self, words: int) -> dict[str, float]:
        median = statistics.median(self.turns)
        return {
            "words_per_second": 1 / median,
            "microseconds_per_word": 1e6 * median,
            "perplexity": math.exp(self.loss / words),
        }


class InTorch:
    def __init__(self, model: LanguageModel) -> None:
        self.model, self.state = model, None
        self.token = torch.zeros(1, 1, dtype=torch.int64)

    def step(self, word: int) -> Tensor:
        self.token.fill_(word)
        scores, self.state = self.model(self.token, self.state)
        return scores[0, 0]

    def run(self, words: Tensor) -> Tensor:
        scores, self.state = self.model(words[:, None], self.state)
        return scores[:, 0]

    def backend(self, name: str) -> None:
        for layer in self.model.layers:
            if isinstance(layer, egru.EGRU):
                layer.backend = name


@torch.no_grad()
def measure(model: LanguageModel, text: Tensor, timed: int, turn: int) -> dict[str, Any]:
    """``text`` is read from its first word to the last but one, each contestant on its own."""
    engines = {weights: egru.EventEngine(model, weights=weights) for weights in LIMITS}
    plain = InTorch(model)
    contestants = {"torch": Contestant(plain)}
    contestants |= {f"engine {weights}": Contestant(engine) for weights, engine in engines.items()}
    words, count = text.tolist(), len(text) - 1
    timed = min(timed, count)
    plain.backend("reference")
    for start in range(0, timed, turn):
        stop = min(start + turn, timed)
        for contestant in contestants.values():
            contestant.turn(words[start:stop], words[start + 1 : stop + 1])
    plain.backend("auto")
    for start in range(timed, count, STRETCH):
        stop = min(start + STRETCH, count)
        for contestant in contestants.values():
            contestant.rest(text[start:stop], text[start + 1 : stop + 1])
    found = {name: contestant.result(count) for name, contestant in contestants.items()}
    for weights, engine in engines.items():
        row, activity = found[f"engine {weights}"], engine.activity
        row["times_torch"] = row["words_per_second"] / found["torch"]["words_per_second"]
        row["perplexity_difference"] = row["perplexity"] - found["torch"]["perplexity"]
        row["macs_per_word"] = activity.macs / activity.steps
        silent = [1 - rate for rate in activity.rates]
        row["activity_sparsity"] = sum(s * h for s, h in zip(silent, activity.hidden, strict=True)) / sum(
            activity.hidden
        )
    return {"words": count, "timed": timed, "contestants": found, "level": engines["float32"].level}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path, metavar="RUN")
    parser.add_argument("--words", type=int, help="read only the first so many words of the test split")
    parser.add_argument("--timed", type=int, default=2000, help="how many of them one at a time, on the clock")
    parser.add_argument("--turn", type=int, default=50, help="words a contestant reads before the next one's turn")
    parser.add_argument("--out", type=pathlib.Path, help="write the result here too, as JSON")
    options = parser.parse_args(arguments)
    for name in ("words", "timed", "turn"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    torch.set_num_threads(1)
    trained = runs.load(options.run, device="cpu")
    if not isinstance(trained.model, LanguageModel) or not isinstance(trained.data, Text):
        parser.error(f"{options.run} holds no language model")
    text = trained.data.test[: None if options.words is None else options.words + 1]
    result = measure(trained.model.float(), text, options.timed, options.turn)
    result |= {
        "recipe": json.loads((options.run / "config.json").read_text())["recipe"],
        "parameters": egru.activity.count_parameters(trained.model),
        "split": "test",
        "torch": torch.__version__,
        "threads": 1,
        "machine": _machine(),
        "date": datetime.date.today().isoformat(),
    }
    for name, row in result["contestants"].items():
        speed = f"{row['words_per_second']:9.1f} words/s, {row['microseconds_per_word']:8.1f} us a word"
        times = f", {row['times_torch']:.2f} x torch" if "times_torch" in row else ""
        print(f"{name:15} {speed}, perplexity {row['perplexity']:.3f}{times}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    apart = {w: result["contestants"][f"engine {w}"]["perplexity_difference"] for w in LIMITS}
    far = {w: difference for w, difference in apart.items() if not abs(difference) <= LIMITS[w]}
    for weights, difference in far.items():
        print(f"engine {weights}: perplexity differs by {difference:.3f}, more than {LIMITS[weights]}")
    return 1 if far else 0


def _machine() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
