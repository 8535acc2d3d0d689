"""Networks of recurrent layers, and the baselines of the paper."""

from egru.models.baselines import CoRNN, CoRNNState, DenseIndRNN, IndRNN
from egru.models.classifier import ClassifierState, SequenceClassifier
from egru.models.dense import GRU, LSTM
from egru.models.gesture import ConvolutionalHead, gesture_network
from egru.models.language import LanguageModel
from egru.models.stack import LAYER_CLASSES, RecurrentStack, StackOutput, detach_state

__all__ = [
    "GRU",
    "LAYER_CLASSES",
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
    "detach_state",
    "gesture_network",
]
