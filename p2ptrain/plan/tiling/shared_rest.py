"""What is not tiled, on a device with tiles: each micro-batch passes the tiles, then the rest."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.plan.tiling.cost import Costs
from p2ptrain.plan.tiling.passage import Taker
from p2ptrain.plan.tiling.problem import TileDevice
from p2ptrain.plan.tiling.row import Passes, Row, row_seconds, stage_seconds
from p2ptrain.plan.tiling.setting import Setting
from p2ptrain.plan.tiling.simulate import simulate


@dataclass(frozen=True, slots=True)
class SharedRest:
    """All units behind the tiles (`search.Rest`)."""

    setting: Setting

    def alone(self, device: TileDevice, units: int) -> float:
        """Seconds of a mini-batch, of all behind the first `units`."""
        cost, split = self.setting.cost, self.setting.split
        return stage_seconds(cost, split, cost.index(device.name), units, cost.unit_count)

    def held_bytes(self, units: int) -> float:
        """With one micro-batch in flight."""
        cost, samples = self.setting.cost, self.setting.split.first_samples
        return cost.peak_bytes(units, cost.unit_count, samples)

    def whole(self, device: TileDevice, costs: Costs, borders: tuple[int, ...]) -> float:
        """Seconds of a mini-batch, tiles included."""
        cost, split = self.setting.cost, self.setting.split
        row = Row.straight(split, (borders[-1], cost.unit_count), (cost.index(device.name),))
        passes = Passes.of(cost, costs, simulate(costs, borders), [Taker(device)])
        return row_seconds(cost, split, passes, row, (1, 1))
