"""Compare the integer form of exported C code with the float32 engine: accuracy on sMNIST, perplexity on Penn Treebank.

    python benchmarks/c_integer.py                # writes benchmarks/results/c_integer.json

The pretrained ``smnist`` model classifies the 10,000 test images. No language model is shipped, so a small one is
trained first, for --minutes on the training words of Penn Treebank: an embedding, a layer and a readout. It knows the
1,999 most frequent words, and one token for all others. Its perplexity is measured on the first --words words of the
test split. The data are read from EGRU_DATA.
"""

import argparse
import datetime
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import egru
from egru import EventEngine
from egru.data import penn_treebank, sequential_mnist
from egru.files import replace_file

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tests.runtime.c.networks import CNetwork, address, compile_library, fixed_point  # noqa: E402

VOCABULARY = 2000
RESULTS = ROOT / "benchmarks" / "results" / "c_integer.json"


class WordModel(nn.Module):
    """A language model of the children that EventEngine accepts."""

    def __init__(self, words: int, units: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 64)
        self.layer = egru.EGRU(64, units)
        self.readout = nn.Linear(units, words)

    def forward(self, x: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        y, state = self.layer(self.embedding(x), state)
        return self.readout(y), state


def train_words(text: torch.Tensor, units: int, minutes: float) -> tuple[WordModel, int]:
    """Train a language model on consecutive windows of twenty parallel streams; return it and the number of windows."""
    torch.manual_seed(0)
    model = WordModel(VOCABULARY, units)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    streams = text[: len(text) // 20 * 20].view(20, -1).t()
    state, windows, end, at = None, 0, time.monotonic() + 60 * minutes, 0
    while time.monotonic() < end:
        if at + 36 > len(streams):
            at, state = 0, None
        scores, state = model(streams[at : at + 35], state)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), streams[at + 1 : at + 36].flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        state = type(state)(*(part.detach() for part in state))
        at, windows = at + 35, windows + 1
        if windows % 100 == 0:
            print(f"{windows} windows, loss {loss.item():.3f}", flush=True)
    return model.eval(), windows


def compile_integer(engine: EventEngine, folder: str) -> CNetwork:
    library = compile_library(Path(folder), {"net": engine}, "-O3", weights="integer")
    return CNetwork(library, "net", engine.output_size, True)


def digits() -> dict[str, Any]:
    """Return the accuracies of the pretrained model on the test images."""
    engine = EventEngine(**egru.pretrained("smnist").streaming())
    images, labels = sequential_mnist().test
    out = np.empty(10, np.int32)
    correct = {"float32": 0, "integer": 0}
    with tempfile.TemporaryDirectory() as folder:
        network = compile_integer(engine, folder)
        for image, label in zip(images, labels.tolist(), strict=True):
            engine.reset()
            correct["float32"] += int(np.asarray(engine.run(image, last=True)).argmax()) == label
            network.call("reset", network.state)
            status = network.call("run", network.state, address(fixed_point(image)), len(image), address(out))
            assert status == 0
            correct["integer"] += int(out.argmax()) == label
    return {key: count / len(labels) for key, count in correct.items()}


def words(minutes: float, count: int, units: int) -> dict[str, Any]:
    """Return the perplexities of a language model trained here."""
    data = penn_treebank()
    token = torch.full((len(data.vocabulary),), VOCABULARY - 1)
    token[data.train.bincount(minlength=len(token)).argsort(descending=True)[: VOCABULARY - 1]] = torch.arange(
        VOCABULARY - 1
    )
    model, windows = train_words(token[data.train], units, minutes)
    engine = EventEngine(model)
    text = token[data.test[: count + 1]]
    losses = {"float32": 0.0, "integer": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        network = compile_integer(engine, folder)
        for word, following in zip(text[:-1], text[1:].tolist(), strict=True):
            scores = {"float32": np.asarray(engine.step(int(word))), "integer": network.step(word) / 2.0**16}
            for key, values in scores.items():
                log_sum = np.logaddexp.reduce(values.astype(np.float64))
                losses[key] += log_sum - float(values[following])
    record = {key: math.exp(loss / count) for key, loss in losses.items()}
    rate = engine.activity.events[0] / (count * units)
    return record | {"units": units, "windows": windows, "words": count, "activity_sparsity": 1 - rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0, help="time to train the language model; default: 3")
    parser.add_argument("--words", type=int, default=5000, help="words of the test split; default: %(default)s")
    parser.add_argument("--units", type=int, default=128, help="units of the language model; default: %(default)s")
    parser.add_argument("--out", type=Path, default=RESULTS, help="write the record to this JSON file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"date": datetime.date.today().isoformat(), "egru": egru.__version__}
    record["ptb_perplexity"] = words(args.minutes, args.words, args.units)
    print(record["ptb_perplexity"], flush=True)
    record["smnist_accuracy"] = digits()
    print(record["smnist_accuracy"])
    replace_file(args.out, (json.dumps(record, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
