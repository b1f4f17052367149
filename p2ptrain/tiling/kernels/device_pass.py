"""One micro-batch on all tiles of one device: messages between these tiles stay here.

Without IO, like `TilePass`: messages from tiles of other devices in, messages for them out.
`broken_units` finds the units in which a tile's values stopped being finite, as far as the maps
that it keeps show.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from p2ptrain.errors import InternalError
from p2ptrain.plan.types.feature_maps import MapNetwork
from p2ptrain.tiling.kernels.tile_pass import TilePass
from p2ptrain.tiling.kernels.tile_program import TileProgram
from p2ptrain.tiling.kernels.tile_steps import Subject, TileMessage

Address: TypeAlias = tuple[int, Subject, int]
"""(receiving tile, what, from which tile): names a message of a pass."""


class DevicePass:
    """Forward, then (in training) backward, once each; see `TilePass`."""

    def __init__(self, programs: Mapping[int, TileProgram], samples: int) -> None:
        """`programs`: by tile, those of this device."""
        self._passes = {
            tile: TilePass(program, samples, pauses=True) for tile, program in programs.items()
        }

    @property
    def is_waiting(self) -> bool:
        """Whether a forward or backward has begun and not ended on every tile."""
        return any(tile_pass.is_waiting for tile_pass in self._passes.values())

    @property
    def awaits(self) -> tuple[frozenset[Address], ...]:
        """By tile that waits: the messages that it needs before it can continue.

        None where it only lets its own messages go out first: `receive` resumes it.
        """
        return tuple(
            frozenset((tile, *key) for key in tile_pass.awaits)
            for tile, tile_pass in self._passes.items()
            if tile_pass.is_waiting
        )

    @property
    def backward_from(self) -> int:
        """Groups from this one on have given their parameters' gradients, on every tile."""
        return max(tile_pass.backward_from for tile_pass in self._passes.values())

    def broken_units(self, network: MapNetwork) -> range | None:
        """Between forward and backward, as the function of that name: the first of all tiles here.

        Nothing where all that leaves is finite: then it is not to blame for what follows.

        Args:
            network: without early borders.
        """
        known = [tile_pass.finite for tile_pass in self._passes.values()]
        if all(finite.get(number, True) for finite in known for number in network.leaving):
            return None
        found = [units for finite in known if (units := broken_units(network, finite)) is not None]
        return min(found, key=lambda units: (units.stop, units.start))

    def begin_forward(self, inputs: Mapping[int, Mapping[int, Tensor]]) -> list[TileMessage]:
        """Start from the inputs of each tile, by tile and map; messages for other devices."""
        sent: list[TileMessage] = []
        for tile, tile_pass in self._passes.items():
            sent += tile_pass.begin_forward(inputs[tile])
        return self._carried(sent)

    def begin_backward(
        self, gradients: Mapping[int, Mapping[int, Tensor | None]]
    ) -> list[TileMessage]:
        """Start the way back from the gradients of each tile's outputs, by tile and map."""
        sent: list[TileMessage] = []
        for tile, tile_pass in self._passes.items():
            sent += tile_pass.begin_backward(gradients[tile])
        return self._carried(sent)

    def receive(self, messages: Iterable[TileMessage]) -> list[TileMessage]:
        """Take what tiles of other devices say, and go on.

        Raises:
            ProtocolError: no tile here expects it.
        """
        sent: list[TileMessage] = []
        paused = [tile_pass for tile_pass in self._passes.values() if tile_pass.is_paused]
        for tile_pass in paused:
            sent += tile_pass.resume()
        return self._carried([*messages, *sent])

    def outputs(self, leaving: Sequence[int]) -> list[Tensor]:
        """After the forward: by tile, then by map, what it owns of it.

        Raises:
            InternalError: a tile still waits.
        """
        if self.is_waiting:
            raise InternalError("outputs of tiles that still wait")
        return [
            tile_pass.outputs[number] for tile_pass in self._passes.values() for number in leaving
        ]

    def _carried(self, messages: Iterable[TileMessage]) -> list[TileMessage]:
        """Deliver what is for tiles here until there is nothing more; the rest is for others."""
        waiting, outside = deque(messages), list[TileMessage]()
        while waiting:
            message = waiting.popleft()
            here = self._passes.get(message.receiver)
            if here is None:
                outside.append(message)
            else:
                waiting += here.receive(message)
        return outside


def broken_units(network: MapNetwork, finite: Mapping[int, bool]) -> range | None:
    """The units between what is finite and the first map that is not.

    Args:
        network: the tiled part, units where they are (without early borders).
        finite: by number of a map that is known: whether it is finite.

    Returns:
        None where all that is known is finite; an empty range where what enters is not.
    """
    broken = next((number for number in sorted(finite) if not finite[number]), None)
    if broken is None:
        return None
    if any(not finite.get(number, True) for number in network.entering):
        return range(0)
    inputs = {operation.output: operation.inputs for operation in network.operations}
    units, seen, waiting = set[int](), set[int](), [broken]
    while waiting:
        number = waiting.pop()
        unit = network.unit_of_map[number]
        if unit is None or number in seen:
            continue
        seen.add(number)
        units.add(unit)
        waiting += [read for read in inputs[number] if not finite.get(read, False)]
    return range(min(units), max(units) + 1)
