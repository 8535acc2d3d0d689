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
    """

    def __init__(self, scores: Tensor, core: Any) -> None:
        self.scores = scores
        self._core = core
        self._normaliser: Tensor | None = None

    @property
    def normaliser(self) -> Tensor:
        """The logarithm of the sum of the exponentials of the scores, ``([N],)``, in float64."""
        if self._normaliser is None:
            if self._core is None:
                self._normaliser = self.scores.double().logsumexp(-1)
            else:
                rows = self.scores.reshape(-1, self.scores.shape[-1])
                values = [self._core.log_sum_exp(row.data_ptr()) for row in rows]
                self._normaliser = torch.tensor(values, dtype=torch.float64).reshape(self.scores.shape[:-1])
        return self._normaliser

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
            rows = zip(self.scores.reshape(-1, outputs), indices.view(-1, k), values.view(-1, k), strict=True)
            for scores, index, value in rows:
                self._core.top(scores.data_ptr(), k, index.data_ptr(), value.data_ptr())
        return Top(indices, (values.double() - self.normaliser[..., None]).float())

    def log_probability(self, output: int | list[int] | Tensor) -> float | Tensor:
        """Return the log-probability of one output, such as the word that comes next.

        Args:
            output: Index of the output. With several streams, one index per stream.

        Returns:
            A number; with several streams, a tensor ``(N,)``.

        Raises:
            ValueError: If an index is out of range, or their number is not that of the streams.
        """
        index, outputs = torch.as_tensor(output), self.scores.shape[-1]
        streams = self.scores.shape[:-1]
        if index.is_floating_point() or index.dtype == torch.bool or index.shape != streams:
            expected = "an integer" if not streams else f"{streams[0]} integers"
            raise ValueError(f"Prediction.log_probability: output must be {expected}, got {output!r}")
        if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < outputs):
            raise ValueError(f"Prediction.log_probability: output must be from 0 to {outputs - 1}, got {output!r}")
        if not streams:
            return float(self.scores[int(index)]) - float(self.normaliser)
        return (self.scores.gather(-1, index.long()[:, None])[:, 0].double() - self.normaliser).float()
