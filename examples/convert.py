"""Convert a trained GRU to an event-based network and fine-tune it in a plain PyTorch loop.

    python examples/convert.py           # about three minutes on two cores

A GRU learns to classify handwritten digits, one pixel per step. `egru.convert` replaces it by an event layer with the
same weights. The loop in `fine_tune` then makes it sparse. It is what `egru.sparsify(model, loader, loss, target=0.15,
teacher=gru)` does in one call; write it yourself to add your own losses, schedules or logging.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import egru
from egru.compress import Distillation, ThresholdSchedule


class Classifier(nn.Module):
    """A GRU and a linear readout of its last output."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.rnn, self.readout = nn.GRU(1, hidden, batch_first=True), nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.rnn(x)[0][:, -1])


def train(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], epochs: int) -> None:
    """Train the dense network."""
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-3, total_steps=epochs * len(loader))
    for _ in range(epochs):
        for x, y in loader:
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            rates.step()


def fine_tune(
    model: nn.Module, teacher: nn.Module, loader: DataLoader[tuple[Tensor, ...]], epochs: int, activity: float
) -> None:
    """Lower the activity of ``model`` to a target while it learns to return the outputs of ``teacher``."""
    steps = epochs * len(loader)
    for name, parameter in model.named_parameters():
        if "threshold" in name:
            parameter.requires_grad_(True)  # thresholds of converted layers are fixed until they are trained
    optimiser = torch.optim.Adam(model.parameters(), 4e-3)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    schedule = ThresholdSchedule(model, activity, steps, ramp=0.7)
    distillation = Distillation(model, teacher, states=0.0)
    events = egru.ActivityLoss(model, rate=4.0, state=0.0, target=0.0)
    for epoch in range(epochs):
        with schedule:  # counts events; leave it for evaluation
            for x, y in loader:
                with distillation, events:
                    loss = F.cross_entropy(model(x), y)
                optimiser.zero_grad()
                (loss + distillation.value + events.value).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimiser.step()
                rates.step()
                schedule.step()  # moves the thresholds
        print(f"epoch {epoch + 1:3}: activity {schedule.measured:.3f}, goal {schedule.goal:.3f}")


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model.eval()(x).argmax(1) == y).double().mean().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=60, help="of training, and of fine-tuning")
    parser.add_argument("--activity", type=float, default=0.15, help="fraction of units and steps with an event")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    data = egru.data.digits(seed=options.seed)
    loader = DataLoader(TensorDataset(*data.train), 32, shuffle=True)

    gru = Classifier(options.hidden)
    train(gru, loader, options.epochs)
    model = egru.convert(gru)  # event layers, the same outputs
    fine_tune(model, gru, loader, options.epochs, options.activity)

    with egru.ActivityMonitor(model) as monitor:
        score = accuracy(model, *data.test)
    print(f"GRU: {accuracy(gru, *data.test):.1%}; with events: {score:.1%}")
    print(f"activity sparsity: {monitor.summary().activity_sparsity:.1%}")
    engine = egru.EventEngine.from_model(model)  # streaming; engine.step(pixel) reads one pixel
    scores = engine.run(data.test.x[0], last=True)
    print(f"first test image, read by the engine: {int(scores.argmax())}, label {int(data.test.y[0])}")


if __name__ == "__main__":
    main()
