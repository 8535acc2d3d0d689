"""Networks built of recurrent layers, and the baselines they are compared with."""

from egru.models.baselines import CoRNN, CoRNNState, DenseIndRNN, IndRNN
from egru.models.classifier import ClassifierState, SequenceClassifier
from egru.models.dense import GRU, LSTM
from egru.models.gesture import ConvolutionalHead, gesture_network
from egru.models.language import LanguageModel
from egru.models.stack import CELLS, RecurrentStack, StackOutput, detached

__all__ = [
    "CELLS",
    "GRU",
    "LSTM",
    "ClassifierState",
    "CoRNN",
    "CoRNNState",
    "ConvolutionalHead",
    "DenseIndRNN",
    "IndRNN",
    "LanguageModel",
    "RecurrentStack",
    "SequenceClassifier",
    "StackOutput",
    "detached",
    "gesture_network",
]
