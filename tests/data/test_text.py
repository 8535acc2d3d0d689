import hashlib

import pytest
import torch

import egru
from egru.data import text
from egru.data.files import DataCorrupt, DataMissing

TEXTS = (" the cat \n the dog \n", " a cat\n", "the end\n")


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "ptb").mkdir()
    files = []
    for file, content in zip(text.PTB_FILES, TEXTS, strict=True):
        (tmp_path / "ptb" / file.name).write_text(content)
        files.append(file._replace(sha256=hashlib.sha256(content.encode()).hexdigest()))
    monkeypatch.setattr(text, "PTB_FILES", tuple(files))
    return tmp_path


def test_words_and_line_ends_become_tokens(files):
    data = egru.data.penn_treebank(files)
    assert data.vocabulary == ["the", "cat", "<eos>", "dog", "a", "end"]
    assert data.train.tolist() == [0, 1, 2, 0, 3, 2]
    assert data.validation.tolist() == [4, 1, 2]
    assert data.test.tolist() == [0, 5, 2]
    assert data.train.dtype == torch.int64


def test_every_line_ends_with_eos():
    data = text.tokenise("x", " \n = a = \n\nb", "a\n", "b")
    assert [data.vocabulary[i] for i in data.train.tolist()] == ["<eos>", "=", "a", "=", "<eos>", "<eos>", "b", "<eos>"]
    assert data.test.tolist() == [data.vocabulary.index("b"), data.vocabulary.index("<eos>")]


def test_missing_and_damaged_files_raise(files):
    path = files / "ptb" / "ptb.valid.txt"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    with pytest.raises(DataCorrupt, match=r"ptb\.valid\.txt is not the published file: 5 bytes.*get it again"):
        egru.data.penn_treebank(files)
    path.unlink()
    with pytest.raises(DataMissing, match=r"ptb\.valid\.txt is not in .*ptb\. Get it from http.*EGRU_DATA"):
        egru.data.penn_treebank(files)
    with pytest.raises(DataMissing, match=r"wiki\.train\.tokens"):
        egru.data.wikitext2(files)


def test_content_that_is_not_utf8_raises(files, monkeypatch):
    content = b"\xff\xfe"
    (files / "ptb" / "ptb.train.txt").write_bytes(content)
    first = text.PTB_FILES[0]._replace(sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(text, "PTB_FILES", (first, *text.PTB_FILES[1:]))
    with pytest.raises(DataCorrupt, match=r"ptb\.train\.txt is not UTF-8"):
        egru.data.penn_treebank(files)


def test_batchify_columns_are_consecutive():
    rows = egru.data.batchify(torch.arange(11), 3)
    assert rows.tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert rows.is_contiguous()
    with pytest.raises(ValueError, match=r"batch must be between 1 and the number of tokens \(2\), got 3"):
        egru.data.batchify(torch.arange(2), 3)
    with pytest.raises(ValueError, match="tokens must be a vector"):
        egru.data.batchify(torch.zeros(2, 2), 1)


@pytest.mark.data
@pytest.mark.parametrize(
    ("load", "tokens", "vocabulary"),
    [
        (egru.data.penn_treebank, [929_589, 73_760, 82_430], 10_000),
        (egru.data.wikitext2, [2_088_628, 217_646, 245_569], 33_278),
    ],
    ids=["Penn Treebank", "WikiText-2"],
)
def test_splits_have_the_published_token_counts(load, tokens, vocabulary):
    data = load()
    splits = (data.train, data.validation, data.test)
    assert [len(split) for split in splits] == tokens
    assert len(data.vocabulary) == vocabulary == len(set(data.vocabulary))
    assert torch.cat(splits).unique().numel() == vocabulary
    assert data.train.unique().numel() == vocabulary, "every word occurs in the training split"
