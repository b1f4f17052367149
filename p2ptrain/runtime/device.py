"""What holder and worker of one device share: mesh, router, transfer server, compute thread."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.mesh.interface import Mesh
from p2ptrain.process.compute_thread import ComputeThread
from p2ptrain.runtime.io.tensor_router import TensorRouter


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """What every stage of this device shares."""

    mesh: Mesh
    switchboard: TensorRouter
    compute: ComputeThread
