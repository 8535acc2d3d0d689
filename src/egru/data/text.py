"""Word-level corpora for language modelling: Penn Treebank and WikiText-2."""

import itertools
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from egru.data.datasets import Text
from egru.data.files import DataCorrupt, DataFile, find_file, verify_content

END_OF_LINE = "<eos>"
_PTB_ORIGIN = "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz (data/ptb.*.txt)"
_WIKITEXT2_ORIGIN = "https://wikitext.smerity.com/wikitext-2-v1.zip (wiki.*.tokens)"
PTB_FILES = (
    DataFile("ptb.train.txt", "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf", _PTB_ORIGIN),
    DataFile("ptb.valid.txt", "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2", _PTB_ORIGIN),
    DataFile("ptb.test.txt", "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0", _PTB_ORIGIN),
)
WIKITEXT2_FILES = (
    DataFile(
        "wiki.train.tokens", "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f", _WIKITEXT2_ORIGIN
    ),
    DataFile(
        "wiki.valid.tokens", "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8", _WIKITEXT2_ORIGIN
    ),
    DataFile("wiki.test.tokens", "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0", _WIKITEXT2_ORIGIN),
)


def penn_treebank(root: str | os.PathLike[str] | None = None) -> Text:
    """Load the Penn Treebank in Mikolov's preparation.

    Args:
        root: Data root. If None, the environment variable ``EGRU_DATA``. The files ``ptb.train.txt``, ``ptb.valid.txt``
            and ``ptb.test.txt`` are read from its folder ``ptb``.

    Returns:
        929,589 / 73,760 / 82,430 tokens with a vocabulary of 10,000 words.

    Raises:
        DataMissing: If a file is missing.
        DataCorrupt: If a file is damaged.

    Example:
        >>> text = egru.data.penn_treebank()  # doctest: +SKIP
        >>> len(text.vocabulary)  # doctest: +SKIP
        10000
    """
    return _load("Penn Treebank", PTB_FILES, "ptb", root)


def wikitext2(root: str | os.PathLike[str] | None = None) -> Text:
    """Load WikiText-2.

    Args:
        root: Data root. If None, the environment variable ``EGRU_DATA``. The files ``wiki.train.tokens``,
            ``wiki.valid.tokens`` and ``wiki.test.tokens`` are read from its folder ``wikitext-2``.

    Returns:
        2,088,628 / 217,646 / 245,569 tokens with a vocabulary of 33,278 words.

    Raises:
        DataMissing: If a file is missing.
        DataCorrupt: If a file is damaged.

    Example:
        >>> text = egru.data.wikitext2()  # doctest: +SKIP
        >>> len(text.vocabulary)  # doctest: +SKIP
        33278
    """
    return _load("WikiText-2", WIKITEXT2_FILES, "wikitext-2", root)


def _load(name: str, files: Sequence[DataFile], folder: str, root: str | os.PathLike[str] | None) -> Text:
    paths = [find_file(file, folder, root) for file in files]  # before reading, to report a missing file at once
    texts: list[str] = []
    for file, path in zip(files, paths, strict=True):
        content = path.read_bytes()
        verify_content(content, file, path)
        try:
            texts.append(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataCorrupt(f"{path} is not UTF-8 text: {error}") from error
    return tokenise(name, *texts)


def tokenise(name: str, train: str, validation: str, test: str) -> Text:
    """Split texts at whitespace and number the words in the order of their first occurrence.

    Every line, including an empty one, ends with the token ``<eos>``.
    """
    ids: dict[str, int] = {}
    splits = [_token_ids(text, ids) for text in (train, validation, test)]
    return Text(name, list(ids), *(torch.from_numpy(split) for split in splits))


def _token_ids(text: str, ids: dict[str, int]) -> np.ndarray:
    """Return the token ids of a text, adding new words to ``ids``."""
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()  # the text after the last newline is not a line
    words = itertools.chain.from_iterable((*line.split(), END_OF_LINE) for line in lines)
    return np.fromiter((ids.setdefault(word, len(ids)) for word in words), np.int64)


def batchify(tokens: Tensor, batch: int) -> Tensor:
    """Cut a text into consecutive columns that are read in parallel.

    Column ``b`` continues from row ``t`` to row ``t + 1``, so a state can be carried from one window of rows to the
    next. Tokens that do not fill a row are dropped.

    Args:
        tokens: Token ids, ``(N,)``.
        batch: Number of columns.

    Returns:
        Token ids, ``(N // batch, batch)``.

    Raises:
        ValueError: If ``tokens`` is not a vector or ``batch`` is not between 1 and its length.

    Example:
        >>> batchify(torch.arange(7), 2)
        tensor([[0, 3],
                [1, 4],
                [2, 5]])
    """
    if tokens.dim() != 1:
        raise ValueError(f"batchify: tokens must be a vector, got shape {tuple(tokens.shape)}")
    if not 1 <= batch <= len(tokens):
        raise ValueError(f"batchify: batch must be between 1 and the number of tokens ({len(tokens)}), got {batch!r}")
    steps = len(tokens) // batch
    return tokens[: steps * batch].view(batch, steps).t().contiguous()
