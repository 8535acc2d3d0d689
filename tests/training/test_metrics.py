"""The file ``metrics.jsonl``: its checksums, and resuming without it."""

import random
import shutil

import pytest
import torch

from egru.training import DamagedMetricsError, FormatError, Run, RunError
from egru.training.run import METRICS
from tests.training.test_survival import assert_same, curve, files
from tests.training.tiny import classifier_run


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)


def test_incomplete_last_line_of_metrics_is_ignored(tmp_path):
    classifier_run(tmp_path / "whole", epochs=4)
    classifier_run(tmp_path / "run", epochs=3)
    with (tmp_path / "run" / METRICS).open("a") as file:
        file.write('{"epoch": 4, "tra')
    classifier_run(tmp_path / "run", epochs=4)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[0], b"{", *lines[2:]],
        lambda lines: [lines[0], b"\xff\xfe", *lines[2:]],
        lambda lines: [lines[0], b"7", *lines[2:]],
        lambda lines: [lines[0], b"", *lines[1:]],
        lambda lines: [lines[0], b'{"format": 3, "epoch": 2}', *lines[2:]],
        lambda lines: [lines[0], lines[1].replace(b'"accuracy":0.', b'"accuracy":1.', 1), *lines[2:]],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
        lambda lines: [lines[0], lines[0], *lines[1:]],
    ],
    ids=["cut", "binary", "number", "empty", "fields", "digit", "missing", "swapped", "repeated"],
)
def test_changed_line_of_metrics_is_refused_with_its_number(change, tmp_path):
    classifier_run(tmp_path / "whole", epochs=5)
    classifier_run(tmp_path / "run", epochs=4)
    path = tmp_path / "run" / METRICS
    before = path.read_bytes()
    path.write_bytes(b"\n".join([*change(before.splitlines()), b""]))
    assert path.read_bytes() != before
    with pytest.raises(DamagedMetricsError, match=r"metrics\.jsonl, line 2: the checksum does not match"):
        classifier_run(tmp_path / "run", epochs=5)
    path.write_bytes(before)
    classifier_run(tmp_path / "run", epochs=5)
    assert_same(files(tmp_path / "run", 5), files(tmp_path / "whole", 5))


def test_flipped_bits_in_the_metrics_are_detected(tmp_path):
    classifier_run(tmp_path / "run", epochs=3)
    run, bits = Run.open(tmp_path / "run"), random.Random(4)
    path = run.folder / METRICS
    good, metrics = path.read_bytes(), run.metrics()
    for _ in range(300):
        bad = bytearray(good)
        bad[bits.randrange(len(bad) - 1)] ^= 1 << bits.randrange(8)
        path.write_bytes(bad)
        with pytest.raises((DamagedMetricsError, FormatError), match=r"metrics\.jsonl"):
            run.metrics()
    path.write_bytes(good[:-1])  # without the last line feed
    assert run.metrics() == metrics


def test_metrics_do_not_decide_the_best_epoch(tmp_path):
    whole, _ = classifier_run(tmp_path / "whole", epochs=12, learning_rate=0.3)
    classifier_run(tmp_path / "run", epochs=10, learning_rate=0.3)
    (tmp_path / "run" / METRICS).unlink()
    messages = []
    result, _ = classifier_run(tmp_path / "run", epochs=12, learning_rate=0.3, log=messages.append)
    assert result.best_epoch == whole.best_epoch
    assert whole.best_epoch < 10  # chosen before the metrics were lost
    assert messages == [f"{tmp_path / 'run' / METRICS} has the metrics of 0 of 10 epochs; the others are lost"]
    assert [line.epoch for line in Run.open(tmp_path / "run").metrics()] == [11, 12]


def test_binary_data_after_the_metrics_is_ignored(tmp_path):
    classifier_run(tmp_path / "run", epochs=2)
    with (tmp_path / "run" / METRICS).open("ab") as file:
        file.write(b"\xff\xfe\x00")
    classifier_run(tmp_path / "run", epochs=3)
    assert [line.epoch for line in Run.open(tmp_path / "run", pytest.fail).metrics()] == [1, 2, 3]


def test_metrics_without_a_checkpoint_are_refused(tmp_path):
    classifier_run(tmp_path / "whole", epochs=3)
    classifier_run(tmp_path / "run", epochs=2)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = (tmp_path / "run" / METRICS).read_bytes()
    with pytest.raises(RunError, match=r"no checkpoint; remove .*metrics.jsonl to start again"):
        classifier_run(tmp_path / "run", epochs=3)
    assert (tmp_path / "run" / METRICS).read_bytes() == before
    (tmp_path / "run" / METRICS).unlink()
    classifier_run(tmp_path / "run", epochs=3)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
