"""Sections of docs/results/experiments.md: tasks, models, published numbers, and the text around each table."""

import dataclasses
from typing import Literal

from egru.experiments import Paper

Row = tuple[str, ...]
Score = Literal["accuracy", "perplexity"]


@dataclasses.dataclass(frozen=True)
class Task:
    """One section of the page.

    Attributes:
        name: Start of the names of its figures.
        title: Heading of the section.
        score: Score that the table reports.
        data: Data set of the runs.
        tables: Tables of :data:`egru.experiments.tables.TABLES` whose recipes and quoted rows it shows.
        models: Name of the model by recipe. Figures show the paper's number of the first recipe that has one.
        before: Text above the table.
        others: Published rows that are not in the paper.
        after: Text below the table.
    """

    name: str
    title: str
    score: Score
    data: str
    tables: tuple[str, ...]
    models: dict[str, str]
    before: str
    others: tuple[Row, ...] = ()
    after: str = ""

    def head(self) -> Row:
        """Return the column names of the table."""
        scores = (f"test {self.score}", f"validation {self.score}, tested epoch")
        sparsity = ("activity sparsity (test)", "backward sparsity (training)")
        last = ("MACs per step", "epochs", "machine", "wall-clock time")
        return ("model", "source", "parameters", *scores, *sparsity, *last)

    def is_comparable(self, paper: Paper) -> bool:
        """Return whether a row of the paper is for the same data and has this score."""
        return paper.data in ("", self.data) and bool(getattr(paper, self.score))


INTRODUCTION = """# Results

Every number on this page comes from the records in `benchmarks/results/runs/`. The command
`python benchmarks/results_page.py` writes the page.

- The test split is scored once per run, with the weights of the saved epoch that has the best validation score. "Best
  of every 40th" means that every 40th epoch and the last one were saved (`--save-every 40`).
- Activity sparsity is the fraction of units without an event, averaged over units and steps.
- Backward sparsity is counted as in the paper: the fraction of states with `|c - threshold|` at or above the
  surrogate's width. "Skippable" is the fraction with `dy/dc = 0`, which a kernel can skip. Ours are measured in
  training mode on one batch per epoch and averaged over all epochs, as the paper does for language models. For images
  and gestures, the paper gives those of one epoch.
- Rows of the paper name its table: 1 to 3 are in the main text, S1 to S7 in the supplement. "Quoted" rows are
  those that the paper takes from other publications.
- Wall-clock time covers training, validation and checkpoints, up to the end of the last epoch.
- Several seeds are summarised by their mean and standard deviation (n - 1).

What is counted:

- MACs (multiply-accumulates) follow from the activity of each layer, as in the paper. Convolutions are counted in full.
- A classifier's readout runs once per sequence, so its MACs are divided by the number of steps. The paper counts it at
  every step: its 1.054M MACs of GRU 590 are 1.048M of the layer and 5.9K of the readout. The readout of a language
  model runs at every step.
- Our parameters include the readout and batch normalisation, for EGRU 590 together 7,090 (1.056M). The paper's 1.048M
  for EGRU 590 are those of the layer alone. Those of language models include the embedding, which the readout shares.
- For coRNN 256 we count 131K MACs, the 256 x 512 recurrent weights. The paper's 262K is twice that number; it may count
  multiplications and additions separately.
"""

