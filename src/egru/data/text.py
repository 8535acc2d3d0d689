"""Word-level corpora as the language-modelling tables need them: Penn Treebank and WikiText-2."""

import itertools
import os
from collections.abc import Sequence

import numpy as np
import torch

from egru.data.root import DataCorrupt, Source, find, verify
from egru.data.sets import Text

END = "<eos>"
_PTB = "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz (its data/ptb.*.txt)"
_WIKITEXT = "https://wikitext.smerity.com/wikitext-2-v1.zip (its wiki.*.tokens)"
PTB = (
    Source("ptb.train.txt", "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf", _PTB),
    Source("ptb.valid.txt", "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2", _PTB),
    Source("ptb.test.txt", "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0", _PTB),
)
WIKITEXT = (
    Source("wiki.train.tokens", "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f", _WIKITEXT),
    Source("wiki.valid.tokens", "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8", _WIKITEXT),
    Source("wiki.test.tokens", "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0", _WIKITEXT),
)


def penn_treebank(root: str | os.PathLike[str] | None = None) -> Text:
    """Mikolov's Penn Treebank, 929,589 / 73,760 / 82,430 tokens, 10,000 words; files in the folder ``ptb``."""
    return _corpus("Penn Treebank", PTB, "ptb", root)


def wikitext2(root: str | os.PathLike[str] | None = None) -> Text:
    """WikiText-2, 2,088,628 / 217,646 / 245,569 tokens, 33,278 words; files in the folder ``wikitext-2``."""
    return _corpus("WikiText-2", WIKITEXT, "wikitext-2", root)


def _corpus(name: str, sources: Sequence[Source], folder: str, root: str | os.PathLike[str] | None) -> Text:
    paths = [find(source, folder, root) for source in sources]  # a missing file is reported before the others are read
    texts: list[str] = []
    for source, path in zip(sources, paths, strict=True):
        content = path.read_bytes()
        verify(content, source, path)
        try:
            texts.append(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataCorrupt(f"{path} is not UTF-8 text: {error}") from error
    return tokenise(name, *texts)


def tokenise(name: str, train: str, validation: str, test: str) -> Text:
    """Words between blanks, ``<eos>`` after every line, empty ones too; ids in order of first appearance."""
    ids: dict[str, int] = {}
    splits = [_ids(text, ids) for text in (train, validation, test)]
    return Text(name, list(ids), *(torch.from_numpy(split) for split in splits))


def _ids(text: str, ids: dict[str, int]) -> np.ndarray:
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()  # what follows the last line end is no line
    words = itertools.chain.from_iterable((*line.split(), END) for line in lines)
    return np.fromiter((ids.setdefault(word, len(ids)) for word in words), np.int64)
