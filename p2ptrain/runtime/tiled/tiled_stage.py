"""A device's part of a tiled stage: its copy of the filters, and the passes of its tiles.

Every device of the stage has all filters. What a forward or backward needs of other devices comes
by messages: a pass is begun, takes in what arrives, and says what to send. `tiled_executor` moves
these messages between devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from p2ptrain.errors import InternalError
from p2ptrain.job.rounds import RoundMode
from p2ptrain.messages.assignment import StageAssignment
from p2ptrain.messages.tensors import Value
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.nodes import StateRef
from p2ptrain.model.stage.stage import Stage
from p2ptrain.plan.types.feature_maps import MapNetwork
from p2ptrain.runtime.io.tensor_receiver import Expected
from p2ptrain.runtime.tiled.tile_layout import StageTileLayout
from p2ptrain.tiling.kernels.device_pass import Address, DevicePass
from p2ptrain.tiling.kernels.tile_program import TileProgram
from p2ptrain.tiling.kernels.tile_steps import TileMessage


class TiledStage(Stage):
    """Units [0, end) of a model on the tiles of one device, with its own copy of the weights.

    Attributes:
        tiles: of the whole stage.
    """

    def __init__(
        self,
        description: ModelDescription,
        place: StageAssignment,
        state: Mapping[str, Tensor],
        device: str,
    ) -> None:
        """Take the tensors of `state`, without copying them, for the tiles of `device`.

        Raises:
            NotTiled, GridError: the model's units, or their maps, cannot be tiled so.
        """
        super().__init__(description, place.first, place.end, state, copy=False)
        self.tiles = StageTileLayout(description, place)
        self._own = self.tiles.tiles(device)
        self._programs: dict[RoundMode, dict[int, TileProgram]] = {}
        self._passes: dict[int, DevicePass] = {}
        self._evaluating: DevicePass | None = None
        self.programs(RoundMode.TRAIN)

    def programs(self, mode: RoundMode) -> Mapping[int, TileProgram]:
        """By tile, those of this device. Raises NotTiled, GridError."""
        if mode not in self._programs:
            tiled = self.tiles.of(mode)
            state = self.state()
            self._programs[mode] = {
                tile: TileProgram(
                    self.description,
                    tiled.part,
                    tiled.layout,
                    tile,
                    state,
                    tracks=tile == self._own[0],
                )
                for tile in self._own
            }
        return self._programs[mode]

    def expected(self, address: Address, mode: RoundMode, samples: int) -> Expected | None:
        """What a message to a tile here must be; None where it is not expected."""
        receiver, subject, sender = address
        program = self.programs(mode).get(receiver)
        found = None if program is None else program.expected(subject, sender, samples)
        return None if found is None else (found[1], found[0])

    # -- one micro-batch, for the compute thread -------------------------------------------------

    def begin_forward(
        self, key: int, mode: RoundMode, inputs: Sequence[Tensor], samples: int
    ) -> list[TileMessage]:
        """Start micro-batch `key`; `inputs` as `StageTileLayout.entering_parts` lists them.

        Returns:
            What other devices must receive; so do `begin_backward` and `receive`.
        """
        if key in self._passes:
            raise InternalError(f"micro-batch {key} was already forwarded")
        begun = DevicePass(self.programs(mode), samples)
        if mode is RoundMode.TRAIN:
            self._passes[key] = begun
        else:
            self._evaluating = begun
        entering = self.tiles.of(mode).part.network.entering
        return begun.begin_forward(_by_tile(self._own, entering, inputs))

    def outputs(self, key: int, mode: RoundMode) -> list[Tensor]:
        """After the forward: what leaves, by tile."""
        return self.passing(key, mode).outputs(self.tiles.of(mode).leaving)

    def begin_backward(self, key: int, gradients: Sequence[Value]) -> list[TileMessage]:
        """Start the way back from a gradient for each of `outputs`; parameters add to `.grad`."""
        leaving = self.tiles.of(RoundMode.TRAIN).leaving
        count = len(leaving)
        by_tile: dict[int, dict[int, Tensor | None]] = {}
        for place, tile in enumerate(self._own):
            sums = by_tile[tile] = dict.fromkeys(leaving, None)
            given = gradients[place * count : (place + 1) * count]
            for number, gradient in zip(leaving, given, strict=True):
                if gradient is not None:
                    known = sums[number]
                    sums[number] = gradient if known is None else known + gradient
        return self._passes[key].begin_backward(by_tile)

    def final_names(self, key: int) -> list[str]:
        """Parameters whose gradient of that micro-batch is complete, the last groups' first."""
        done = self._passes[key].backward_from
        return [name for name, group in self._first_groups.items() if group >= done]

    @cached_property
    def _first_groups(self) -> Mapping[str, int]:
        """Trainable parameters of the tiled operators -> the first group that uses them.

        In the order in which a backward is done with them. What no operator uses is not there.
        """
        tiled = self.tiles.of(RoundMode.TRAIN)
        part, groups = tiled.part, tiled.layout.groups
        nodes = self.description.train.nodes
        first: dict[str, int] = {}
        for number, group in enumerate(groups):
            for operation in _operations(tiled.layout.network, group.first, group.end):
                for reference in nodes[part.nodes[operation]].references():
                    if isinstance(reference, StateRef):
                        first.setdefault(reference.name, number)
        trainable = self.parameters()
        names = [name for name in first if name in trainable and trainable[name].requires_grad]
        return {name: first[name] for name in sorted(names, key=lambda name: -first[name])}

    def forget(self, key: int, mode: RoundMode) -> None:
        """That micro-batch is done."""
        if mode is RoundMode.TRAIN:
            del self._passes[key]
        else:
            self._evaluating = None

    def passing(self, key: int, mode: RoundMode) -> DevicePass:
        """The tiles' pass of a micro-batch that was begun, which takes what other devices say."""
        found = self._passes.get(key) if mode is RoundMode.TRAIN else self._evaluating
        if found is None:
            raise InternalError(f"micro-batch {key} was never forwarded")
        return found

    # -- as a stage that computes by itself ------------------------------------------------------

    def _begun_only(self, *_: Any, **__: Any) -> Any:
        """Raises InternalError: tiles need messages of other devices."""
        raise InternalError("a tiled stage is begun, and receives messages")

    forward = backward = evaluate = _begun_only

    def held(self) -> int:
        """How many micro-batches wait for their backward."""
        return len(self._passes)

    def forget_held(self) -> None:
        """Give up all micro-batches that wait for their backward."""
        self._passes.clear()


def _operations(network: MapNetwork, first: int, end: int) -> range:
    """Numbers of those of units [first, end)."""
    return range(network.units[first].first, network.units[end - 1].end)


def _by_tile(
    tiles: Sequence[int], maps: Sequence[int], values: Sequence[Tensor]
) -> dict[int, dict[int, Tensor]]:
    given = iter(values)
    return {tile: {number: next(given) for number in maps} for tile in tiles}
