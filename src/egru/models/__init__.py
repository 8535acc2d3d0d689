"""Networks built of recurrent layers, and the baselines they are compared with."""

from egru.models.baselines import CoRNN, CoRNNState, DenseIndRNN, IndRNN

__all__ = ["CoRNN", "CoRNNState", "DenseIndRNN", "IndRNN"]
