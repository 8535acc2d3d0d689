"""Convert a trained GRU to an event-based network and fine-tune it with Lightning.

    pip install lightning
    python examples/convert_lightning.py

The same fine-tuning as in examples/convert.py, as a LightningModule.
"""

import argparse
import runpy
from pathlib import Path
from typing import Any

import lightning as L  # pyright: ignore[reportMissingImports]
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import egru
from egru.compress import Distillation, ThresholdSchedule

PLAIN: Any = runpy.run_path(str(Path(__file__).with_name("convert.py")))


class FineTuning(L.LightningModule):
    """Lowers the activity of a converted model to a target, with distillation from the dense model."""

    def __init__(self, model: nn.Module, teacher: nn.Module, activity: float, steps: int) -> None:
        super().__init__()
        self.model, self.steps = model, steps
        for name, parameter in model.named_parameters():
            if "threshold" in name:
                parameter.requires_grad_(True)
        self.schedule = ThresholdSchedule(model, activity, steps, ramp=0.7)
        self.distillation = Distillation(model, teacher, states=0.0)
        self.events = egru.ActivityLoss(model, rate=4.0, state=0.0, target=0.0)

    def on_fit_start(self) -> None:
        self.distillation.teacher.to(self.device)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.schedule.__enter__()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        with self.distillation, self.events:
            loss = F.cross_entropy(self.model(x), y)
        return loss + self.distillation.value + self.events.value

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.schedule.step()  # after the optimiser's step
        self.schedule.__exit__()
        self.log("activity", self.schedule.measured, prog_bar=True)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self.model(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimiser = torch.optim.Adam(self.model.parameters(), 4e-3)
        rates = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=self.steps)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": rates, "interval": "step"}}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=60, help="of training, and of fine-tuning")
    parser.add_argument("--activity", type=float, default=0.15, help="fraction of units and steps with an event")
    options = parser.parse_args(arguments)
    L.seed_everything(0)
    data = egru.data.digits()
    loader = DataLoader(TensorDataset(*data.train), 32, shuffle=True)
    validation = DataLoader(TensorDataset(*data.validation), 270)

    gru = PLAIN["Classifier"](options.hidden)
    PLAIN["train"](gru, loader, options.epochs)
    module = FineTuning(egru.convert(gru), gru, options.activity, options.epochs * len(loader))
    trainer = L.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, validation)
    with egru.ActivityMonitor(module.model) as monitor:
        score = PLAIN["accuracy"](module.model, *data.test)
    sparsity = monitor.summary().activity_sparsity
    print(f"GRU: {PLAIN['accuracy'](gru, *data.test):.1%}; with events: {score:.1%}, activity sparsity {sparsity:.1%}")


if __name__ == "__main__":
    main()
