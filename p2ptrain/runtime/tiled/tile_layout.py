"""Which device of a tiled stage has what of everything that crosses its two cuts.

    holder ──► each device: its tiles' parts of the images, halos of the first group included
    device ──► each device behind: its tiles' own parts of the maps that leave, and their gradients
               on the way back

Every device computes this itself from the model and the plan. Values travel tile by tile, in row
order, and within a tile in the order in which they cross.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from p2ptrain.errors import InternalError, OptionError
from p2ptrain.job.rounds import RoundMode
from p2ptrain.messages.assignment import StageAssignment
from p2ptrain.messages.tensors import Value
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.nodes import InputRef, NodeRef
from p2ptrain.plan.types.allocation import TileShape, owners
from p2ptrain.plan.types.feature_maps import MapNetwork, Region
from p2ptrain.runtime.io.tensor_receiver import Expected
from p2ptrain.tiling.grid import GridLayout
from p2ptrain.tiling.kernels.kernels import cut_region
from p2ptrain.tiling.kernels.read_tiled_part import read_tiled_part
from p2ptrain.tiling.kernels.tileable_operators import NotTiled, TiledPart


def tiled_units(description: ModelDescription, units: int, mode: RoundMode) -> TiledPart:
    """The first `units` units as tiles.

    Raises:
        NotTiled: they cannot all be tiled; names the unit and why.
    """
    part = read_tiled_part(description, mode.value, whole_units=True, most_units=units)
    if len(part.network.units) < units:
        raise NotTiled(part.reason or f"only {len(part.network.units)} units can be tiled")
    images = dict(zip(part.network.entering, part.entering, strict=True))
    leaf_of = {value: images[number] for value, number in part.leaving if number in images}
    for value in description.crossing_values(units, mode.value):
        leaf = value.index if isinstance(value, InputRef) else leaf_of.get(value)
        if leaf is not None:
            name, who = description.inputs[leaf].name, _reader_of(description, value, mode)
            raise NotTiled(f"{who} the model's input {name} too, which only tiles have")
    return part


def _reader_of(description: ModelDescription, value: InputRef | NodeRef, mode: RoundMode) -> str:
    """The last unit that reads a value."""
    nodes = description.graph(mode.value).nodes
    for unit in reversed(description.units):
        first, end = unit.nodes(mode.value)
        if any(value in node.references() for node in nodes[first:end]):
            return f"layer {unit.name} reads"
    return "its output holds"


def tileable(description: ModelDescription) -> MapNetwork:
    """The maps of as many first units as can be tiled in both modes.

    A stage may end behind each of them but those in front of the network's `least`: there the
    model's input is still read behind.

    Raises:
        NotTiled: none can be; says why.
    """
    part = read_tiled_part(description, whole_units=True)
    reasons = [] if part.reason is None else [part.reason]
    most = least = 0
    for units in range(min(part.whole, len(description.units) - 1), 0, -1):
        try:
            for mode in RoundMode:
                tiled_units(description, units, mode)
        except NotTiled as error:
            if least:
                break
            reasons.append(str(error))
        else:
            most, least = max(most, units), units
    if not least:
        raise NotTiled("; ".join(dict.fromkeys(reasons)) or "the model has one unit only")
    return replace(part.network.first_units(most), least=least)


class ModeTileLayout:
    """The tiles of one of the model's two graphs.

    Attributes:
        part, layout: what is tiled, and how.
        leaving: maps that cross the cut behind the stage, in the order in which they do; a map
            that crosses under two names stands there twice.
    """

    def __init__(self, description: ModelDescription, shape: TileShape, mode: RoundMode) -> None:
        """Lay out the grid.

        Raises:
            NotTiled: some unit cannot be tiled.
            GridError: the grid does not fit its maps.
        """
        self.part = tiled_units(description, shape.units, mode)
        weights = shape.rows, shape.columns
        network = self.part.network.with_early(shape.early)
        self.layout = GridLayout(network, weights, shape.borders, aligned=shape.aligned)
        by_value = dict(self.part.leaving)
        crossing = description.crossing_values(shape.units, mode.value)
        self.leaving = tuple(by_value[v] for v in crossing if not isinstance(v, InputRef))
        place_of = {v: at for at, v in enumerate(description.crossing_values(0, mode.value))}
        images = zip(self.part.network.entering, self.part.entering, strict=True)
        self._images = [(number, place_of[InputRef(leaf)]) for number, leaf in images]
        dtype = description.inputs[self.part.entering[0]].dtype
        assert dtype is not None
        self._dtype = dtype

    def entering_expected(self, tiles: Sequence[int], samples: int) -> list[Expected]:
        """Of the images' parts that tiles get."""
        return [
            self._expected(number, self.layout.input_region(tile, number), samples)
            for tile in tiles
            for number in self.part.network.entering
        ]

    def leaving_expected(self, tiles: Sequence[int], samples: int) -> list[Expected]:
        """Of what tiles give, and of its gradients."""
        return [
            self._expected(number, self.layout.owned(tile, number), samples)
            for tile in tiles
            for number in self.leaving
        ]

    def entering_parts(self, tiles: Sequence[int], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Views of the images: what tiles get of the model's inputs.

        Args:
            tiles: numbers of them.
            inputs: as `ModelDescription.crossing` lists them for boundary 0.

        Raises:
            OptionError: an image has another size than those that the job began with.
        """
        for number, place in self._images:
            whole, found = self.part.network.maps[number], tuple(inputs[place].shape[1:])
            if found != (whole.channels, whole.height, whole.width):
                raise OptionError(
                    f"images of {whole.channels} x {whole.height} x {whole.width} are trained in "
                    f"tiles, and one of {' x '.join(map(str, found))} came: images must keep "
                    "their size within a job"
                )
        return [
            _at(inputs[place], self.layout.input_region(tile, number))
            for tile in tiles
            for number, place in self._images
        ]

    def leaving_parts(self, tiles: Sequence[int], values: Sequence[Value]) -> list[Value]:
        """Views of whole maps, or of their gradients: what belongs to tiles."""
        return [
            None if value is None else _at(value, self.layout.owned(tile, number))
            for tile in tiles
            for number, value in zip(self.leaving, values, strict=True)
        ]

    def joined(
        self, parts: Sequence[Sequence[Value]], tiles: Sequence[Sequence[int]]
    ) -> list[Value]:
        """The whole maps from what each device gave, and the tiles that each of them has."""
        by_tile: dict[int, Sequence[Value]] = {}
        count = len(self.leaving)
        for given, own in zip(parts, tiles, strict=True):
            for place, tile in enumerate(own):
                by_tile[tile] = given[place * count : (place + 1) * count]
        return [self._whole(position, by_tile) for position in range(count)]

    def _whole(self, position: int, by_tile: Mapping[int, Sequence[Value]]) -> Tensor:
        number = self.leaving[position]
        feature_map = self.part.network.maps[number]
        whole: Tensor | None = None
        for tile, values in by_tile.items():
            part = values[position]
            if part is None:
                raise InternalError(f"a tile gave nothing of {feature_map.name}")
            if whole is None:
                shape = (*part.shape[:2], feature_map.height, feature_map.width)
                whole = part.new_empty(shape)
            _at(whole, self.layout.owned(tile, number)).copy_(part)
        assert whole is not None
        return whole

    def _expected(self, number: int, region: Region, samples: int) -> Expected:
        channels = self.part.network.maps[number].channels
        return self._dtype, (samples, channels, region.rows.size, region.columns.size)


class StageTileLayout:
    """A tiled stage, as its senders and receivers see it.

    Attributes:
        devices: of the stage.
        device_of: by tile.
    """

    def __init__(self, description: ModelDescription, place: StageAssignment) -> None:
        """Of a place that has a `tiling`. Layouts are made when they are asked for."""
        assert place.tiling is not None
        self._description, self._shape = description, place.tiling
        self.devices = place.devices
        self.device_of = tuple(place.devices[at] for at in owners(place.shares))

    @cached_property
    def _train(self) -> ModeTileLayout:
        return ModeTileLayout(self._description, self._shape, RoundMode.TRAIN)

    @cached_property
    def _evaluate(self) -> ModeTileLayout:
        return ModeTileLayout(self._description, self._shape, RoundMode.EVAL)

    def of(self, mode: RoundMode) -> ModeTileLayout:
        """Of one graph. Raises NotTiled, GridError."""
        return self._train if mode is RoundMode.TRAIN else self._evaluate

    def tiles(self, device: str) -> tuple[int, ...]:
        """Those of one device, ascending."""
        return tuple(tile for tile, owner in enumerate(self.device_of) if owner == device)

    def entering_parts(
        self, device: str, mode: RoundMode, inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """What a device gets of the images."""
        return self.of(mode).entering_parts(self.tiles(device), inputs)

    def leaving_parts(self, device: str, mode: RoundMode, values: Sequence[Value]) -> list[Value]:
        """What of the gradients of whole maps a device gets."""
        return self.of(mode).leaving_parts(self.tiles(device), values)

    def leaving_expected(self, device: str, mode: RoundMode, samples: int) -> list[Expected]:
        """What a device gives."""
        return self.of(mode).leaving_expected(self.tiles(device), samples)

    def joined(self, mode: RoundMode, parts: Mapping[str, Sequence[Value]]) -> list[Value]:
        """Whole maps from what each device of the stage gave."""
        tiles = [self.tiles(device) for device in parts]
        return self.of(mode).joined(list(parts.values()), tiles)


def tiles_of(description: ModelDescription, place: StageAssignment) -> StageTileLayout | None:
    """None where the stage is not tiled."""
    return None if place.tiling is None else StageTileLayout(description, place)


def _at(tensor: Tensor, region: Region) -> Tensor:
    rows, columns = region.rows, region.columns
    return cut_region(tensor, (slice(rows.first, rows.end), slice(columns.first, columns.end)))
