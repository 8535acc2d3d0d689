"""Time a trained language model word by word on the CPU: egru.EventEngine against the same model in torch.

    python benchmarks/language_engine.py RUN                    # the complete test split
    python benchmarks/language_engine.py RUN --words 5000       # its first 5000 words

RUN is the folder of a run or of an export (`egru export`). The data are read from EGRU_DATA.

All contestants read the same words with batch size 1 and one thread, and carry their state from the first word to the
last. They are the engine with float32 and with int8 weights, and the model in plain torch (the reference backend, which
is faster than the compiled layers for a single step).

The first --timed words are read one at a time, interleaved in turns of --turn words. The time per word is the time from
its id to the scores of the next word; the median over turns is reported. The remaining words are read in blocks and not
timed. Perplexities are computed in float64 over all words. The exit status is 1 if the perplexity of an engine differs
from that of torch by more than LIMITS.
"""

import argparse
import json
import math
import pathlib
import statistics
import sys
import time
from typing import Any, Protocol

import torch
from torch import Tensor

import egru
from egru import runs
from egru.data import Text
from egru.layers import event_layers
from egru.models import LanguageModel
from egru.types import Backend, WeightFormat

try:
    from benchmarks.conditions import conditions, load_average
except ImportError:  # run as a script
    from conditions import conditions, load_average

LIMITS: dict[WeightFormat, float] = {"float32": 0.1, "int8": 0.5}
"""Maximum difference of perplexity between an engine and the torch model."""
BLOCK = 256
"""Words per call when the time is not measured."""


class Reader(Protocol):
    def step(self, word: int) -> Tensor:
        """Return the scores of the word after ``word``, ``(V,)``."""
        ...

    def run(self, words: Tensor) -> Tensor:
        """Return the scores after each of ``words``, ``(T, V)``."""
        ...


class Contestant:
    """A reader with the time per word of each turn and the sum of its losses."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.turns, self.loss = reader, [], 0.0

    def read_timed(self, words: list[int], targets: list[int]) -> None:
        seconds = 0.0
        for word, target in zip(words, targets, strict=True):
            start = time.perf_counter()
            scores = self.reader.step(word)
            seconds += time.perf_counter() - start
            self.loss -= scores.double().log_softmax(0)[target].item()
        self.turns.append(seconds / len(words))

    def read_untimed(self, words: Tensor, targets: Tensor) -> None:
        scores = self.reader.run(words)
        self.loss -= scores.double().log_softmax(1).gather(1, targets[:, None]).sum().item()

    def result(self, words: int) -> dict[str, float]:
        median = statistics.median(self.turns)
        return {
            "words_per_second": 1 / median,
            "microseconds_per_word": 1e6 * median,
            "perplexity": math.exp(self.loss / words),
        }


class TorchReader:
    """The model in torch, with its state."""

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

    def set_backend(self, backend: Backend) -> None:
        for _, layer in event_layers(self.model):
            if isinstance(layer, egru.EGRU):
                layer.backend = backend


@torch.no_grad()
def measure(model: LanguageModel, text: Tensor, timed: int, turn: int) -> dict[str, Any]:
    """Let all contestants read ``text`` up to its last word but one, and return the record of the comparison."""
    engines = {weights: egru.EventEngine(model, weights=weights) for weights in LIMITS}
    reference = TorchReader(model)
    contestants = {"torch": Contestant(reference)}
    contestants |= {f"engine {weights}": Contestant(engine) for weights, engine in engines.items()}
    words, count = text.tolist(), len(text) - 1
    timed = min(timed, count)
    reference.set_backend("reference")
    for start in range(0, timed, turn):
        stop = min(start + turn, timed)
        for contestant in contestants.values():
            contestant.read_timed(words[start:stop], words[start + 1 : stop + 1])
    reference.set_backend("auto")
    for start in range(timed, count, BLOCK):
        stop = min(start + BLOCK, count)
        for contestant in contestants.values():
            contestant.read_untimed(text[start:stop], text[start + 1 : stop + 1])
    rows = {name: contestant.result(count) for name, contestant in contestants.items()}
    for weights, engine in engines.items():
        row, activity = rows[f"engine {weights}"], engine.activity
        row["times_torch"] = row["words_per_second"] / rows["torch"]["words_per_second"]
        row["perplexity_difference"] = row["perplexity"] - rows["torch"]["perplexity"]
        row["macs_per_word"] = activity.macs / activity.steps
        row["activity_sparsity"] = 1 - sum(activity.events) / (activity.steps * sum(activity.hidden))
    return {"words": count, "timed": timed, "contestants": rows, "level": engines["float32"].level}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path, metavar="RUN")
    parser.add_argument("--words", type=int, help="number of words of the test split to read; default: all")
    parser.add_argument("--timed", type=int, default=2000, help="number of words to time; default: %(default)s")
    parser.add_argument("--turn", type=int, default=50, help="words per turn; default: %(default)s")
    parser.add_argument("--out", type=pathlib.Path, help="write the result to this JSON file")
    options = parser.parse_args(arguments)
    for name in ("words", "timed", "turn"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    torch.set_num_threads(1)
    trained = runs.load(options.run, device="cpu")
    if not isinstance(trained.model, LanguageModel) or not isinstance(trained.data, Text):
        parser.error(f"RUN must be a language model, got {options.run}")
    text = trained.data.test[: None if options.words is None else options.words + 1]
    load = load_average()
    result = measure(trained.model.float(), text, options.timed, options.turn)
    result |= {
        "recipe": json.loads((options.run / "config.json").read_text())["recipe"],
        "parameters": egru.activity.count_parameters(trained.model),
        "split": "test",
        **conditions(load),
    }
    for name, row in result["contestants"].items():
        speed = f"{row['words_per_second']:9.1f} words/s, {row['microseconds_per_word']:8.1f} us per word"
        times = f", {row['times_torch']:.2f} x torch" if "times_torch" in row else ""
        print(f"{name:15} {speed}, perplexity {row['perplexity']:.3f}{times}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    differences = {w: result["contestants"][f"engine {w}"]["perplexity_difference"] for w in LIMITS}
    too_large = {w: difference for w, difference in differences.items() if not abs(difference) <= LIMITS[w]}
    for weights, difference in too_large.items():
        print(f"engine {weights}: perplexity differs by {difference:.3f}, the maximum is {LIMITS[weights]}")
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
