"""What holder and worker of one device share.

The two never import each other: what one knows and the other needs stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.mesh.interface import Mesh
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.plan.types.memory_budgets import MemoryBudgets
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.process.energy import EnergyMeter
from p2ptrain.runtime.io.tensor_router import TensorRouter
from p2ptrain.state.transfer_server import TransferServer


class KnownModel:
    """The one model that this device keeps: its own, captured here, or the last that it fetched."""

    def __init__(self) -> None:
        self._description: ModelDescription | None = None
        self._own_samples: int | None = None

    def know_own(self, description: ModelDescription, most_samples: int) -> None:
        """The model of this device's own job, which has batches of so many samples at most."""
        self._description, self._own_samples = description, most_samples

    def know_fetched(self, description: ModelDescription) -> None:
        """The model of another device's job."""
        self._description, self._own_samples = description, None

    def get(self, digest: str) -> ModelDescription | None:
        """The model, if it is that one."""
        known = self._description
        return known if known is not None and known.digest == digest else None

    def own_samples(self, digest: str) -> int | None:
        """Most samples of a batch, if that model is this device's own."""
        return None if self.get(digest) is None else self._own_samples


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """One a device, from the start to the end of its membership.

    Attributes:
        states: what other devices may read of the jobs here.
        memory: what a job may take here now, with what it has taken already.
    """

    mesh: Mesh
    router: TensorRouter
    compute: ComputeThread
    states: TransferServer
    known: KnownModel
    memory: Callable[[], MemoryBudgets]
    energy: EnergyMeter

    @property
    def device(self) -> ComputeDevice:
        """What stages here compute on."""
        return self.compute.device
