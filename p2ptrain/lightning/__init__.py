"""A LightningModule as a Job: `p2ptrain.lightning.job(module, datamodule)`.

Neither `lightning` nor `pytorch_lightning` is imported here: the user's module belongs to one.
"""

from __future__ import annotations

from p2ptrain.lightning.job import job

__all__ = ["job"]
