"""Option names that several modules share. Each list of accepted strings is defined here."""

from typing import Literal, get_args

Events = Literal["positive", "signed", "delta"]
"""When a unit emits an event, and what the output is.

========= ======================= ================================ ===========================================
name      event ``e``             output ``y``                     use
========= ======================= ================================ ===========================================
positive  ``c > theta``           ``c`` at an event, else 0        networks trained with events (the paper)
signed    ``|c| > theta``         ``c`` at an event, else 0        trained GRUs, with fine-tuning
delta     ``|c - y| > theta``     ``c`` at an event, else held     trained GRUs, also without training
========= ======================= ================================ ===========================================

In the third row, ``y`` is the output of the previous step. Receivers of a ``"delta"`` unit accumulate the changes
``c - y`` that it emits (the principle of delta networks).
"""
Reset = Literal["output", "threshold", "hard", "none"]
"""How a unit is cleared after an event.

========== ============================================================== =======================
name       update                                                         origin
========== ============================================================== =======================
output     ``c_t = F(c_{t-1}) - rho * y_{t-1}``                           paper, Eq. 2
threshold  events from ``c~ = F(c_{t-1})``, carried ``c~ - rho*theta*e``  EvNN
hard       ``c_t = F(c_{t-1} * (1 - rho * e_{t-1}))``                     paper, "hard clear"
none       ``c_t = F(c_{t-1})``                                           paper, "no clear"
========== ============================================================== =======================

``rho`` is ``reset_scale``. With ``rho = 0`` every reset equals ``"none"``. ``events="signed"`` carries
``c~ - rho*theta*sign(c~)*e`` with ``"threshold"``; ``events="delta"`` requires ``"none"``.
"""
ResetGate = Literal["before", "after"]
"""Whether the reset gate acts before or after the recurrent product."""
Compare = Literal["cell", "output"]
"""What an event LSTM compares with the threshold: the memory cell ``c``, or the value ``o * tanh(c)`` of an event."""
SequenceCell = Literal["gru", "lstm"]
"""The cells that the sequence operation runs."""
Backend = Literal["auto", "cpu", "cuda", "reference"]
"""Which kernel runs the sequence operation."""
ThresholdKind = Literal["sigmoid", "abs", "clamp", "identity"]
"""How an unconstrained parameter becomes a threshold."""
DropoutMode = Literal["variational", "plain"]
"""One dropout mask per sequence, or one per step."""
EventCell = Literal["egru", "elstm", "ernn"]
DenseCell = Literal["gru", "lstm", "cornn", "indrnn", "dense_indrnn"]
Cell = Literal[EventCell, DenseCell]
"""The recurrent layers a model can be built from."""
Readout = Literal["trace", "mean", "last", "every"]
"""Which outputs the classifier's readout reads."""
WeightFormat = Literal["float32", "bfloat16", "int8"]
CWeightFormat = Literal["float32", "int8", "integer"]
"""The number format that weights are stored in."""
Packing = Literal["auto", "dense", "sparse"]
"""Whether the engine stores blocks of weights that are zero."""
Split = Literal["train", "validation", "test"]
LabelledData = Literal["digits", "permuted-digits", "smnist", "psmnist", "dvs", "dvs-raw"]
"""The data sets of labelled sequences that an experiment can use."""
TextData = Literal["ptb", "wikitext2"]
"""The corpora that an experiment can use."""

EVENTS: tuple[Events, ...] = get_args(Events)
RESETS: tuple[Reset, ...] = get_args(Reset)
RESET_GATES: tuple[ResetGate, ...] = get_args(ResetGate)
COMPARES: tuple[Compare, ...] = get_args(Compare)
SEQUENCE_CELLS: tuple[SequenceCell, ...] = get_args(SequenceCell)
BACKENDS: tuple[Backend, ...] = get_args(Backend)
THRESHOLD_KINDS: tuple[ThresholdKind, ...] = get_args(ThresholdKind)
DROPOUT_MODES: tuple[DropoutMode, ...] = get_args(DropoutMode)
EVENT_CELLS: tuple[EventCell, ...] = get_args(EventCell)
CELLS: tuple[Cell, ...] = get_args(Cell)
READOUTS: tuple[Readout, ...] = get_args(Readout)
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
PACKINGS: tuple[Packing, ...] = get_args(Packing)
C_WEIGHT_FORMATS: tuple[CWeightFormat, ...] = get_args(CWeightFormat)
