"""Training steps as CUDA graphs. On the CPU, a fake graph re-runs the function into the same tensors."""

import types
from typing import Any

import pytest
import torch

from egru.records import to_plain
from egru.training import ClassifierTask, ClassifierTraining, LanguageTask, LanguageTraining, NoProgress, Run, train
from egru.training import graphs as graphs_module
from egru.training import loop as loop_module
from egru.training.graphs import GraphedStep, StepOutput, state_tensors
from egru.training.optimise import make_optimiser, make_scaler
from tests.training.tiny import make_classifier, make_language_model, sequences, text


@pytest.fixture(autouse=True)
def single_precision(defaults):
    torch.set_default_dtype(torch.float32)


class FakeCapture:
    def __init__(self):
        self.captured = self.replayed = 0

    def __call__(self, run):
        self.captured += 1
        with torch.random.fork_rng():  # recording a graph does not execute it
            output = run()

        def replay():
            self.replayed += 1
            new = run()
            for target, source in zip(state_tensors(output), state_tensors(new), strict=True):
                target.copy_(source)

        return output, replay


def make(kind, **common):
    torch.manual_seed(0)
    if kind == "language":
        training: Any = LanguageTraining(batch=8, evaluation_batch=4, bptt=12, **common)
        return make_language_model(), LanguageTask(text(), training), training
    training = ClassifierTraining(batch=20, rate_loss=0.1, **common)
    return make_classifier(), ClassifierTask(sequences(), training), training


@pytest.mark.parametrize("kind", ["language", "classifier"])
def test_replayed_steps_equal_eager_steps(kind):
    records = {}
    capture = FakeCapture()
    for graph in (False, True):
        model, task, training = make(kind)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimiser, scaler = make_optimiser(model, training), make_scaler(training)
        if graph:
            object.__setattr__(training, "graph", True)  # validation refuses it on the CPU
            step = loop_module.make_step(model, task, training, optimiser, scaler, capture)
            assert isinstance(step, GraphedStep)
        else:
            step = loop_module.make_step(model, task, training, optimiser, scaler)
        state, records[graph] = None, []
        for batch in [*task.batches(), *task.batches()]:
            output = step(batch, state)
            state = output.state
            records[graph] += [
                output.loss,
                output.objective,
                *(p.grad.clone() for p in parameters if p.grad is not None),
            ]
            optimiser.step()
    assert capture.captured >= 2
    assert capture.replayed > capture.captured
    for replayed, plain in zip(records[True], records[False], strict=True):
        torch.testing.assert_close(replayed, plain, rtol=1e-5, atol=1e-7)


def test_first_batch_of_a_shape_runs_eagerly_and_losses_are_copied():
    weight = torch.nn.Parameter(torch.ones(2))

    def step(batch, state):
        loss = (weight * batch.x).sum() + (0 if state is None else state[0])
        loss.backward()
        return StepOutput(loss.detach(), loss.detach(), (loss.detach() + 1,))

    capture = FakeCapture()
    graphs = GraphedStep(step, [weight], capture)
    batch = next(LanguageTask(text(), LanguageTraining(batch=8, evaluation_batch=4)).batches())
    losses, state = [], None
    for value in (1.0, 2.0, 3.0, 4.0):
        output = graphs(batch._replace(x=torch.full((2,), value)), state)
        state = output.state
        losses.append(output.loss)
        assert weight.grad is graphs.gradients[0]
        assert torch.equal(graphs.gradients[0], torch.full((2,), value))
    assert torch.stack(losses).tolist() == [2.0, 7.0, 14.0, 23.0]
    assert (capture.captured, capture.replayed) == (1, 2)  # the first two shapes: without and with a state


def test_training_with_graphs_equals_eager_training(tmp_path, monkeypatch):
    """Includes the step of each epoch that runs eagerly because its activity is measured."""
    monkeypatch.setattr(graphs_module, "CUDACapture", FakeCapture)
    lines = []
    for graph in (False, True):
        model, task, training = make("language", epochs=2, vary_bptt=False)
        object.__setattr__(training, "graph", graph)
        run = Run.create(tmp_path / f"{graph}", {})
        train(model, task, training, run, NoProgress())
        lines.append(run.metrics())
    for plain, replayed in zip(*lines, strict=True):
        assert replayed.train.loss == pytest.approx(plain.train.loss, rel=1e-5)
        assert to_plain(replayed.training_activity) == pytest.approx(to_plain(plain.training_activity), abs=1e-3)


def test_graphs_require_cuda():
    with pytest.raises(ValueError, match="graph must be off on device cpu"):
        LanguageTraining(graph=True)
    with pytest.raises(ValueError, match="and not float16"):
        LanguageTraining(graph=True, device="cuda", precision="float16")


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_graphs_equal_eager_training_on_a_gpu(precision):
    """Without random numbers, only the order of sums differs."""
    curves = []
    for graph in (False, True):
        model, task, training = make("language", device="cuda", precision=precision, graph=graph, vary_bptt=False)
        model.dropout = 0.0
        model.cuda()
        losses = []
        run: Any = types.SimpleNamespace(
            remove_temporary_files=int, require_no_metrics=int, saved_epochs=list, metrics=list, save=lambda *_: None
        )  # a run that stores nothing
        batches = task.batches

        def twice(batches=batches):
            yield from batches()
            yield from batches()

        task.batches = twice
        add = loop_module.EpochStatistics.add

        def watched(self, loss, *rest, losses=losses, add=add):
            losses.append(loss.item())
            return add(self, loss, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop_module.EpochStatistics, "add", watched)
            patch.setattr(loop_module, "score", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                train(model, task, training, run, NoProgress())
        curves.append(losses)
    assert len(curves[0]) > 10
    assert curves[1] == pytest.approx(curves[0], rel=2e-2)
