"""Export to ONNX: ONNX Runtime computes what the modules compute."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import egru
from egru import EGRU, ELSTM, cli
from egru.runtime import export_onnx, onnx_export

pytest.importorskip("onnxscript", reason="requires onnxscript: pip install 'egru[onnx]'")
onnx = pytest.importorskip("onnx", reason="requires onnx: pip install 'egru[onnx]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="requires onnxruntime: pip install 'egru[onnx]'")


class Layers(nn.Module):
    """Layers with different options side by side, so that one export covers them all.

    Zoneout is a number that float32 represents, because torch.onnx stores scalars in float32.
    """

    def __init__(self) -> None:
        super().__init__()
        low: Any = {"threshold": egru.Threshold(mean=-2.0)}
        fixed: Any = {"threshold": egru.Threshold("clamp", mean=0.1)}
        self.layers = nn.ModuleList(
            [
                EGRU(3, 5, num_layers=2, bidirectional=True, **low),
                EGRU(3, 5, reset="threshold", reset_gate="after", events="signed", zoneout=0.25, **fixed),
                EGRU(3, 5, reset="none", reset_gate="after", events="delta", **fixed),
                EGRU(3, 5, reset="hard", bias=False, zoneout=0.5, **low),
                EGRU(3, 5, reset="threshold", reset_scale=0.75, **low),
                ELSTM(3, 5, **low),
                ELSTM(3, 5, events="delta", reset="none", compare="output", **fixed),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x)[0] for layer in self.layers], -1)


def run_graph(path: Path, x: Tensor) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(["output"], {"input": x.numpy()})[0]


def test_every_kind_of_layer_gives_the_outputs_of_the_module_for_other_sizes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Layers().double().eval()
    path = export_onnx(model, tmp_path / "new" / "model.onnx", torch.randn(4, 2, 3).double())
    graph = onnx.load(str(path))
    onnx.checker.check_model(graph, full_check=True)
    bodies = [node.attribute for node in graph.graph.node if node.op_type == "Scan"]
    assert len(bodies) == 10  # one per layer and direction
    assert {node.op_type for node in bodies[0][0].g.node} >= {"Where", "Greater"}
    x = torch.randn(11, 3, 3).double()
    with torch.no_grad():
        expected = model(x)
    # float64: no state is within 1e-9 of its threshold, so that rounding changes no event
    assert 0.05 < float((expected == 0).double().mean()) < 0.95
    np.testing.assert_allclose(run_graph(path, x), expected.numpy(), rtol=0, atol=1e-12)


def test_language_model_reads_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = egru.models.LanguageModel(11, 6, 8, num_layers=2).double().eval()
    path = export_onnx(model, tmp_path / "model.onnx", torch.zeros(4, 2, dtype=torch.long))
    words = torch.randint(0, 11, (9, 3))
    with torch.no_grad():
        expected = model(words)[0]
    np.testing.assert_allclose(run_graph(path, words), expected.numpy(), rtol=0, atol=1e-12)


def test_command_exports_the_pretrained_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_default_dtype(torch.float32)
    assert cli.main(["export", "smnist", str(tmp_path / "out"), "--target", "onnx"]) == 0
    assert "model.onnx: 4." in capsys.readouterr().out
    with np.load(Path(__file__).parents[1] / "mnist-sample.npz") as stored:
        images, labels = stored["images"][:20], stored["labels"][:20]
    x = torch.from_numpy(images.astype(np.float32) / 255).reshape(20, 784, 1)
    scores = run_graph(tmp_path / "out" / "model.onnx", x)
    with torch.no_grad():
        expected = egru.pretrained("smnist")(x)[0]
    assert scores.argmax(1).tolist() == expected.argmax(1).tolist()
    assert float((torch.from_numpy(scores.argmax(1)) == torch.from_numpy(labels)).double().mean()) >= 0.9
    assert cli.main(["export", "smnist", str(tmp_path / "int8"), "--target", "onnx", "--weights", "int8"]) == 2
    assert not (tmp_path / "int8").exists()


def test_unsupported_models_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="export_onnx: the model is in training mode"):
        export_onnx(EGRU(2, 3), tmp_path / "model.onnx", torch.zeros(4, 1, 2))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"^export_onnx: autocast to .* is not supported"), torch.autocast("cpu"):
        export_onnx(EGRU(2, 3).eval(), tmp_path / "model.onnx", torch.zeros(4, 1, 2))
    with pytest.raises(ValueError, match=r"^export_onnx: zoneout that changes with time is not supported"):
        export_onnx(TrainingLayer(), tmp_path / "model.onnx", torch.zeros(4, 1, 2))
    with pytest.raises(ValueError, match=r"^export_onnx: Packed.forward must have one input, but requires lengths too"):
        export_onnx(Packed().eval(), tmp_path / "model.onnx", torch.zeros(4, 1, 2))
    assert list(tmp_path.iterdir()) == []


def test_sequence_operation_with_lengths_is_refused() -> None:
    problem: Any = SimpleNamespace(lengths=torch.tensor([3]), precision="", keep=None)
    with pytest.raises(Exception, match="export_onnx: packed sequences are not supported"):
        onnx_export._check(problem)


class Packed(nn.Module):
    """A model that packs its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = EGRU(2, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0])[0]


class TrainingLayer(nn.Module):
    """A model that is in evaluation mode, and its layer is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = EGRU(2, 3, zoneout=0.2)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.layer.train()
        return self.layer(x)[0]
