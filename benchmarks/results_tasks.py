"""Sections of docs/results.md: the tasks, their models, published numbers, and the text around each table."""

import dataclasses
from typing import Literal

Row = tuple[str, ...]
Score = Literal["accuracy", "perplexity"]


@dataclasses.dataclass(frozen=True)
class Task:
    """One section of the page.

    Attributes:
        name: Prefix of the recipes of the task.
        title: Heading of the section.
        score: Score that the table reports.
        models: Name of the model by recipe. Figures show the paper's number of the first recipe that has one.
        before: Text above the table.
        others: Published rows that no recipe contains.
        after: Text below the table.
    """

    name: str
    title: str
    score: Score
    models: dict[str, str]
    before: str
    others: tuple[Row, ...] = ()
    after: str = ""

    def head(self) -> Row:
        """Return the column names of the table."""
        scores = (f"test {self.score}", f"validation {self.score}, best epoch")
        sparsity = ("activity sparsity (test)", "backward sparsity (training)")
        return ("model", "source", "parameters", *scores, *sparsity, "MACs per step", "epochs", "wall-clock time")


INTRODUCTION = """# Results

`benchmarks/results_page.py` writes this page from the records in `benchmarks/results/runs/`. Do not edit it.

- The test split is scored once per run, with the weights of the epoch that has the best validation score.
- Activity sparsity is the fraction of units without an event, averaged over units and steps.
- MACs (multiply-accumulates) are counted as in the paper: from the activity of each layer, including the readout.
- Backward sparsity is counted as in the paper: the fraction of states with `|c - threshold|` at or above the
  surrogate's width. "Skippable" is the fraction with `dy/dc = 0`, which a kernel can skip. Both are measured in
  training mode on one batch per epoch and averaged over all epochs.
- Wall-clock time covers training, validation and checkpoints, up to the end of the last epoch.
- Several seeds are summarised by their mean and standard deviation (n - 1).
"""

SEQUENTIAL_MNIST = Task(
    "smnist",
    "Sequential MNIST",
    "accuracy",
    {
        "smnist-stable": "EGRU 590, stable settings",
        "smnist-egru-590": "EGRU 590, the paper's settings",
        "smnist-stable-gru": "GRU 590, same settings and initialisation",
        "smnist-gru-590": "GRU 590, the paper's settings",
        "smnist-cornn-256": "coRNN 256",
    },
    others=(
        (
            "EGRU 590",
            "paper, supplement, 4 runs",
            "1.048M",
            "95.5 ± 1.6 %",
            "-",
            "80.5 ± 4.9 %",
            "25.6 ± 1.7 %, epoch 100",
            "(210 ± 51)K",
            "200",
            "-",
        ),
        ("EGRU 590", "EvNN", "-", "not published", "-", "-", "-", "-", "200", "-"),
    ),
    before="""\
The network reads an image as 784 pixels, one per step. It trains on 55,000 images, and 5,000 others select the epoch.
The 10,000 images of the test file are scored once per run. The stable settings were chosen on images of the training
file only ([study](smnist-study.md)). Unlike the paper's EGRU, they do not reset states at events. The paper quotes
the result of coRNN from its authors.

Runs with a reset use learning rate 0.003 and a surrogate of width 0.3 and height 0.2. Runs of 2026-11-16 shared the GPU
with others, which lengthened their wall-clock times; alone, one takes about 2.5 minutes.
""",
    after="""\
EvNN has a command for this task but reports no accuracy (see benchmarks/README.md in its repository). Its trace passes
gradients back from the last step only, because the recursion is commented out in `frameworks/pytorch/egru.py`. It did
not learn when we ran it; with the trace repaired, its gradients exploded.
""",
)

PERMUTED_MNIST = Task(
    "psmnist",
    "Permuted sequential MNIST",
    "accuracy",
    {
        "psmnist-stable": "EGRU 590, stable settings",
        "psmnist-egru-590": "EGRU 590, the paper's settings",
        "psmnist-gru-590": "GRU 590, the paper's settings",
        "psmnist-cornn-256": "coRNN 256",
    },
    before="The same task with the pixels in one fixed random order.\n",
)

PENN_TREEBANK = Task(
    "ptb",
    "Penn Treebank",
    "perplexity",
    {
        "ptb-evnn": "EGRU 1350, EvNN's settings",
        "ptb-egru-1350": "EGRU 1350, the paper's settings",
        "ptb-evnn-gru": "GRU 1350, same settings",
        "ptb-gru-1350": "GRU 1350, the paper's settings",
        "ptb-awd-lstm": "AWD-LSTM 1150",
    },
    others=(
        ("EGRU 1350", "paper, supplement", "33M", "58.7", "-", "79.9 %", "46.0 %", "6.8M + 3.1M", "2500", "-"),
        ("EGRU 1350", "EvNN", "32M", "not published", "-", "-", "-", "-", "1000", "-"),
    ),
    before="""\
The test split is read once, as a single sequence: the state (`c` and `y`) is carried from the first word to the last.
Validation runs after every epoch in 64 parallel sequences (AWD-LSTM: 10), each of which starts from a zero state. The
paper quotes the result of the AWD-LSTM from its authors.

With embedding size 750 (31.7M parameters), a step takes 3.05M + 10.9M a + 8.5M b + 9.2M c MACs, where a, b and c are
the activities of the three layers. Here the last layer is the most active one and costs more than the other two
together.

The weights (60.5 MiB in bfloat16, 30.5 MiB in int8) are not part of the repository. The command listed under each run
recreates them, and `egru export RUN small --weights int8` packs them.
""",
    after="""\
EvNN's README offers weights but reports no perplexity. We ran its code and settings on an H200. The validation
perplexity was 392, 150, 122, 109, 102, 98 and 94 after epochs 1, 6, 11, 16, 21, 26 and 31, with 15 % activity and 68 %
backward sparsity. It was not run further. [Training](training.md) lists where our code differs.

"Thresholds raised" is the run of 1000 epochs after `egru quieten`, which raises low thresholds to a floor and trains
nothing. The floors were chosen on the validation split, read as a single sequence like the test split
([details](pruning.md#raising-thresholds)). "Fine-tuned" continues the same run for 120 epochs with floors of 0.1, 0.2
and 0.4 and without a reset at events. Training did not recover the perplexity that this cost.

GRU and AWD-LSTM were trained for fewer epochs than their recipes specify (1000 and 500), limited by GPU time. An epoch
takes 3.1 s for the GRU with cuDNN and 1.14 s for the EGRU. Both keep the learning rate constant for 70 % of their
epochs. In that phase, the EGRU's validation perplexity was 69.5 after as many epochs as the GRU's whole training (241),
and 65.7 after as much time. The GRU uses the EGRU's settings, which were not tuned for it.
""",
)

TASKS = (SEQUENTIAL_MNIST, PERMUTED_MNIST, PENN_TREEBANK)
