"""One micro-batch on all tiles of one device: messages between these tiles stay here.

Without IO, like `TilePass`: messages from tiles of other devices in, messages for them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from p2ptrain.errors import InternalError
from p2ptrain.tiling.kernels.tile_pass import TilePass
from p2ptrain.tiling.kernels.tile_program import TileProgram
from p2ptrain.tiling.kernels.tile_steps import Subject, TileMessage

Address: TypeAlias = tuple[int, Subject, int]
"""(receiving tile, what, from which tile): names a message of a pass."""


class DevicePass:
    """Forward, then (in training) backward, once each; see `TilePass`."""

    def __init__(self, programs: Mapping[int, TileProgram], samples: int) -> None:
        """`programs`: by tile, those of this device."""
        self._passes = {tile: TilePass(program, samples) for tile, program in programs.items()}

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
