"""A tile's operators, prepared to be run again and again with one device's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import torch
from torch import Tensor

from p2ptrain.errors import ProtocolError
from p2ptrain.model.graph.description import ModelDescription
from p2ptrain.model.graph.nodes import StateRef
from p2ptrain.plan.types.feature_maps import Operation, Region
from p2ptrain.tiling.grid import GridLayout, HaloTransfer
from p2ptrain.tiling.kernels.kernels import (
    Kernel,
    TilePlace,
    convolution,
    cut_region,
    kernel,
    leaves_zeros,
    maker_for,
    padded_by_hand,
    padding_first,
)
from p2ptrain.tiling.kernels.tile_steps import (
    GradientSums,
    Halo,
    HaloGradient,
    Moments,
    Normalise,
    Step,
    StepUses,
    Subject,
    TileSegment,
    fused_step,
    steps_of,
    uses_of,
)
from p2ptrain.tiling.kernels.tileable_operators import CONVOLUTIONS, TiledPart, is_in_place
from p2ptrain.tiling.kernels.tiled_normalisation import Normalisation


@dataclass(frozen=True, slots=True)
class TileInstruction:
    """One operator on the tile.

    Attributes:
        operation: what it reads and makes.
        cuts: for each input, where what it reads lies in what the tile has; None = it is all.
        call: the operator on what it reads.
        grad_enabled: whether autograd records it.
        weighs: whether it is a product with filters, whose gradients can be put off.
    """

    operation: Operation
    cuts: tuple[tuple[slice, slice] | None, ...]
    call: Kernel
    grad_enabled: bool
    weighs: bool


class TileProgram:
    """One tile of a layout with a device's tensors, which all of its tiles share.

    Parameters' gradients add up in `.grad` over the device's tiles and micro-batches.

    Attributes:
        tile: its number.
        tensors: by name.
        dtype: of all maps.
        steps, uses: by group.
        fused: by group: the normalisation with which it begins, of a map that others have parts of.
        instructions, normalisations: by number of the operation.
    """

    def __init__(
        self,
        description: ModelDescription,
        part: TiledPart,
        layout: GridLayout,
        tile: int,
        tensors: Mapping[str, Tensor],
        *,
        tracks: bool = True,
    ) -> None:
        """Prepare the tile.

        Args:
            description, part: the model, and what of it is tiled.
            layout: of `part.network`.
            tile: its number.
            tensors: of the model's state, at least those of the part; parameters are leaves.
            tracks: it changes running statistics and counters; one tile of a device.
        """
        self.part, self.layout, self.tile, self.tensors = part, layout, tile, tensors
        self.tracks = tracks
        dtype = description.inputs[part.entering[0]].dtype
        assert dtype is not None
        self.dtype = dtype
        self._nodes = description.graph(part.mode).nodes
        self.steps = tuple(steps_of(layout, place) for place in range(len(layout.groups)))
        self.uses: tuple[tuple[StepUses, ...], ...] = tuple(
            uses_of(layout, steps) for steps in self.steps
        )
        self.fused = tuple(map(fused_step, self.steps, layout.groups, repeat(layout.network)))
        self.instructions: dict[int, TileInstruction] = {}
        self.normalisations: dict[int, Normalisation] = {}
        for place, steps in enumerate(self.steps):
            for step in steps:
                self._prepare(place, step)
        self._shapes = self._expected_shapes()

    @property
    def trains(self) -> bool:
        """Whether a backward follows."""
        return self.part.mode == "train"

    def expected(
        self, subject: Subject, sender: int, samples: int
    ) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and type of what another tile may send in a pass; None where it may not."""
        shape = self._shapes.get((subject, sender))
        if shape is None:
            return None
        if isinstance(subject, Moments | GradientSums):
            return shape, torch.float64
        return (samples, *shape), self.dtype

    def check_inputs(self, inputs: Mapping[int, Tensor], samples: int) -> None:
        """Raises ProtocolError: an input has another shape than the tile's."""
        for number in self.layout.network.entering:
            region, found = self.layout.input_region(self.tile, number), inputs[number]
            channels = self.layout.network.maps[number].channels
            shape = samples, channels, region.rows.size, region.columns.size
            if tuple(found.shape) != shape or found.dtype is not self.dtype:
                raise ProtocolError(
                    f"tile {self.tile} takes {shape} {self.dtype} of the model's input, found "
                    f"{tuple(found.shape)} {found.dtype}: images must keep their size within a job"
                )

    def owned(self, number: int) -> Region:
        """What the tile owns of a map."""
        return self.layout.owned(self.tile, number)

    def required(self, group: int, number: int) -> Region:
        """What the tile has of a map inside a group."""
        return self.layout.required(group, self.tile, number)

    def parameters(self, step: TileSegment) -> list[Tensor]:
        """Those that its operators read and that take gradients, once a use."""
        references = (
            reference
            for k in step.operations
            for reference in self._nodes[self.part.nodes[k]].references()
        )
        states = [self.tensors[r.name] for r in references if isinstance(r, StateRef)]
        return [tensor for tensor in states if tensor.requires_grad]

    def count(self, group: int) -> None:
        """Run the counters of a group's units, once a micro-batch."""
        units = self.layout.groups[group]
        for nodes in self.part.counters[units.first : units.end]:
            for index in nodes:
                node = self._nodes[index]
                reference, rise = node.args
                assert isinstance(reference, StateRef)
                assert isinstance(rise, int | float)
                with torch.no_grad():
                    self.tensors[reference.name].add_(rise)

    def _expected_shapes(self) -> dict[tuple[Subject, int], tuple[int, ...]]:
        """By (what, from which tile), the samples left out."""
        network, tile = self.layout.network, self.tile
        shapes: dict[tuple[Subject, int], tuple[int, ...]] = {}

        def shape(transfer: HaloTransfer) -> tuple[int, ...]:
            region = transfer.region
            return network.maps[transfer.map].channels, region.rows.size, region.columns.size

        for place, transfers in enumerate(self.layout.transfers):
            for transfer in transfers:
                if transfer.receiver == tile:
                    shapes[Halo(place, transfer.map), transfer.sender] = shape(transfer)
                if transfer.sender == tile and network.maps[transfer.map].differentiable:
                    shapes[HaloGradient(place, transfer.map), transfer.receiver] = shape(transfer)
        for steps in self.steps:
            for step in steps:
                if isinstance(step, Normalise):
                    for other in range(self.layout.tiles):
                        if other != tile:
                            sums = 2, network.maps[step.read].channels
                            shapes[Moments(step.operation), other] = sums
                            shapes[GradientSums(step.operation), other] = sums
        return shapes

    def _prepare(self, group: int, step: Step) -> None:
        if isinstance(step, TileSegment):
            for k in step.operations:
                self.instructions[k] = self._instruction(group, k)
            for k in step.operations:
                self._pad_early(group, step, k)
        else:
            node = self._nodes[self.part.nodes[step.operation]]
            self.normalisations[step.operation] = Normalisation(node, self.tensors)

    def _instruction(self, group: int, k: int) -> TileInstruction:
        place = self._place(group, k)
        return TileInstruction(
            place.operation,
            self._cuts(group, place.operation, place.outputs),
            kernel(place, self.tensors),
            place.node.grad_enabled,
            place.node.operator in CONVOLUTIONS,
        )

    def _pad_early(self, group: int, segment: TileSegment, reader: int) -> None:
        """Have what a convolution reads padded before it is made, where that can be."""
        place, network = self._place(group, reader), self.part.network
        by_hand = padded_by_hand(place.padding)
        maker = maker_for(network, segment, reader)
        if maker is None or place.node.operator not in CONVOLUTIONS or not any(map(any, by_hand)):
            return
        first, behind = self.instructions[maker], self.instructions[reader]
        source = network.maps[first.operation.inputs[0]]
        operator = self._nodes[self.part.nodes[maker]].operator
        reads_all = behind.cuts == (None,)
        if not reads_all or not leaves_zeros(operator, first.call, source, self.dtype):
            return
        left = tuple(
            (0, 0) if any(hand) else both for hand, both in zip(by_hand, place.padding, strict=True)
        )
        call = convolution(place, self.tensors, (left[0], left[1]))
        self.instructions[maker] = replace(first, call=padding_first(first.call, by_hand))
        self.instructions[reader] = replace(behind, call=call)

    def _place(self, group: int, k: int) -> TilePlace:
        operation = self.part.network.operations[k]
        node = self._nodes[self.part.nodes[k]]
        return TilePlace(
            node=node,
            operation=operation,
            reads=self.part.reads[k],
            source=self.part.network.maps[operation.inputs[0]],
            outputs=self.required(group, operation.output),
            in_place=is_in_place(node.operator) and self._may_write(group, operation),
        )

    def _cuts(
        self, group: int, operation: Operation, outputs: Region
    ) -> tuple[tuple[slice, slice] | None, ...]:
        cuts: list[tuple[slice, slice] | None] = []
        for number in operation.inputs:
            source = self.part.network.maps[number]
            needed = Region(
                operation.rows.needed(outputs.rows, source.height),
                operation.columns.needed(outputs.columns, source.width),
            )
            here = self.required(group, number)
            cuts.append(None if needed == here else needed.within(here))
        return tuple(cuts)

    def _may_write(self, group: int, operation: Operation) -> bool:
        """Whether nothing else needs its first input: it is made in the group and read here only.

        Then the user's own in-place operator runs in place, which saves the memory of a map.
        """
        number, network = operation.inputs[0], self.part.network
        readers = sum(other.inputs.count(number) for other in network.operations)
        made_outside = number in self.layout.groups[group].entering
        return readers == 1 and not made_outside and number not in network.leaving


def run_segment(
    instructions: Mapping[int, TileInstruction],
    operations: Sequence[int],
    values: dict[int, Tensor],
    last_reads: Mapping[int, Sequence[int]],
    watch: Callable[[Tensor], None],
) -> None:
    """Run operators; `values` (by map) gains what they make and loses what is read no more.

    Args:
        instructions: by number of the operation.
        operations: which.
        values: what they read.
        last_reads: operation -> maps that nothing reads after it.
        watch: gets what each product with filters makes.
    """
    recording = torch.is_grad_enabled()
    for k in operations:
        instruction = instructions[k]
        operation = instruction.operation
        inputs = [
            cut_region(values[number], cuts)
            for number, cuts in zip(operation.inputs, instruction.cuts, strict=True)
        ]
        with torch.set_grad_enabled(recording and instruction.grad_enabled):
            made = instruction.call(inputs)
            values[operation.output] = made
        if instruction.weighs:
            watch(made)
        del inputs, made
        for number in last_reads.get(k, ()):
            values.pop(number, None)