SEQUENTIAL_MNIST = Task(
    "smnist",
    "Sequential MNIST",
    "accuracy",
    "smnist",
    ("smnist",),
    {
        "smnist": "EGRU 590, our settings",
        "smnist-paper": "EGRU 590, the paper's settings",
        "smnist-egru-512": "EGRU 512, the paper's settings",
        "smnist-gru": "GRU 590, same settings and initialisation",
        "smnist-gru-590": "GRU 590, the paper's settings",
        "smnist-gru-512": "GRU 512, the paper's settings",
        "smnist-cornn-256": "coRNN 256",
    },
    others=(("EGRU 590", "EvNN", "-", "not published", "-", "-", "-", "-", "200", "-", "-"),),
    before="""\
The network reads an image as 784 pixels, one per step. It trains on 55,000 images, and 5,000 others select the epoch.
The 10,000 images of the test file are scored once per run. Our settings were chosen on images of the training file only
([study](smnist-study.md)). Unlike the paper's EGRU, they do not reset states at events, and they include a rate loss of
0.3.

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
    "psmnist",
    ("psmnist",),
    {
        "psmnist": "EGRU 590, our settings",
        "psmnist-paper": "EGRU 590, the paper's settings",
        "psmnist-egru-512": "EGRU 512, the paper's settings",
        "psmnist-gru-590": "GRU 590, the paper's settings",
        "psmnist-cornn-256": "coRNN 256",
    },
    before="The same task with the pixels in one fixed random order.\n",
)

SMALL_ABLATION = Task(
    "ablation",
    "Ablation study on small images",
    "accuracy",
    "smnist",
    ("small-ablation",),
    {
        "smnist14-ablation-full": "EGRU 128, full",
        "smnist14-ablation-unregularised": "EGRU 128, without regularisation",
        "smnist14-ablation-scalar": "EGRU 128, scalar threshold",
        "smnist14-ablation-hard": "EGRU 128, hard clear",
        "smnist14-ablation-none": "EGRU 128, no clear",
    },
    before="""\
The paper's ablation study (Table S4, on gestures) repeated on sequential MNIST with 14 by 14 pixels, 196 steps. Each
run trains for 20 epochs on 20,000 images, on one CPU core.

Clearing costs accuracy here: no clearing is 4 points better than the paper's clearing by the output (full), and a hard
clear 2 points, at nearly the same activity sparsity. The paper finds the opposite on gestures, where the full network
is 1.3 and 3 points ahead. Two of its other findings hold: one threshold for all units makes the network sparser but
less accurate, and regularisation adds about 7 points of activity sparsity at almost no cost in accuracy.
""",
)

SCALING = Task(
    "scaling",
    "Size of the layer on small images",
    "accuracy",
    "smnist",
    ("scaling",),
    {f"smnist14-egru-{units}": f"EGRU {units}" for units in (64, 128, 256, 384, 512, 640)},
    before="""\
The paper's scaling study: networks of different sizes on sequential MNIST with 14 by 14 pixels, with the settings of
the ablation study above, 20 epochs on 20,000 images, one seed.

Larger networks learn faster, as in the paper, but the effect ends at 256 units: the validation accuracy reached 90 %
after 17 epochs with 64 units, 9 with 128, 5 with 256, then 6, 4 and 7. The paper reports a fivefold speed for ten times
the units, at twice the computation. Here the MACs per step grow 48-fold, half as fast as those of the dense network:
activity sparsity rises with the size, from 78 to 88 %.
""",
)

DIGITS = Task(
    "digits",
    "Digits",
    "accuracy",
    "digits",
    ("digits",),
    {"digits": "EGRU 128", "digits-gru": "GRU 128, same settings"},
    before="""\
The small digits of scikit-learn, 64 steps of one pixel. This is the task of the demo; a run takes less than a minute on
one CPU core.
""",
)

GESTURES = Task(
    "dvs",
    "DVS128 Gesture on packed frames",
    "accuracy",
    "dvs",
    ("frames", "gestures", "ablation"),
    {
        "dvs": "EGRU, tuned for these frames",
        "dvs-gru": "GRU, tuned for these frames",
        "dvs-egru-512": "EGRU 512, the paper's settings",
        "dvs-gru-512": "GRU 512, the paper's settings",
        "dvs-egru-1024": "EGRU 1024, the paper's settings",
        "dvs-gru-1024": "GRU 1024, the paper's settings",
        "dvs-lstm-867": "LSTM 867, the paper's settings",
        "dvs-egru-1024-da": "EGRU 1024, with augmentation",
        "dvs-gru-1024-da": "GRU 1024, with augmentation",
        "dvs-cnn-gru-136-da": "CNN + GRU 136, with augmentation",
        "dvs-cnn-egru-256-da": "CNN + EGRU 256, with augmentation",
        "dvs-cnn-egru-795-da": "CNN + EGRU 795, with augmentation",
        "dvs-ablation-unregularised": "EGRU 1024, without regularisation",
        "dvs-ablation-scalar": "EGRU 1024, scalar threshold",
        "dvs-ablation-hard": "EGRU 1024, hard clear",
        "dvs-ablation-none": "EGRU 1024, no clear",
    },
    before="""\
The frames are binary, 32 by 32 pixels and 0.2 s long
([training](../guides/training.md#dvs-gestures-on-packed-frames)). The paper's frames cover 25 ms and have grey values
(`--data dvs-raw`), so its accuracies are in a table of their own. Rows "tuned for these frames" have our own settings,
with 256 units. Those of the first round were trained for 30 epochs on frames that were not moved in time; the runs of
2026-11-15 had 512 units and neither translated nor pooled the frames. The rows without regularisation, with a scalar
threshold, with a hard clear and without a clear are the paper's ablations of EGRU 1024. The runs of 300 epochs did not
clip gradients, which the recipes now do. Rows with augmentation and the one with a scalar threshold were trained for a
part of their epochs, as the column of epochs shows. With a scalar threshold, the training loss had fallen to 0.001 by
epoch 55 and rose to 2.3 at epoch 88; epoch 50 was scored.
""",
)

PENN_TREEBANK = Task(
    "ptb",
    "Penn Treebank",
    "perplexity",
    "ptb",
    ("ptb",),
    {
        "ptb-evnn": "EGRU 1350, EvNN's settings",
        "ptb-egru-1350": "EGRU 1350, the paper's settings",
        "ptb-egru-2000": "EGRU 2000, the paper's settings",
        "ptb-evnn-gru": "GRU 1350, same settings",
        "ptb-gru-1350": "GRU 1350, the paper's settings",
        "ptb-awd-lstm": "AWD-LSTM 1150",
        "ptb-indrnn": "densely connected IndRNN",
    },
    others=(("EGRU 1350", "EvNN", "32M", "not published", "-", "-", "-", "-", "1000", "-", "-"),),
    before="""\
The test split is read once, as a single sequence: the state (`c` and `y`) is carried from the first word to the last.
Validation runs after every epoch in 64 parallel sequences (AWD-LSTM: 10), each of which starts from a zero state. The
perplexity of the validation split read in one column, like the test split, is given where it was measured. The paper
reports 59.5 for its best run and 59.7 ± 0.1 over five, and does not say in how many columns.

"EvNN's settings" train the paper's network, three layers with tied embeddings, with these differences from the
paper's settings:

- an embedding and a last layer of 750 units instead of 788;
- an event subtracts the threshold from the state (`reset="threshold"`) instead of the output;
- the reset gate acts after the recurrent product, as in cuDNN's GRU, instead of before it;
- thresholds stay at their initial values, most of them near zero, instead of being trained;
- AdamW with other dropout rates, a narrower and higher surrogate, and 1000 epochs instead of 2500
  ([all settings](../guides/training.md#evnns-recipe-for-language-models)).

With embedding size 750 (31.7M parameters), a step takes 3.05M + 10.9M a + 8.5M b + 9.2M c MACs, where a, b and c are
the activities of the three layers. Here the last layer is the most active one and costs more than the other two
together.

The weights (60.5 MiB in bfloat16, 30.5 MiB in int8) are not part of the repository. The command listed under each run
recreates them, and `egru export RUN small --weights int8` packs them.
""",
    after="""\
EvNN's README offers weights but reports no perplexity. We ran its code and settings on an H200. The validation
perplexity was 392, 150, 122, 109, 102, 98 and 94 after epochs 1, 6, 11, 16, 21, 26 and 31, with 15 % activity and 68 %
backward sparsity. It was not run further. [Training](../guides/training.md) lists where our code differs.

"Thresholds raised" is the run of 1000 epochs after `egru quieten`, which raises low thresholds to a floor and trains
nothing. The floors were chosen on the validation split, read as a single sequence like the test split
([details](../guides/pruning.md#raising-thresholds)). "Fine-tuned" starts from that run's weights, rounded to int8, and
trains for 120 epochs with floors of 0.1, 0.2 and 0.4 and without a reset at events. Training did not recover the
perplexity that this cost.

GRU and AWD-LSTM were trained for fewer epochs than their recipes specify (1000 and 500), limited by GPU time. An epoch
takes 3.1 s for the GRU with cuDNN and 1.14 s for the EGRU. cuDNN is fastest at multiples of 64, and 1350 is not one: in
the benchmark of a single layer (68 steps, batch 64, bfloat16, `h200_train.json`) its GRU takes 4.86 ms with 1350 units
and 4.71 ms with 1408, against 1.68 ms for the EGRU. Both keep the learning rate constant for 70 % of their epochs. In
that phase, the EGRU's validation perplexity was 69.5 after as many epochs as the GRU's whole training (241), and 65.7
after as much time. The GRU uses the EGRU's settings, which were not tuned for it.
""",
)

WIKITEXT2 = Task(
    "wikitext2",
    "WikiText-2",
    "perplexity",
    "wikitext2",
    ("wikitext2",),
    {
        "wikitext2-evnn": "EGRU 1350, EvNN's settings for PTB",
        "wikitext2-egru-1350": "EGRU 1350, the paper's settings",
        "wikitext2-egru-2000": "EGRU 2000, the paper's settings",
        "wikitext2-evnn-gru": "GRU 1350, same settings",
        "wikitext2-gru-1350": "GRU 1350, the paper's settings",
        "wikitext2-awd-lstm": "AWD-LSTM 1150",
    },
    before="""\
The splits are read as on Penn Treebank. EvNN has no settings for this data set; `wikitext2-evnn` uses those for Penn
Treebank, as the paper does with its own.
""",
)

TASKS = (SEQUENTIAL_MNIST, PERMUTED_MNIST, SMALL_ABLATION, SCALING, DIGITS, GESTURES, PENN_TREEBANK, WIKITEXT2)
