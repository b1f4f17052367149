"""All tiles of a layout in one process: who carries messages is a loop.

What a network runtime has to do instead: one `TilePass` a tile and micro-batch on its device, with
the messages of `messages` between them, and the replicas' gradients added up once a mini-batch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from p2ptrain.errors import InternalError
from p2ptrain.model.graph.description import ModelDescription, TensorKind
from p2ptrain.model.graph.nodes import StateRef
from p2ptrain.tiling.grid import GridLayout
from p2ptrain.tiling.kernels.kernels import cut_region
from p2ptrain.tiling.kernels.tile_pass import TilePass
from p2ptrain.tiling.kernels.tile_program import TileProgram
from p2ptrain.tiling.kernels.tile_steps import TileMessage
from p2ptrain.tiling.kernels.tileable_operators import TiledPart

Traffic: TypeAlias = Counter[str]
"""Bytes by kind of message, between tiles of different devices."""


def replica(
    description: ModelDescription, part: TiledPart, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The part's tensors on one device, without copying them; parameters are leaves."""
    nodes = description.graph(part.mode).nodes[: part.stop]
    names = {r.name for node in nodes for r in node.references() if isinstance(r, StateRef)}
    tensors = {name: state[name].detach() for name in sorted(names)}
    for name, described in description.tensors_by_name.items():
        if name in names and described.kind is TensorKind.PARAMETER:
            tensors[name] = nn.Parameter(tensors[name], requires_grad=described.trainable)
    return tensors


def trained(replica: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that take gradients, by name."""
    return {name: tensor for name, tensor in replica.items() if tensor.requires_grad}


class Tiles:
    """The tiled part of a model on several emulated devices.

    Attributes:
        replicas: by device.
        traffic: of all passes so far.
    """

    def __init__(
        self,
        description: ModelDescription,
        part: TiledPart,
        layout: GridLayout,
        states: Sequence[Mapping[str, Tensor]],
        *,
        device_of_tile: Sequence[int] | None = None,
    ) -> None:
        """Prepare all tiles.

        Args:
            description, part: the model, and what of it is tiled.
            layout: of `part.network`.
            states: by device: its own tensors, which training changes in place.
            device_of_tile: by tile; None = one device a tile.
        """
        devices = list(range(layout.tiles)) if device_of_tile is None else list(device_of_tile)
        if len(devices) != layout.tiles or sorted({*devices}) != list(range(len(states))):
            raise InternalError(f"{layout.tiles} tiles on devices {devices}, {len(states)} states")
        self._part, self._layout, self._devices = part, layout, devices
        self.replicas = [replica(description, part, state) for state in states]
        self._programs = [
            TileProgram(
                *(description, part, layout, tile, self.replicas[device]),
                tracks=device not in devices[:tile],
            )
            for tile, device in enumerate(devices)
        ]
        self._passes: dict[int, list[TilePass]] = {}
        self.traffic: Traffic = Counter()

    def forward(self, key: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run a micro-batch forward on all tiles.

        Args:
            key: number of the micro-batch.
            inputs: leaves of the model's input, whole.

        Returns:
            `part.leaving`, whole.
        """
        images = dict(zip(self._part.network.entering, self._part.entering, strict=True))
        samples = inputs[0].shape[0]
        passes = [TilePass(program, samples) for program in self._programs]
        sent: list[TileMessage] = []
        for tile, tile_pass in enumerate(passes):
            cuts = {
                number: cut_region(inputs[leaf], self._input_region(tile, number))
                for number, leaf in images.items()
            }
            sent += tile_pass.begin_forward(cuts)
        self._carry(passes, sent)
        if self._programs[0].trains:
            self._passes[key] = passes
        return [
            self._joined(number, [tile_pass.outputs[number] for tile_pass in passes])
            for number in self._part.network.leaving
        ]

    def backward(self, key: int, gradients: Sequence[Tensor | None]) -> None:
        """Run it back from the gradients of what `forward` gave; parameters add to `.grad`."""
        passes = self._passes.pop(key)
        sent: list[TileMessage] = []
        for tile, tile_pass in enumerate(passes):
            parts: dict[int, Tensor | None] = {}
            for number, gradient in zip(self._part.network.leaving, gradients, strict=True):
                region = self._owned(tile, number)
                parts[number] = None if gradient is None else cut_region(gradient, region)
            sent += tile_pass.begin_backward(parts)
        self._carry(passes, sent)

    def sum_gradients(self) -> dict[str, Tensor | None]:
        """Add up the replicas' gradients, once a mini-batch; every replica gets the sum.

        Returns:
            The sums by name of the parameter.
        """
        sums: dict[str, Tensor | None] = {}
        with torch.no_grad():
            for name in trained(self.replicas[0]):
                parts = [replica[name].grad for replica in self.replicas]
                known = [part for part in parts if part is not None]
                sums[name] = None if not known else sum(known[1:], known[0].clone())
                for replica in self.replicas:
                    total = sums[name]
                    replica[name].grad = None if total is None else total.clone()
        return sums

    def _carry(self, passes: Sequence[TilePass], sent: Sequence[TileMessage]) -> None:
        """Deliver messages until there are none."""
        waiting = deque(sent)
        while waiting or any(tile_pass.is_paused for tile_pass in passes):
            if not waiting:
                waiting += [m for one in passes if one.is_paused for m in one.resume()]
                continue
            message = waiting.popleft()
            ends = self._devices[message.sender], self._devices[message.receiver]
            if ends[0] != ends[1]:
                kind = type(message.subject).__name__
                self.traffic[kind] += message.tensor.numel() * message.tensor.itemsize
            waiting += passes[message.receiver].receive(message)
        stuck = [tile for tile, tile_pass in enumerate(passes) if tile_pass.is_waiting]
        if stuck:
            raise InternalError(f"tiles {stuck} wait for messages that nobody sends")

    def _joined(self, number: int, parts: Sequence[Tensor]) -> Tensor:
        feature_map = self._part.network.maps[number]
        shape = (*parts[0].shape[:2], feature_map.height, feature_map.width)
        whole = parts[0].new_empty(shape)
        for tile, part in enumerate(parts):
            cut_region(whole, self._owned(tile, number)).copy_(part)
        return whole

    def _owned(self, tile: int, number: int) -> tuple[slice, slice]:
        region = self._layout.owned(tile, number)
        return slice(region.rows.first, region.rows.end), slice(
            region.columns.first, region.columns.end
        )

    def _input_region(self, tile: int, number: int) -> tuple[slice, slice]:
        region = self._layout.input_region(tile, number)
        return slice(region.rows.first, region.rows.end), slice(
            region.columns.first, region.columns.end
        )
