"""LightningModules as people write them, and what Lightning's own Trainer makes of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

EPOCHS, SAMPLES = 3, 56


class Classifier(pl.LightningModule):
    """The usual one: hyperparameters, logs, metric objects."""

    def __init__(self, form: str = "adam", lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))
        self.train_accuracy = MulticlassAccuracy(2)
        self.scores = MetricCollection({"acc": MulticlassAccuracy(2), "f1": MulticlassF1Score(2)})

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def shared_step(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        output = self(x)
        return nn.functional.cross_entropy(output, y), output, y

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, output, y = self.shared_step(batch)
        self.train_accuracy(output, y)
        self.log("train_loss", loss, prog_bar=True)
        return {"loss": loss, "n": len(y)}

    def on_validation_epoch_start(self) -> None:
        self.seen = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, output, y = self.shared_step(batch)
        self.seen += len(y)
        self.scores.update(output, y)
        self.log("val_loss", loss)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.scores.compute(), prog_bar=True)
        self.log("seen", float(self.seen))
        self.log("epoch_then", float(self.current_epoch))
        self.log("step_then", float(self.global_step))
        self.scores.reset()

    def configure_optimizers(self) -> Any:
        decayed, others = [], []
        for parameter in self.parameters():
            (decayed if parameter.dim() > 1 else others).append(parameter)
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        adam, lr = AdamW(groups, lr=self.hparams.lr), self.hparams.lr
        if self.hparams.form == "one cycle":
            total = self.trainer.estimated_stepping_batches
            each = {"scheduler": OneCycleLR(adam, lr, total_steps=total), "interval": "step"}
            return {"optimizer": adam, "lr_scheduler": each}
        if self.hparams.form == "lists":
            sgd = SGD(self.parameters(), lr=lr, momentum=0.9)
            return [sgd], [ExponentialLR(sgd, 0.5)]
        if self.hparams.form == "plateau":
            down = ReduceLROnPlateau(adam, patience=0, threshold=10.0)
            return {"optimizer": adam, "lr_scheduler": down, "monitor": "val_loss"}
        return adam


class Dictionaries(Classifier):
    """Batches that are dicts, a step without an index, loaders of its own."""

    def shared_step(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        return super().shared_step((batch["x"], batch["labels"]))

    def training_step(self, batch: Any) -> Any:
        loss, *_ = self.shared_step(batch)
        self.log_dict({"train_loss": loss.detach()})
        return loss

    def setup(self, stage: str) -> None:
        data = samples()
        self.rows = [{"x": x, "labels": y} for x, y in data]

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=16)

    def val_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=10)


def samples() -> TensorDataset:
    x = torch.randn(SAMPLES, 20, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


class Data(pl.LightningDataModule):
    """Prepared in `setup`."""

    def setup(self, stage: str) -> None:
        self.data = samples()

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=16, drop_last=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=30)


@dataclass
class Curve(pl.Callback):
    """What Lightning's own Trainer gives."""

    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        self.losses.append(outputs["loss"].item())

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.metrics.append({name: v.item() for name, v in trainer.callback_metrics.items()})


def fitted(module: pl.LightningModule, data: Any = None, clip: float | None = None) -> Curve:
    """Train with Lightning.

    Args:
        clip: the gradients' largest norm. Lightning adds the norms up in the order of the groups,
            which rounds otherwise than plain torch's order of the model where there are several.
    """
    curve = Curve()
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        gradient_clip_val=clip,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[curve],
    )
    trainer.fit(module, data)
    return curve
