"""The scores of one step as a distribution over the outputs: the best ones, and the log-probability of one of them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Top(NamedTuple):
    """The most probable outputs, most probable first.

    Attributes:
        indices: Indices of the outputs, such as word ids, ``([N,] k)``.
        log_probabilities: Their log-probabilities, ``([N,] k)``.
    """

    indices: Tensor
    log_probabilities: Tensor


class Prediction:
    """The softmax of the scores of one step. :meth:`egru.EventEngine.predict` returns it.

    The scores are computed once. Each method reads them once or twice, and forms no other tensor of their size.

    Attributes:
        scores: The output of the step, ``([N,] O)``.

    Example:
        >>> model = egru.models.LanguageModel(vocabulary=100, embedding_size=16, hidden_size=32)
        >>> prediction = egru.EventEngine(model).predict(7)  # the index of a word
        >>> prediction.top(5).indices.shape
        torch.Size([5])
    """

    def __init__(self, scores: Tensor, core: Any) -> None:
        self.scores = scores
        self._core = core
        self._normaliser: float | Tensor | None = None

    def _log_sum_exp(self) -> float | Tensor:
        """Return the normaliser of the softmax: a number, or ``(N, 1)`` in float64. It is computed once."""
        if self._normaliser is not None:
            return self._normaliser
        if self._core is None:
            sums = self.scores.double().logsumexp(-1, keepdim=True)
            normaliser = sums if sums.dim() > 1 else sums.item()
        elif self.scores.dim() == 1:
            normaliser = self._core.log_sum_exp(self.scores.data_ptr())
        else:
            rows = [[self._core.log_sum_exp(row.data_ptr())] for row in self.scores]
            normaliser = torch.tensor(rows, dtype=torch.float64)
        self._normaliser = normaliser
        return normaliser

    def top(self, k: int) -> Top:
        """Return the ``k`` most probable outputs. Of equal scores, those with lower indices come first.

        Args:
            k: Number of outputs, from 1 to the number of outputs of the engine.

        Raises:
            ValueError: If ``k`` is out of range.
        """
        outputs = self.scores.shape[-1]
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= outputs:
            raise ValueError(f"Prediction.top: k must be an integer from 1 to {outputs}, got {k!r}")
        if self._core is None:
            values, indices = self.scores.sort(dim=-1, descending=True, stable=True)
            values, indices = values[..., :k], indices[..., :k]
        else:
            shape = (*self.scores.shape[:-1], k)
            values, indices = torch.empty(shape, dtype=torch.float32), torch.empty(shape, dtype=torch.int64)
            if self.scores.dim() == 1:
                self._core.top(self.scores.data_ptr(), k, indices.data_ptr(), values.data_ptr())
            else:
                for scores, index, value in zip(self.scores, indices, values, strict=True):
                    self._core.top(scores.data_ptr(), k, index.data_ptr(), value.data_ptr())
        return Top(indices, (values.double() - self._log_sum_exp()).float())

    def log_probability(self, output: int | list[int] | Tensor) -> float | Tensor:
        """Return the log-probability of one output, such as the word that comes next.

        Args:
            output: Index of the output. With several streams, one index per stream.

        Returns:
            A number; with several streams, a tensor ``(N,)``.

        Raises:
            ValueError: If an index is out of range, or their number is not that of the streams.
        """
        outputs, streams = self.scores.shape[-1], self.scores.shape[:-1]
        if type(output) is int and not streams and 0 <= output < outputs:  # the common case
            return self.scores[output].item() - self._log_sum_exp()
        index = torch.as_tensor(output)
        if index.is_floating_point() or index.dtype == torch.bool or index.shape != streams:
            expected = "an integer" if not streams else f"{streams[0]} integers"
            raise ValueError(f"Prediction.log_probability: output must be {expected}, got {output!r}")
        if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < outputs):
            raise ValueError(f"Prediction.log_probability: output must be from 0 to {outputs - 1}, got {output!r}")
        if not streams:
            return self.scores[int(index)].item() - self._log_sum_exp()
        scores = self.scores.gather(-1, index.long()[:, None]).double()
        return (scores - self._log_sum_exp()).float()[:, 0]
